"""Nodes that have become slower, because another program computes there or the board is hot."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

PIECE_S = 15.0
N_PIECES = 5  # more than a minute, whenever it became slow
SLOWER = 1.25  # what counts as slower; less is noise


@dataclass
class _Seen:
    counts: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=N_PIECES + 1))
    paces: list[float] = field(default_factory=list)  # in the pieces of the last whole minute
    best: float | None = None
    before: float = 1.0  # how slow it was when its counts were dropped


class Paces:
    """Pure: from each node's counts at some moments to how much slower it is than at its best.

    A pace is the time per frame over the expected time for its blocks, so it does not depend on the blocks. A node is slow
    if it is slow in all pieces of a minute. More texts in a frame slow down all nodes alike. So a node's slowness is what
    it has lost compared with the others, since the minute in which all of them were there.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def add(self, name: str, now: float, compute_s: float, n_frames: int, expected_s: float) -> None:
        """Take a node's compute time and number of frames since its ring was closed.

        Args:
            expected_s: for a frame, with the blocks that it has.
        """
        seen = self._seen.setdefault(name, _Seen())
        counts = seen.counts
        if counts and now - counts[-1][0] < PIECE_S:
            return
        if counts and (compute_s < counts[-1][1] or n_frames <= counts[-1][2]):
            counts.clear()  # it counts from the beginning, or has not computed
        counts.append((now, compute_s, n_frames))
        if len(counts) == counts.maxlen and expected_s > 0:
            seen.paces = [(b[1] - a[1]) / (b[2] - a[2]) / expected_s for a, b in pairwise(counts)]
            lowest = min(seen.paces)
            seen.best = lowest / seen.before if seen.best is None else min(seen.best, lowest)

    def begin_again(self, names: Sequence[str]) -> None:
        """Another ring: the nodes' counts begin again; known paces stay until there is a new minute."""
        for seen in self._seen.values():
            seen.counts.clear()
        if set(names) != self._seen.keys():  # one that has come has seen no times with fewer texts
            factors = self.factors([name for name in names if name in self._seen])
            self._seen = {name: _Seen(before=factors.get(name, 1.0)) for name in names}

    def factors(self, names: Sequence[str]) -> dict[str, float]:
        """How many times as long as at its best each of these nodes takes, as far as not all do; 1.0 where it is little."""
        lost = {name: self._lost(name) for name in names}
        common = min((usual for _, usual in lost.values()), default=1.0)
        return {name: usual / common if least > SLOWER * common else 1.0 for name, (least, usual) in lost.items()}

    def _lost(self, name: str) -> tuple[float, float]:
        """How many times as long as at its best a node takes: at least, and usually."""
        seen = self._seen.get(name)
        if seen is None or not seen.paces or not seen.best:
            before = 1.0 if seen is None else seen.before
            return before, before
        return min(seen.paces) / seen.best, median(seen.paces) / seen.best
