"""What the tests of training share: a small grammar's text, a data set of it, a small shape, and train.py in-process."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from unittest.mock import patch

import yaml

from mdi.spec.options import Options
from mdi.spec.parser import Parser
from mdi_training import prepare_data_command as cli_data
from mdi_training import train_command as cli_train

SHAPE = dict(
    name="tiny",
    block_size=32,
    vocab_size=320,
    padded_vocab_size=320,
    n_layer=2,
    n_embd=32,
    n_head=4,
    head_size=8,
    n_query_groups=2,
    intermediate_size=64,
    norm_class_name="RMSNorm",
    mlp_class_name="LLaMAMLP",
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
)
FLAGS = "--device cpu --batch-size 8 --grad-acc-steps 1 --max-iters 60 --lr 1e-2 --min-lr 1e-3 --warmup-iters 5"


def grammar_text(n_sentences: int, seed: int = 1) -> str:
    """Speeches of a small grammar: twelve equally likely ones, about nine tokens each."""
    rng = random.Random(seed)
    names, verbs, things = ("Anna", "Bob"), ("sees", "likes"), ("tree", "house", "river")
    return "".join(
        f"{(name := rng.choice(names))}:\n{name} {rng.choice(verbs)} the {rng.choice(things)}.\n\n"
        for _ in range(n_sentences)
    )


def prepare(*argv: object) -> int:
    """prepare_data.py, without its handling of errors."""
    parser = Parser(Options)
    cli_data.add_arguments(parser)
    return cli_data.run(parser.parse_args([str(arg) for arg in argv]))


def make_dataset(folder: Path, seed: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(grammar_text(400, seed))
    assert prepare(folder / "text.txt", "--vocab-size", 320) == 0
    return folder


def make_shape(folder: Path, **changes: object) -> Path:
    """A folder with nothing but a model_config.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump({**SHAPE, **changes}))
    return folder


def argv_of(ckpt: Path, dataset: Path, *more: object) -> list[str]:
    return ["--ckpt", str(ckpt), "--dataset", str(dataset), *FLAGS.split(), *map(str, more)]


def train(ckpt: Path, dataset: Path, *more: object) -> int:
    """train.py with small numbers, which `more` can change; without its handling of errors."""
    return train_with(*argv_of(ckpt, dataset, *more))


def train_with(*argv: object) -> int:
    """train.py with these flags and no others; without the figure of the losses, which takes longer than such a training."""
    parser = Parser(Options)
    cli_train.add_arguments(parser)
    with patch.object(cli_train, "draw_losses"):
        return cli_train.run(parser.parse_args([str(arg) for arg in argv]))


def losses(folder: Path) -> list[dict[str, str]]:
    with open(folder / "losses.csv", newline="") as handle:
        return list(csv.DictReader(handle))


def curve(folder: Path) -> list[tuple[str, str, str, str]]:
    """What has to be the same in two runs: all of the record but the times."""
    return [(row["step"], row["lr"], row["train_loss"], row["val_loss"]) for row in losses(folder)]


def val_losses(folder: Path) -> list[float]:
    return [float(row["val_loss"]) for row in losses(folder) if row["val_loss"]]
