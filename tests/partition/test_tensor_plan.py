"""Shares of every block by what nodes compute and hold, and the time of a token."""

from __future__ import annotations

import pytest

from mdi.errors import PlacementError
from mdi.partition.tensor_plan import shares_of


def test_shares_follow_speeds_as_far_as_memory_goes() -> None:
    assert shares_of([1, 1], [1, 1]) == [0.5, 0.5]
    assert shares_of([3, 1], [1, 1]) == [0.75, 0.25]
    assert shares_of([3, 1], [0.5, 1]) == [0.5, 0.5]
    assert shares_of([4, 1, 1], [0.4, 0.3, 1]) == pytest.approx([0.4, 0.3, 0.3])


def test_a_model_that_fits_nowhere_is_told() -> None:
    with pytest.raises(PlacementError):
        shares_of([1, 1], [0.4, 0.5])
