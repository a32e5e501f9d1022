"""Before a run, with real processes: the doctor on healthy and ill nodes, a plan, and a placement by measurement."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from processes import Cluster, Spawn, Starter
from tiny_checkpoint import reference

THREE = ("--n-tokens", 6, "--n-samples", 3)


@pytest.mark.slow
def test_a_ring_that_is_placed_by_what_its_nodes_measure(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    """Whatever they measure, and whoever is left out, the text is the same."""
    for method in ("throughput", "latency"):
        result = starter(checkpoint, ring.path, *THREE, "--placement", method, "--wait", 60)
        assert result.token_ids == [list(reference("Who are you?", 6))] * 3
        assert f"placement {method}: blocks starter" in result.err
        held = [node["layers"] for node in result.json["nodes"]]
        assert held[0][0] == 0 and held[-1][1] == 5
        assert all(a[1] == b[0] for a, b in zip(held, held[1:], strict=False)), "each block once, in order"
    assert "Traceback" not in ring[0].err + ring[1].err


def test_the_doctor_and_a_plan(ring: Cluster, checkpoint: Path, spawn: Spawn) -> None:
    doctor = spawn("doctor", "--nodes-config", ring.path, "--ckpt", checkpoint)
    assert doctor.wait() == 0, doctor.story()
    assert "No problems found." in doctor.out and "secondary0 -> secondary1" in doctor.out
    plan = spawn("plan", "--nodes-config", ring.path, "--ckpt", checkpoint, "--n-samples", 4, "--json", "--wait", 60)
    assert plan.wait() == 0, plan.story()
    blocks = [node["blocks"] for node in json.loads(plan.out)["nodes"]]
    assert sum(stop - start for start, stop in blocks) == 5
    assert ring.status(1)["state"] in ("IDLE", "READY")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "nothing listens there"), (signal.SIGSTOP, "does not answer")]
)
def test_the_doctor_names_the_ill_node(ring: Cluster, spawn: Spawn, number: int, words: str) -> None:
    ring[1].signal(number)
    if number == signal.SIGKILL:
        ring[1].wait()
    doctor = spawn("doctor", "--nodes-config", ring.path, "--deadline", 2, "--json")
    assert doctor.wait() == 1, doctor.story()
    problems = json.loads(doctor.out)["problems"]
    assert {problem["node"] for problem in problems} == {"secondary1"} and words in problems[0]["what"], problems
    assert "Traceback" not in doctor.err
