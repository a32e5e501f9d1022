"""Plans of a model that may be cut at some places only, against all placements."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from clusters import block, cluster, every_placement, may_be_cut, model, node
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.model import Workload
from mdi.placement.profile import LinkProfile
from mdi.placement.search import fastest, ring_of, spread


def test_the_fastest_ring_is_the_best_of_those_that_may_be() -> None:
    rng, n_used = random.Random(3), []
    for _ in range(60):
        blocks = tuple(rng.choice([block(), block(25, 6_000_000), block(4, 1_000_000, 8192)]) for _ in range(7))
        cuts = tuple(sorted({0, 7, *rng.sample(range(1, 7), rng.choice([2, 3]))}))
        nodes = (node(f"n{i}", rng.choice([0.5, 0.8, 1.0, 1.3])) for i in range(4))
        cost = CostModel(cluster(*nodes), replace(model(7, blocks), cuts=cuts), Workload(rng.choice([1, 8]), 100))
        best = min(cost.predict(*one).round_s for one in every_placement(cost))
        found, even = fastest(cost), place(cost, "even")
        assert found is not None
        assert may_be_cut(cost, found.counts) and may_be_cut(cost, even.counts)
        assert cost.predict(found.order, found.counts).round_s == pytest.approx(best, rel=1e-8)
        n_used.append(len(found.order))
    assert n_used.count(3) > 3 and n_used.count(4) > 3


def test_copies_of_caches_in_front_of_a_cut_need_memory() -> None:
    """Blocks 2 and 3 have large caches, which the last three blocks read: a stage behind them has copies."""
    large, reader = block(10, page_bytes=600_000), block(10, page_bytes=0)
    blocks = (block(), block(), large, large, reader, reader, reader)
    copied = tuple(tuple(i for i in (2, 3) if i < cut < 7) for cut in range(8))
    rng, n_other = random.Random(4), 0
    for _ in range(40):
        nodes = [node(f"n{i}", rng.choice([0.5, 1.0]), rng.randrange(110, 220)) for i in range(3)]
        cost, without = (
            CostModel(cluster(*nodes), replace(model(7, blocks), copied=one), Workload(8, 100))
            for one in (copied, None)
        )
        terms = cost.terms(3)
        for start in range(7):
            fitting = [stop for stop in range(start, 8) if terms.fits(1, start, stop)]
            assert terms.reach(1, start, 1e9) == max(fitting, default=start)
            more = cost.memory(1, start, 7, 3).caches - without.memory(1, start, 7, 3).caches
            assert more == sum(8 * blocks[k].cache_bytes(100) for k in copied[start])
        best = min((cost.predict(*one).round_s for one in every_placement(cost)), default=None)
        found, other = fastest(cost), fastest(without)
        assert (found is None) == (best is None)
        if found is not None:
            assert cost.predict(found.order, found.counts).round_s == pytest.approx(best, rel=1e-8)
            n_other += other is None or other.counts != found.counts
    assert n_other


def test_a_link_that_is_too_slow_for_the_rows_of_a_cut_does_not_hide_another_cut() -> None:
    """The way round is the shortest with (0, 3, 5); but its first link takes 9.25 ms for a frame, and no stage of (3, 3, 2)
    more than 9 ms.
    """
    names = ("n0", "n1", "n2")
    nodes = [
        node(name, speed, read_bytes_s=0.0, head_s=((1, 1e-9),))
        for name, speed in zip(names, (1 / 3, 1 / 3, 10), strict=True)
    ]
    links = tuple(LinkProfile(a, b, 0.0, 4.096e6) for a in names for b in names if a != b)
    cut_bytes = tuple(4096 if cut in (3, 6, 8) else 37888 for cut in range(9))
    cost = CostModel(cluster(*nodes, links=links), replace(model(8), cut_bytes=cut_bytes), Workload(3, 100))
    found = spread(cost, ring_of(cost, (0, 1, 2), 1))
    assert found is not None and found.counts == (3, 3, 2)
    assert found.round_s == pytest.approx(27e-3) == cost.predict((0, 1, 2), found.counts).round_s
    assert cost.predict((0, 1, 2), (0, 3, 5)).round_s == pytest.approx(27.75e-3)
