"""A starter that is killed in the middle of a run: another one goes on, and gives what an undisturbed run gives."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from mdi.checkpoint.hfconfig import derive_config
from mdi.cli import launch
from mdi.errors import UsageError
from mdi.run.journal import find_run, read_record, runs_in
from processes import DEADLINE_S, Cluster, Spawn, Starter, wait_for_tokens
from test_own_families import random_checkpoint
from tiny_checkpoint import VOCAB, tokenizer

N_TOKENS = 3000  # so that a run with right guesses is still under way when it has been looked at
RUN = ("--prompt-style", "none", "--n-tokens", N_TOKENS, "--n-samples", 3, "--temperature", 0.9, "--seed", 5)


def wait_until_written(folder: Path, n_tokens: int) -> None:
    """Until a run that goes on has written down so many ids of each text."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for path in folder.glob("*/journal"):
            try:
                texts = read_record(path).texts
            except UsageError:  # not written yet
                continue
            if len(texts) == 3 and all(len(text.ids) >= n_tokens for text in texts):
                return
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks have states, all but every third one; no token ends its texts."""
    sizes = {
        "model_type": "qwen3_5_text", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "vocab_size": VOCAB,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "full_attention_interval": 3, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("ckpt") / "states"
    random_checkpoint(derive_config(sizes, "states", Path("config.json")), folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_guessed"), [("endless", False), ("endless", True), ("states", True)])
def test_a_run_whose_starter_was_killed_goes_on(
    ring: Cluster,
    request: pytest.FixtureRequest,
    spawn: Spawn,
    starter: Starter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    is_guessed: bool,
) -> None:
    folder, model = tmp_path / "runs", request.getfixturevalue(name)
    guesses = ("--draft", model) if is_guessed else ()  # the model itself: all guesses are right
    first = spawn("starter", "--ckpt", model, "--nodes-config", ring.path, *RUN, *guesses, "--run-dir", folder)
    wait_until_written(folder, 5)
    first.signal(signal.SIGKILL)
    first.wait()
    before = read_record(find_run(folder, "last")).texts
    n_ended = sum(len(text.ids) == N_TOKENS for text in before)  # right guesses may take one of them to its end
    assert all(len(text.ids) >= 5 for text in before) and n_ended < 3
    capsys.readouterr()
    assert launch("starter", ["--resume", "--run-dir", str(folder)]) == 0
    assert f"{name}: {n_ended} of 3 texts ended" in capsys.readouterr().out
    status = launch("starter", ["--resume", "last", "--run-dir", str(folder), "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    ids = [sample["token_ids"] for sample in json.loads(printed.out)["samples"]]
    assert [text.ids for text in before] == [one[: len(text.ids)] for one, text in zip(ids, before, strict=True)]
    assert not runs_in(folder) and not list(folder.iterdir())
    assert ids == starter(model, ring.path, *RUN, "--no-journal").token_ids


def test_a_search_whose_starter_was_killed_begins_again(
    ring: Cluster, endless: Path, spawn: Spawn, starter: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search writes nothing down before its end, since any of its beams may be dropped."""
    search = (endless, ring.path, "--prompt-style", "none", "--n-tokens", 500, "--beams", 4, "--n-samples", 2)
    folder = tmp_path / "runs"
    first = spawn("starter", "--ckpt", endless, "--nodes-config", *search[1:], "--run-dir", folder)
    wait_for_tokens(ring, 5, lambda: first.child.poll() is not None, 2)
    first.signal(signal.SIGKILL)
    first.wait()
    assert all(not text.ids for text in read_record(find_run(folder, "last")).texts)
    capsys.readouterr()
    status = launch("starter", ["--resume", "last", "--run-dir", str(folder), "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    resumed = [sample["token_ids"] for sample in json.loads(printed.out)["samples"]]
    assert not list(folder.iterdir())
    assert resumed == starter(*search, "--no-journal").token_ids


@pytest.mark.slow
def test_another_model_is_refused(
    ring: Cluster, endless: Path, checkpoint: Path, spawn: Spawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    model = tmp_path / "endless"
    model.symlink_to(endless)
    first = spawn("starter", "--ckpt", model, "--nodes-config", ring.path, *RUN, "--run-dir", folder)
    wait_until_written(folder, 1)
    first.signal(signal.SIGKILL)
    first.wait()
    model.unlink()
    model.symlink_to(checkpoint)
    assert launch("starter", ["--resume", "last", "--run-dir", str(folder), "--json"]) == 2
    assert len(runs_in(folder)) == 1
