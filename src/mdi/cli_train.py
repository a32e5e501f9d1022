r"""Train a language model from scratch on token files made by prepare_data.py.

The checkpoint folder holds model_config.yaml, the shape. Into it go lit_model.pth (the weights with the best held-out
loss so far, replaced whole), the tokenizer, and losses.csv. What comes out is an ordinary litgpt checkpoint.

example:
  mkdir -p checkpoints/custom/small && cp assets/nano-llama/model_config.yaml checkpoints/custom/small/
  prepare_data.py shakespeare.txt --out data/shakespeare --vocab-size 2048
  train.py --ckpt checkpoints/custom/small --dataset data/shakespeare --batch-size 2 --grad-acc-steps 1 \
           --max-iters 1500 --lr 2e-3 --min-lr 1e-4 --warmup-iters 100
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.errors import UsageError
from mdi.training.settings import DTYPES, TrainingSettings

if TYPE_CHECKING:
    from mdi.training.data import DataSet
    from mdi.training.loop import Report, Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags

    parser.add_argument("--ckpt", type=Path, required=True, metavar="DIR", help="folder with model_config.yaml")
    parser.add_argument("--dataset", type=Path, required=True, metavar="DIR", help="folder made by prepare_data.py")
    parser.add_argument("--init", choices=["scratch"], default="scratch", help="where weights come from (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights that the folder may hold already")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: the best that is there)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("-c", "--compile", action="store_true", help="compile the model first (needs a C++ compiler)")
    add_common_flags(parser)

    default = TrainingSettings(sequence_length=1)
    run_group = parser.add_argument_group("how long and how much at once")

    def number(group: argparse._ArgumentGroup, flag: str, kind: type, text: str) -> None:
        value = getattr(default, flag.replace("-", "_"))
        group.add_argument(
            f"--{flag}", type=kind, default=value, metavar="N", help=f"{text} ({'never' if value is None else value})"
        )

    number(run_group, "max-iters", int, "optimizer steps")
    number(run_group, "batch-size", int, "windows per forward pass")
    number(run_group, "grad-acc-steps", int, "forward passes per optimizer step")
    run_group.add_argument("--sequence-length", type=int, metavar="N", help="tokens per window (the model's context)")
    number(run_group, "ckpt-interval", int, "steps between evaluations; the best weights are saved")
    number(run_group, "eval-iters", int, "batches per evaluation at most")
    number(run_group, "log-interval", int, "steps between progress lines")
    number(run_group, "patience", int, "stop after so many evaluations without a better one")
    number(run_group, "seed", int, "of the first weights and the order of the windows")
    optimizer = parser.add_argument_group("optimizer (AdamW; linear warm-up, then cosine)")
    number(optimizer, "lr", float, "learning rate after the warm-up")
    number(optimizer, "min-lr", float, "learning rate at the end")
    number(optimizer, "warmup-iters", int, "steps of warm-up")
    number(optimizer, "weight-decay", float, "on matrices only")
    number(optimizer, "beta1", float, "decay of the mean gradient")
    number(optimizer, "beta2", float, "decay of the mean squared gradient")
    number(optimizer, "grad-clip", float, "largest norm of the gradient; 0: no limit")
    types = parser.add_argument_group("number types")
    types.add_argument(
        "--dtype", choices=DTYPES, help="of the matrix products (bfloat16 where a GPU has it, else float32)"
    )
    types.add_argument("--save-dtype", choices=DTYPES, default=default.save_dtype, help="of the file (%(default)s)")


def run(args: argparse.Namespace) -> int:
    import torch

    from mdi.training.data import load_data_set
    from mdi.training.loop import Trainer
    from mdi.training.record import LossRecord, progress_line
    from mdi.training.shape import WEIGHTS_NAME, load_shape, new_model, save_checkpoint
    from mdi.training.windows import Windows

    if args.threads is not None:
        if args.threads < 1:
            raise UsageError(f"--threads {args.threads}: expected at least 1")
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    config = load_shape(args.ckpt)
    data = load_data_set(args.dataset)
    check_free(args.ckpt, WEIGHTS_NAME, args.overwrite)
    check_fit(args.ckpt, config.padded_vocab_size, data)
    settings = make_settings(args, config.block_size, device)
    model = new_model(config, settings.seed).to(device)
    train = Windows(data.train, settings.sequence_length, settings.seed, str(args.dataset / "train.bin"))
    val = Windows(data.val, settings.sequence_length, settings.seed, str(args.dataset / "val.bin"))
    n_params = sum(p.numel() for p in model.parameters())
    print(f"{n_params:,} parameters on {device}; {describe(settings, len(data.train), len(data.val))}", flush=True)
    trainer = Trainer(model, train, val, settings, forward=torch.compile(model) if args.compile else None)
    save_dtype = getattr(torch, settings.save_dtype)
    with LossRecord(args.ckpt / "losses.csv") as record:

        def report(news: Report) -> None:
            record.add(news)
            print(progress_line(news, settings.max_iters), flush=True)

        def save() -> None:
            save_checkpoint(model, args.ckpt, save_dtype, data.tokenizer)

        run_trainer(trainer, report, save, args.ckpt / WEIGHTS_NAME)
    return 0


def describe(settings: TrainingSettings, n_train: int, n_val: int) -> str:
    n_tokens = settings.max_iters * settings.n_tokens_per_step
    return (
        f"{n_train:,} tokens to train on, {n_val:,} held out; {settings.max_iters} steps of "
        f"{settings.n_tokens_per_step:,} tokens in {settings.dtype}, {n_tokens / n_train:.1f} passes over the text"
    )


def run_trainer(trainer: Trainer, report: Callable[[Report], None], save: Callable[[], object], weights: Path) -> None:
    """Trains, and says how it ended; whatever ends it, the best weights so far stay."""
    began = time.monotonic()
    try:
        trainer.run(report, save)
        how = "done"
    except KeyboardInterrupt:
        how = "interrupted"
        raise
    except BaseException:
        how = "failed"
        raise
    finally:
        progress = trainer.progress
        best = progress.best_val_loss
        kept = f"best held-out loss {best:.4f} in {weights}" if math.isfinite(best) else "nothing was saved"
        print(f"{how} after {progress.n_steps} steps and {time.monotonic() - began:.0f} s; {kept}", flush=True)


def pick_device(name: str | None) -> str:
    """The device asked for, or the best one there is.

    Raises:
        UsageError: this machine does not have it.
    """
    import torch

    if name is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as err:
        reason = str(err).splitlines()[0]
        raise UsageError(f"--device {name}: this machine or this torch does not have it ({reason}); try cpu") from err
    return name


def make_settings(args: argparse.Namespace, block_size: int, device: str) -> TrainingSettings:
    """Settings from the flags, with what depends on the model and the device filled in.

    Raises:
        UsageError: a number is out of its range, or the device cannot train in that type.
    """
    import torch

    kind = device.partition(":")[0]
    values = {f.name: getattr(args, f.name) for f in fields(TrainingSettings)}
    if values["dtype"] is None:
        values["dtype"] = "bfloat16" if kind == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    if values["dtype"] == "float16" and kind != "cuda":
        raise UsageError(f"--dtype float16 trains on cuda only, not on {device}; use bfloat16 or float32")
    if values["sequence_length"] is None:
        values["sequence_length"] = block_size
    if values["sequence_length"] > block_size:
        raise UsageError(f"--sequence-length {args.sequence_length} is more than the model's context of {block_size}")
    return TrainingSettings(**values)


def check_fit(ckpt: Path, padded_vocab_size: int, data: DataSet) -> None:
    """Refuses a data set with ids that the model has no embedding for.

    Raises:
        UsageError: names both sizes.
    """
    if data.vocab_size > padded_vocab_size:
        raise UsageError(
            f"{data.folder} has {data.vocab_size} token ids, but the model in {ckpt} has room for {padded_vocab_size}; "
            "set vocab_size and padded_vocab_size in its model_config.yaml, or prepare the data with fewer"
        )


def check_free(ckpt: Path, weights_name: str, overwrite: bool) -> None:
    """Refuses to train over weights that are there already, unless asked to.

    Raises:
        UsageError: the weights are there.
    """
    if (ckpt / weights_name).exists() and not overwrite:
        raise UsageError(f"{ckpt / weights_name} exists already; --overwrite replaces it, or train into another folder")
