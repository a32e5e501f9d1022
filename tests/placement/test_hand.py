"""Placements that measure nothing: even, and by hand."""

from __future__ import annotations

import pytest

from clusters import MB, cluster, model, node
from mdi.errors import PlacementError, UsageError
from mdi.placement.cost import CostModel
from mdi.placement.methods import by_hand, place
from mdi.placement.model import Workload


def cost_of(*memory_and_cores: tuple[float, float], n_layer: int = 6, n_sequences: int = 1) -> CostModel:
    nodes = (node(f"n{i}", memory_mb=mb, n_cores=cores) for i, (mb, cores) in enumerate(memory_and_cores))
    return CostModel(cluster(*nodes), model(n_layer), Workload(n_sequences, 10))


def test_even_and_by_hand_say_where_the_memory_is_too_small() -> None:
    cost = cost_of((500, 1), (75, 1), (500, 1))
    with pytest.raises(PlacementError) as e:
        place(cost, "even")
    ((name, lack),) = e.value.missing
    counts = (0, 3, 3)  # the head is worth two blocks
    assert name == "n1" and lack == cost.memory(1, 0, counts[1], 3).total - 75 * MB
    with pytest.raises(PlacementError) as e:
        by_hand(cost, (1, 4, 1))
    assert e.value.missing[0][0] == "n1"
    assert by_hand(cost, (3, 1, 2)).ranges == ((0, 3), (3, 4), (4, 6))


def test_even_leaves_out_what_has_no_block() -> None:
    found = place(cost_of(*[(500, 1)] * 5, n_layer=2), "even")
    assert found.counts == (0, 1, 1) and [name for name, _ in found.left_out] == ["n3", "n4"]


def test_unknown_placement() -> None:
    with pytest.raises(UsageError):
        place(cost_of((500, 1)), "best")


def test_nodes_that_are_alike_get_an_even_cut() -> None:
    """As the processes of a local ring that measured themselves."""
    nodes = [node(f"n{i}", memory_mb=500, machine="loopback", head_s=((1, 1e-9), (16, 1e-9))) for i in range(3)]
    found = place(CostModel(cluster(*nodes), model(9), Workload(12, 10)))
    assert sorted(found.counts) == [3, 3, 3]
