"""Times of frames by their number of rows, learned from frames: the price of one more row."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest time
MORE_ROW = 0.1  # of the time of one row, for each further one, as long as that is not known


class Prices:
    """Seconds that frames of so many rows took, the newest with the most weight."""

    def __init__(self) -> None:
        self._times_s: dict[int, float] = {}
        self.n_noted = 0

    def note(self, n_rows: int, time_s: float, weight: float = WEIGHT) -> None:
        """A frame of `n_rows` rows took `time_s`."""
        known = self._times_s.get(n_rows, time_s)
        self._times_s[n_rows] = known + weight * (time_s - known)
        self.n_noted += 1

    def note_most(self, n_rows: int, time_s: float) -> None:
        """A frame took at most `time_s`: it counts if that is shorter than what is known. One that was late may seem short."""
        if time_s < (known := self.of(n_rows, time_s)):
            self._times_s[n_rows] = known + WEIGHT * (time_s - known)

    def of(self, n_rows: int, unknown_s: float = 0.0) -> float:
        """The time of a frame; from that of one with fewer rows where it is not known, and `unknown_s` without any."""
        found = self._times_s.get(n_rows)
        if found is not None:
            return found
        below = max((n for n in self._times_s if n < n_rows), default=0)
        if below:
            return self._times_s[below] * (1 + MORE_ROW * (n_rows - below) / (1 + MORE_ROW * (below - 1)))
        return self._times_s[min(self._times_s)] if self._times_s else unknown_s

    def clear(self) -> None:
        self._times_s.clear()
        self.n_noted = 0
