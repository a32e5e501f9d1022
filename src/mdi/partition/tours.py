"""The order of nodes in a ring whose links differ: exact for a few nodes, a good heuristic for many."""

from __future__ import annotations

from collections.abc import Sequence

from mdi.partition.cost import CostModel
from mdi.partition.spread import TOLERANCE, RingOrder, ring_of

_Label = tuple[float, float, tuple[int, ...]]  # way so far, slowest link, nodes


def best_rings(cost: CostModel, n_used: int) -> dict[frozenset[int], list[RingOrder]]:
    """For every choice of `n_used` nodes with the starter: the rings that no other order beats both in way and slowest link.

    Held and Karp's dynamic programming over subsets ("A dynamic programming approach to sequencing problems", 1962), with
    two measures instead of one.
    """
    terms = cost.terms(n_used)
    n_bytes = terms.n_rows * cost.shape.row_bytes
    # A path begins at the starter; keyed by (nodes, last).
    paths: dict[tuple[frozenset[int], int], list[_Label]] = {(frozenset({0}), 0): [(0.0, 0.0, (0,))]}
    for _ in range(n_used - 1):
        longer: dict[tuple[frozenset[int], int], list[_Label]] = {}
        for (nodes, last), labels in paths.items():
            for new in range(1, cost.n_nodes):
                if new in nodes:
                    continue
                way = cost.links.seconds(last, new, n_bytes)
                busy = cost.links.transmit_s(last, new, n_bytes)
                found = longer.setdefault((nodes | {new}, new), [])
                found.extend((w + way, max(b, busy), (*order, new)) for w, b, order in labels)
        paths = {key: _unbeaten(labels) for key, labels in longer.items()}
    closed: dict[frozenset[int], list[_Label]] = {}
    for (nodes, last), labels in paths.items():
        way, busy = 0.0, 0.0
        if n_used > 1:
            way, busy = cost.links.seconds(last, 0, n_bytes), cost.links.transmit_s(last, 0, n_bytes)
        closed.setdefault(nodes, []).extend((w + way, max(b, busy), order) for w, b, order in labels)
    return {nodes: [RingOrder(o, w, b) for w, b, o in _unbeaten(labels)] for nodes, labels in closed.items()}


def _unbeaten(labels: list[_Label]) -> list[_Label]:
    """Labels that none beats in both measures; of equal ones the first by order, which is as the nodes are listed."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda x: (x[0], x[2])):
        if not any(other[1] <= label[1] for other in kept):
            kept.append(label)
    return kept


def good_ring(cost: CostModel, order: Sequence[int], n_rows: int) -> RingOrder:
    """A short way round the same nodes: nearest neighbours, then single nodes moved as long as it helps."""
    listed = ring_of(cost, sorted(order), n_rows)
    if cost.links.are_equal or len(order) < 3:
        return listed
    n_bytes = n_rows * cost.shape.row_bytes
    way = {(a, b): cost.links.seconds(a, b, n_bytes) for a in order for b in order if a != b}
    best = listed
    for begin in (_nearest(list(order), way), list(listed.order)):
        ring = ring_of(cost, _moved(begin, way), n_rows)
        if ring.way_s < best.way_s * (1 - TOLERANCE):
            best = ring
    return best


def _nearest(nodes: list[int], way: dict[tuple[int, int], float]) -> list[int]:
    left = sorted(set(nodes) - {0})
    order = [0]
    while left:
        following = min(left, key=lambda j: (way[order[-1], j], j))
        left.remove(following)
        order.append(following)
    return order


def _moved(order: list[int], way: dict[tuple[int, int], float], passes: int = 4) -> list[int]:
    """Take one node out and put it in elsewhere, wherever the ring becomes shorter."""
    for _ in range(passes):
        is_better = False
        for node in sorted(set(order) - {0}):
            at = order.index(node)
            before, after = order[at - 1], order[(at + 1) % len(order)]
            gain = way[before, node] + way[node, after] - (way[before, after] if before != after else 0.0)
            rest = order[:at] + order[at + 1 :]
            places = range(1, len(rest) + 1)

            def price(place: int, rest: list[int] = rest, node: int = node) -> float:
                a, b = rest[place - 1], rest[place % len(rest)]
                return way[a, node] + way[node, b] - (way[a, b] if a != b else 0.0)

            place = min(places, key=lambda p: (price(p), p))
            if price(place) < gain * (1 - TOLERANCE):
                order = [*rest[:place], node, *rest[place:]]
                is_better = True
        if not is_better:
            break
    return order
