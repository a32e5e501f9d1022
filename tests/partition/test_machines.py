"""Nodes that share a machine: what they take from each other, and the placements that follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import block, cluster, every_placement, model, node
from mdi.errors import UsageError
from mdi.partition.cost import CostModel
from mdi.partition.links import HOP_S
from mdi.partition.methods import place
from mdi.partition.model import Workload
from mdi.partition.preference import MARGIN
from mdi.partition.profile import NodeProfile
from mdi.partition.throughput import fastest


def on(machine: str, share: float, *nodes: NodeProfile) -> tuple[NodeProfile, ...]:
    return tuple(replace(n, machine=machine, machine_share=share) for n in nodes)


THREE = (node("starter"), node("secondary0"), node("secondary1"))
MANY = Workload(48, 128)


def test_three_nodes_that_each_take_the_whole_machine_are_no_faster_than_one() -> None:
    cost = CostModel(cluster(*on("pc", 1.0, *THREE)), model(), MANY)
    apart = CostModel(cluster(*THREE), model(), MANY)
    order, counts = (0, 1, 2), (2, 2, 2)
    ring = cost.predict(order, counts)
    assert ring.limit == "machine"
    assert ring.round_s == pytest.approx(3 * (sum(ring.stage_s) + 3 * HOP_S))
    assert apart.predict(order, counts).tokens_s > 2 * ring.tokens_s
    assert len(place(apart, "throughput").order) == 3


def test_half_of_the_machine_each_is_enough_for_two() -> None:
    cost = CostModel(cluster(*on("pc", 0.5, *THREE)), model(), MANY)
    two = cost.predict((0, 1), (3, 3))
    three = cost.predict((0, 1, 2), (2, 2, 2))
    assert two.round_s == pytest.approx(2 * max(two.stage_s), rel=0.1), "as if each had it to itself"
    assert three.round_s == pytest.approx(3 * 0.5 * (sum(three.stage_s) + 3 * HOP_S))


def test_one_sequence_finds_the_machine_idle() -> None:
    shared = CostModel(cluster(*on("pc", 1.0, *THREE)), model(), Workload(1, 128)).predict((0, 1, 2), (2, 2, 2))
    apart = CostModel(cluster(*THREE), model(), Workload(1, 128)).predict((0, 1, 2), (2, 2, 2))
    assert shared.round_s == apart.round_s


def test_a_node_of_another_machine_takes_more() -> None:
    nodes = (*on("pc", 1.0, *THREE[:2]), replace(THREE[2], machine="other", machine_share=1.0))
    cost = CostModel(cluster(*nodes), model(12), MANY)
    found = fastest(cost)
    assert found is not None
    held = dict(zip(found.order, found.counts, strict=True))
    assert held[2] >= held[0] + held.get(1, 0)


def test_a_share_is_at_most_all() -> None:
    data = on("pc", 0.5, THREE[0])[0].to_json()
    assert NodeProfile.from_json(data).machine_share == 0.5
    for wrong in (1.5, -0.1, "all"):
        with pytest.raises(UsageError):
            NodeProfile.from_json({**data, "machine_share": wrong})


@st.composite
def shared(draw: st.DrawFn) -> CostModel:
    """Up to four nodes on up to two machines; those of one machine are alike."""
    kinds = [(draw(st.sampled_from([0.3, 1.0, 2.5])), draw(st.sampled_from([0.34, 0.6, 1.0]))) for _ in "ab"]
    nodes = []
    for i in range(draw(st.integers(1, 4))):
        machine = draw(st.integers(0, 1))
        speed, share = kinds[machine]
        nodes.append(on("ab"[machine], share, node(f"n{i}", speed))[0])
    blocks = draw(st.sampled_from([None, (block(), block(25, 6_000_000), block(), block(4, 1_000_000), block())]))
    shape = model(draw(st.integers(1, 6)), blocks)
    return CostModel(cluster(*nodes), shape, Workload(draw(st.sampled_from([1, 3, 8, 40])), 100))


@given(shared())
@settings(max_examples=150)
def test_the_fastest_ring_over_shared_machines(cost: CostModel) -> None:
    """Exact where blocks are alike; where they differ, each node of a machine keeps to an even part of its time."""
    best = min(cost.predict(*p).round_s for p in every_placement(cost))
    found = fastest(cost)
    assert found is not None
    round_s = cost.predict(found.order, found.counts).round_s
    assert round_s == pytest.approx(found.round_s, rel=1e-9)
    assert best * (1 - 1e-8) <= round_s <= best * (1 + 1e-8 if cost.is_uniform else MARGIN)
