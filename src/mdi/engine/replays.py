"""Sends the rows of sequences again to nodes that lost their caches, before the sequences go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mdi.engine.planned import Plan, PlannedSlice
from mdi.engine.sequence import Sequence


class Replays:
    """Sequences that wait for a replay, in order; each is replayed up to `Sequence.n_sent`."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence, int]] = deque()  # and how many positions have been replayed

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append((sequence, 0))

    def drop(self, sequence: Sequence) -> None:
        """Removes the sequence, if it is one of them."""
        self._waiting = deque(pair for pair in self._waiting if pair[0] is not sequence)

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, n_rows: int) -> tuple[list[PlannedSlice], list[Sequence]]:
        """The next rows, `n_rows` at most, and the sequences that have all of theirs with them."""
        slices: list[PlannedSlice] = []
        restored: list[Sequence] = []
        while self._waiting and n_rows:
            sequence, start = self._waiting.popleft()
            n = min(n_rows, sequence.n_sent - start)
            slices.append(PlannedSlice(sequence.seq_id, start, n, 0, (), sequence.life))
            n_rows -= n
            if start + n < sequence.n_sent:
                self._waiting.appendleft((sequence, start + n))
            else:
                restored.append(sequence)
        return slices, restored

    def unfinished(self, in_flight: Iterable[Plan]) -> set[int]:
        """Sequences whose replays are not over, so that no node has them completely."""
        flying = {part.seq_id for plan in in_flight if plan.is_replay for part in plan.slices}
        return flying | {sequence.seq_id for sequence, _ in self._waiting}
