"""Whether all systems compute the same model: greedy tokens in float32, side by side."""

from __future__ import annotations

import sys

from peers.protocol import Case
from side_by_side.files import make_all
from side_by_side.runner import run_scenario, say
from side_by_side.scenario import Run, Scenario
from side_by_side.setup import Setup

CASE = Case(1, 24, 24)


def check(setup: Setup, python: str) -> int:
    """Compare llama.cpp's and the ring's tokens with litgpt's; returns the exit status."""
    systems = (
        setup.framework("litgpt", "float32"), setup.llama("float32", cache="float32"), setup.ring("float32", 2),
    )  # fmt: skip
    if make_all(setup.needs, python):
        return 1
    scenario = Scenario(
        "check", "The same tokens", systems, tuple(Run(s.name, s.name, CASE) for s in systems), repeats=1
    )
    outcome = run_scenario(scenario, {"": sys.executable, "llama.cpp": python}, setup.work / "logs", None, 600.0)
    expected, *others = (outcome.ids.get(system.name, [[]])[0] for system in systems)
    for system, ids in zip(systems[1:], others, strict=True):
        n_same = sum(a == b for a, b in zip(ids, expected, strict=False))
        say(f"{system.name}: {n_same} of {CASE.n_new} greedy tokens are litgpt's")
    return int(len(expected) < CASE.n_new or any(ids != expected for ids in others))
