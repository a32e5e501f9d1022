"""When a window makes computing wait: the paper's conditions, and a simulation that knows how long."""

from __future__ import annotations

import itertools
import random

import pytest

from window_steady import HalfTimes, UnitTimes, is_loose, is_tight, simulate

PAPER = HalfTimes(attention_s=0.011, mlp_s=0.017, attention_load_s=0.018, mlp_load_s=0.030, link_s=0.014)  # section 3.3


def units_of(t: HalfTimes, n_blocks: int, retain: int | None = None) -> list[UnitTimes]:
    units = []
    for i in range(n_blocks):
        kept = retain is not None and i % retain == 0
        units.append(UnitTimes(0.0 if kept else t.attention_load_s, t.attention_s, t.link_s))
        units.append(UnitTimes(0.0 if kept else t.mlp_load_s, t.mlp_s, t.link_s))
    return units


def test_the_papers_laptops_are_loosely_but_not_tightly_steady() -> None:
    assert not is_tight(PAPER)
    assert is_loose(PAPER, 32)
    assert simulate(units_of(PAPER, 32), 4).wait_s == pytest.approx(0, abs=1e-9)


def test_what_is_tightly_steady_is_loosely_steady_and_never_waits_even_with_two_units() -> None:
    generator = random.Random(1)
    seen = 0
    for _ in range(3000):
        t = HalfTimes(*(generator.uniform(0.001, 0.03) for _ in range(5)))
        if is_tight(t):
            seen += 1
            assert is_loose(t, 12)
            assert simulate(units_of(t, 12), 2).wait_s == pytest.approx(0, abs=1e-9)
    assert seen > 100


@pytest.mark.parametrize("retain", [None, 2, 3])
def test_a_pass_that_is_not_loosely_steady_waits(retain: int | None) -> None:
    """The other way round is not so: in steady state the disk has a head start that the conditions do not count on."""
    generator = random.Random(2)
    for _ in range(500):
        t = HalfTimes(*(generator.uniform(0.001, 0.03) for _ in range(5)))
        units = units_of(t, 12, retain)
        load_s, compute_s = sum(u.load_s for u in units), sum(u.compute_s + u.link_s for u in units)
        found = simulate(units, 24)
        assert found.pass_s == pytest.approx(max(load_s, compute_s), rel=1e-6), (
            "the slower of the two, with a window so wide"
        )
        if is_loose(t, 12, retain) and load_s <= compute_s:
            assert found.wait_s == pytest.approx(0, abs=1e-9)
        if load_s > 1.001 * compute_s:
            assert found.wait_s > 0 and not is_loose(t, 12, retain)


def test_keeping_more_blocks_never_makes_it_worse() -> None:
    t = HalfTimes(0.002, 0.004, 0.010, 0.030)
    passes = [simulate(units_of(t, 12, retain), 2).pass_s for retain in (1, 2, 3, 4, 6, 12, None)]
    assert passes == sorted(passes)
    assert simulate(units_of(t, 12, 1), 2).wait_s == 0


def test_one_slot_reads_and_computes_in_turn() -> None:
    units = [UnitTimes(0.3, 0.1), UnitTimes(0.2, 0.1)]
    assert simulate(units, 1).pass_s == pytest.approx(0.7)
    assert simulate(units, 2).pass_s == pytest.approx(0.5)


def test_a_pause_between_passes_is_time_for_the_disk_as_far_as_the_window_reaches() -> None:
    units = [UnitTimes(0.1, 0.0) for _ in range(10)]
    waits = [simulate(units, n, pause_s=0.5).wait_s for n in (1, 2, 4, 8)]
    assert waits == sorted(waits, reverse=True)
    assert waits[1] == pytest.approx(0.8), "two of ten are there when the pass begins"
    assert all(b < a for a, b in itertools.pairwise(waits[1:]))
