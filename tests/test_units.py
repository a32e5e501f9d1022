"""How sizes, times and counts are written."""

from __future__ import annotations

import pytest

from mdi.units import counted, duration, size


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (12e6, "12.0 MB"), (-2e9, "-2.0 GB"), (1e13, "10.0 TB")],
)
def test_sizes(n: float, text: str) -> None:
    assert size(n) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (None, "-"), (0.0, "0 ms"), (5e-324, "0 ms"),
        (0.00426, "4.26 ms"), (0.5, "500 ms"), (0.9996, "1.0 s"), (99.9, "99.9 s"),
        (99.96, "1:40 min"), (150, "2:30 min"), (3662, "1:01 h"), (360_000, "100 h"),
    ],
)  # fmt: skip
def test_times(time_s: float | None, text: str) -> None:
    assert duration(time_s) == text


def test_counts() -> None:
    assert (counted(1, "node"), counted(0, "node"), counted(3, "node")) == ("1 node", "0 nodes", "3 nodes")
