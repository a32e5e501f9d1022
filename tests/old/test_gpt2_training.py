"""Training a GPT-2: it learns, resumes exactly, goes on from a Hugging Face directory, and runs afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt_models import check_refusal, write_gpt2
from test_gpt_commands import data_set, losses, run

from gpt.commands import gpt2_sample, gpt2_train
from gpt.model import greedy, n_parameters
from gpt.shape import GPT2_SIZES, gpt2_config
from gpt.tokens import gpt2_codec
from gpt.weights import open_gpt2

SHAPE = ["--n-layer", "2", "--n-embd", "24", "--n-head", "2", "--context", "12", "--dropout", "0.1"]
STEPS = ["--batch-size", "4", "--grad-acc-steps", "1", "--ckpt-interval", "10", "--lr", "1e-2", "--decay-iters", "40"]


def train(tmp_path: Path, ckpt: Path, n_steps: int, *flags: object) -> int:
    data = ["--dataset", tmp_path / "data", "--max-iters", n_steps, "--threads", 1]
    return run(gpt2_train, "--ckpt", ckpt, *data, *STEPS, *flags)


def test_it_learns_resumes_exactly_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_set(tmp_path)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(tmp_path, whole, 40, *SHAPE) == 0
    assert train(tmp_path, halves, 20, *SHAPE) == 0
    assert train(tmp_path, halves, 40, "--init", "resume") == 0
    assert losses(whole) == losses(halves), "dropout included"
    val_losses = [float(line.rsplit(",", 1)[1]) for line in losses(whole)[1:] if line.rsplit(",", 1)[1]]
    assert val_losses[-1] < val_losses[0] < 3.3, "the logarithm of 26 characters is 3.26"
    capsys.readouterr()
    model, codec = gpt2_train.pretrained(whole, 0.0).eval(), gpt2_codec(whole, "none")
    expected = codec.decode(greedy(model, codec.encode("The ring"), 10))
    flags = ["--prompt", "The ring", "--n-tokens", 10, "--temperature", 0, "--no-stream"]
    assert run(gpt2_sample, "--ckpt", whole, *flags) == 0
    assert expected in capsys.readouterr().out


def test_it_goes_on_from_a_hugging_face_directory(tmp_path: Path) -> None:
    data_set(tmp_path)
    first, out = write_gpt2(tmp_path / "gpt2"), tmp_path / "tuned"
    source = open_gpt2(first)
    begun = gpt2_train.pretrained(first, 0.1).state_dict()
    assert all(torch.equal(begun[name], source.tensor(name)) for name in source.specs)
    assert train(tmp_path, first, 2, "--init", "finetune", "--out", out) == 0
    tuned = open_gpt2(out)
    assert tuned.config.n_layer == source.config.n_layer
    assert not torch.equal(tuned.tensor("lm_head.weight"), source.tensor("lm_head.weight"))


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--n-embd", "25"], "no multiple"),
        (["--size", "gpt3"], "gpt2-xl"),
        (["--n-layer", "0"], "--n-layer 0"),
        (["--context", "0"], "--context 0"),
        (["--dropout", "1"], "--dropout"),
        (["--lora-r", "4"], "--lora-r"),
        (["--init", "finetune"], "--out"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    data_set(tmp_path)
    capsys.readouterr()
    assert train(tmp_path, tmp_path / "gpt2", 1, *flags) in (1, 2)
    check_refusal(capsys, words)


@pytest.mark.parametrize(
    "size, millions", [("gpt2", 124), ("gpt2-medium", 354), ("gpt2-large", 773), ("gpt2-xl", 1556)]
)
def test_the_shapes_are_the_thesis(size: str, millions: int) -> None:
    """Counted as the thesis does, without the embedding of positions: 123.7, 353.8, 772.7 and 1556.0 million."""
    assert round(n_parameters(gpt2_config(size, *GPT2_SIZES[size])) / 1e6) == millions
