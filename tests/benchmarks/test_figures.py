"""The figures of the documents show nothing by halves."""

from __future__ import annotations

from typing import Any

import pytest

from draw_figures import beside_papers, ring_bars
from write_results import PETALS_TABLE_1


@pytest.mark.parametrize("n_samples", [1, 3])
def test_no_bar_of_the_timeline_is_cut(n_samples: int) -> None:
    end = 12.95
    bars = list(ring_bars(3, n_samples, end))
    assert bars and all(begin + 1 <= end for _, begin, _, _ in bars)
    begins = {node: sorted(begin for n, begin, _, _ in bars if n == node) for node in range(3)}
    assert all(b - a >= 1 for node in begins.values() for a, b in zip(node, node[1:], strict=False)), "none overlaps"


def test_values_of_papers_are_points_beside_our_lines() -> None:
    """As many of each kind as the tables have; LLaMPS' has twelve clusters with three numbers of clients."""
    memory, failures, clients = beside_papers().axes

    def n_points(axes: Any) -> int:
        return sum(len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None")

    assert [n_points(memory), n_points(clients)] == [3 * 4, 12 * 3]
    drawn = [steps[way] for steps in PETALS_TABLE_1.values() for way in ("replay", "restart")]
    assert n_points(failures) == sum(step is not None for steps in drawn for step in steps[1:])
    assert all(sum(line.get_linestyle() != "None" for line in axes.lines) > 1 for axes in (memory, failures, clients))
