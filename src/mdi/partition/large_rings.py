"""Choosing nodes and their order where there are too many for trying all: a guess, then improved step by step.

The guess rests on what the exact search would find if all links were as good as each node's best one. It finds a shortest
round by halving, as `spread` does, but chooses the nodes as well: those that can take the most blocks in the time, or those
that are the fastest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from mdi.partition.cost import CostModel, Terms
from mdi.partition.spread import TOLERANCE, Ring, Spread, spread
from mdi.partition.tours import good_ring

WORK = 600  # nodes of all rings together that the improvement may look at
NEAR = 6  # unused nodes that it tries in each place


def selections(cost: CostModel) -> Iterator[Ring]:
    """Rings that are likely to be good, at least one for each number of rows per frame."""
    best_s = float("inf")
    for low, high in _groups(cost):
        group = _Group(cost, low, high)
        chosen = group.best(best_s)
        if chosen is None:
            continue
        best_s = min(best_s, chosen[0])
        yield good_ring(cost, chosen[1], cost.terms(len(chosen[1])).n_rows)
    # What fits at all may be found only with the largest nodes.
    capacity = sorted(range(1, cost.n_nodes), key=lambda i: (-_node_capacity(cost, i), i))
    for n_used in _fitting(cost, capacity):
        yield good_ring(cost, [0, *capacity[: n_used - 1]], cost.terms(n_used).n_rows)


def improved(cost: CostModel, best: Spread) -> Spread:
    """Leave out, put in or exchange single nodes as long as it helps; a given number of tries, so that it always ends."""
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
    for node in slow_first:
        yield [i for i in order if i != node]
    for new in unused if len(order) <= cost.n_layer else ():
        yield [*order, new]
    for new in unused[:2]:
        for node in slow_first[:NEAR]:
            yield [new if i == node else i for i in order]


def _groups(cost: CostModel) -> list[tuple[int, int]]:
    """Numbers of nodes that have as many rows per frame, as (fewest, most)."""
    most = min(cost.n_nodes, cost.n_layer + 1)
    groups: list[tuple[int, int]] = []
    low = 1
    for n_used in range(1, most + 1):
        if n_used == most or cost.terms(n_used + 1) is not cost.terms(low):
            groups.append((low, n_used))
            low = n_used + 1
    return groups


def _node_capacity(cost: CostModel, i: int) -> float:
    return cost.profile.nodes[i].memory_bytes - cost.fixed_bytes(i)


def _fitting(cost: CostModel, capacity: Sequence[int]) -> list[int]:
    """The fewest of the largest nodes that hold the model, if blocks could be cut at will, and a few more."""
    most = min(cost.n_nodes, cost.n_layer + 1)
    for n_used in range(1, most + 1):
        terms = cost.terms(n_used)
        total = sum(max(0.0, min(terms.capacity(i))) for i in (0, *capacity[: n_used - 1]))
        if total >= cost.weights[-1]:
            return [n for n in range(n_used, min(n_used + 4, most) + 1)]
    return [most]


class _Group:
    """Rings of `low` to `high` nodes, all with as many rows per frame. Blocks count as alike here."""

    def __init__(self, cost: CostModel, low: int, high: int) -> None:
        self._low, self._high, self._n_layer = low, high, cost.n_layer
        terms: Terms = cost.terms(low)
        self._frames = terms.n_frames
        n_bytes = terms.n_rows * cost.shape.row_bytes
        nodes = range(cost.n_nodes)
        self._base = terms.base_s
        self._unit = [terms.unit_s(i) for i in nodes]
        per_block = (cost.weights[-1] + cost.caches[-1]) / cost.n_layer
        self._most = [
            terms.most_blocks(i) if cost.is_uniform else int(min(terms.capacity(i)) // per_block) for i in nodes
        ]
        self._way = [cost.links.best_s(i, n_bytes) for i in nodes]
        self._by_speed = sorted(range(1, cost.n_nodes), key=lambda i: (self._unit[i], i))

    def best(self, below_s: float) -> tuple[float, list[int]] | None:
        """The shortest round that seems possible, and its nodes; None if it is not below `below_s`."""
        limit = below_s * (1 - TOLERANCE)
        chosen = self._chosen(limit)
        if chosen is None:
            return None
        high = limit if limit < float("inf") else self._frames * (
            self._base[0] + sum(self._way) + self._n_layer * max(self._unit)
        )  # fmt: skip
        low = self._frames * self._base[0]
        for _ in range(40):
            if high - low <= 1e-6 * high:
                break
            middle = (low + high) / 2
            found = self._chosen(middle)
            if found is None:
                low = middle
            else:
                chosen, high = found, middle
        return high, chosen

    def _chosen(self, round_s: float) -> list[int] | None:
        """Nodes that can do a round in this time, with luck."""
        stage_s = round_s / self._frames
        if self._base[0] > stage_s or self._most[0] < 0:
            return None
        infinite = stage_s == float("inf")
        caps = {}
        for i in self._by_speed:
            cap = self._most[i] if infinite else min(self._most[i], int((stage_s - self._base[i]) / self._unit[i]))
            if cap >= 1:
                caps[i] = cap
        own = self._most[0] if infinite else min(self._most[0], int((stage_s - self._base[0]) / self._unit[0]))
        for order in (sorted(caps, key=lambda i: (-caps[i], self._unit[i], i)), list(caps)):
            nodes = self._enough(order, caps, own)
            if nodes is not None and self._way_round(nodes, caps, own) <= round_s:
                return [0, *sorted(nodes)]
        return None

    def _enough(self, order: list[int], caps: dict[int, int], own: int) -> list[int] | None:
        """The first nodes of an order that hold all blocks together, and not fewer than belong to this group."""
        total = own
        for n, i in enumerate(order):
            if total >= self._n_layer and n + 1 >= self._low:
                return order[:n]
            total += caps[i]
        enough = total >= self._n_layer and self._low <= len(order) + 1 <= self._high
        return order if enough else None

    def _way_round(self, nodes: list[int], caps: dict[int, int], own: int) -> float:
        """One frame's way if the fastest nodes are filled first."""
        if len(nodes) + 1 > self._high or len(nodes) > self._n_layer:
            return float("inf")
        way = self._base[0] + sum(self._way[i] + self._unit[i] for i in nodes) + (self._way[0] if nodes else 0.0)
        left = self._n_layer - len(nodes)
        for unit, cap in sorted([(self._unit[i], caps[i] - 1) for i in nodes] + [(self._unit[0], own)]):
            way += unit * min(cap, left)
            left -= min(cap, left)
        return way
