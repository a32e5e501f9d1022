"""Plans of a model that may be cut at some places only, against all placements."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from clusters import block, cluster, every_placement, may_be_cut, model, node
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.model import Workload
from mdi.placement.search import fastest


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
