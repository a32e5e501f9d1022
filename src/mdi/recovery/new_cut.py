"""Another cut of the model over the remaining nodes: few blocks move, and no node is much slower than the others.

Pure. What is weighed is time: that of moving weights, once, against that of a frame, as often as the texts still need one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

N_PACES = 48  # different paces that are tried, the fastest possible ones first

INFINITE = float("inf")


@dataclass(frozen=True)
class Holder:
    """A node that can hold blocks.

    Attributes:
        has: blocks in its memory, half-open; (0, 0) if there are none.
        block_s: of one block and a frame.
        base_s: seconds per frame for everything but blocks.
        move_s: of getting one more block: over its link, or from its disk.
        most_bytes: of weights and caches of blocks.
        least, most: blocks that it must hold (none for a starter), and can hold; None is any number.
    """

    name: str
    has: tuple[int, int]
    block_s: float
    base_s: float
    move_s: float
    most_bytes: float
    least: int = 1
    most: int | None = None

    def n_moved(self, start: int, stop: int) -> int:
        """How many of these blocks it does not have."""
        return (stop - start) - max(0, min(stop, self.has[1]) - max(start, self.has[0]))


def cut(holders: Sequence[Holder], block_bytes: Sequence[float], n_frames: float) -> tuple[int, ...] | None:
    """Blocks of each node, in ring order, so that moving and `n_frames` frames take the least time; None if nothing fits.

    Args:
        block_bytes: of each block, weights with its caches.
    """
    best: tuple[float, tuple[int, ...]] | None = None
    for pace_s in _paces(holders, block_bytes):
        found = _moved_least(holders, block_bytes, pace_s)
        if found is None:
            continue
        moving_s, counts = found
        total = moving_s + n_frames * slowest_s(holders, counts)
        if best is None or total < best[0]:
            best = (total, counts)
    return None if best is None else best[1]


def slowest_s(holders: Sequence[Holder], counts: Sequence[int]) -> float:
    """Seconds of the slowest node for a frame; the others wait for it."""
    return max(h.base_s + h.block_s * n for h, n in zip(holders, counts, strict=True))


def _paces(holders: Sequence[Holder], block_bytes: Sequence[float]) -> list[float]:
    """Times of the slowest stage that are worth a try, from the shortest that is possible on."""
    n = len(block_bytes)
    paces = sorted({h.base_s + h.block_s * count for h in holders for count in range(h.least, n + 1)})
    low, high = 0, len(paces)
    while low < high:  # the more time, the more fits
        middle = (low + high) // 2
        if _moved_least(holders, block_bytes, paces[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return paces[low : low + N_PACES]


def _moved_least(
    holders: Sequence[Holder], block_bytes: Sequence[float], pace_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """The cut with the least time of moving in which no stage takes more than `pace_s`; None if there is none."""
    n = len(block_bytes)
    sums = [0.0, *accumulate(block_bytes)]
    costs = [0.0] + [INFINITE] * n  # of the cheapest way in which the nodes so far hold the first blocks
    ways: list[list[int]] = []
    for holder in holders:
        free_s = pace_s - holder.base_s
        most = int(free_s / holder.block_s * (1 + 1e-9)) if holder.block_s else n
        if free_s < 0:
            most = 0
        if holder.most is not None:
            most = min(most, holder.most)
        after, way = [INFINITE] * (n + 1), [0] * (n + 1)
        for start, cost in enumerate(costs):
            if cost == INFINITE:
                continue
            for stop in range(start + holder.least, min(n, start + most) + 1):
                if sums[stop] - sums[start] > holder.most_bytes:
                    break
                total = cost + holder.move_s * holder.n_moved(start, stop)
                if total < after[stop]:
                    after[stop], way[stop] = total, start
        costs = after
        ways.append(way)
    if costs[n] == INFINITE:
        return None
    counts, stop = [], n
    for way in reversed(ways):
        counts.append(stop - way[stop])
        stop = way[stop]
    return costs[n], tuple(reversed(counts))
