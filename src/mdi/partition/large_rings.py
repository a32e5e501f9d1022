"""Chooses nodes and their order if there are too many to try all: the fastest or largest ones, then improved.

The spread of blocks over each ring that is looked at stays exact.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from mdi.partition.cost import CostModel
from mdi.partition.spread import Spread, spread
from mdi.partition.tours import good_ring

WORK = 600  # nodes of all rings together that the improvement may look at
NEAR = 6  # unused nodes that it tries in each place


def guessed(cost: CostModel) -> Spread | None:
    """The best ring of the starter with the fastest or with the largest others; None if the model fits none."""
    best: Spread | None = None
    others = range(1, cost.n_nodes)
    for n_used in range(1, min(cost.n_nodes, cost.n_layer + 1) + 1):
        if best is not None and n_used > 2 * len(best.order) + NEAR:
            break  # longer rings have not been better for a while
        terms = cost.terms(n_used)
        usable = [i for i in others if terms.most_blocks(i) > 0] if cost.is_uniform else others
        fastest = heapq.nsmallest(n_used - 1, usable, key=lambda i: (terms.unit_s(i), i))
        largest = heapq.nsmallest(n_used - 1, usable, key=lambda i: (-terms.capacity(i)[0], i))
        for chosen in (fastest, largest) if len(fastest) == n_used - 1 else ():
            ring = good_ring(cost, [0, *chosen], terms.n_rows)
            best = spread(cost, ring, best.round_s if best else float("inf")) or best
    return best


def improved(cost: CostModel, best: Spread) -> Spread:
    """Leave out, add or exchange nodes as long as it helps, with a limited number of tries."""
    tries = max(8, WORK // len(best.order))
    is_better = True
    while is_better and tries > 0:
        is_better = False
        for nodes in _neighbours(cost, best):
            if tries == 0:
                break
            tries -= 1
            ring = good_ring(cost, nodes, cost.terms(len(nodes)).n_rows)
            found = spread(cost, ring, best.round_s)
            if found is not None:
                best, is_better = found, True
                break
    return best


def _neighbours(cost: CostModel, best: Spread) -> Iterator[list[int]]:
    order = list(best.order)
    terms = cost.terms(len(order))
    slow_first = sorted(order[1:], key=lambda i: (-terms.block_s[i], i))
    used = set(order)
    unused = heapq.nsmallest(
        NEAR, (i for i in range(1, cost.n_nodes) if i not in used), key=lambda i: (terms.block_s[i], i)
    )
    # Two at a time as well: with one less, frames may have as many rows as before, and the ring gains nothing yet.
    for left_out in (*((i,) for i in slow_first), *itertools.combinations(slow_first[:NEAR], 2)):
        yield [i for i in order if i not in left_out]
    for new in unused if len(order) <= cost.n_layer else ():
        yield [*order, new]
    for new in unused[:2]:
        for node in slow_first[:NEAR]:
            yield [new if i == node else i for i in order]
