"""Train a GPT-2: from scratch in one of the thesis' shapes (table I), on from a Hugging Face directory, or on from a stop.

Data are what src/prepare_data.py makes with GPT-2's tokenizer. Into the output folder go what src/train.py writes; give it to
starter.py, sample.py or local_ring.py here.

examples:
  ../../src/prepare_data.py shakespeare.txt --out data/shakespeare --tokenizer checkpoints/gpt2
  ../../src/prepare_data.py Skylion007/openwebtext --out data/openwebtext --tokenizer checkpoints/gpt2 --workers 8
  train.py --size gpt2 --ckpt checkpoints/my-gpt2 --dataset data/openwebtext --batch-size 12 --lr 6e-4
  train.py --init finetune --ckpt checkpoints/gpt2 --out checkpoints/gpt2-shakespeare --dataset data/shakespeare --lr 3e-5
  train.py --init resume --ckpt checkpoints/my-gpt2 --dataset data/openwebtext
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.commands.nano_train import refuse_foreign, resumed
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from gpt.model import PositionGPT
    from gpt.shape import GPTConfig
    from mdi_training.begin import Beginning
    from mdi_training.data import DataSet

_SHAPE = ("n_layer", "n_embd", "n_head")


def add_arguments(parser: Parser) -> None:
    from mdi_training import train_command as cli_train

    cli_train.add_arguments(parser)
    shape = parser.add_argument_group("shape of the model, from scratch (default: the thesis')")
    shape.add_argument(
        "--size", default="gpt2", metavar="NAME", help="gpt2, gpt2-medium, gpt2-large or gpt2-xl (%(default)s)"
    )
    for name in _SHAPE:
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="instead of --size's")
    shape.add_argument("--context", type=int, default=1024, metavar="N", help="tokens that it sees (%(default)s)")
    shape.add_argument("--dropout", type=float, default=0.0, metavar="P", help="(%(default)s)")
    parser.set_defaults(ckpt="checkpoints/my-gpt2", dataset=Path("data/shakespeare"))


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

    refuse_foreign(args, "a GPT-2's shape is --size and so on")
    given = Path(args.ckpt).expanduser()
    if args.init == "resume":
        folder = args.out or given
        return resumed(folder, data), folder
    if args.init == "finetune":
        if args.out is None or args.out.resolve() == given.resolve():
            raise UsageError("--init finetune reads --ckpt and writes to --out: name another folder with --out")
        check_free(args.out, args.overwrite)
        model = pretrained(given, args.dropout)
        folder = args.out
    else:
        folder = args.out or given
        check_free(folder, args.overwrite)
        config = shape_of(args, data.vocab_size)
        model = random_model(config, TrainingSettings.seed if args.seed is None else args.seed)
    if data.vocab_size > model.config.padded_vocab_size:
        raise UsageError(
            f"{data.folder} has ids up to {data.vocab_size - 1}, the model's vocabulary has {model.config.padded_vocab_size}: "
            "make the data set with the model's tokenizer"
        )
    files = {"model_config.yaml": nano_config_file(model.config), **data.tokenizer}
    return Beginning(model, model.config, files), folder


def shape_of(args: argparse.Namespace, vocab_size: int) -> GPTConfig:
    from gpt.shape import GPT2_SIZES, gpt2_config
    from mdi.errors import UsageError

    if args.size not in GPT2_SIZES:
        raise UsageError(f"--size {args.size}: expected one of {', '.join(GPT2_SIZES)}")
    sizes = dict(zip(_SHAPE, GPT2_SIZES[args.size], strict=True))
    sizes |= {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    for name, value in {**sizes, "context": args.context}.items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if sizes["n_embd"] % sizes["n_head"]:
        raise UsageError(f"--n-embd {sizes['n_embd']} is no multiple of --n-head {sizes['n_head']}")
    config = gpt2_config(args.size, **sizes, vocab_size=vocab_size, context=args.context)
    config.dropout = _dropout(args.dropout)
    return config


def pretrained(folder: Path, dropout: float) -> PositionGPT:
    """The model of a Hugging Face directory, or of one that was trained here."""
    from gpt.model import random_model
    from gpt.shape import config_of
    from gpt.weights import open_gpt2

    source = open_gpt2(folder)
    config = config_of(source.config.plain(), str(folder))
    config.dropout = _dropout(dropout)
    model = random_model(config, 0)
    model.load_state_dict({name: source.tensor(name).float() for name in source.specs})
    source.close()
    return model


def _dropout(value: float) -> float:
    from mdi.errors import UsageError

    if not 0 <= value < 1:
        raise UsageError(f"--dropout {value}: expected from 0 to less than 1")
    return value
