"""What failures cost, where it is computed instead of measured."""

from __future__ import annotations

import random

import pytest

from recovery_rates import Row, n_restarts, per_token, summary


def test_restarts_cost_what_chance_says() -> None:
    chance, n_texts, in_vain = random.Random(1), 2000, 0
    for _ in range(n_texts):
        while (last := next((k + 1 for k in range(50) if chance.random() < per_token(0.01)), None)) is not None:
            in_vain += last
    assert n_restarts(0.01, 50) == pytest.approx(in_vain / n_texts / 50, rel=0.05)
    assert n_restarts(0.0, 50) == 0.0


def test_rare_failures_are_reckoned_with_at_their_mean_cost() -> None:
    rows = [Row("replay", rate, 10.0 + 2.0 * n, n, True) for rate, n in ((0.0, 0), (0.0, 0), (0.01, 2), (0.01, 3))]
    lines = {line["rate"]: line for line in summary(rows, 400.0, [0.0, 1e-4, 0.01], 100) if line["way"] == "replay"}
    assert lines[0.01]["s_per_failure"] == pytest.approx(2.0) and lines[0.01]["failures"] == 5
    assert lines[0.01]["left"] == pytest.approx(10 / 15)
    assert lines[1e-4]["left"] is None and lines[1e-4]["computed"] == pytest.approx(
        10 / (10 + 2.0 * 100 * per_token(1e-4))
    )
