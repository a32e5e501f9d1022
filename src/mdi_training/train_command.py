r"""Train a language model on token files made by mdi prepare-data: from scratch, on from a checkpoint, or on from a stop.

Into the output folder go lit_model.pth (the weights with the best held-out loss so far), last/ (the last ones),
train_state.pth (what --init resume goes on from, exactly), losses.csv and losses.png. Both checkpoints are ordinary litgpt
ones, with their tokenizer: give them to mdi prepare-model or mdi starter. Ctrl-C stops after the step in hand and saves.

examples:
  mdi prepare-data shakespeare.txt --out data/shakespeare --vocab-size 2048
  mdi train --config pythia-14m --fit-vocab --ckpt checkpoints/custom/small --dataset data/shakespeare --max-iters 1500
  mdi train --init resume --ckpt checkpoints/custom/small --dataset data/shakespeare --max-iters 3000
  mdi train --init finetune --ckpt org/name --out checkpoints/custom/mine --dataset data/mine --lora-r 8
  torchrun --nproc-per-node 4 -m mdi train --ckpt checkpoints/custom/small --dataset data/shakespeare
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.errors import Code, UsageError
from mdi_training.train_flags import add_arguments, make_lora, make_settings
from mdi_training.training_settings import TrainingSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from mdi_training.begin import Beginning
    from mdi_training.data import DataSet
    from mdi_training.processes import Processes
    from mdi_training.training_session import TrainingSession

    # The weights to begin with, and the folder for the results.
    Begin = Callable[[argparse.Namespace, DataSet], tuple[Beginning, Path]]

__all__ = ["FIRST", "add_arguments", "run"]

FIRST = (
    "--ckpt", "--out", "--dataset", "--init", "--config", "--device", "--max-iters", "--batch-size", "--sequence-length",
    "--lr", "--verb",
)  # fmt: skip

logger = logging.getLogger("mdi")


def run(args: argparse.Namespace) -> int:
    return train(args, begin)


def train(args: argparse.Namespace, begin: Begin) -> int:
    """A session of training from where `begin` says; for models of other kinds, too."""
    from mdi.host.device import load_torch
    from mdi.host.threads import choose_threads
    from mdi_training.interrupt import StopRequest
    from mdi_training.processes import Processes, joined

    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: expected at least 1", code=Code.VALUE)
    processes = Processes.from_environment()
    choose_threads(args.threads, others=[None] * (processes.local_count - 1))
    load_torch("training")
    device = pick_device(processes.device_for(args.device or best_device()))
    with joined(processes, device), StopRequest(processes.is_first) as stop:
        _run(args, device, processes, begin, lambda: bool(stop))
    return 0 if stop.number is None else 128 + stop.number


def _run(args: argparse.Namespace, device: str, processes: Processes, begin: Begin, stop: Callable[[], bool]) -> None:
    """A function of its own, so that the session is freed before the processes separate (`mdi_training.processes.joined`)."""
    session = make_session(args, device, processes, begin)
    session.run(stop)
    if processes.is_first:
        draw_losses(session.out)


def make_session(args: argparse.Namespace, device: str, processes: Processes, begin: Begin) -> TrainingSession:
    """Check everything that a session needs, and print it in one line. Raises MdiError."""
    import torch

    from mdi_training.begin import check_fit, restore
    from mdi_training.data import load_data_set
    from mdi_training.loop import Trainer
    from mdi_training.training_session import TrainingSession
    from mdi_training.windows import Windows

    data = load_data_set(args.dataset)
    beginning, out = begin(args, data)
    check_fit(beginning.config, data)
    settings = make_settings(args, beginning.config.block_size, device, beginning.saved)
    model = beginning.model.to(device)
    forward = torch.compile(model) if args.compile else model
    trainer = Trainer(
        model,
        Windows(data.train, settings.sequence_length, settings.seed, str(args.dataset / "train.bin")),
        Windows(data.val, settings.sequence_length, settings.seed, str(args.dataset / "val.bin")),
        settings,
        forward=processes.wrap(forward),
        progress=beginning.progress,
        processes=processes,
    )
    if beginning.saved is not None:
        restore(trainer, beginning.saved)
    session = TrainingSession(trainer, beginning, out, data.sha256, processes, lambda line: print(line, flush=True))
    session.check_disk()
    if processes.is_first:
        for note in beginning.notes:
            logger.warning("%s", note)
        n_params = sum(p.numel() for p in model.parameters())
        n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        trained = f", {n_trained:,} of them trained," if n_trained < n_params else ""
        where = f"{processes.count} processes ({device}, ...)" if processes.count > 1 else device
        print(f"{n_params:,} parameters{trained} on {where}; {describe(settings, len(data.train), len(data.val))}")
        if beginning.saved is not None:
            print(f"going on after step {trainer.progress.n_steps}", flush=True)
    return session


def begin(args: argparse.Namespace, data: DataSet) -> tuple[Beginning, Path]:
    """The weights to begin with, and the folder for the results. Raises MdiError."""
    from mdi_training.begin import check_fit, check_free, from_checkpoint, from_scratch, from_state
    from mdi_training.checkpoint import load_state
    from mdi_training.new_model import fit_vocabulary, load_shape

    lora = make_lora(args)
    for flag in ("config", "fit_vocab"):
        if getattr(args, flag) and args.init != "scratch":
            raise UsageError(
                f"--{flag.replace('_', '-')} is for --init scratch: the weights of --ckpt have their shape",
                code=Code.FLAGS,
            )
    if args.force_old and args.init != "resume":
        raise UsageError("-F/--force-old is for --init resume", code=Code.FLAGS)
    folder = Path(args.ckpt).expanduser()
    seed = TrainingSettings.seed if args.seed is None else args.seed
    if args.init == "scratch":
        if lora is not None:
            raise UsageError(
                "--lora-r adapts weights that were trained before: use it with --init finetune", code=Code.FLAGS
            )
        config = load_shape(args.config or folder)
        config = fit_vocabulary(config, data.vocab_size) if args.fit_vocab else config
        check_fit(config, data)
        check_free(args.out or folder, args.overwrite)
        return from_scratch(config, seed, data), args.out or folder
    if args.init == "resume":
        if lora is not None:
            raise UsageError("--lora-r: a resumed run keeps the adapters that it began with", code=Code.FLAGS)
        folder = args.out or folder
        return from_state(folder, load_state(folder), data), folder
    folder = find_checkpoint(args.ckpt, args.hf_token)
    out = args.out or folder / "finetuned"
    check_free(out, args.overwrite)
    return from_checkpoint(folder, lora, seed, data), out


def find_checkpoint(ckpt: str, token: str | None) -> Path:
    """The folder of a checkpoint in litgpt's format; downloaded and converted where needed. Raises MdiError."""
    from mdi.checkpoint.convert import ready
    from mdi.checkpoint.folder import is_repo_id
    from mdi.checkpoint.model_store import ModelStore
    from mdi.cli.session import found_ckpt

    folder, store = Path(ckpt).expanduser(), ModelStore()
    if folder.exists() or not is_repo_id(ckpt):
        folder = found_ckpt(folder)
    else:
        model = store.find(ckpt)
        folder = store.fetch(ckpt, token, say=logger.info) if model is None else store.folder_of(model)
    return ready(folder, store.folder)[0]


def describe(settings: TrainingSettings, n_train: int, n_val: int) -> str:
    n_tokens = settings.max_iters * settings.n_tokens_per_step
    return (
        f"{n_train:,} tokens to train on, {n_val:,} held out; {settings.max_iters} steps of "
        f"{settings.n_tokens_per_step:,} tokens in {settings.dtype}, {n_tokens / n_train:.1f} passes over the text"
    )


def best_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def pick_device(name: str) -> str:
    """The device asked for.

    Raises:
        UsageError: this machine does not have it.
    """
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as err:
        reason = str(err).splitlines()[0]
        raise UsageError(
            f"--device {name}: this machine or this torch does not have it ({reason}); try cpu", code=Code.DEVICE
        ) from err
    return name


def draw_losses(out: Path) -> None:
    """losses.png beside losses.csv, if matplotlib is installed; an error in it does not end the run."""
    from mdi.errors import MdiError
    from mdi_tools.plots import plot_losses
    from mdi_training.record import read_losses
    from mdi_training.training_session import RECORD_NAME

    try:
        rows = read_losses(out / RECORD_NAME)
        series = {
            label: [(int(row["step"]), float(row[name])) for row in rows if row[name]]
            for label, name in (("training", "train_loss"), ("held out", "val_loss"))
        }
        plot_losses(out / "losses.png", series, out.name)
    except MdiError as e:
        logger.warning("no figure of the losses: %s", e)
