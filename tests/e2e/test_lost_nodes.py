"""A node that is killed or stopped, and a run that is interrupted: named, told, and everybody ready for the next run.

The moment is read from what the starter prints; every deadline is generous.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import SOON_S, Cluster, Process, Spawn, Starter
from tiny_checkpoint import reference

N_BYTES = 300  # printed, so the run is well under way

Running = Callable[..., Process]


@pytest.fixture
def running(ring: Cluster, endless: Path, spawn: Spawn) -> Running:
    """A starter in the middle of a run that ends only if something ends it."""

    def start(*flags: object) -> Process:
        args = ("--ckpt", endless, "--nodes-config", ring.path, "--prompt-style", "none", "--n-tokens", 60000)
        process = spawn("starter", *args, "--n-samples", 3, *flags)
        if "--json" in flags:
            wait_for_tokens(ring, process)
        else:
            process.wait_bytes(N_BYTES)
        return process

    return start


def wait_for_tokens(ring: Cluster, process: Process) -> None:
    """Until each sample has some tokens; the starter prints nothing with --json, so it is asked."""
    import requests

    while process.child.poll() is None:
        try:
            samples = ring.status(0).get("samples", [])
        except requests.ConnectionError:
            continue  # it is still importing
        if samples and all(s["n_tokens"] > 5 for s in samples):
            return
    raise AssertionError(process.story())


def check_next_run(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    result = starter(checkpoint, ring.path, "--n-tokens", 8, "--n-samples", 1, "--wait", 60)
    assert result.token_ids == [list(reference("Who are you?", 8))], result.err


def check_told(process: Process, status: int) -> str:
    """One line of error; what each sample had reached."""
    assert process.wait(SOON_S) == status, process.story()
    assert "Traceback" not in process.err, process.err
    assert "what each sample had reached" in process.out
    assert all(f"--- sample {i} (" in process.out for i in range(3))
    assert "(0 tokens)" not in process.out
    lines: list[str] = [line for line in process.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == (1 if status == 1 else 0), process.err
    return lines[0] if lines else ""


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_secondary_is_named(
    ring: Cluster, running: Running, checkpoint: Path, starter: Starter, index: int
) -> None:
    process = running()
    ring[index].signal(signal.SIGKILL)
    assert f"secondary{index}" in check_told(process, 1)
    other = 1 - index
    ring[other].wait_for("waits for the next run", deadline_s=SOON_S)
    assert ring.status(other + 1)["state"] == "IDLE" and f"secondary{index}" in ring.status(other + 1)["error"]
    ring.revive()
    check_next_run(ring, checkpoint, starter)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_secondary_is_named_and_can_be_used_again(
    ring: Cluster, running: Running, checkpoint: Path, starter: Starter, index: int
) -> None:
    process = running("--json")
    ring[index].signal(signal.SIGSTOP)
    try:
        assert process.wait(SOON_S) == 1, process.story()
    finally:
        ring[index].signal(signal.SIGCONT)
    told = json.loads(process.out)
    assert set(told) == {"error", "samples"} and f"secondary{index}" in told["error"], told["error"]
    assert len(told["samples"]) == 3 and all(len(s["token_ids"]) > 5 for s in told["samples"])
    assert all(s["finish_reason"] is None for s in told["samples"])
    assert "Traceback" not in process.err
    ring.wait_states("IDLE", "READY")
    check_next_run(ring, checkpoint, starter)


def test_a_killed_starter_leaves_the_secondaries_waiting(
    ring: Cluster, running: Running, checkpoint: Path, starter: Starter
) -> None:
    process = running()
    process.signal(signal.SIGKILL)
    process.wait()
    ring.wait_states("IDLE", "READY")
    check_next_run(ring, checkpoint, starter)


def test_a_stopped_starter_leaves_the_secondaries_waiting(
    ring: Cluster, running: Running, checkpoint: Path, starter: Starter
) -> None:
    process = running()
    process.signal(signal.SIGSTOP)
    found = ring.wait_states("IDLE")
    assert "starter" in found[0]["error"]
    process.signal(signal.SIGCONT)
    assert check_told(process, 1)
    check_next_run(ring, checkpoint, starter)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_starter_ends_the_run_everywhere(
    ring: Cluster, running: Running, checkpoint: Path, starter: Starter, number: int, status: int
) -> None:
    process = running()
    assert [s["state"] for s in ring.wait_states("RUNNING")] == ["RUNNING", "RUNNING"]
    process.signal(number)
    check_told(process, status)
    found = ring.wait_states("READY")
    assert [s["error"] for s in found] == [None, None], "the run was ended in good order"
    check_next_run(ring, checkpoint, starter)


def test_an_interrupted_run_is_one_object_with_json(ring: Cluster, running: Running) -> None:
    process = running("--json")
    process.signal(signal.SIGINT)
    assert process.wait(SOON_S) == 130, process.story()
    told = json.loads(process.out)
    assert told["error"] == "interrupted" and len(told["samples"]) == 3
    assert all(s["token_ids"] for s in told["samples"])


def test_a_starter_that_is_killed_while_it_loads(
    ring: Cluster, endless: Path, spawn: Spawn, checkpoint: Path, starter: Starter
) -> None:
    """Secondary 1 is stopped, so that the ring cannot close; secondary 0 waits for a starter that is gone."""
    ring[1].signal(signal.SIGSTOP)
    process = spawn("starter", "--ckpt", endless, "--nodes-config", ring.path, "--wait", 60)
    ring[0].wait_for("is ready: blocks", n_times=ring[0].err.count("is ready: blocks") + 1)
    process.signal(signal.SIGKILL)
    ring[1].signal(signal.SIGCONT)
    ring[0].wait_for("given up", n_times=ring[0].err.count("given up") + 1, deadline_s=SOON_S)
    found = ring.wait_states("IDLE")
    assert "silent" in found[0]["error"]
    check_next_run(ring, checkpoint, starter)


def test_a_secondary_that_ends_by_itself_ends_in_good_order(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter
) -> None:
    cluster = make_cluster(3)
    for index in range(2):
        cluster.start(index)
    for index, (number, status) in enumerate([(signal.SIGINT, 130), (signal.SIGTERM, 143)]):
        cluster[index].wait_for("waits for its starter")
        cluster[index].signal(number)
        assert cluster[index].wait(SOON_S) == status
        assert "Traceback" not in cluster[index].err, cluster[index].err
