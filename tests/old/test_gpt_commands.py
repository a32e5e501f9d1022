"""Tokenizers, training and the command lines of old/: what works, and what is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpt_models import CONTEXT, TEXT, check_refusal, tiny_nano, write_gpt2, write_nano

from gpt.commands import (
    gpt2_ring,
    gpt2_sample,
    gpt2_secondary,
    gpt2_starter,
    nano_data,
    nano_finisher,
    nano_intermediate,
    nano_ring,
    nano_sample,
    nano_starter,
    nano_train,
)
from gpt.families import NanoFamily
from gpt.model import greedy
from gpt.tokens import CharCodec, character_vocabulary, gpt2_codec
from gpt.turns import WholeTextScheduler
from gpt.weights import open_nano
from mdi.cli import launch
from mdi.engine.sequence import SamplingParams, Sequence
from mdi.errors import CheckpointError, UsageError
from mdi.model.plain import ModelConfig, spec_of
from mdi_training.data import load_data_set

OLD = Path(__file__).resolve().parents[2] / "old"
ROLES = (
    gpt2_ring, gpt2_sample, gpt2_secondary, gpt2_starter,
    nano_finisher, nano_intermediate, nano_ring, nano_sample, nano_starter,
)  # fmt: skip
LAUNCHERS = sorted([*OLD.glob("nanoGPT/*.py"), *OLD.glob("GPT2/*.py")])
SHAPE = ["--blocks", "2", "--n-embd", "24", "--n-head", "2", "--context", "12", "--dropout", "0.2", "--threads", "1"]


def run(module: object, *args: object) -> int:
    return launch("sample", list(map(str, args)), module_name=module.__name__)  # type: ignore[attr-defined]


def test_characters_there_and_back() -> None:
    vocabulary = character_vocabulary([TEXT, "ä\t  x"])
    assert vocabulary.size == len(set(TEXT + "ä\t x"))
    for text in (TEXT, " \n\n  ä\tx ", ""):
        ids = vocabulary.encode(text)
        assert len(ids) == len(text) and vocabulary.decode(ids) == text
    assert vocabulary.encode("\tä") == [0, vocabulary.size - 1], "in the order of code points"


def test_an_unknown_character_is_named(tmp_path: Path) -> None:
    codec = CharCodec.from_checkpoint(write_nano(tmp_path / "nano", tiny_nano()), "none")
    assert codec.decode(codec.encode("The ring\n")) == "The ring\n"
    with pytest.raises(UsageError) as caught:
        codec.encode("Who\u00df")
    assert caught.value.code == "vocabulary"


def test_gpt2_tokenizers(tmp_path: Path) -> None:
    folder = write_gpt2(tmp_path / "gpt2")
    codec = gpt2_codec(folder, "none")
    ids = codec.encode("so it<|endoftext|>\nis")
    assert ids[5] == 96 and codec.decode(ids) == "so it\nis" and codec.eos_ids == {96}
    (folder / "merges.txt").unlink()
    with pytest.raises(CheckpointError) as caught:
        gpt2_codec(folder, "none")
    assert caught.value.code == "missing"


def data_set(tmp_path: Path, *flags: object) -> Path:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    assert run(nano_data, text, "--out", tmp_path / "data", *flags) == 0
    return tmp_path / "data"


def test_data_of_characters_and_of_byte_pairs(tmp_path: Path) -> None:
    found = load_data_set(data_set(tmp_path))
    assert found.vocab_size == 26 and len(found.train) + len(found.val) == 20 * len(TEXT)
    pairs = load_data_set(data_set(tmp_path, "--vocab-size", 280))
    assert 257 < pairs.vocab_size <= 280 and len(pairs.train) < len(found.train)


def train(tmp_path: Path, ckpt: Path, n_steps: int, *flags: object) -> int:
    small = [
        "--batch-size",
        "4",
        "--grad-acc-steps",
        "1",
        "--ckpt-interval",
        "10",
        "--lr",
        "1e-2",
        "--decay-iters",
        "40",
    ]
    return run(nano_train, "--ckpt", ckpt, "--dataset", tmp_path / "data", "--max-iters", n_steps, *small, *flags)


def losses(ckpt: Path) -> list[str]:
    lines = (ckpt / "losses.csv").read_text().splitlines()
    columns = [i for i, name in enumerate(lines[0].split(",")) if name in ("step", "train_loss", "val_loss")]
    return [",".join(line.split(",")[i] for i in columns) for line in lines]


def test_training_learns_and_resumes_exactly(tmp_path: Path) -> None:
    data_set(tmp_path)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(tmp_path, whole, 40, *SHAPE) == 0
    assert train(tmp_path, halves, 20, *SHAPE) == 0
    assert train(tmp_path, halves, 40, "--init", "resume", "--threads", "1") == 0
    assert losses(whole) == losses(halves), "dropout included"
    first, last = open_nano(whole), open_nano(halves)
    assert all(torch.equal(first.tensor(name), last.tensor(name)) for name in first.specs)
    assert torch.equal(first.tensor("lm_head.weight"), first.tensor("transformer.wte.weight")), "tied"
    val_losses = [float(line.rsplit(",", 1)[1]) for line in losses(whole)[1:] if line.rsplit(",", 1)[1]]
    assert val_losses[-1] < val_losses[0] < 3.3, "the logarithm of 26 characters is 3.26"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--init", "finetune"], "from scratch, or goes on with resume"),
        (["--fit-vocab"], "--fit-vocab is for src/train.py"),
        (["--lora-r", "4"], "--lora-r is for src/train.py"),
        (["--n-head", "5"], "no multiple"),
        (["--dropout", "1"], "--dropout 1.0"),
        (["--blocks", "0"], "--blocks 0"),
        (["--init", "resume"], "nothing to resume"),
    ],
)
def test_training_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    data_set(tmp_path)
    capsys.readouterr()
    assert train(tmp_path, tmp_path / "nano", 1, *flags) in (1, 2)
    check_refusal(capsys, words)


def test_sample_is_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_nano()
    ckpt = write_nano(tmp_path / "nano", model)
    assert run(nano_sample, "--ckpt", ckpt, "--n-tokens", 25, "--temperature", 0, "--json", "--threads", 1) == 0
    sample = json.loads(capsys.readouterr().out)["samples"][0]
    assert sample["prompt"] == "\n" and sample["token_ids"] == greedy(model, sample["prompt_ids"], 25)


@pytest.mark.parametrize(
    ("module", "words"), [(nano_sample, "no NanoGPT checkpoint"), (gpt2_sample, "no Hugging Face")]
)
def test_no_model_is_told_in_one_line(
    module: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, reason in ((tmp_path / "none", "no such directory"), (tmp_path, words)):
        assert run(module, "--ckpt", folder) in (1, 2)
        told = capsys.readouterr().err.strip()
        assert reason in told and str(tmp_path) in told and "\n" not in told


@pytest.mark.parametrize("module", ROLES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_flags_that_would_have_no_effect_are_not_there(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    """These models have no caches and no chunks, and their cut is the thesis' or even."""
    for flag in ("--chunk", "--kv-dtype", "--kv-memory", "--placement", "--frames"):
        with pytest.raises(SystemExit) as caught:
            run(module, flag, "1")
        assert caught.value.code == 2
        assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run(module, "--help")
    assert caught.value.code == 0
    assert "kv" not in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--dtype", "bfloat16"), ("--quantize", "fp16"), ("--quantize", "int8")])
def test_gpt2_in_other_formats(flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weight formats wrap linear layers from outside, so they hold here as well."""
    args = ("--ckpt", write_gpt2(tmp_path / "gpt2"), "--prompt", "Hello there", "--n-tokens", 3, "--temperature", 0)
    found = []
    for wanted in ((), flags):
        assert run(gpt2_sample, *args, "--json", "--threads", 1, *wanted) == 0
        found.append(json.loads(capsys.readouterr().out)["samples"][0]["token_ids"])
    assert len(found[1]) == 3 and found[0][0] == found[1][0]


def test_as_many_samples_as_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpt.commands import nano_ring, nano_starter

    nodes = OLD / "nanoGPT" / "settings" / "3nodes.json"
    for module, flags in ((nano_starter, ["--nodes-config", nodes]), (nano_ring, ["--nodes", "3"])):
        assert run(module, "--ckpt", tmp_path, "--n-samples", 2, *flags) == 2
        assert "as many samples as nodes: 3, not 2" in capsys.readouterr().err


def test_three_nodes_take_turns_with_whole_texts() -> None:
    """Frame after frame one sample, the new ones first, the last `context` tokens of it, from position 0 on."""
    scheduler = WholeTextScheduler(2, CONTEXT)
    for seq_id, n_prompt in enumerate((3, CONTEXT + 2, 1)):
        scheduler.submit(Sequence(seq_id, tuple(range(n_prompt)), SamplingParams(n_tokens=2), 1000))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.schedule() is None, "two frames for two nodes"
    sent = []
    while plans:
        plan = plans.pop(0)
        assert plan is not None
        for part in plan.slices:
            assert part.start == 0 and part.n_logits == 1 and part.n_rows == len(part.ids)
            sent.append((part.seq_id, part.n_rows))
        scheduler.update(plan.number, {part.seq_id: [7] for part in plan.slices})
        if (following := scheduler.schedule()) is not None:
            plans.append(following)
    assert sent == [(0, 3), (1, CONTEXT), (2, 1), (0, 4), (1, CONTEXT), (2, 2)]
    assert not scheduler.has_work


def test_rows_may_be_as_wide_as_the_vocabulary() -> None:
    model = tiny_nano()
    assert NanoFamily().widest_row(spec_of(ModelConfig.from_litgpt(model.config))) == max(24, 26)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_launchers_have_help_without_torch(path: Path) -> None:
    code = (
        "import runpy, sys\npath, sys.argv = sys.argv[1], [sys.argv[1], '--help']\n"
        "try:\n    runpy.run_path(path, run_name='__main__')\nexcept SystemExit as e:\n    assert not e.code\n"
        "assert 'torch' not in sys.modules and 'litgpt' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout
