"""The most texts of a length that have a pace: against a search that tries every number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusters import cluster, model, node
from mdi.errors import PlacementError
from mdi.placement.clients import most_clients
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.model import Workload

WORK = Workload(1, 256)


def keeps_pace(profile: object, n: int, tokens_s: float) -> bool:
    cost = CostModel(profile, model(), replace(WORK, n_sequences=n))  # type: ignore[arg-type]
    try:
        placement = place(cost)
    except PlacementError:
        return False
    return cost.predict(placement.order, placement.counts).tokens_s >= n * tokens_s


@pytest.mark.parametrize(("memory_mb", "tokens_s", "limit"), [(1000, 20.0, "speed"), (170, 0.1, "memory")])
def test_one_text_more_would_be_too_slow_or_too_large(memory_mb: float, tokens_s: float, limit: str) -> None:
    profile = cluster(node("a", memory_mb=memory_mb), node("b", memory_mb=memory_mb))
    found = most_clients(profile, model(), WORK, tokens_s, may_share=True)
    assert found.limit == limit and found.n > 1 and found.tensor_n is not None and found.tensor_n > 0
    assert keeps_pace(profile, found.n, tokens_s) and not keeps_pace(profile, found.n + 1, tokens_s)


def test_longer_texts_are_fewer() -> None:
    profile = cluster(node("a", memory_mb=200), node("b", memory_mb=200))
    short, long = (most_clients(profile, model(), Workload(1, n), 0.1, False) for n in (128, 1024))
    assert short.n > long.n > 0 and short.tensor_n is None


def test_none_is_an_answer() -> None:
    found = most_clients(cluster(node("a")), model(), WORK, 1e9, may_share=True)
    assert (found.n, found.limit, found.tensor_n) == (0, "speed", None)
