"""Nodes that have become slower than they were: another program computes there, or the board is hot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0
SLOWER = 1.25  # what counts as slower; less is noise


@dataclass
class _Seen:
    counts: deque[tuple[float, float, int]] = field(default_factory=deque)  # time, compute_s, frames
    best_s: float | None = None


class Paces:
    """Pure: what each node has counted goes in, at some moments; how much slower it is than at its best comes out."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def add(self, name: str, now: float, compute_s: float, n_frames: int) -> None:
        """Node `name` has computed for so long, for so many frames, since its ring was closed."""
        seen = self._seen.setdefault(name, _Seen())
        if seen.counts and (compute_s < seen.counts[-1][1] or n_frames < seen.counts[-1][2]):
            seen.counts.clear()  # it counts from the beginning: another ring
        seen.counts.append((now, compute_s, n_frames))
        while len(seen.counts) > 2 and seen.counts[1][0] <= now - WINDOW_S:
            seen.counts.popleft()
        pace_s = self._pace_s(name)
        if pace_s is not None:
            seen.best_s = pace_s if seen.best_s is None else min(seen.best_s, pace_s)

    def factor(self, name: str) -> float:
        """How many times as long as at its best a node has taken for a frame in the last minute; 1.0 if it is not known."""
        seen, pace_s = self._seen.get(name), self._pace_s(name)
        if seen is None or pace_s is None or not seen.best_s:
            return 1.0
        factor = pace_s / seen.best_s
        return factor if factor > SLOWER else 1.0

    def forget(self) -> None:
        """Other blocks, other times."""
        self._seen.clear()

    def _pace_s(self, name: str) -> float | None:
        """Seconds per frame over a whole window; None before there is one."""
        counts = self._seen[name].counts if name in self._seen else deque()
        if len(counts) < 2 or counts[-1][0] - counts[0][0] < WINDOW_S:
            return None
        n_frames = counts[-1][2] - counts[0][2]
        return (counts[-1][1] - counts[0][1]) / n_frames if n_frames else None
