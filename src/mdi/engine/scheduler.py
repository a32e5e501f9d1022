"""What goes into the next frame. Pure: values in, values out; no torch, no sockets, no clock.

The two methods are `schedule` (which rows leave now) and `update` (which tokens came back). With N nodes, N frames are in
flight, so that every node has one to compute (recurrent pipelining, MDI-LLM thesis, section 3.3.2), and each frame carries
its share of all sequences, so that a node reads its weights once for many rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from mdi.engine.sequence import Sequence
from mdi.errors import EngineError

DECODE_ROWS = 4096  # sequences in a frame at most; with a chunk, well below what a link accepts (net.wire.FRAME_ROWS)
CHUNK_ROWS = 64  # prompt rows per frame: small enough that stages overlap during prefill (DESIGN: measured)


@dataclass(frozen=True)
class PlannedSlice:
    """Rows of one sequence that go into a frame; see net.wire.Slice."""

    seq_id: int
    start: int
    n_rows: int
    n_logits: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One frame to be sent: its number, its slices, and the sequences whose caches are to be freed before."""

    number: int
    slices: tuple[PlannedSlice, ...]
    freed: tuple[int, ...]


@dataclass(frozen=True)
class Event:
    """What happened to a sequence: a new token, its end, or both."""

    seq_id: int
    token: int | None
    finish_reason: str | None


class Scheduler:
    """Spreads sequences over frames.

    Args:
        n_frames: frames in flight at most; the number of nodes.
        chunk_rows: prompt rows that one frame takes at most.
        kv_positions: cache positions that all admitted sequences together may come to need (the smallest of what the
            nodes can hold); None is unlimited. A sequence enters only if all it can reach still fits.
    """

    def __init__(self, n_frames: int, chunk_rows: int = CHUNK_ROWS, kv_positions: int | None = None) -> None:
        self.n_frames = n_frames
        self.chunk_rows = chunk_rows
        self.kv_positions = kv_positions
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._ready: deque[Sequence] = deque()  # a new token, to be sent
        self._prefilling: deque[Sequence] = deque()
        self._in_flight: deque[Plan] = deque()
        self._freed: list[int] = []
        self._n_reserved = 0
        self._number = 0

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._in_flight or self._freed)

    @property
    def n_running(self) -> int:
        return len(self._running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it enters as soon as there is cache memory for it."""
        self._waiting.append(sequence)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence could be admitted if it were alone."""
        return self.kv_positions is None or sequence.n_positions <= self.kv_positions

    def cancel(self, seq_id: int, reason: str = "cancelled") -> Event | None:
        """End a sequence now; None if it has ended already."""
        for sequence in self._waiting:
            if sequence.seq_id == seq_id:
                self._waiting.remove(sequence)
                sequence.finish_reason = reason
                return Event(seq_id, None, reason)
        running = self._running.get(seq_id)
        if running is None:
            return None
        running.finish_reason = reason
        for queue in (self._ready, self._prefilling):
            if running in queue:
                queue.remove(running)
        self._retire(running)
        return Event(seq_id, None, reason)

    def schedule(self) -> Plan | None:
        """The next frame, or None if enough are in flight or nothing is ready."""
        if self.n_in_flight >= self.n_frames:
            return None
        self._admit()
        slices = self._decode_slices() + self._prefill_slices()
        if not slices and not (self._freed and not self._in_flight):
            return None
        plan = Plan(self._number, tuple(slices), tuple(self._freed))
        self._number += 1
        self._freed = []
        self._in_flight.append(plan)
        return plan

    def update(self, number: int, tokens: Mapping[int, int]) -> list[Event]:
        """Take the tokens that were sampled from a returned frame.

        Args:
            number: of the frame; frames return in the order in which they left.
            tokens: new token by seq_id, for each slice that wanted logits.

        Raises:
            EngineError: it is not the frame that is due, or not with the tokens that it went out for.
        """
        due = self._in_flight[0] if self._in_flight else None
        if due is None or due.number != number:
            raise EngineError(f"frame {number} came back, expected " + (f"frame {due.number}" if due else "none"))
        plan = self._in_flight.popleft()
        if tokens.keys() != {part.seq_id for part in plan.slices if part.n_logits}:
            raise EngineError(f"frame {number} came back with the rows of other sequences than it left with")
        events = []
        for part in plan.slices:
            sequence = self._running.get(part.seq_id)
            if sequence is None or not part.n_logits:
                continue  # cancelled meanwhile, or the middle of a prompt
            token = tokens[part.seq_id]
            kept = sequence.append(token)
            events.append(Event(part.seq_id, token if kept else None, sequence.finish_reason))
            if sequence.finish_reason:
                self._retire(sequence)
            else:
                self._ready.append(sequence)
        return events

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            if self.kv_positions is not None and self._n_reserved + sequence.n_positions > self.kv_positions:
                return  # first come, first served: nobody overtakes, so nobody starves
            self._waiting.popleft()
            self._n_reserved += sequence.n_positions
            self._running[sequence.seq_id] = sequence
            self._prefilling.append(sequence)

    def _retire(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self._n_reserved -= sequence.n_positions
        self._freed.append(sequence.seq_id)

    def _decode_slices(self) -> list[PlannedSlice]:
        # An even share, so that frames which have become unequal even out. With few sequences some frames stay away: a
        # round takes as long, and the weights are read less often.
        n_decoding = len(self._running) - len(self._prefilling)
        share = min(-(-n_decoding // self.n_frames), DECODE_ROWS)
        slices: list[PlannedSlice] = []
        while self._ready and len(slices) < share:
            slices.append(self._cut(self._ready.popleft(), 1))
        return slices

    def _prefill_slices(self) -> list[PlannedSlice]:
        slices: list[PlannedSlice] = []
        budget = self.chunk_rows
        while self._prefilling and budget:
            sequence = self._prefilling[0]
            part = self._cut(sequence, min(budget, sequence.n_to_send))
            budget -= part.n_rows
            slices.append(part)
            if not sequence.in_prefill:
                self._prefilling.popleft()
        return slices

    def _cut(self, sequence: Sequence, n_rows: int) -> PlannedSlice:
        start = sequence.n_sent
        sequence.n_sent += n_rows
        ids = tuple(sequence.ids[start : start + n_rows])
        return PlannedSlice(sequence.seq_id, start, n_rows, 0 if sequence.in_prefill else 1, ids)
