"""The figures of the documents show nothing by halves."""

from __future__ import annotations

import pytest

from draw_figures import ring_bars


@pytest.mark.parametrize("n_samples", [1, 3])
def test_no_bar_of_the_timeline_is_cut(n_samples: int) -> None:
    end = 12.95
    bars = list(ring_bars(3, n_samples, end))
    assert bars and all(begin + 1 <= end for _, begin, _, _ in bars)
    begins = {node: sorted(begin for n, begin, _, _ in bars if n == node) for node in range(3)}
    assert all(b - a >= 1 for node in begins.values() for a, b in zip(node, node[1:], strict=False)), "none overlaps"
