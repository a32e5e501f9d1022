"""Train a NanoGPT, from scratch or on from a stop: src/train.py with the thesis' shapes (section 3.3) instead of litgpt's.

Into the output folder go what src/train.py writes; give it to starter.py, sample.py or local_ring.py here.

examples:
  prepare_data.py shakespeare.txt --out data/shakespeare-char
  train.py --blocks 7 --ckpt checkpoints/nano-7 --dataset data/shakespeare-char --max-iters 2000 --lr 1e-3
  train.py --init resume --ckpt checkpoints/nano-7 --dataset data/shakespeare-char --max-iters 3000
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from gpt.shape import GPTConfig
    from mdi_training.begin import Beginning
    from mdi_training.data import DataSet

FOREIGN = ("config", "fit_vocab", "hf_token", "lora_r")  # flags of src/train.py that have no meaning here


def add_arguments(parser: Parser) -> None:
    from mdi_training import train_command as cli_train

    cli_train.add_arguments(parser)
    shape = parser.add_argument_group("shape of the model, from scratch (default: the thesis')")
    shape.add_argument("--blocks", type=int, default=7, metavar="N", help="7, 9 and 12 are the thesis' (%(default)s)")
    shape.add_argument("--n-embd", type=int, default=384, metavar="N", help="(%(default)s)")
    shape.add_argument("--n-head", type=int, default=6, metavar="N", help="(%(default)s)")
    shape.add_argument("--context", type=int, default=128, metavar="N", help="tokens that it sees (%(default)s)")
    shape.add_argument("--dropout", type=float, default=0.2, metavar="P", help="(%(default)s)")
    parser.set_defaults(ckpt="checkpoints/nano", dataset=Path("data/shakespeare-char"))


def run(args: argparse.Namespace) -> int:
    from mdi_training.train_command import train

    return train(args, begin)


def begin(args: argparse.Namespace, data: DataSet) -> tuple[Beginning, Path]:
    """The weights to begin with, and the folder for the results. Raises MdiError."""
    from gpt.model import random_model
    from gpt.weights import nano_config_file
    from mdi.errors import UsageError
    from mdi_training.begin import Beginning, check_free
    from mdi_training.training_settings import TrainingSettings

    if args.init not in ("scratch", "resume"):
        raise UsageError(f"--init {args.init}: a NanoGPT begins from scratch, or goes on with resume")
    refuse_foreign(args, "a NanoGPT's shape is --blocks and so on")
    folder = args.out or Path(args.ckpt).expanduser()
    if args.init == "resume":
        return resumed(folder, data), folder
    check_free(folder, args.overwrite)
    config = shape_of(args, data.vocab_size)
    model = random_model(config, TrainingSettings.seed if args.seed is None else args.seed)
    return Beginning(model, config, {"model_config.yaml": nano_config_file(config), **data.tokenizer}), folder


def refuse_foreign(args: argparse.Namespace, instead: str) -> None:
    """Raises UsageError for flags of src/train.py that have no meaning here; `instead` says what has."""
    from mdi.errors import UsageError

    for name in FOREIGN:
        if getattr(args, name, None):
            raise UsageError(f"--{name.replace('_', '-')} is for src/train.py: {instead}")


def shape_of(args: argparse.Namespace, vocab_size: int) -> GPTConfig:
    from gpt.shape import nano_config
    from mdi.errors import UsageError

    for name in ("blocks", "n_embd", "n_head", "context"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    if args.n_embd % args.n_head:
        raise UsageError(f"--n-embd {args.n_embd} is no multiple of --n-head {args.n_head}")
    if not 0 <= args.dropout < 1:
        raise UsageError(f"--dropout {args.dropout}: expected from 0 to less than 1")
    return nano_config(args.blocks, vocab_size, args.n_embd, args.n_head, args.context, args.dropout)


def resumed(folder: Path, data: DataSet) -> Beginning:
    from gpt.model import random_model
    from gpt.weights import parse_nano_config
    from mdi.errors import CheckpointError
    from mdi_training.begin import Beginning
    from mdi_training.checkpoint import load_state

    saved = load_state(folder)
    config = parse_nano_config(saved.files["model_config.yaml"], folder)
    model = random_model(config, 0)
    given = model.load_state_dict(saved.weights, strict=False)
    if given.unexpected_keys or set(given.missing_keys) - {"lm_head.weight"}:  # tied, so that it may be named once
        raise CheckpointError(f"the state in {folder} is not that of the GPT that it describes")
    same = saved.data_sha256 == data.sha256
    notes = [] if same else [f"warning: {data.folder} is not the data set that this run began with"]
    return Beginning(model, config, {**saved.files, **data.tokenizer}, saved=saved, notes=notes)
