"""The placement with the most tokens per second, or with the shortest way of one token.

Exact for up to EXACT_NODES nodes: every choice of nodes, every order that may be best, and for each the exact spread of
blocks. With more nodes the choice and the order are a guess, improved step by step; the spread of blocks stays exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from mdi.partition.cost import CostModel
from mdi.partition.large_rings import guessed, improved
from mdi.partition.spread import TOLERANCE, RingOrder, Spread, ring_of, spread
from mdi.partition.tours import best_rings

EXACT_NODES = 8


def fastest(cost: CostModel, also: Iterable[Sequence[int]] = ()) -> Spread | None:
    """The fastest ring; None if the model fits no choice of nodes.

    Args:
        cost: its workload says how many sequences are meant: with one, the fastest ring is that with the shortest way.
        also: more orders of nodes to be tried.
    """
    best: Spread | None = None
    if cost.n_nodes > EXACT_NODES:
        best = guessed(cost)
    else:
        for n_used in range(1, min(cost.n_nodes, cost.n_layer + 1) + 1):
            for ring in _rings(cost, n_used, best):
                best = _better(cost, ring, best)
    for order in also:  # last, because most need no more than a look when a good ring is known
        best = _better(cost, ring_of(cost, order, cost.terms(len(order)).n_rows), best)
    return improved(cost, best) if best is not None and cost.n_nodes > EXACT_NODES else best


def fastest_of(cost: CostModel, n_used: int, below_s: float) -> Spread | None:
    """The fastest ring of so many nodes, up to EXACT_NODES; None if no round takes less than `below_s`."""
    best: Spread | None = None
    for ring in _rings(cost, n_used, None):
        best = spread(cost, ring, best.round_s if best else below_s) or best
    return best


def _better(cost: CostModel, ring: RingOrder, best: Spread | None) -> Spread | None:
    found = spread(cost, ring, best.round_s if best else float("inf"))
    return found or best


def _rings(cost: CostModel, n_used: int, best: Spread | None) -> Iterator[RingOrder]:
    """All rings of so many nodes that may be the fastest, as listed first."""
    n_rows = cost.terms(n_used).n_rows
    others = range(1, cost.n_nodes)
    if cost.is_uniform and cost.links.are_equal:
        yield from (ring_of(cost, (0, *chosen), n_rows) for chosen in itertools.combinations(others, n_used - 1))
    elif cost.is_uniform:  # links do not depend on the blocks of the nodes
        for _, rings in sorted(best_rings(cost, n_used).items(), key=lambda item: sorted(item[0])):
            yield from rings
    else:
        for chosen in itertools.combinations(others, n_used - 1):
            if _may_do(cost, (0, *chosen), best):
                for order in _different_orders(cost, chosen):
                    yield ring_of(cost, (0, *order), n_rows)


def _different_orders(cost: CostModel, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All orders, but of those that only exchange equal nodes the first."""
    if not cost.links.are_equal:
        yield from itertools.permutations(chosen)
        return
    nodes = cost.profile.nodes
    classes = {
        i: (*(nodes[i].memory_bytes, nodes[i].process_bytes, nodes[i].block_s, nodes[i].read_bytes_s),) for i in chosen
    }
    seen = set()
    for order in itertools.permutations(chosen):
        key = tuple(classes[i] for i in order)
        if key not in seen:
            seen.add(key)
            yield order


def _may_do(cost: CostModel, order: tuple[int, ...], best: Spread | None) -> bool:
    """Whether these nodes could be faster than `best` in some order, if blocks could be cut at will."""
    terms = cost.terms(len(order))
    share, total = 0.0, cost.work[-1]
    limit = best.round_s * (1 - TOLERANCE) / terms.n_frames if best else float("inf")
    for i in order:
        free = limit - terms.base_s[i]
        if free <= 0 and i:
            return False
        share += min(total, max(0.0, free) / terms.block_s[i])
    return share >= total * (1 - TOLERANCE)
