"""The flags of train.py, and the settings that they ask for."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.errors import Code, UsageError
from mdi.spec.parser import Parser
from mdi_training.schedule import SCHEDULES
from mdi_training.training_settings import DTYPES, LORA_TARGETS, LoraSettings, TrainingSettings

if TYPE_CHECKING:
    from mdi_training.checkpoint import SavedRun

INITS = ("scratch", "resume", "finetune", "hf", "huggingface")
DEFAULT_DATASET = Path("data/shakespeare")
DEFAULT = TrainingSettings(sequence_length=1)


def add_arguments(parser: Parser) -> None:
    from mdi.cli import output_dir
    from mdi.spec.options import COMMON

    ckpt = str(output_dir("checkpoints") / "custom" / "NanoLlama")
    parser.add_argument(
        "--ckpt",
        default=ckpt,
        metavar="DIR",
        help="the model's folder; to fine-tune also org/name on the hub (checkpoints/custom/NanoLlama; in a checkout in src/)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results (--ckpt; fine-tuning: finetuned/ in it)"
    )
    parser.add_argument(
        "--dataset",
        type=Path,
        default=DEFAULT_DATASET,
        metavar="DIR",
        help="folder that prepare_data made (%(default)s)",
    )
    parser.add_argument(
        "--init",
        choices=INITS,
        default="scratch",
        help="first weights: random, from an earlier run, or (finetune, hf, huggingface) from a checkpoint (default: scratch)",
    )
    parser.add_argument(
        "--config", metavar="SHAPE", help="shape of a new model: a litgpt name, a .yaml file or a folder with one"
    )
    parser.add_argument("--fit-vocab", action="store_true", help="give a new model the vocabulary size of the data set")
    parser.add_argument("--overwrite", action="store_true", help="replace existing weights in the folder")
    parser.add_argument(
        "-F", "--force-old", action="store_true", help="resume with the earlier run's settings and ignore other flags"
    )
    parser.add_argument("--hf-token", metavar="TOKEN", help="for gated and private models (default: $HF_TOKEN)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: a GPU if there is one)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (default: this process's share of the cores)"
    )
    parser.add_argument("-c", "--compile", action="store_true", help="compile the model first (needs a C++ compiler)")
    parser.options(None, *COMMON)
    _add_length_flags(parser)
    _add_optimizer_flags(parser)
    _add_lora_flags(parser)
    group = parser.add_argument_group("number types")
    group.add_argument(
        "--dtype", choices=DTYPES, help="number type of the matrix products (bfloat16 if a GPU has it, else float32)"
    )
    group.add_argument("--save-dtype", choices=DTYPES, help=f"number type of the checkpoints ({DEFAULT.save_dtype})")


def _number(group: argparse._ArgumentGroup, flag: str, value_type: type, text: str) -> None:
    value = getattr(DEFAULT, flag.replace("-", "_"))
    group.add_argument(
        f"--{flag}", type=value_type, metavar="N", help=f"{text} ({'never' if value is None else value})"
    )


def _add_length_flags(parser: Parser) -> None:
    group = parser.add_argument_group(
        "how long and how much at once (when resuming, the defaults are the earlier run's)"
    )
    _number(group, "max-iters", int, "optimizer steps")
    _number(group, "batch-size", int, "windows per forward pass")
    _number(group, "grad-acc-steps", int, "forward passes per optimizer step, of all processes together")
    group.add_argument("--sequence-length", type=int, metavar="N", help="tokens per window (the model's context)")
    _number(group, "ckpt-interval", int, "steps between evaluations; each is followed by a save")
    _number(group, "eval-iters", int, "most batches per evaluation")
    _number(group, "log-interval", int, "steps between progress lines")
    _number(group, "patience", int, "stop after N evaluations without an improvement")
    group.add_argument(
        "-au",
        "--always-update",
        action="store_true",
        default=None,
        help="save the last weights to lit_model.pth, not the best",
    )
    _number(group, "seed", int, "seed of the first weights and the order of the windows")


def _add_optimizer_flags(parser: Parser) -> None:
    group = parser.add_argument_group("optimizer (AdamW) and learning rate (rises linearly, then falls)")
    _number(group, "lr", float, "learning rate after the warm-up")
    _number(group, "min-lr", float, "learning rate at the end; by default a tenth of --lr, if that is given")
    _number(group, "warmup-iters", int, "steps of warm-up")
    group.add_argument("--schedule", choices=SCHEDULES, help=f"how the learning rate falls ({DEFAULT.schedule})")
    group.add_argument("--decay-iters", type=int, metavar="N", help="step at which --min-lr is reached (--max-iters)")
    _number(group, "weight-decay", float, "weight decay, on matrices only")
    _number(group, "beta1", float, "decay of the mean gradient")
    _number(group, "beta2", float, "decay of the mean squared gradient")
    _number(group, "eps", float, "added to the square root of the mean squared gradient")
    _number(group, "grad-clip", float, "largest norm of the gradient; 0 is no limit")


def _add_lora_flags(parser: Parser) -> None:
    lora = LoraSettings(r=1)
    group = parser.add_argument_group("LoRA (with --init finetune)")
    group.add_argument("--lora-r", type=int, metavar="N", help="train adapters of this rank, not the weights (off)")
    group.add_argument("--lora-alpha", type=int, metavar="N", help=f"adapters are scaled by alpha / r ({lora.alpha})")
    group.add_argument("--lora-dropout", type=float, metavar="P", help=f"dropout of their input ({lora.dropout})")
    group.add_argument(
        "--lora-targets",
        metavar="A,B,...",
        help=f"matrices with adapters, from {','.join(LORA_TARGETS)} ({','.join(lora.targets)})",
    )


def make_settings(
    args: argparse.Namespace, block_size: int, device: str, saved: SavedRun | None = None
) -> TrainingSettings:
    """Settings from the flags, else from the resumed run, else as the model and the device suggest.

    Raises:
        UsageError: a number is out of its range, or the device cannot train in that type.
    """
    import torch

    value_type = device.partition(":")[0]
    given: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(TrainingSettings)}
    given = {} if args.force_old else {name: value for name, value in given.items() if value is not None}
    if saved is None:
        has_bf16 = value_type == "cuda" and torch.cuda.is_bf16_supported()
        lr = given.get("lr")
        rest = {"min_lr": lr / 10} if lr is not None else {}
        settings = TrainingSettings(
            **{"sequence_length": block_size, "dtype": "bfloat16" if has_bf16 else "float32", **rest, **given}
        )
    else:
        settings = replace(saved.settings, **given)
    if settings.dtype == "float16" and value_type != "cuda":
        raise UsageError(
            f"--dtype float16 trains on cuda only, not on {device}; use bfloat16 or float32", code=Code.DEVICE
        )
    if settings.sequence_length > block_size:
        raise UsageError(
            f"--sequence-length {settings.sequence_length} is more than the model's context of {block_size}",
            code=Code.VALUE,
        )
    return settings


def make_lora(args: argparse.Namespace) -> LoraSettings | None:
    """What the flags ask for; None without --lora-r. Raises UsageError."""
    given = {name: getattr(args, f"lora_{name}") for name in ("alpha", "dropout", "targets")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.lora_r is None or args.lora_r == 0:
        if given:
            raise UsageError(
                f"--lora-{next(iter(given))} without --lora-r: give the rank of the adapters, e.g. 8", code=Code.FLAGS
            )
        return None
    if "targets" in given:
        given["targets"] = tuple(given["targets"].split(","))
    return LoraSettings(r=args.lora_r, **given)
