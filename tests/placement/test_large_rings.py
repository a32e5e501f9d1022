"""Large clusters: the guess against the exact search, and a thousand nodes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from clusters import cluster, fits, model, node, problems
from mdi.placement import search as throughput
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.model import Workload
from mdi.placement.profile import LinkProfile
from mdi.placement.search import SEARCH_S, best_rings, fastest, fastest_of, good_ring, ring_of, spread


def random_cluster(n_nodes: int, seed: int, link_share: float = 0.0) -> CostModel:
    rnd = random.Random(seed)
    nodes = [node("n0", 1.0, 600)]
    nodes += [
        node(f"n{i}", rnd.choice([0.2, 0.5, 1, 2, 4]) * rnd.uniform(0.9, 1.1), rnd.uniform(100, 400))
        for i in range(1, n_nodes)
    ]
    names = [n.name for n in nodes]
    links = tuple(
        LinkProfile(a, b, rnd.uniform(1e-4, 5e-3), rnd.uniform(1e7, 1e9))
        for a in names
        for b in names
        if a != b and rnd.random() < link_share
    )
    return CostModel(cluster(*nodes, links=links), model(48), Workload(rnd.choice([1, 4, 16, 40]), 256))


@pytest.mark.parametrize("seed", range(12))
def test_the_guess_is_near_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = random_cluster(8, seed, link_share=seed % 2)
    exact = throughput.fastest(cost)
    monkeypatch.setattr(throughput, "EXACT_NODES", 0)
    guess = throughput.fastest(cost)
    assert exact is not None and guess is not None
    assert exact.round_s * (1 - 1e-8) <= guess.round_s <= 1.05 * exact.round_s


@given(problems(max_nodes=5, max_blocks=7))
@settings(max_examples=60)
def test_the_guess_finds_a_placement_where_one_is_found(cost: CostModel) -> None:
    exact = throughput.fastest(cost)
    before, throughput.EXACT_NODES = throughput.EXACT_NODES, 0
    try:
        guess = throughput.fastest(cost, [tuple(range(min(cost.n_nodes, cost.n_layer + 1)))])
    finally:
        throughput.EXACT_NODES = before
    if guess is not None:
        assert exact is not None and fits(cost, guess.order, guess.counts)
        assert exact.round_s <= guess.round_s * (1 + 1e-8)


def test_the_likely_rings_are_of_the_fastest_of_the_largest_and_of_a_good_ring() -> None:
    """Nine blocks: fast nodes have room for two, others for four, and slow ones for all; one has no room for any."""
    kinds = [(1, 130)] + [(4, 80)] * 3 + [(1, 105)] * 3 + [(0.1, 1000)] * 3 + [(10, 65)]
    nodes = [node(f"n{i}", speed, memory_mb) for i, (speed, memory_mb) in enumerate(kinds)]
    cost = CostModel(cluster(*nodes), model(9), Workload(8, 100))
    terms = cost.terms(5)
    assert [terms.most_blocks(i) for i in range(11)] == [2, 2, 2, 2, 4, 4, 4, 9, 9, 9, 0]
    near = spread(cost, ring_of(cost, (0, 4, 1, 5, 6), terms.n_rows))
    for n_used, good, order in (
        (4, None, (0, 7, 8, 9)), (5, None, (0, 1, 2, 3, 4)), (4, near, (0, 1, 4, 5)), (10, None, tuple(range(10))),
    ):  # fmt: skip
        found = fastest_of(cost, n_used, float("inf"), good)
        assert found is not None and found.order == order
        assert fastest_of(cost, n_used, found.round_s, good) is None
    assert fastest_of(cost, 1, float("inf"), near) is None


@pytest.mark.parametrize("n_sequences", [1, 64])
def test_a_thousand_nodes(n_sequences: int) -> None:
    cost = random_cluster(1000, 3)
    cost = CostModel(cost.profile, model(128), Workload(n_sequences, 256))
    found = place(cost)
    assert sum(found.counts) == 128 and fits(cost, found.order, found.counts)
    assert len(found.order) + len(found.left_out) == 1000
    assert found == place(CostModel(cost.profile, cost.shape, cost.workload))  # the same each time


def test_the_order_follows_the_links() -> None:
    names = "abcd"
    near = {("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")}
    links = tuple(LinkProfile(x, y, 1e-4 if (x, y) in near else 1.0, 1e9) for x in names for y in names if x != y)
    cost = CostModel(cluster(*(node(n, memory_mb=115) for n in names), links=links), model(6), Workload(4, 10))
    cost = CostModel(
        cluster(node("a", memory_mb=160), *cost.profile.nodes[1:], links=links), model(12), Workload(4, 10)
    )
    assert place(cost).names == ("a", "c", "b", "d")
    n_rows = cost.terms(4).n_rows
    assert good_ring(cost, [0, 1, 2, 3], n_rows).order == (0, 2, 1, 3)
    (rings,) = best_rings(cost, 4).values()
    assert rings[0].order == (0, 2, 1, 3)
    assert rings[0].way_s == pytest.approx(ring_of(cost, (0, 2, 1, 3), n_rows).way_s)


def test_equal_links_leave_the_nodes_as_they_are_listed() -> None:
    cost = CostModel(cluster(*(node(f"n{i}", memory_mb=115) for i in range(5))), model(6), Workload(5, 10))
    cost = CostModel(cluster(node("s", memory_mb=160), *cost.profile.nodes[1:]), model(12), Workload(5, 10))
    found = place(cost)
    assert found.order == tuple(sorted(found.order))


def test_the_search_ends_when_its_time_is_up() -> None:
    cost = random_cluster(40, 5, link_share=1.0)
    asked = []

    def clock() -> float:
        asked.append(SEARCH_S * len(asked))
        return asked[-1]

    begun, whole = fastest(cost, clock=clock), fastest(cost, clock=lambda: 0.0)
    assert len(asked) == 2, "the time was up before the first change"
    assert begun is not None and whole is not None and fits(cost, begun.order, begun.counts)
    assert whole.round_s < begun.round_s, "with time, it is improved"
