"""A chain over nodes that hold blocks already: by properties, and beside the best of all chains."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.placement.chain import Holder, Part, choose_chain, round_s


@st.composite
def holders(draw: st.DrawFn) -> tuple[list[Holder], int, list[int]]:
    n_layer, found = draw(st.integers(1, 12)), []
    for i in range(draw(st.integers(1, 8))):
        start = draw(st.integers(0, n_layer - 1))
        stop = draw(st.integers(start + 1, n_layer))
        block_s, delay_s = draw(st.sampled_from([1.0, 2.0, 5.0])), draw(st.sampled_from([0.0, 1.0, 10.0]))
        found.append(Holder(f"h{i}", start, stop, block_s, delay_s))
    cuts = sorted({0, n_layer, *draw(st.sets(st.integers(0, n_layer), max_size=n_layer))})
    return found, n_layer, draw(st.sampled_from([cuts, list(range(n_layer + 1))]))


@given(holders())
@settings(max_examples=200, deadline=None)
def test_a_chain_has_each_block_once_on_a_node_that_holds_it(
    swarm: tuple[list[Holder], int, list[int]],
) -> None:
    nodes, n_layer, cuts = swarm
    chain = choose_chain(nodes, n_layer, cuts)
    is_held = all(any(h.start <= a and b <= h.stop for h in nodes) for a, b in itertools.pairwise(cuts))
    assert (chain is not None) == is_held
    if chain is None:
        return
    assert [i for part in chain for i in range(part.start, part.stop)] == list(range(n_layer))
    assert all(part.stop in cuts for part in chain), "blocks that belong to each other stay on one node"
    assert len({part.name for part in chain}) == len(chain) and all(part.start < part.stop for part in chain)
    by_name = {h.name: h for h in nodes}
    assert all(by_name[p.name].start <= p.start and p.stop <= by_name[p.name].stop for p in chain)


@pytest.mark.parametrize(("delay_s", "expected_s"), [(0.0, 10.0), (3.0, 10.0), (3.5, 10.5)])
def test_a_round_takes_the_slowest_stage_for_each_frame_or_the_whole_way(delay_s: float, expected_s: float) -> None:
    nodes = {"a": Holder("a", 0, 4, 1.0, delay_s), "b": Holder("b", 2, 4, 5.0)}
    assert round_s((Part("a", 0, 2), Part("b", 2, 3)), nodes) == expected_s


def test_chains_come_near_the_best_of_all() -> None:
    rng, ratios = random.Random(5), []
    while len(ratios) < 60:
        n_layer = 6
        spans = [sorted(rng.sample(range(n_layer + 1), 2)) for _ in range(5)]
        nodes = [Holder(f"h{i}", *span, rng.uniform(1, 5), rng.uniform(0, 5)) for i, span in enumerate(spans)]
        by_name = {h.name: h for h in nodes}
        best = min((round_s(c, by_name) for c in _all_chains(nodes, n_layer, 0, ())), default=None)
        chain = choose_chain(nodes, n_layer)
        assert (chain is None) == (best is None)
        if chain is not None and best is not None:
            ratios.append(round_s(chain, by_name) / best)
    assert max(ratios) <= 1.35 and sum(ratios) / len(ratios) <= 1.03


def test_a_chain_is_cut_where_the_model_may_be() -> None:
    rng, n_parts = random.Random(6), []
    for _ in range(100):
        cuts = sorted({0, 9, *rng.sample(range(1, 9), 3)})
        nodes = [Holder(f"h{i}", rng.choice([0, 0, 2]), rng.choice([7, 9, 9]), rng.uniform(1, 3)) for i in range(4)]
        chain = choose_chain(nodes, 9, cuts)
        if chain is not None:
            assert [i for part in chain for i in range(part.start, part.stop)] == list(range(9))
            assert all(part.stop in cuts for part in chain), "blocks that belong to each other stay on one node"
            n_parts.append(len(chain))
    assert len(n_parts) > 80 and max(n_parts) > 2


def _all_chains(nodes: Sequence[Holder], n_layer: int, at: int, chain):  # type: ignore[no-untyped-def]
    if at == n_layer:
        yield chain
    for h in nodes:
        if h.start <= at < h.stop and all(part.name != h.name for part in chain):
            for stop in range(at + 1, h.stop + 1):
                yield from _all_chains(nodes, n_layer, stop, (*chain, Part(h.name, at, stop)))


def test_a_slow_node_or_a_long_way_is_left_out() -> None:
    near, slow, far = Holder("near", 0, 4, 1.0, 0.1), Holder("slow", 0, 4, 9.0, 0.1), Holder("far", 0, 4, 1.0, 90.0)
    chain = choose_chain([slow, far, near], 4)
    assert chain is not None and [part.name for part in chain] == ["near"]


def test_blocks_that_two_nodes_hold_are_shared_evenly() -> None:
    slow, first, second = Holder("slow", 0, 6, 10.0), Holder("first", 0, 4, 1.0), Holder("second", 2, 6, 1.0)
    assert choose_chain([slow, first, second], 6) == (Part("first", 0, 3), Part("second", 3, 6))
