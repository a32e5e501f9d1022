"""Runs with a window, from the command line: the same texts, and what they took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdi.checkpoint.chunks import find_chunk
from mdi.checkpoint.safetensors_layout import read_header
from mdi.cli import launch
from mdi.engine.speculation import WINDOW_ROWS
from mdi.errors import LimitError
from mdi.kernels import library
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from secondaries import cluster_of, secondaries
from tiny_checkpoint import TEXT, reference, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

PROMPTS = ("Who are you?", "The ring", TEXT)
N_TOKENS = 10
# A text may come when the first frame is under way, and so end in a later one; one more, without rows, may free the caches.
MOST_FRAMES = N_TOKENS + len(PROMPTS)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "cache"))
    return write_checkpoint(tmp_path / "m")


def sample(capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    run = ["--prompt-style", "none", "--n-tokens", str(N_TOKENS), "--temperature", "0", "--json"]
    assert launch("sample", [*flags, *prompts, *run]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def ids(found: dict[str, Any]) -> list[list[int]]:
    return [one["token_ids"] for one in found["samples"]]


EXPECTED = [list(reference(prompt, N_TOKENS)) for prompt in PROMPTS]


def test_from_a_checkpoint_and_from_a_chunk(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = sample(capsys, "--ckpt", str(checkpoint), "--window", "2")
    assert ids(found) == EXPECTED
    assert launch("prepare-model", [str(checkpoint), "--n-nodes", "1"]) == 0
    again = sample(capsys, "--ckpt", str(checkpoint), "--window", "3", "--retain", "2")
    assert ids(again) == EXPECTED
    chunk = find_chunk(checkpoint, 1, "starter")
    n_bytes = sum(stop - start for start, stop in read_header(chunk).offsets.values())
    for one in (found["nodes"][0], again["nodes"][0]):
        assert 0 < one["weights_resident_bytes"] < n_bytes
        # The prompts in a frame, then a frame for every token but the last: each is a pass.
        assert one["weights_read_bytes"] > (N_TOKENS - 1) * (n_bytes - one["weights_resident_bytes"]) / 2
        assert N_TOKENS <= one["frames"] <= MOST_FRAMES
        assert one["disk_wait_s"] >= 0
    whole = sample(capsys, "--ckpt", str(checkpoint))["nodes"][0]
    assert whole["weights_resident_bytes"] == whole["weights_read_bytes"] > again["nodes"][0]["weights_resident_bytes"]
    assert whole["disk_wait_s"] == 0


def test_a_limit_of_memory(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ids(sample(capsys, "--ckpt", str(checkpoint), "--memory", "8G")) == EXPECTED
    failed = sample(capsys, "--ckpt", str(checkpoint), "--memory", "1M", status=2)
    assert failed["error"].count("--memory") == 1 and "\n" not in failed["error"]


def test_a_limit_counts_the_small_model_and_the_rows_of_guesses(checkpoint: Path, tmp_path: Path) -> None:
    """Both are part of the least that works, which is told before anything is computed."""
    n_texts, vocabulary = 16, 16_000
    wide = write_checkpoint(tmp_path / "wide", padded_vocab_size=vocabulary)
    small = write_checkpoint(tmp_path / "small", padded_vocab_size=vocabulary, n_layer=1, n_embd=256)

    def opened(draft: str, limit: int) -> Run:
        options = StarterOptions(
            ckpt=wide, prompt_style="none", device="cpu", quantize="float32", draft=draft, dtype="float32",
            weight_memory=WindowMemory(window=WindowOptions(memory=limit)),
        )  # fmt: skip
        return Run(GivenNodes(standalone()), options, 100, n_texts=n_texts)

    def least(draft: str) -> int:
        limit = 1 << 20
        while True:
            with pytest.raises(LimitError) as error, opened(draft, limit):
                raise AssertionError("it is not enough")
            if "the least that works" in str(error.value):
                return error.value.least_bytes
            limit = error.value.least_bytes + (1 << 20)  # packing needs memory, too, and comes first

    none, auto, own = least("none"), least("auto"), least(str(small))
    logits = (WINDOW_ROWS - 1) * n_texts * 4 * vocabulary
    assert auto - none > logits
    assert own - auto > 2 * 4 * vocabulary * 256, "its embedding and its head"


def test_flags_that_do_not_fit_each_other(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (
        ["--retain", "2"],
        ["--window", "0"],
        ["--window", "2", "--mlock"],
        ["--window", "2", "--dtype", "bfloat16"],
    ):
        sample(capsys, "--ckpt", str(checkpoint), *flags, status=2)


def test_a_damaged_chunk_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("prepare-model", [str(checkpoint), "--n-nodes", "1"]) == 0
    chunk = find_chunk(checkpoint, 1, "starter")
    start, stop = read_header(chunk).offsets["transformer.h.3.mlp.proj.weight"]
    with open(chunk, "r+b") as file:
        file.seek((start + stop) // 2)
        file.write(b"\xff\x00\xff\x00")
    failed = sample(capsys, "--ckpt", str(checkpoint), "--window", "2", status=1)
    assert "block.3" in failed["error"] and str(chunk) in failed["error"]


@pytest.mark.parametrize("with_chunks", [True, False])
def test_a_ring_whose_nodes_all_have_a_window(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], with_chunks: bool
) -> None:
    """Secondaries have what the starter asks for, their weights from parts that they were sent."""
    if with_chunks:
        assert launch("prepare-model", [str(checkpoint), "--n-nodes", "3", "--quantize", "float32"]) == 0
    with secondaries(2, tmp_path) as nodes:
        cluster = cluster_of(nodes)
        entries = [
            {"addr": n.addr, "communication": {"port": n.port}, "inference": {"port_in": n.port_in}}
            for n in cluster.nodes
        ]
        path = tmp_path / "nodes.json"
        path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}))
        capsys.readouterr()
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        flags = ["--nodes-config", str(path), "--ckpt", str(checkpoint), "--window", "1", "--json"]
        flags += ["--memory", "8G"] if with_chunks else []  # which holds everything: then it is read once
        run = [*prompts, "--prompt-style", "none", "--n-tokens", str(N_TOKENS), "--temperature", "0"]
        for _ in range(2):  # the second one finds the stages in memory
            assert launch("starter", [*flags, *run]) == 0
            found = json.loads(capsys.readouterr().out)
            assert ids(found) == EXPECTED
            for one in found["nodes"]:
                assert one["frames"] <= MOST_FRAMES, "all texts go round in one frame"
                times_read = one["weights_read_bytes"] / one["weights_resident_bytes"]
                assert 0.9 < times_read <= 1 if with_chunks else times_read > N_TOKENS
