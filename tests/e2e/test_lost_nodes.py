"""A node that is killed or stopped, and a run that is interrupted: named, told, and everybody ready for the next run.

The moment is read from what the starter prints or answers; every deadline is generous.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import SOON_S, Cluster, Process, Result, Spawn, Starter, meanwhile, wait_for_tokens
from tiny_checkpoint import reference

ENDLESS = ("--prompt-style", "none", "--n-tokens", 60000, "--n-samples", 3, "--temperature", 0)


@pytest.fixture
def running(ring: Cluster, endless: Path, spawn: Spawn) -> Callable[..., Process]:
    """A starter as a process, in the middle of a run that ends only if something ends it."""

    def start(*flags: object) -> Process:
        process = spawn("starter", "--ckpt", endless, "--nodes-config", ring.path, *ENDLESS, *flags)
        wait_for_tokens(ring, 5, lambda: process.child.poll() is not None)
        return process

    return start


def in_mid_run(ring: Cluster, action: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Do something as soon as the run that the caller drives inside is well under way."""

    def act(is_over: Callable[[], bool]) -> None:
        wait_for_tokens(ring, 5, is_over)
        action()

    return meanwhile(act)


def check_next_run(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    result = starter(checkpoint, ring.path, "--n-tokens", 8, "--n-samples", 1, "--wait", 60)
    assert result.token_ids == [list(reference("Who are you?", 8))], result.err


def check_object(result: Result, *words: str) -> None:
    """A failure with --json: one object that says what went wrong and what each sample had reached; one line of error."""
    assert result.status == 1, result
    assert set(result.json) == {"error", "samples"} and result.out.count("\n") == 1
    assert all(word in result.json["error"] for word in words), result.json["error"]
    assert len(result.json["samples"]) == 3
    for sample in result.json["samples"]:
        assert len(sample["token_ids"]) > 5 and sample["finish_reason"] is None and sample["text"]
    assert [x for x in result.err.splitlines() if x.startswith("error: ")] == [f"error: {result.json['error']}"]
    assert "Traceback" not in result.err


def check_told(process: Process, status: int) -> None:
    """A starter that was ended from outside says what each sample had reached."""
    assert process.wait(SOON_S) == status, process.story()
    assert "Traceback" not in process.err, process.err
    assert "what each sample had reached" in process.out
    assert all(f"--- sample {i} (" in process.out for i in range(3)) and "(0 tokens)" not in process.out


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_secondary_is_named(
    ring: Cluster, endless: Path, checkpoint: Path, starter: Starter, index: int
) -> None:
    other = 1 - index
    n_waits = ring[other].err.count("waits for the next run")
    with in_mid_run(ring, lambda: ring[index].signal(signal.SIGKILL)):
        result = starter(endless, ring.path, "--n-tokens", 60000, "--n-samples", 3, "--fixed")
    check_object(result, f"secondary{index} is lost")
    ring[other].wait_for("waits for the next run", n_waits + 1, deadline_s=SOON_S)
    status = ring.status(other + 1)
    assert status["state"] == "IDLE" and f"secondary{index}" in status["error"]
    ring.revive()
    check_next_run(ring, checkpoint, starter)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_secondary_is_named_and_can_be_used_again(
    ring: Cluster, endless: Path, checkpoint: Path, starter: Starter, index: int
) -> None:
    with in_mid_run(ring, lambda: ring[index].signal(signal.SIGSTOP)):
        result = starter(endless, ring.path, "--n-tokens", 60000, "--n-samples", 3, "--fixed")
    ring[index].signal(signal.SIGCONT)
    check_object(result, f"secondary{index} is lost", "nothing was heard")
    ring.wait_states("IDLE", "READY")
    check_next_run(ring, checkpoint, starter)


@pytest.mark.slow
def test_a_killed_starter_leaves_the_secondaries_waiting(
    ring: Cluster, running: Callable[..., Process], checkpoint: Path, starter: Starter
) -> None:
    process = running()
    process.signal(signal.SIGKILL)
    process.wait()
    found = ring.wait_states("IDLE", "READY")
    assert "starter" in found[0]["error"]
    check_next_run(ring, checkpoint, starter)


@pytest.mark.slow
def test_a_stopped_starter_leaves_the_secondaries_waiting(
    ring: Cluster, running: Callable[..., Process], checkpoint: Path, starter: Starter
) -> None:
    process = running("--fixed")
    process.signal(signal.SIGSTOP)
    found = ring.wait_states("IDLE")
    assert "starter" in found[0]["error"]
    process.signal(signal.SIGCONT)
    check_told(process, 1)
    check_next_run(ring, checkpoint, starter)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_starter_ends_the_run_everywhere(
    ring: Cluster, running: Callable[..., Process], checkpoint: Path, starter: Starter, number: int, status: int
) -> None:
    is_object = number == signal.SIGTERM
    process = running(*(["--json"] if is_object else []))
    process.signal(number)
    if is_object:
        assert process.wait(SOON_S) == status, process.story()
        told = json.loads(process.out)
        assert told["error"] == "interrupted" and all(len(s["token_ids"]) > 5 for s in told["samples"])
    else:
        check_told(process, status)
    found = ring.wait_states("READY")
    assert [s["error"] for s in found] == [None, None], "the run was ended in good order"
    check_next_run(ring, checkpoint, starter)


def test_an_idle_secondary_ends_when_it_is_told_to(make_cluster: Callable[[int], Cluster]) -> None:
    """At once after its ports are open, too, and however often it is told."""
    cluster = make_cluster(3)
    for index in range(2):
        cluster.start(index)
    for index, number in enumerate([signal.SIGINT, signal.SIGTERM]):
        cluster[index].wait_for("waits for its starter")
        cluster[index].signal(number)
    for index, (number, status) in enumerate([(signal.SIGINT, 130), (signal.SIGTERM, 143)]):
        for _ in range(100):  # an impatient user
            with contextlib.suppress(subprocess.TimeoutExpired):
                cluster[index].signal(number)
                cluster[index].child.wait(0.05)
                break
        assert cluster[index].wait(SOON_S) == status
        assert "Traceback" not in cluster[index].err, cluster[index].err
