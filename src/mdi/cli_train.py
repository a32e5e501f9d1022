r"""Train a language model on token files made by prepare_data.py: from scratch, on from a checkpoint, or on from a stop.

Into the output folder go lit_model.pth (the weights with the best held-out loss so far), last/ (the last ones),
train_state.pth (what --init resume goes on from, exactly), losses.csv and losses.png. Both checkpoints are ordinary litgpt
ones, with their tokenizer: give them to prepare_model.py or starter.py. Ctrl-C stops after the step in hand and saves.

examples:
  prepare_data.py shakespeare.txt --out data/shakespeare --vocab-size 2048
  train.py --config pythia-14m --fit-vocab --ckpt checkpoints/custom/small --dataset data/shakespeare --max-iters 1500
  train.py --init resume --ckpt checkpoints/custom/small --dataset data/shakespeare --max-iters 3000
  train.py --init finetune --ckpt org/name --out checkpoints/custom/mine --dataset data/mine --lora-r 8
  torchrun --nproc-per-node 4 src/train.py --ckpt checkpoints/custom/small --dataset data/shakespeare
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.errors import UsageError
from mdi.training.schedule import SCHEDULES
from mdi.training.settings import DTYPES, LORA_TARGETS, LoraSettings, TrainingSettings

if TYPE_CHECKING:
    from mdi.training.begin import Beginning
    from mdi.training.checkpoint import SavedRun
    from mdi.training.data import DataSet
    from mdi.training.processes import Processes
    from mdi.training.session import Session

INITS = ("scratch", "resume", "finetune", "hf", "huggingface")
DEFAULT_DATASET = Path("data/shakespeare")

logger = logging.getLogger("mdi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags, default_ckpt_folder

    ckpt = str(default_ckpt_folder() / "custom" / "NanoLlama")
    default = TrainingSettings(sequence_length=1)

    def number(group: argparse._ArgumentGroup, flag: str, kind: type, text: str) -> None:
        value = getattr(default, flag.replace("-", "_"))
        group.add_argument(f"--{flag}", type=kind, metavar="N", help=f"{text} ({'never' if value is None else value})")

    parser.add_argument(
        "--ckpt",
        default=ckpt,
        metavar="DIR",
        help="the model's folder; to fine-tune also org/name on the hub (%(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for the results (--ckpt; fine-tuning: finetuned/ in it)"
    )
    parser.add_argument(
        "--dataset", type=Path, default=DEFAULT_DATASET, metavar="DIR", help="of prepare_data (%(default)s)"
    )
    parser.add_argument(
        "--init",
        choices=INITS,
        default="scratch",
        help="where weights come from: random ones, an earlier run, or a checkpoint (finetune, hf, huggingface: the same)",
    )
    parser.add_argument(
        "--config", metavar="SHAPE", help="from scratch: a litgpt name, a .yaml file or a folder with one"
    )
    parser.add_argument("--fit-vocab", action="store_true", help="from scratch: as many tokens as the data set has")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights that the folder may hold already")
    parser.add_argument(
        "-F", "--force-old", action="store_true", help="resume with the earlier run's settings, whatever flags say"
    )
    parser.add_argument("--hf-token", metavar="TOKEN", help="for gated and private models (default: $HF_TOKEN)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: the best that is there)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("-c", "--compile", action="store_true", help="compile the model first (needs a C++ compiler)")
    add_common_flags(parser)

    group = parser.add_argument_group(
        "how long and how much at once (when resuming, the defaults are the earlier run's)"
    )
    number(group, "max-iters", int, "optimizer steps")
    number(group, "batch-size", int, "windows per forward pass")
    number(group, "grad-acc-steps", int, "forward passes per optimizer step, of all processes together")
    group.add_argument("--sequence-length", type=int, metavar="N", help="tokens per window (the model's context)")
    number(group, "ckpt-interval", int, "steps between evaluations, after each of which is saved")
    number(group, "eval-iters", int, "batches per evaluation at most")
    number(group, "log-interval", int, "steps between progress lines")
    number(group, "patience", int, "stop after so many evaluations without a better one")
    group.add_argument(
        "-au",
        "--always-update",
        action="store_true",
        default=None,
        help="lit_model.pth: the last weights, not the best",
    )
    number(group, "seed", int, "of the first weights and the order of the windows")
    group = parser.add_argument_group("optimizer (AdamW) and learning rate (linear warm-up, then down)")
    number(group, "lr", float, "learning rate after the warm-up")
    number(group, "min-lr", float, "learning rate at the end; by default a tenth of --lr, if that is given")
    number(group, "warmup-iters", int, "steps of warm-up")
    group.add_argument("--schedule", choices=SCHEDULES, help=f"the way down ({default.schedule})")
    group.add_argument("--decay-iters", type=int, metavar="N", help="step at which --min-lr is reached (--max-iters)")
    number(group, "weight-decay", float, "on matrices only")
    number(group, "beta1", float, "decay of the mean gradient")
    number(group, "beta2", float, "decay of the mean squared gradient")
    number(group, "eps", float, "added to the root of the latter")
    number(group, "grad-clip", float, "largest norm of the gradient; 0: no limit")
    lora = LoraSettings(r=1)
    group = parser.add_argument_group("LoRA (with --init finetune)")
    group.add_argument("--lora-r", type=int, metavar="N", help="train adapters of this rank, not the weights (off)")
    group.add_argument("--lora-alpha", type=int, metavar="N", help=f"they count alpha / r ({lora.alpha})")
    group.add_argument("--lora-dropout", type=float, metavar="P", help=f"of their input ({lora.dropout})")
    group.add_argument(
        "--lora-targets", metavar="A,B,...", help=f"of {','.join(LORA_TARGETS)} ({','.join(lora.targets)})"
    )
    group = parser.add_argument_group("number types")
    group.add_argument(
        "--dtype", choices=DTYPES, help="of the matrix products (bfloat16 where a GPU has it, else float32)"
    )
    group.add_argument("--save-dtype", choices=DTYPES, help=f"of the checkpoints ({default.save_dtype})")


def run(args: argparse.Namespace) -> int:
    import torch

    from mdi.training.interrupt import StopRequest
    from mdi.training.processes import Processes, joined

    if args.threads is not None:
        if args.threads < 1:
            raise UsageError(f"--threads {args.threads}: expected at least 1")
        torch.set_num_threads(args.threads)
    processes = Processes.from_environment()
    device = pick_device(processes.device_for(args.device or best_device()))
    with joined(processes, device), StopRequest() as stop:
        session = make_session(args, device, processes)
        session.run(lambda: bool(stop))
        if processes.is_first:
            draw_losses(session.out)
    return 0 if stop.number is None else 128 + stop.number


def make_session(args: argparse.Namespace, device: str, processes: Processes) -> Session:
    """Everything that a session needs, checked, and told in one line. Raises MdiError."""
    import torch

    from mdi.training.begin import check_fit, restore
    from mdi.training.data import load_data_set
    from mdi.training.loop import Trainer
    from mdi.training.session import Session
    from mdi.training.windows import Windows

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
        forward=processes.wrap(forward, may_skip_weights=beginning.config.n_expert > 0),
        progress=beginning.progress,
        processes=processes,
    )
    if beginning.saved is not None:
        restore(trainer, beginning.saved)
    session = Session(trainer, beginning, out, data.sha256, processes, lambda line: print(line, flush=True))
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
    from mdi.training.begin import check_fit, check_free, from_checkpoint, from_scratch, from_state
    from mdi.training.checkpoint import load_state
    from mdi.training.shape import fit_vocabulary, load_shape

    lora = make_lora(args)
    for flag in ("config", "fit_vocab"):
        if getattr(args, flag) and args.init != "scratch":
            raise UsageError(
                f"--{flag.replace('_', '-')} is for --init scratch: the weights of --ckpt have their shape"
            )
    if args.force_old and args.init != "resume":
        raise UsageError("-F/--force-old is for --init resume")
    folder = Path(args.ckpt).expanduser()
    seed = TrainingSettings.seed if args.seed is None else args.seed
    if args.init == "scratch":
        if lora is not None:
            raise UsageError("--lora-r adapts weights that were trained before: use it with --init finetune")
        config = load_shape(args.config or folder)
        config = fit_vocabulary(config, data.vocab_size) if args.fit_vocab else config
        check_fit(config, data)
        check_free(args.out or folder, args.overwrite)
        return from_scratch(config, seed, data), args.out or folder
    if args.init == "resume":
        if lora is not None:
            raise UsageError("--lora-r: a resumed run keeps the adapters that it began with")
        folder = args.out or folder
        return from_state(folder, load_state(folder), data), folder
    folder = find_checkpoint(args.ckpt, args.hf_token)
    out = args.out or folder / "finetuned"
    check_free(out, args.overwrite)
    return from_checkpoint(folder, lora, seed, data), out


def find_checkpoint(ckpt: str, token: str | None) -> Path:
    """The folder of a checkpoint in litgpt's format; downloaded and converted where needed. Raises MdiError."""
    from mdi.checkpoint.convert import convert, needs_conversion
    from mdi.checkpoint.download import download, is_repo_id
    from mdi.cli import default_ckpt_folder

    folder = Path(ckpt).expanduser()
    if not folder.exists() and is_repo_id(ckpt):
        logger.info("looking for %s on the hub", ckpt)
        folder = download(ckpt, default_ckpt_folder(), token)
    if needs_conversion(folder):
        logger.info("converting %s", folder)
        folder = convert(folder)
    return folder


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
        raise UsageError(f"--device {name}: this machine or this torch does not have it ({reason}); try cpu") from err
    return name


def make_settings(
    args: argparse.Namespace, block_size: int, device: str, saved: SavedRun | None = None
) -> TrainingSettings:
    """Settings from the flags, else from the run that is resumed, else as the model and the device suggest.

    Raises:
        UsageError: a number is out of its range, or the device cannot train in that type.
    """
    import torch

    kind = device.partition(":")[0]
    given: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(TrainingSettings)}
    given = {} if args.force_old else {name: value for name, value in given.items() if value is not None}
    if saved is None:
        has_bf16 = kind == "cuda" and torch.cuda.is_bf16_supported()
        lr = given.get("lr")
        rest = {"min_lr": lr / 10} if lr is not None else {}
        settings = TrainingSettings(
            **{"sequence_length": block_size, "dtype": "bfloat16" if has_bf16 else "float32", **rest, **given}
        )
    else:
        settings = replace(saved.settings, **given)
    if settings.dtype == "float16" and kind != "cuda":
        raise UsageError(f"--dtype float16 trains on cuda only, not on {device}; use bfloat16 or float32")
    if settings.sequence_length > block_size:
        raise UsageError(
            f"--sequence-length {settings.sequence_length} is more than the model's context of {block_size}"
        )
    return settings


def make_lora(args: argparse.Namespace) -> LoraSettings | None:
    """What the flags ask for; None without --lora-r. Raises UsageError."""
    given = {name: getattr(args, f"lora_{name}") for name in ("alpha", "dropout", "targets")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.lora_r is None or args.lora_r == 0:
        if given:
            raise UsageError(f"--lora-{next(iter(given))} without --lora-r: give the rank of the adapters, e.g. 8")
        return None
    if "targets" in given:
        given["targets"] = tuple(given["targets"].split(","))
    return LoraSettings(r=args.lora_r, **given)


def draw_losses(out: Path) -> None:
    """losses.png beside losses.csv, if matplotlib is there; a run is not lost for a figure."""
    from mdi.errors import MdiError
    from mdi.plots import plot_losses
    from mdi.training.record import read_losses
    from mdi.training.session import RECORD_NAME

    try:
        rows = read_losses(out / RECORD_NAME)
        series = {
            label: [(int(row["step"]), float(row[name])) for row in rows if row[name]]
            for label, name in (("training", "train_loss"), ("held out", "val_loss"))
        }
        plot_losses(out / "losses.png", series, out.name)
    except MdiError as e:
        logger.warning("no figure of the losses: %s", e)
