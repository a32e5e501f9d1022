"""Restores the caches of nodes that have lost them: a node keeps the rows that it has sent to the next one, for replays."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from mdi.engine.sequence import Plan, PlannedSlice, Sequence
from mdi.errors import EngineError
from mdi.kernels.slices import Slice, Slices
from mdi.net.wire import DTYPE_CODES, DTYPES, Frame, PayloadType

COMPUTE, FILL, PASS = "compute", "fill", "pass"  # the parts that a node can have in replays, see SecondaryLoop


@dataclass
class _Text:
    """Of one sequence, all positions from the first on: scales and values, row by row."""

    scales: bytearray = field(default_factory=bytearray)
    values: bytearray = field(default_factory=bytearray)
    n_rows: int = 0

    @property
    def n_bytes(self) -> int:
        return len(self.scales) + len(self.values)


class SentRows:
    """Rows by sequence and position, in bounded memory: the oldest text is forgotten first, as a whole, unless it waits for a
    replay.

    Args:
        limit_bytes: of all rows together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._texts: dict[int, _Text] = {}  # the oldest first
        self._held: set[int] = set()  # those of them that wait for a replay, or are being replayed
        self._dtype, self._n_cols = "bytes", 0
        self._row_bytes = 0, 0  # of the scales and of the values of a row

    @property
    def counts(self) -> dict[int, int]:
        """Positions that are here of each sequence, from the first on."""
        return {seq_id: text.n_rows for seq_id, text in list(self._texts.items())}

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def hold(self) -> None:
        """A ring begins in which these rows are sent again. Each text that is here now stays, even if others lack the memory,
        until a frame frees it or has new rows of it: then it was replayed, or has begun again.
        """
        self._held = set(self._texts)

    def add(self, frame: Frame) -> None:
        """A frame leaves, with all its rows."""
        self._rearrange(frame.freed, frame.copies)
        if not frame.is_replay:
            self._held.difference_update([part.seq_id for part in frame.slices])
        if frame.n_rows and self._limit_bytes:
            self._keep(frame)
        while self._n_bytes > self._limit_bytes:  # those that are held were here when there was memory for all
            self._forget(next(seq_id for seq_id in self._texts if seq_id not in self._held))

    def _keep(self, frame: Frame) -> None:
        if (frame.dtype, frame.n_cols) != (self._dtype, self._n_cols):
            self.clear()
            self._dtype, self._n_cols = frame.dtype, frame.n_cols
            form: PayloadType = DTYPES[DTYPE_CODES[frame.dtype]]
            self._row_bytes = form.n_scales(frame.n_cols) * form.scale_bytes, frame.n_cols * form.value_bytes
        scale, value = self._row_bytes
        payload = memoryview(frame.payload).cast("B")
        scales, values = payload[: frame.n_rows * scale], payload[frame.n_rows * scale :]
        row = 0
        for part in frame.slices:
            end = row + part.n_rows
            self._append(part, scales[row * scale : end * scale], values[row * value : end * value])
            row = end

    def fill(self, slices: Slices) -> tuple[str, int, bytes]:
        """The rows of these slices: their type, columns, and payload. Raises EngineError if some are not here."""
        scale, value = self._row_bytes
        scales, values = bytearray(), bytearray()
        for part in slices:
            text, end = self._texts.get(part.seq_id), part.start + part.n_rows
            if text is None or text.n_rows < end:
                raise EngineError(f"the sent rows of sequence {part.seq_id} are not stored any more")
            scales += text.scales[part.start * scale : end * scale]
            values += text.values[part.start * value : end * value]
        return self._dtype, self._n_cols, bytes(scales + values)

    def clear(self) -> None:
        self._texts.clear()
        self._held.clear()
        self._n_bytes = 0

    def _append(self, part: Slice, scales: memoryview, values: memoryview) -> None:
        text = self._texts.get(part.seq_id)
        if text is None:
            if part.start:
                return  # its beginning was forgotten
            text = self._texts[part.seq_id] = _Text()
        if part.start > text.n_rows:
            return self._forget(part.seq_id)
        before = text.n_bytes
        scale, value = self._row_bytes
        del text.scales[part.start * scale :], text.values[part.start * value :]
        text.scales += scales
        text.values += values
        text.n_rows = part.start + part.n_rows
        self._n_bytes += text.n_bytes - before

    def _rearrange(self, freed: Iterable[int], copies: Collection[tuple[int, int]]) -> None:
        """As CachePages.rearrange; what has been forgotten cannot be copied."""
        made = {
            new_id: _Text(bytearray(text.scales), bytearray(text.values), text.n_rows)
            for seq_id, new_id in copies
            if (text := self._texts.get(seq_id)) is not None
        }
        for seq_id in (*freed, *(new_id for _, new_id in copies)):
            self._forget(seq_id)
        self._texts.update(made)
        self._n_bytes += sum(text.n_bytes for text in made.values())

    def _forget(self, seq_id: int) -> None:
        self._held.discard(seq_id)
        text = self._texts.pop(seq_id, None)
        if text is not None:
            self._n_bytes -= text.n_bytes


class Replays:
    """Sequences that wait for a replay, in order; each is replayed up to `Sequence.n_sent`."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence, int]] = deque()  # and how many positions have been replayed

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return any(one is sequence for one, _ in self._waiting)

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
            slices.append(PlannedSlice(sequence.seq_id, start, n, 0, (), sequence.n_evictions))
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
