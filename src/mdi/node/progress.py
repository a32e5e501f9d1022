"""Progress of one node's weights: bytes, rate, time left. Pure: from numbers and times to a line."""

from __future__ import annotations

from collections import deque

from mdi.units import duration, size

WINDOW_S = 10.0  # the rate is that of the last seconds, because a slow start says nothing about the rest


class Progress:
    """One transfer, as the receiver reports it.

    Args:
        name: of the receiving node.
        total_bytes: of all parts that it lacked.
        had_bytes: bytes that an interrupted transfer left.
        now_s: any clock's time.
    """

    def __init__(self, name: str, total_bytes: int, had_bytes: int, now_s: float) -> None:
        self._name = name
        self._total = total_bytes
        self._had = self._done = min(had_bytes, total_bytes)
        self._begin_s = now_s
        self._points: deque[tuple[float, int]] = deque([(now_s, self._done)])

    def update(self, done_bytes: int, now_s: float) -> None:
        """The receiver has so much; it never has less than before, and never more than all."""
        self._done = min(max(self._done, done_bytes), self._total)
        self._points.append((now_s, self._done))
        while len(self._points) > 2 and self._points[1][0] <= now_s - WINDOW_S:
            self._points.popleft()

    @property
    def bytes_s(self) -> float:
        """Over the last seconds; 0 while nothing can be said."""
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def __str__(self) -> str:
        """ "secondary0: 120.0 of 400.0 MB (30 %), 40.0 MB/s, 7 s left" """
        share = 100 * self._done // self._total if self._total else 100
        line = f"{self._name}: {size(self._done)} of {size(self._total)} ({share} %)"
        if self._done == self._total:
            return line
        rate = self.bytes_s
        if not rate:
            return line + ", nothing comes at the moment"
        return line + f", {size(rate)}/s, {duration((self._total - self._done) / rate)} left"

    def summary(self, now_s: float) -> str:
        """The last line, when everything has arrived and was checked."""
        taken = max(now_s - self._begin_s, 1e-9)
        sent = self._total - self._had
        rest = f" ({size(self._had)} were there)" if self._had else ""
        return f"{self._name} has its weights: {size(sent)} in {duration(taken)}, {size(sent / taken)}/s{rest}"
