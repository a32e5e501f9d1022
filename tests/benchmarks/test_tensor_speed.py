"""Nodes that share blocks out, on a tiny model: every way gives the same tokens, and halves of blocks wait for their time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tensor_speed
import write_results
from mdi.checkpoint.chunks import write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import LitCheckpoint
from mdi.model.plain import ModelConfig
from mdi.tensor.shares import Share, share_out
from random_checkpoint import config_of, make_checkpoint
from tensor_speed import WaitingHalves, halves_s

SCRIPT = Path(tensor_speed.__file__)
FLAGS = ["--head", "shared", "--prompt", "5", "--tokens", "4", "--wait-ms", "8", "--key"]


@pytest.fixture(scope="module")
def chunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "tiny-1m")
    source = PackedSource(LitCheckpoint(folder), Packing("int8", "int8"))
    (path,) = write_chunks(source, folder, (source.config.n_layer,))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no pinning on this system")
def test_nodes_without_a_key_and_with_one_give_the_same_tokens(chunk: Path, tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--chunk", str(chunk), "--nodes", "1", "2", *FLAGS, "--json", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(kept.read_text())["tokens"]
    assert [(one["nodes"], one["key"]) for one in found] == [(1, False), (2, False), (2, True)]
    assert len(set(found[0]["ids"])) > 1 and all(one["ids"] == found[0]["ids"] for one in found)
    assert [one["ids"] for one in found] == [json.loads(line)["ids"] for line in done.stdout.splitlines()]
    assert [len(one["read_gb_s"]) for one in found] == [1, 2, 2]
    assert all(before > 0 and after > 0 for one in found for before, after in one["read_gb_s"])
    assert found[1]["sums"] == found[2]["sums"] == 4 * 2 * 3  # of four tokens, two in each block
    assert all(one["wait_ms"] == 8 for one in found)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no pinning on this system")
def test_rounds_have_the_reading_rate_of_each_process(
    chunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "benchmarks" / "results" / "tensor_speed.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--chunk",
        str(chunk),
        "--rounds",
        "2",
        "--nodes",
        "1",
        "3",
        "--tokens",
        "2",
    ]
    subprocess.run([*command, "--json", str(kept)], capture_output=True, check=True)
    one, three = json.loads(kept.read_text())["tokens"]
    assert (one["way"], one["gain"], three["way"]) == ("one node", 1, "3 nodes")
    assert [len(of_round["read_gb_s"]) for of_round in three["rounds"]] == [3, 3]
    monkeypatch.setattr(write_results, "RESULTS", tmp_path / "benchmarks" / "results")
    rates = [sum(map(statistics.mean, of_round["read_gb_s"])) for of_round in three["rounds"]]
    line = f"({min(rates):.1f} to {max(rates):.1f}) |"
    assert any(
        row.startswith("| int8 | 3 nodes |") and row.endswith(line)
        for row in write_results.table("tensor-speed").splitlines()
    )


@pytest.mark.parametrize("has_failed_before", [False, True])
def test_a_process_that_fails_ends_the_others(has_failed_before: bool) -> None:
    """Also if it has failed before anybody waits for it."""
    start = "process = multiprocessing.get_context('fork').Process; start = process.start\n"
    ended = "process.start = lambda self: (start(self), self.name.endswith('3') and self.join())\n"
    code = (
        "import multiprocessing, signal, tensor_sums\n"
        f"{start + ended if has_failed_before else ''}"
        "def work(rank):\n    if rank == 2:\n        raise ValueError('rank 2')\n    signal.pause()\n"
        "tensor_sums.in_forks(3, work)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "rank 2" in done.stderr


def test_a_half_of_a_block_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, []

    def read_clock() -> float:
        return now

    monkeypatch.setattr(tensor_speed, "time", SimpleNamespace(perf_counter=read_clock, sleep=slept.append))
    weights = WaitingHalves([], lambda part: {}, (0.5, 0.25))
    for half, taken_s in ((0, 0.125), (1, 0.125), (1, 3.0)):
        with weights.ready(0, half):
            now += taken_s
    assert slept == [0.375, 0.125, 0.0]


def test_nodes_share_the_time_as_they_share_heads_and_columns() -> None:
    config = ModelConfig.from_litgpt(config_of("tiny-1m"))
    shares = [Share(share_out(config, [3.0, 1.0], False), rank, config) for rank in range(2)]
    of_nodes = [halves_s(share, 4, 0.8) for share in shares]
    assert [sum(times) for times in zip(*of_nodes, strict=True)] == pytest.approx([0.1, 0.1])
    assert of_nodes[0][0] == pytest.approx(0.1 * shares[0].n_heads / 8) and shares[0].n_heads > shares[1].n_heads
