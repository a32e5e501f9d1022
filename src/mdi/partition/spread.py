"""How many blocks each node of a given ring gets for the shortest possible round: exact.

A round takes max(F * slowest stage or link, way round the ring). The search is on its length T: T can be reached if blocks
can be spread so that no stage takes more than T / F and the way round takes at most T. Given the limit on the stages, the
shortest way round is found exactly: where all blocks are alike by filling the fastest nodes first, else by dynamic
programming over the blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mdi.partition.cost import CostModel, Terms

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
        way_s: of one frame over all links, hand-overs included.
        busy_s: time of one frame on the slowest link.
    """

    order: tuple[int, ...]
    way_s: float
    busy_s: float


def ring_of(cost: CostModel, order: Sequence[int], n_rows: int) -> RingOrder:
    if len(order) == 1:
        return RingOrder(tuple(order), 0.0, 0.0)
    n_bytes = n_rows * cost.shape.row_bytes
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
            if free < -1e-15 or most < (k > 0):
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
        self._weights, self._held = cost.weights, cost.held

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
            starts.append(start_of)
        if best[n] == _INF:
            return None
        counts, stop = [], n
        for start_of in reversed(starts):
            counts.append(stop - start_of[stop])
            stop = start_of[stop]
        return tuple(reversed(counts))

    def _reaches(self, limits: Sequence[float]) -> bool:
        """Whether the nodes hold all blocks if each takes as many as it can: cheap, and mostly decides."""
        stop = 0
        for i, limit in zip(self._order, limits, strict=True):
            stop = self._terms.reach(i, stop, limit * (1 + 1e-9))
        return stop == self._n_layer

    def _with(self, i: int, best: list[float], stage_s: float, is_starter: bool) -> tuple[list[float], list[int]]:
        """One more node. The window of possible starts only moves on, so its minimum is kept in a deque."""
        n, terms = self._n_layer, self._terms
        prefix, base = terms.prefix_s(i), terms.base_s[i]
        weights, held, (running, loading) = self._weights, self._held, terms.capacity(i)
        result, start_of = [_INF] * (n + 1), [0] * (n + 1)
        window: deque[int] = deque()
        limit = stage_s * (1 + 1e-12)
        if is_starter:
            for stop in range(n + 1):
                if base + prefix[stop] > limit or not terms.fits(i, 0, stop):
                    break
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
                or held[stop] - held[low] > running
                or weights[stop] - weights[low] > loading
            ):
                low += 1
            while window and window[0] < low:
                window.popleft()
            if window and best[window[0]] < _INF:
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
    link = ring.busy_s if terms.n_frames > 1 else 0.0
    round_s = max(terms.n_frames * max(slowest, link), sum(stages) + ring.way_s)
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
