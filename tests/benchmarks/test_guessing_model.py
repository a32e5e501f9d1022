"""The ideal starter of a simulated ring is what the formula says, and ours comes close to it."""

from __future__ import annotations

import random

import pytest

from guessing_model import best, learned_speed, simulated_s
from mdi.engine.speculation import most_frames, tokens_per_s


def price(n: int) -> float:
    return 1 + 0.1 * (n - 1)


@pytest.mark.parametrize("n_nodes", [1, 4, 8])
def test_guesses_that_are_always_wrong_cost_nothing_and_those_always_right_fill_the_ring(n_nodes: int) -> None:
    plain_s = 300 * n_nodes * 0.012
    for n_frames in range(1, n_nodes + 1):
        assert simulated_s([False] * 300, n_nodes, 0.01, 0.002, price, 1, n_frames) == pytest.approx(plain_s)
    right_s = simulated_s([True] * 300, n_nodes, 0.01, 0.002, price, 1, n_nodes)
    assert right_s == pytest.approx(300 * 0.012, rel=0.1)


def test_more_frames_than_the_slowest_stage_lets_through_delay_the_right_token() -> None:
    assert simulated_s([False] * 300, 4, 0.01, 0.0, price, 1, 8) > 1.5 * 300 * 0.04


@pytest.mark.parametrize(("n_nodes", "link_s"), [(2, 0.0), (4, 0.01), (8, 0.01)])
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_more_frames_that_do_not_wait_are_never_worse(n_nodes: int, link_s: float, p: float) -> None:
    chance = random.Random(4)
    is_right = [chance.random() < p for _ in range(400)]
    for n_rows in (1, 2, 4):
        most = int(n_nodes * (price(n_rows) + link_s / 0.016) / price(n_rows))
        times = [simulated_s(is_right, n_nodes, 0.016, link_s, price, n_rows, n) for n in range(1, most + 1)]
        assert all(after <= before * (1 + 1e-9) for before, after in zip(times, times[1:], strict=False))


@pytest.mark.parametrize("n_nodes", [1, 4, 8])
@pytest.mark.parametrize("link_s", [0.0, 0.01])
@pytest.mark.parametrize("p", [0.5, 0.7, 0.8, 0.9])
def test_the_formula_is_within_15_percent(n_nodes: int, link_s: float, p: float) -> None:
    chance = random.Random(2)
    is_right = [chance.random() < p for _ in range(6000)]
    stage_s = 0.016
    link_s = link_s if n_nodes > 1 else 0.0
    simulated, n_rows, _ = best(is_right, n_nodes, stage_s, link_s, price, 4)
    formula = []
    for r in range(1, 5):
        t = stage_s * price(r)
        round_s = n_nodes * (t + link_s)
        n_frames = most_frames(round_s, t) if n_nodes > 1 else 1
        formula.append(tokens_per_s(sum(is_right) / len(is_right), r, n_frames, round_s, t))
    assert max(formula) == pytest.approx(simulated, rel=0.15) and 1 <= n_rows <= 4


@pytest.mark.slow
@pytest.mark.parametrize(("n_nodes", "link_s"), [(1, 0.0), (2, 0.01), (4, 0.0), (4, 0.01), (8, 0.0), (8, 0.01)])
@pytest.mark.parametrize("p", [0.5, 0.8, 0.9])
def test_what_learns_its_times_has_90_percent_of_what_knows_them(n_nodes: int, link_s: float, p: float) -> None:
    """Scheduler and speculation in simulated time; they know neither the times nor the rate beforehand."""
    is_right: list[bool] = []
    for seed in range(4):  # few wrong guesses decide about a text: of its own draws each has another number
        chance = random.Random(seed)
        is_right += [chance.random() < p for _ in range(2000)]
    ideal, _, _ = best(is_right, n_nodes, 0.016, link_s, price, 4)
    found, _ = learned_speed([0.016] * n_nodes, link_s, p, n_tokens=6000, price=price)
    assert found > 0.9 * ideal
