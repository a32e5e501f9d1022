"""The short form of the endurance benchmark: nothing grows from run to run."""

from __future__ import annotations

import sys

import pytest

import endurance
from endurance import Held, growth


def test_growth_is_seen() -> None:
    before = Held(100_000_000, 5, 4, 10)
    quiet = [[before, before]] * 4
    assert growth([*quiet, *quiet[:2]]) == []
    assert len(growth([*quiet, *[[before, Held(100_000_000, 6, 5, 11)]] * 2])) == 3
    assert len(growth([*quiet, *[[Held(200_000_000, 5, 4, 10), before]] * 2])) == 1
    assert growth([*quiet, [Held(200_000_000, 5, 4, 10), before], [before, before]]) == [], "up and down again"
    assert growth([*quiet, *[[Held(101_000_000, 5, 4, 10), Held(90_000_000, 1, 1, 1)]] * 2]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_nothing_grows_in_a_few_runs() -> None:
    """A thread that was just ending, or that a library starts once, may count as growth of few runs; what leaks grows again."""
    for n in (1, 2):
        found = endurance.measure(6 * n, 40 * n)
        grown = [line for line in found["growth"] if "memory" not in line]
        assert found["wrong"] == 0
        if not grown:
            return
    raise AssertionError(grown)
