"""Times of frames by their number of rows, learned from frames: the price of one more row."""

from __future__ import annotations

from bisect import bisect_right

WEIGHT = 0.2  # of the newest time
LATE = 2.0  # times what is thought of so many rows, the first frame that has them counts at most
MORE_ROW = 0.1  # of the time of one row, for each further one, as long as that is not known
N_GROUPS = 4  # of numbers of rows from one to twice as many; less than eight rows are a group of their own each


class Prices:
    """Seconds that frames of so many rows took, the newest with the most weight.

    Large numbers of rows are known in groups, by their means: each number of its own comes too seldom.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # by group: rows, seconds
        self._ordered: list[tuple[float, float]] = []
        self.n_noted = 0

    def note(self, n_rows: int, time_s: float) -> None:
        """A frame of `n_rows` rows took `time_s`."""
        if _group(n_rows) not in self._known:
            time_s = min(time_s, LATE * self.of(n_rows, time_s))
        rows, known_s = self._known.get(_group(n_rows), (n_rows, time_s))
        self._learn(n_rows, rows + WEIGHT * (n_rows - rows), known_s + WEIGHT * (time_s - known_s))
        self.n_noted += 1

    def note_most(self, n_rows: int, time_s: float) -> None:
        """A frame took at most `time_s`: it counts if that is shorter than what is known. One that was late may seem short."""
        if time_s < (known_s := self.of(n_rows, time_s)):
            rows, at_s = self._known.get(_group(n_rows), (n_rows, known_s))
            self._learn(n_rows, rows, at_s + WEIGHT * (time_s - at_s))

    def of(self, n_rows: int, unknown_s: float = 0.0) -> float:
        """The time of a frame. Where it is not known, it lies between those with fewer and with more rows; beyond all, each row
        costs as much as those that are known. `unknown_s` without any.
        """
        ordered = self._ordered
        if not ordered:
            return unknown_s
        at = bisect_right(ordered, (n_rows, float("inf")))
        if not at:
            return ordered[0][1]
        rows, time_s = ordered[at - 1]
        if rows == n_rows:
            return time_s
        if len(ordered) == 1:
            return time_s * (1 + MORE_ROW * (n_rows - rows) / (1 + MORE_ROW * (rows - 1)))
        (first, first_s), (last, last_s) = ordered[at - 1 : at + 1] if at < len(ordered) else (ordered[0], ordered[-1])
        return time_s + max(0.0, (last_s - first_s) / (last - first)) * (n_rows - rows)

    def forget_more(self, n_rows: int) -> None:
        """Forget what frames with more rows took, so that they are tried again: one that was late may be all that is known."""
        self._known = {group: known for group, known in self._known.items() if group <= _group(n_rows)}
        self._ordered = [self._known[group] for group in sorted(self._known)]

    def clear(self) -> None:
        self._known.clear()
        self._ordered.clear()
        self.n_noted = 0

    def _learn(self, n_rows: int, rows: float, time_s: float) -> None:
        self._known[_group(n_rows)] = rows, time_s
        self._ordered = [self._known[group] for group in sorted(self._known)]


def _group(n_rows: int) -> int:
    """The least number of rows of its group."""
    step = 1 << max(0, (n_rows // N_GROUPS).bit_length() - 1)
    return n_rows // step * step
