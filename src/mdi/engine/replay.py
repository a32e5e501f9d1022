"""Restores the caches of nodes that have lost them: a node keeps the rows that it has sent to the next one, for replays."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from mdi.engine.sequence import Plan, PlannedSlice, Sequence
from mdi.errors import EngineError
from mdi.kernels.slices import Slice
from mdi.net.wire import DTYPE_CODES, DTYPES, Frame, PayloadType

COMPUTE, FILL, PASS = "compute", "fill", "pass"  # the parts that a node can have in replays, see SecondaryLoop


@dataclass
class _Text:
    """Of one sequence, all positions from the first on: of each section the scales, then the values, row by row."""

    parts: list[bytearray]
    n_rows: int = 0

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self.parts))


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
        self._shape = "bytes", 0, 0  # type of the rows, columns that only computed rows have, columns for caches
        self._row_bytes: list[int] = []  # of each part of a row, see _Text

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

    def add(self, frame: Frame, is_skipped: bool = False) -> None:
        """A frame leaves, with all its rows.

        Args:
            is_skipped: only columns for caches are kept: a replay needs no others, where rows without logits have no others.
        """
        self._rearrange(frame.freed, frame.copies)
        if not frame.is_replay:
            self._held.difference_update([part.seq_id for part in frame.slices])
        if frame.has_rows and self._limit_bytes:
            self._keep(frame, [one for one in frame.sections[is_skipped:] if one.n_rows])
        while self._n_bytes > self._limit_bytes:  # those that are held were here when there was memory for all
            self._forget(next(seq_id for seq_id in self._texts if seq_id not in self._held))

    def _keep(self, frame: Frame, sections: list[Frame]) -> None:
        form: PayloadType = DTYPES[DTYPE_CODES[frame.dtype]]
        shape = frame.dtype, sum(one.n_cols for one in sections) - frame.n_cached, frame.n_cached
        if shape != self._shape:
            self.clear()
            self._shape = shape
            sizes = [(form.n_scales(n) * form.scale_bytes, n * form.value_bytes) for n in shape[1:] if n]
            self._row_bytes = [n_bytes for pair in sizes for n_bytes in pair]
        parts: list[memoryview] = []
        for section, scale in zip(sections, self._row_bytes[::2], strict=True):
            payload, split = memoryview(section.payload).cast("B"), section.n_rows * scale
            parts += payload[:split], payload[split:]
        row = 0
        for one in frame.slices:
            end = row + one.n_rows
            self._append(one, [part[row * n : end * n] for part, n in zip(parts, self._row_bytes, strict=True)])
            row = end

    def fill(self, frame: Frame) -> Frame:
        """The frame with the rows of its slices. Raises EngineError if some are not here."""
        found = [bytearray() for _ in self._row_bytes]
        for one in frame.slices:
            text, end = self._texts.get(one.seq_id), one.start + one.n_rows
            if text is None or text.n_rows < end:
                raise EngineError(f"the sent rows of sequence {one.seq_id} are not stored any more")
            for whole, part, n in zip(found, text.parts, self._row_bytes, strict=True):
                whole += part[one.start * n : end * n]
        dtype, n_cols, n_cached = self._shape
        n_rows = frame.slices.n_rows if n_cols else 0
        return replace(frame, dtype=dtype, n_rows=n_rows, n_cols=n_cols, n_cached=n_cached, payload=b"".join(found))

    def clear(self) -> None:
        self._texts.clear()
        self._held.clear()
        self._n_bytes = 0

    def _append(self, rows: Slice, parts: list[memoryview]) -> None:
        text = self._texts.get(rows.seq_id)
        if text is None:
            if rows.start:
                return  # its beginning was forgotten
            text = self._texts[rows.seq_id] = _Text([bytearray() for _ in parts])
        if rows.start > text.n_rows:
            return self._forget(rows.seq_id)
        before = text.n_bytes
        for whole, part, n in zip(text.parts, parts, self._row_bytes, strict=True):
            del whole[rows.start * n :]
            whole += part
        text.n_rows = rows.start + rows.n_rows
        self._n_bytes += text.n_bytes - before

    def _rearrange(self, freed: Iterable[int], copies: Collection[tuple[int, int]]) -> None:
        """As CachePages.rearrange; what has been forgotten cannot be copied."""
        made = {
            new_id: _Text([part.copy() for part in text.parts], text.n_rows)
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
