"""Of rings that are about equally fast: all nodes that have something to do, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusters import cluster, model, node
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.model import Workload
from mdi.placement.profile import LinkProfile
from mdi.placement.search import MARGIN, fastest

FLAT = ((1, 1e-3), (128, 1.0001e-3))  # more rows cost nothing: three nodes bring no more than one


def nodes_of(n: int) -> tuple[str, ...]:
    return tuple(f"n{i}" for i in range(n))


def test_a_node_is_not_left_out_for_noise() -> None:
    names = nodes_of(3)
    links = tuple(LinkProfile(a, b, 1e-6, 1e10) for a in names for b in names if a != b)
    nodes = tuple(node(name, block_s=FLAT, head_s=((1, 1e-6),), read_bytes_s=0.0) for name in names)
    cost = CostModel(cluster(*nodes, links=links), model(6), Workload(24, 100))
    best = fastest(cost)
    assert best is not None and len(best.order) == 1, "by less than the margin"
    chosen = place(cost, "throughput")
    assert len(chosen.order) == 3
    assert cost.predict(chosen.order, chosen.counts).round_s <= best.round_s * MARGIN


@pytest.mark.parametrize("speed", [1.05, 0.95])
@pytest.mark.parametrize("method", ["throughput", "latency"])
def test_one_sequence_stays_where_it_is(speed: float, method: str) -> None:
    """A secondary that seems a little faster is no reason to go there and back."""
    cost = CostModel(cluster(node("n0"), node("n1", speed), node("n2", speed)), model(20), Workload(1, 100))
    assert place(cost, method).order == (0,)


def test_one_sequence_goes_where_it_must() -> None:
    small = CostModel(cluster(node("n0", memory_mb=140), node("n1"), node("n2")), model(8), Workload(1, 100))
    assert len(place(small, "throughput").order) == 2, "the starter is too small"
    much_faster = CostModel(cluster(node("n0"), node("n1", 8.0), node("n2", 8.0)), model(20), Workload(1, 100))
    assert len(place(much_faster, "throughput").order) == 2, "once round is enough"


def test_two_sequences_keep_two_nodes_busy() -> None:
    cost = CostModel(cluster(*(node(name) for name in nodes_of(4))), model(12), Workload(2, 100))
    assert len(place(cost, "throughput").order) == 2


def test_of_many_nodes_no_more_than_have_something_to_do() -> None:
    nodes = tuple(node(name, 1.0 + 0.004 * i) for i, name in enumerate(nodes_of(12)))
    cost = CostModel(cluster(*nodes), model(20), Workload(1, 100))
    assert place(cost, "throughput").order == (0,)
    tight = tuple(replace(n, memory_bytes=n.memory_bytes // 8) for n in nodes)
    assert len(place(CostModel(cluster(*tight), model(20), Workload(1, 100)), "throughput").order) > 1


@pytest.mark.parametrize("noise", [(1.0, 1.0, 1.0), (1.0, 1.03, 0.98), (0.97, 1.0, 1.02)])
def test_three_alike_nodes_get_an_even_cut(noise: tuple[float, ...]) -> None:
    """Processes of one machine, as they measure themselves."""
    cost = CostModel(
        cluster(*(node(n, s) for n, s in zip(nodes_of(3), noise, strict=True))), model(12), Workload(8, 100)
    )
    found, even = place(cost, "throughput"), place(cost, "even")
    assert found.names == even.names
    assert all(abs(n - m) <= 1 for n, m in zip(found.counts, even.counts, strict=True)), (
        "the head counts as some blocks"
    )
