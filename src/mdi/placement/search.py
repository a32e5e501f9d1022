"""The fastest ring: which nodes, in which order, with how many blocks each.

A round takes max(F * slowest stage or link, way round the ring). For a given ring the spread of blocks is exact: the search
is on the round's length T, which can be reached if blocks can be spread so that no stage takes more than T / F and the way
round takes at most T. Given the limit on the stages, the shortest way round is found exactly: where all blocks are alike by
filling the fastest nodes first, else by dynamic programming over the blocks.

Up to EXACT_NODES nodes every choice of nodes is tried, and every order that may be best. With more nodes the search begins with
likely ones (the fastest or largest), and improves the ring step by step, for SEARCH_S at most.

A prediction is no better than what it rests on: times that were measured in a moment. A ring that is faster by less than
MARGIN may be no faster at all. Then all nodes that have something to do take part, since their owner put them there; but
more nodes than sequences have nothing to do, and every further node is one more that can fail.
"""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mdi.placement.cost import CostModel, Terms

Clock = Callable[[], float]

TOLERANCE = 1e-9  # relative; smaller differences count as equal
_INF = float("inf")


@dataclass(frozen=True)
class Spread:
    """Blocks per node of a ring, and the time of a round with them."""

    counts: tuple[int, ...]
    round_s: float
    slowest_s: float
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class RingOrder:
    """Nodes in an order, with the time that their links add to a round.

    Attributes:
        way_s: of one frame over all links, hand-overs included; of rows that have hidden alone.
        busy_s: time of one such frame on the slowest link.
    """

    order: tuple[int, ...]
    way_s: float
    busy_s: float


def ring_of(cost: CostModel, order: Sequence[int], n_rows: int) -> RingOrder:
    if len(order) == 1:
        return RingOrder(tuple(order), 0.0, 0.0)
    n_bytes = n_rows * cost.shape.row_bytes  # `spread` adds what rows have besides hidden
    pairs = list(zip(order, [*order[1:], order[0]], strict=True))
    way = sum(cost.links.seconds(a, b, n_bytes) for a, b in pairs)
    return RingOrder(tuple(order), way, max(cost.links.transmit_s(a, b, n_bytes) for a, b in pairs))


def spread(cost: CostModel, ring: RingOrder, below_s: float = _INF) -> Spread | None:
    """The best spread over a ring; None if the model does not fit it, or no round takes less than `below_s`.

    Of spreads with equal rounds, one whose slowest stage is as fast as can be.
    """
    terms = cost.terms(len(ring.order))
    make = _Alike if cost.is_uniform else _Different
    fill: _Fill = make(cost, terms, ring.order)
    frames, link = terms.n_frames, ring.busy_s

    def attempt(stage_s: float, round_s: float) -> Spread | None:
        """A spread whose stages take at most `stage_s` and whose round at most `round_s`."""
        counts = fill.shortest(stage_s) if link <= stage_s or frames == 1 else None
        if counts is None:
            return None
        result = _measured(terms, ring, counts)
        return result if result.round_s <= round_s * (1 + 1e-12) else None

    limit = below_s * (1 - TOLERANCE)
    best = attempt(limit / frames, limit)
    if best is None:
        return None
    low = max(frames * max(link, *(terms.base_s[i] for i in ring.order)), ring.way_s)
    best = _shortest_round(attempt, frames, low, best)
    return _fastest_stages(attempt, fill, terms, ring, best)


class _Fill(ABC):
    """Finds the counts with the shortest sum of stages under a limit for each stage."""

    @abstractmethod
    def shortest(self, stage_s: float) -> tuple[int, ...] | None:
        """Blocks of each node; None if they cannot be spread so."""

    def balanced(self, stage_s: float) -> tuple[int, ...] | None:
        """The same, with equal nodes treated alike."""
        return self.shortest(stage_s)


class _Alike(_Fill):
    """All blocks are alike: a node is a fixed time, a time per block and a capacity."""

    def __init__(self, cost: CostModel, terms: Terms, order: Sequence[int]) -> None:
        self._n_layer = cost.n_layer
        self._base = [terms.base_s[i] for i in order]
        self._unit = [terms.unit_s(i) for i in order]
        self._most = [terms.most_blocks(i) for i in order]
        self._by_speed = sorted(range(len(order)), key=lambda k: self._unit[k])

    def _caps(self, stage_s: float) -> list[int] | None:
        """The most blocks of each node; None if a node cannot take part or they are too few."""
        caps = []
        for k, (base, unit, most) in enumerate(zip(self._base, self._unit, self._most, strict=True)):
            free = stage_s - base
            if free < -1e-15 or most < 0:
                return None
            cap = most if free == _INF else min(most, int(free / unit * (1 + 1e-12)))
            if k and cap < 1:
                return None
            caps.append(cap)
        return caps if sum(caps) >= self._n_layer else None

    def shortest(self, stage_s: float) -> tuple[int, ...] | None:
        caps = self._caps(stage_s)
        left = self._n_layer - (len(self._base) - 1)
        if caps is None or left < 0:
            return None
        counts = [0, *[1] * (len(self._base) - 1)]
        for k in self._by_speed:
            more = min(caps[k] - counts[k], left)
            counts[k] += more
            left -= more
        return tuple(counts) if left == 0 else None

    def balanced(self, stage_s: float) -> tuple[int, ...] | None:
        counts = self.shortest(stage_s)
        caps = self._caps(stage_s)
        if counts is None or caps is None:
            return None
        even = list(counts)
        for unit in set(self._unit):
            same = [k for k in self._by_speed if self._unit[k] == unit]
            total = sum(counts[k] for k in same)
            for k in same:
                even[k] = int(k > 0)
            for _ in range(total - sum(even[k] for k in same)):
                k = min((k for k in same if even[k] < caps[k]), key=lambda k: (self._base[k] + even[k] * unit, k))
                even[k] += 1
        return tuple(even)


class _Different(_Fill):
    """Blocks differ: dynamic programming over how many blocks the first nodes hold, O(nodes x blocks)."""

    def __init__(self, cost: CostModel, terms: Terms, order: Sequence[int]) -> None:
        self._n_layer, self._terms, self._order = cost.n_layer, terms, order
        self._weights, self._held, self._begins = cost.weights, cost.held, cost.begins
        cuts = range(self._n_layer + 1) if cost.shape.cuts is None else cost.shape.cuts
        # Of each place the last one, up to it, where the model may be cut.
        self._cut_at = list(itertools.accumulate((i if i in cuts else -1 for i in range(self._n_layer + 1)), max))

    def shortest(self, stage_s: float) -> tuple[int, ...] | None:
        return self._within([stage_s] * len(self._order))

    def _within(self, limits: Sequence[float]) -> tuple[int, ...] | None:
        n = self._n_layer
        if not self._reaches(limits):
            return None
        best = [0.0, *[_INF] * n]  # of the nodes so far, holding the first e blocks: sum of their times
        starts: list[list[int]] = []
        for k, i in enumerate(self._order):
            best, start_of = self._with(i, best, limits[k], is_starter=k == 0)
            if self._terms.has_columns and k + 1 < len(self._order):
                more = self._more_s(i, self._order[k + 1], limits[k])
                best = [a + b for a, b in zip(best, more, strict=True)]
            starts.append(start_of)
        if best[n] == _INF:
            return None
        counts, stop = [], n
        for start_of in reversed(starts):
            counts.append(stop - start_of[stop])
            stop = start_of[stop]
        return tuple(reversed(counts))

    def _more_s(self, i: int, following: int, limit_s: float) -> list[float]:
        """Of each cut, what a frame's way takes more than with hidden alone; infinite where the link is too slow."""
        links = [self._terms.link_s(i, following, cut) for cut in range(self._n_layer + 1)]
        hidden_s, is_alone = links[-1][0], self._terms.n_frames == 1
        return [way - hidden_s if is_alone or busy <= limit_s * (1 + 1e-12) else _INF for way, busy in links]

    def _reaches(self, limits: Sequence[float]) -> bool:
        """Whether the nodes hold all blocks if each takes as many as it can: cheap, and mostly decides."""
        stop = 0
        for i, limit in zip(self._order, limits, strict=True):
            stop = self._cut_at[self._terms.reach(i, stop, limit * (1 + 1e-9))]
        return stop == self._n_layer

    def _with(self, i: int, best: list[float], stage_s: float, is_starter: bool) -> tuple[list[float], list[int]]:
        """One more node. The window of possible starts only moves on, so its minimum is kept in a deque."""
        n, terms = self._n_layer, self._terms
        prefix, base = terms.prefix_s(i), terms.base_s[i]
        weights, held, begins, (running, loading) = self._weights, self._held, self._begins, terms.capacity(i)
        result, start_of = [_INF] * (n + 1), [0] * (n + 1)
        window: deque[int] = deque()
        limit = stage_s * (1 + 1e-12)
        if is_starter:
            for stop in range(n + 1):
                if base + prefix[stop] > limit or not terms.fits(i, 0, stop):
                    break
                if self._cut_at[stop] == stop:
                    result[stop] = base + prefix[stop]
            return result, start_of
        low = 0
        for stop in range(1, n + 1):
            start = stop - 1
            while window and best[window[-1]] - prefix[window[-1]] > best[start] - prefix[start]:
                window.pop()
            window.append(start)
            while low < stop and (
                base + prefix[stop] - prefix[low] > limit
                or held[stop] - begins[low] > running
                or weights[stop] - weights[low] > loading
            ):
                low += 1
            while window and window[0] < low:
                window.popleft()
            if window and best[window[0]] < _INF and self._cut_at[stop] == stop:
                start_of[stop] = window[0]
                result[stop] = best[window[0]] + base + prefix[stop] - prefix[window[0]]
        return result, start_of


_Attempt = Callable[[float, float], "Spread | None"]


def _stages(terms: Terms, order: Sequence[int], counts: Sequence[int]) -> list[float]:
    stages, start = [], 0
    for i, count in zip(order, counts, strict=True):
        stages.append(terms.stage_s(i, start, start + count))
        start += count
    return stages


def _measured(terms: Terms, ring: RingOrder, counts: tuple[int, ...]) -> Spread:
    stages = _stages(terms, ring.order, counts)
    slowest = max(stages)
    way_s, link = ring.way_s, ring.busy_s if terms.n_frames > 1 else 0.0
    if terms.has_columns and len(counts) > 1:
        links = terms.links_s(ring.order, counts)
        way_s, link = sum(way for way, _ in links), max(busy for _, busy in links) if link else 0.0
    round_s = max(terms.n_frames * max(slowest, link), sum(stages) + way_s)
    return Spread(counts, round_s, slowest, ring.order)


def _shortest_round(attempt: _Attempt, frames: int, low: float, best: Spread) -> Spread:
    """Bisect between an impossible round and a possible one."""
    while best.round_s - low > 1e-10 * best.round_s:
        middle = (low + best.round_s) / 2
        found = attempt(middle / frames, middle)
        if found is None:
            low = middle
        else:
            best = found if found.round_s < best.round_s else best
            if found.round_s > middle:  # within rounding: the two have met
                break
    return best


def _fastest_stages(attempt: _Attempt, fill: _Fill, terms: Terms, ring: RingOrder, best: Spread) -> Spread:
    """Among spreads with this round, one with the fastest slowest stage; it leaves the most room for noise."""
    low = max(ring.busy_s if terms.n_frames > 1 else 0.0, *(terms.base_s[i] for i in ring.order))
    high = best.slowest_s
    for _ in range(30):
        if high - low <= 1e-6 * high:
            break
        middle = (low + high) / 2
        found = attempt(middle, best.round_s)
        if found is None:
            low = middle
        else:
            best, high = found, min(found.slowest_s, middle)
    counts = fill.balanced(high * (1 + 1e-9))
    if counts is None:
        return best
    even = _measured(terms, ring, counts)
    return even if even.round_s <= best.round_s * (1 + 1e-12) else best


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


EXACT_NODES = 8  # with more nodes, not every choice of them is tried
NEAR = 6  # unused nodes that the improvement tries in each place
SEARCH_S = 1.0  # after which the ring of a large cluster is not improved any more
MARGIN = 1.1


def fastest(cost: CostModel, also: Iterable[Sequence[int]] = (), clock: Clock = time.monotonic) -> Spread | None:
    """The fastest ring; None if the model fits no choice of nodes.

    Args:
        cost: its workload says how many sequences are meant: with one, the fastest ring is that with the shortest way.
        also: more orders of nodes to be tried.
    """
    best: Spread | None = None
    for n_used in range(1, min(cost.n_nodes, cost.shape.most_nodes) + 1):
        if cost.n_nodes > EXACT_NODES and best is not None and n_used > 2 * len(best.order) + NEAR:
            break  # longer rings have not been better for a while
        best = fastest_of(cost, n_used, best.round_s if best else _INF) or best
    for order in also:  # last, because most need no more than a look when a good ring is known
        ring = ring_of(cost, order, cost.terms(len(order)).n_rows)
        best = spread(cost, ring, best.round_s if best else _INF) or best
    return improved(cost, best, clock) if best is not None and cost.n_nodes > EXACT_NODES else best


def fastest_of(cost: CostModel, n_used: int, below_s: float, near: Spread | None = None) -> Spread | None:
    """The fastest ring of so many nodes; None if no round takes less than `below_s`.

    Args:
        near: a good ring of more nodes. Of a large cluster, rings without its slowest nodes are tried as well.
    """
    best: Spread | None = None
    for ring in _rings(cost, n_used, below_s, near):
        best = spread(cost, ring, best.round_s if best else below_s) or best
    return best


def improved(cost: CostModel, best: Spread, clock: Clock) -> Spread:
    """Leave out, add or exchange nodes as long as it helps, but no longer than SEARCH_S."""
    deadline, is_better = clock() + SEARCH_S, True
    while is_better:
        is_better = False
        for nodes in _neighbours(cost, best):
            if clock() >= deadline:
                return best
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
    for new in unused if len(order) < cost.shape.most_nodes else ():
        yield [*order, new]
    for new in unused[:2]:
        for node in slow_first[:NEAR]:
            yield [new if i == node else i for i in order]


def _rings(cost: CostModel, n_used: int, below_s: float, near: Spread | None) -> Iterator[RingOrder]:
    """All rings of so many nodes that may be the fastest, as listed first; of a large cluster, likely ones."""
    n_rows = cost.terms(n_used).n_rows
    if cost.n_nodes > EXACT_NODES:
        yield from (good_ring(cost, nodes, n_rows) for nodes in _likely(cost, n_used, near))
        return
    others = range(1, cost.n_nodes)
    if cost.is_uniform and cost.links.are_equal:
        yield from (ring_of(cost, (0, *chosen), n_rows) for chosen in itertools.combinations(others, n_used - 1))
    elif cost.is_uniform:  # links do not depend on the blocks of the nodes
        for _, rings in sorted(best_rings(cost, n_used).items(), key=lambda item: sorted(item[0])):
            yield from rings
    else:
        for chosen in itertools.combinations(others, n_used - 1):
            if _may_do(cost, (0, *chosen), below_s):
                for order in _different_orders(cost, chosen):
                    yield ring_of(cost, (0, *order), n_rows)


def _likely(cost: CostModel, n_used: int, near: Spread | None) -> Iterator[list[int]]:
    """The starter with the fastest or with the largest others, and a good ring without its slowest nodes."""
    terms, others = cost.terms(n_used), range(1, cost.n_nodes)
    usable = [i for i in others if terms.most_blocks(i) > 0] if cost.is_uniform else others
    if len(usable) >= n_used - 1:
        yield [0, *heapq.nsmallest(n_used - 1, usable, key=lambda i: (terms.unit_s(i), i))]
        yield [0, *heapq.nsmallest(n_used - 1, usable, key=lambda i: (-terms.capacity(i)[0], i))]
    if near is not None and n_used < len(near.order):
        fast_first = sorted(near.order[1:], key=lambda i: (terms.block_s[i], i))[: n_used - 1]
        yield [0, *(i for i in near.order if i in fast_first)]


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


def _may_do(cost: CostModel, order: tuple[int, ...], below_s: float) -> bool:
    """Whether these nodes could have a shorter round in some order, if blocks could be cut at will."""
    terms = cost.terms(len(order))
    share, total = 0.0, cost.work[-1]
    limit = below_s * (1 - TOLERANCE) / terms.n_frames
    for i in order:
        free = limit - terms.base_s[i]
        if free <= 0 and i:
            return False
        share += min(total, max(0.0, free) / terms.block_s[i])
    return share >= total * (1 - TOLERANCE)


def useful_nodes(cost: CostModel) -> int:
    """How many nodes can compute at the same time: one sequence is on one node at a time."""
    return min(cost.timed.n_sequences, cost.n_nodes, cost.shape.most_nodes)


def preferred(cost: CostModel, best: Spread) -> Spread:
    """The ring to use, where `best` is the fastest: one of as many nodes as have something to do, if it is about as fast."""
    limit_s, useful = best.round_s * MARGIN, useful_nodes(cost)
    for n_used in (*range(useful, 0, -1), *range(useful + 1, len(best.order))):
        found = best if n_used == len(best.order) else fastest_of(cost, n_used, limit_s, best)
        if found is not None:
            return found
    return best
