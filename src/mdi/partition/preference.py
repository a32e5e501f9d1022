"""Chooses among rings that are about equally fast.

A prediction is no better than what it rests on: times that were measured in a moment. A ring that is faster by less than
MARGIN may be no faster at all. Then all nodes that have something to do take part, since their owner put them there; but
more nodes than sequences have nothing to do, and every further node is one more that can fail.
"""

from __future__ import annotations

from mdi.partition.cost import CostModel
from mdi.partition.spread import Spread, ring_of, spread
from mdi.partition.throughput import EXACT_NODES, fastest_of

MARGIN = 1.1


def useful_nodes(cost: CostModel) -> int:
    """How many nodes can compute at the same time: one sequence is on one node at a time."""
    return min(cost.timed.n_sequences, cost.n_nodes, cost.n_layer + 1)


def preferred(cost: CostModel, best: Spread) -> Spread:
    """The ring to use, where `best` is the fastest."""
    limit_s, useful = best.round_s * MARGIN, useful_nodes(cost)
    if cost.n_nodes > EXACT_NODES:
        return _smaller(cost, best, limit_s, useful)
    for n_used in (*range(useful, 0, -1), *range(useful + 1, min(cost.n_nodes, cost.n_layer + 1) + 1)):
        found = best if n_used == len(best.order) else fastest_of(cost, n_used, limit_s)
        if found is not None:
            return found
    return best


def _smaller(cost: CostModel, best: Spread, limit_s: float, useful: int) -> Spread:
    """The ring without its slowest nodes, until it has no more nodes than have something to do."""
    while len(best.order) > useful:
        block_s = cost.terms(len(best.order)).block_s
        for node in sorted(best.order[1:], key=lambda i: (-block_s[i], i)):
            order = [i for i in best.order if i != node]
            found = spread(cost, ring_of(cost, order, cost.terms(len(order)).n_rows), limit_s)
            if found is not None:
                best = found
                break
        else:
            return best
    return best
