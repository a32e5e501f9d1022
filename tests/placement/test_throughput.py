"""The fastest placement against all placements, and the rules that every placement keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from clusters import every_placement, fits, may_be_cut, problems
from mdi.errors import PlacementError
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.placement import Placement
from mdi.placement.search import MARGIN, fastest, useful_nodes
from mdi.spec.options import PLACEMENTS


def placed(cost: CostModel, method: str) -> Placement | None:
    try:
        return place(cost, method)
    except PlacementError:
        return None


@given(problems())
@settings(max_examples=300)
def test_throughput_is_the_best_of_all_placements(cost: CostModel) -> None:
    best = min((cost.predict(*p).round_s for p in every_placement(cost)), default=None)
    found, chosen = fastest(cost), placed(cost, "throughput")
    if best is None:
        assert found is None and chosen is None
    else:
        assert found is not None and chosen is not None
        assert cost.predict(found.order, found.counts).round_s == pytest.approx(best, rel=1e-8)
        assert cost.predict(chosen.order, chosen.counts).round_s <= best * MARGIN * (1 + 1e-8)


@given(problems(max_nodes=4, max_blocks=5))
@settings(max_examples=150)
def test_of_rings_that_are_about_as_fast_the_preferred_one(cost: CostModel) -> None:
    rounds: dict[int, float] = {}
    for order, counts in every_placement(cost):
        rounds[len(order)] = min(rounds.get(len(order), float("inf")), cost.predict(order, counts).round_s)
    chosen = placed(cost, "throughput")
    assert (chosen is None) == (not rounds)
    if chosen is None:
        return
    limit = min(rounds.values()) * MARGIN
    good = [n for n, round_s in rounds.items() if round_s <= limit * (1 - 1e-8)]
    fair = [n for n, round_s in rounds.items() if round_s <= limit * (1 + 1e-8)]
    useful = [n for n in good if n <= useful_nodes(cost)]
    assert len(chosen.order) in fair
    if useful:
        assert max(useful) <= len(chosen.order) <= useful_nodes(cost), "all nodes that have something to do"
    else:
        assert len(chosen.order) <= min(good), "no more nodes than it must be"


@given(problems())
@settings(max_examples=80)
def test_latency_is_the_shortest_way_of_all(cost: CostModel) -> None:
    ways = (cost.predict(*p, n_sequences=1).round_s for p in every_placement(cost))
    best = min(ways, default=None)
    found = placed(cost, "latency")
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        way = cost.predict(found.order, found.counts, n_sequences=1).round_s
        assert best * (1 - 1e-8) <= way <= best * MARGIN * (1 + 1e-8)


@given(problems(max_nodes=7, max_blocks=9))
@settings(max_examples=40)
def test_every_placement_covers_every_block_once_in_order_within_memory(cost: CostModel) -> None:
    for method in PLACEMENTS:
        found = placed(cost, method)
        if found is None:
            continue
        assert [b for start, stop in found.ranges for b in range(start, stop)] == list(range(cost.n_layer))
        assert found.order[0] == 0 and all(start < stop for start, stop in found.ranges[1:])
        assert may_be_cut(cost, found.counts)
        assert fits(cost, found.order, found.counts)
        names = {*found.names, *(name for name, _ in found.left_out)}
        assert names == {n.name for n in cost.profile.nodes}
        assert len(found.names) + len(found.left_out) == cost.n_nodes


@given(problems(max_nodes=10, max_blocks=12))
@settings(max_examples=40)
def test_throughput_is_never_worse_than_the_simple_placements(cost: CostModel) -> None:
    best = placed(cost, "throughput")
    for method in ("even", "latency"):
        other = placed(cost, method)
        if other is not None:
            assert best is not None
            rate = cost.predict(best.order, best.counts).tokens_s
            assert rate >= cost.predict(other.order, other.counts).tokens_s / MARGIN * (1 - 1e-8)


@given(problems(max_nodes=6, max_blocks=8))
@settings(max_examples=60)
def test_a_refusal_says_how_much_is_missing(cost: CostModel) -> None:
    assume(cost.is_uniform)
    try:
        place(cost, "throughput")
    except PlacementError as e:
        ((name, lack),) = e.missing
        assert lack > 0 and name in ("", cost.profile.nodes[0].name)
        more = replace(cost.profile.nodes[0], memory_bytes=cost.profile.nodes[0].memory_bytes + lack)
        enough = CostModel(replace(cost.profile, nodes=(more, *cost.profile.nodes[1:])), cost.shape, cost.workload)
        if name:  # embedding and head fit now; the blocks may still not
            assert enough.memory(0, 0, 0, cost.n_nodes).total <= more.memory_bytes
        else:
            place(enough, "throughput")
