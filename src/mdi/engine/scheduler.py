"""What goes into the next frame. Pure: values in, values out; no torch, no sockets, no clock.

The two methods are `schedule` (which rows leave now) and `update` (which tokens came back). With N nodes, N frames are in
flight, so that every node has one to compute (recurrent pipelining, MDI-LLM thesis, section 3.3.2), and each frame carries
its share of all sequences, so that a node reads its weights once for many rows.

How many frames. With N nodes, a stage time t and a transfer time T per hop, a frame is back after N (t + T), so N frames keep
a node busy for t / (t + T) of the time. With one frame more, each has N / (N + 1) of the rows and a stage time t', and every
sequence has its token after max((N + 1) t', N (t' + T)). So a frame more brings something as far as fewer rows take less time:
much where rows are computed one after the other, nothing where a stage reads its weights for most of the time. The cost model
compares both with the times that were measured (`mdi.partition.plan`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from mdi.engine.memory import CacheMemory
from mdi.engine.sequence import Sequence
from mdi.errors import EngineError
from mdi.model.room import CHUNK_ROWS as CHUNK_ROWS

DECODE_ROWS = 4096  # sequences in a frame at most; with a chunk, well below what a link accepts (net.wire.FRAME_ROWS)


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
    """What happened to a sequence: its text has grown, it has ended, or both.

    Attributes:
        tokens: new ones; tokens that may become a stop sequence come together, once they cannot any more.
    """

    seq_id: int
    tokens: tuple[int, ...]
    finish_reason: str | None


class Scheduler:
    """Spreads sequences over frames.

    Args:
        n_frames: frames in flight at most; the number of nodes, or more where transfers take long (see the module).
        chunk_rows: prompt rows that one frame takes at most.
        memory: what the nodes can hold; None is unlimited. A sequence enters only if all that it can reach fits beside all
            that the others can reach.
        decode_rows: decoding sequences in a frame at most.
    """

    def __init__(
        self,
        n_frames: int,
        chunk_rows: int = CHUNK_ROWS,
        memory: CacheMemory | None = None,
        decode_rows: int = DECODE_ROWS,
    ) -> None:
        self.n_frames = n_frames
        self.chunk_rows = chunk_rows
        self.memory = memory
        self.decode_rows = decode_rows
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._ready: deque[Sequence] = deque()  # a new token, to be sent
        self._prefilling: deque[Sequence] = deque()
        self._in_flight: deque[Plan] = deque()
        self._freed: list[int] = []
        self._needs: dict[int, tuple[int, ...]] = {}  # of each admitted sequence, bytes on each node
        self._reserved = [0] * (0 if memory is None else len(memory.nodes))  # their sums
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

    def refusal(self, sequence: Sequence) -> str | None:
        """Why the sequence could not be admitted even if it were alone; None if it could."""
        return None if self.memory is None else self.memory.refusal(sequence.n_positions)

    @property
    def reserved(self) -> tuple[int, ...]:
        """Bytes on each node that the admitted sequences can come to need; () without a limit."""
        return tuple(self._reserved)

    def cancel(self, seq_id: int, reason: str = "cancelled") -> Event | None:
        """End a sequence now; None if it has ended already."""
        for sequence in self._waiting:
            if sequence.seq_id == seq_id:
                self._waiting.remove(sequence)
                return Event(seq_id, sequence.end(reason), reason)
        running = self._running.get(seq_id)
        if running is None:
            return None
        tokens = running.end(reason)
        for queue in (self._ready, self._prefilling):
            if running in queue:
                queue.remove(running)
        self._retire(running)
        return Event(seq_id, tokens, reason)

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
            new = sequence.append(tokens[part.seq_id])
            if new or sequence.finish_reason:
                events.append(Event(part.seq_id, new, sequence.finish_reason))
            if sequence.finish_reason:
                self._retire(sequence)
            else:
                self._ready.append(sequence)
        return events

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            needs = () if self.memory is None else self.memory.needs(sequence.n_positions)
            if self.memory is not None and not self.memory.admits(self._reserved, needs):
                return  # first come, first served: nobody overtakes, so nobody starves
            self._waiting.popleft()
            self._reserve(needs)
            self._needs[sequence.seq_id] = needs
            self._running[sequence.seq_id] = sequence
            self._prefilling.append(sequence)

    def _retire(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self._reserve(tuple(-n for n in self._needs.pop(sequence.seq_id)))
        self._freed.append(sequence.seq_id)

    def _reserve(self, needs: tuple[int, ...]) -> None:
        for node, n_bytes in enumerate(needs):
            self._reserved[node] += n_bytes

    def _decode_slices(self) -> list[PlannedSlice]:
        share = self._share()
        slices: list[PlannedSlice] = []
        while self._ready and len(slices) < share:
            slices.append(self._cut(self._ready.popleft(), 1))
        return slices

    def _share(self) -> int:
        """How many decoding sequences the next frame takes, so that all frames come to hold the same number or one more.

        With few sequences some frames stay away: a round takes as long as the fullest one, whether the others are there or
        not, and the weights are read less often.
        """
        n_decoding = len(self._running) - len(self._prefilling)
        if not n_decoding:
            return 0
        fullest = -(-n_decoding // self.n_frames)
        n_used = -(-n_decoding // fullest)
        flying = [n for n in map(self._n_returning, self._in_flight) if n]
        if len(flying) >= n_used:
            return 0  # one frame too many is under way: what is ready joins the next one
        size, n_larger = divmod(n_decoding, n_used)
        if sum(n > size for n in flying) < n_larger:
            size += 1
        return min(size, self.decode_rows)

    def _n_returning(self, plan: Plan) -> int:
        """Sequences of a frame that go on when it is back."""
        return sum(part.n_logits > 0 and part.seq_id in self._running for part in plan.slices)

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
