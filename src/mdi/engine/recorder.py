"""Activities of a node with each frame, as spans in a bounded buffer; recorded from outside, by wrapping the ring."""

from __future__ import annotations

import base64
import binascii
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from mdi.errors import ControlError
from mdi.net.ring import LoopbackRing, Ring, TcpRing
from mdi.net.wire import Frame

# Spans that a node keeps; the oldest make place. As text they stay well below net.message.ANSWER_LIMIT_BYTES.
N_SPANS = 60_000
_PACKED = struct.Struct("<BqqIIII")
_UINT32 = (1 << 32) - 1


class Activity(IntEnum):
    WAIT = 0  # for the next frame
    BLOCKS = 1  # computing; on the starter the embedding, too
    HEAD = 2  # on the starter: final norm, head, drawing
    SEND = 3  # writing to the socket
    ARRIVAL = 4  # a moment: the frame is here, whole
    TEXTS = 5  # a moment: how many texts run and wait


class Span(NamedTuple):
    """One activity with one frame.

    Attributes:
        begin_ns, end_ns: of a timer, which each node has its own of; equal for a moment.
        frame: its number; the same on all nodes.
        n_rows: of the frame, where it is computed. Of TEXTS: how many run.
        n_prompt_rows: those of prompts among them. Of TEXTS: how many wait for memory.
        n_bytes: of the payload on a link. For TEXTS: how often one was evicted so far.
    """

    activity: int
    begin_ns: int
    end_ns: int
    frame: int
    n_rows: int = 0
    n_prompt_rows: int = 0
    n_bytes: int = 0

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


class SpanBuffer:
    """The last spans of a node. Several threads may add."""

    def __init__(self, n_spans: int = N_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=n_spans)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def last(self, n: int | None = None) -> list[Span]:
        """A copy of all, or of the last `n`, in the order in which they were added."""
        spans = list(self._spans.copy())
        return spans if n is None else spans[-n:]

    @property
    def is_full(self) -> bool:
        """Whether older ones may have made place."""
        return len(self._spans) == self._spans.maxlen


def pack(spans: Iterable[Span]) -> str:
    """Spans as text, for JSON."""
    packed = bytearray()
    for span in spans:
        counts = (min(n, _UINT32) for n in span[4:])
        packed += _PACKED.pack(span.activity, span.begin_ns, span.end_ns, span.frame & _UINT32, *counts)
    return base64.b64encode(packed).decode("ascii")


def unpack(text: object, where: str) -> list[Span]:
    """Read what another node sent.

    Raises:
        ControlError: it is not what `pack` makes; names `where`.
    """
    wrong = ControlError(f"{where}: its spans cannot be read")
    if not isinstance(text, str):
        raise wrong
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong from None
    if len(packed) % _PACKED.size:
        raise wrong
    spans = [Span(*fields) for fields in _PACKED.iter_unpack(packed)]
    if any(span.activity > max(Activity) or span.begin_ns > span.end_ns for span in spans):
        raise wrong
    return spans


def ways_ns(source: Iterable[Span], target: Iterable[Span]) -> list[int]:
    """How long each frame took from the socket of one node to that of the next, both on one time axis."""
    arrived = {s.frame: s.begin_ns for s in target if s.activity == Activity.ARRIVAL}
    return [arrived[s.frame] - s.begin_ns for s in source if s.activity == Activity.SEND and s.frame in arrived]


LIVE_SPANS = 256  # reported during a run: enough for the last frames of its links
SERVE_SPANS = 1024  # that a node of a server keeps, where no trace is asked for

# How many texts run, how many wait for memory, and how often one was evicted so far.
Texts = Callable[[], tuple[int, int, int]]


class Recorder:
    """The spans of one node.

    Args:
        n_spans: kept at most.
        texts: asked with each frame that leaves, on the starter.

    Attributes:
        prompt_rows: how many rows of a frame belong to prompts, by its number. None: nobody here knows; then those of slices do
            of which not all rows come back, which is wrong where a token was not drawn.
    """

    def __init__(self, n_spans: int = N_SPANS, texts: Texts | None = None) -> None:
        self.buffer = SpanBuffer(n_spans)
        self.texts = texts
        self.prompt_rows: Callable[[int], int] | None = None

    def over(self, ring: TcpRing | LoopbackRing, sends_first: bool = False) -> RecordedRing:
        """The ring as the node's loop is to see it; see RecordedRing."""
        if isinstance(ring, TcpRing):
            ring.observe(self)
        return RecordedRing(ring, self, sends_first)

    def add(self, activity: Activity, begin_ns: int, end_ns: int, frame: Frame) -> None:
        """Something was done with a frame's rows."""
        if self.prompt_rows is not None:
            n_prompt = self.prompt_rows(frame.number)
        else:
            n_prompt = sum([s.n_rows for s in frame.slices if s.n_rows != s.n_logits])
        self.buffer.add(Span(activity, begin_ns, end_ns, frame.number, frame.slices.n_rows, n_prompt))

    def to_json(self, n_spans: int | None = None) -> dict[str, Any]:
        """The last `n_spans`, or all, in the form that a node sends."""
        return {"spans": pack(self.buffer.last(n_spans)), "spans_cut": self.buffer.is_full}

    # What the links call, from their threads

    def sent(self, frame: Frame, begin_s: float, end_s: float) -> None:
        span = Span(Activity.SEND, int(begin_s * 1e9), int(end_s * 1e9), frame.number, n_bytes=len(frame.payload))
        self.buffer.add(span)

    def arrived(self, frame: Frame) -> None:
        now = time.perf_counter_ns()
        self.buffer.add(Span(Activity.ARRIVAL, now, now, frame.number, n_bytes=len(frame.payload)))


def recorder_of(n_spans: int) -> Recorder | None:
    """The recorder of a node that is to keep so many; it keeps at most N_SPANS."""
    return Recorder(min(n_spans, N_SPANS)) if n_spans else None


class RecordedRing:
    """A ring whose calls are noted; for one loop, in one thread.

    From the return of `recv` to `send` is computing. The starter gives a frame back (`release`) before it sends another: until
    then it was the head, from then on its blocks.

    Args:
        sends_first: whether each frame is sent on before it is computed, as by a hot spare; then `release` ends computing.
    """

    def __init__(self, ring: Ring, recorder: Recorder, sends_first: bool = False) -> None:
        self._ring = ring
        self._recorder = recorder
        self._sends_first = sends_first
        self._mark: int | None = None  # since when there is something to do
        self._received: Frame | None = None  # not yet given back, and nothing sent

    @property
    def epoch(self) -> int:
        return self._ring.epoch

    @property
    def n_nodes(self) -> int:
        return self._ring.n_nodes

    @property
    def capacity(self) -> int:
        return self._ring.capacity

    def send(self, frame: Frame) -> None:
        now = time.perf_counter_ns()
        if self._mark is not None and not self._sends_first:
            self._recorder.add(Activity.BLOCKS, self._mark, now, frame)
        if self._recorder.texts is not None:
            self._recorder.buffer.add(Span(Activity.TEXTS, now, now, frame.number, *self._recorder.texts()))
        self._ring.send(frame)
        self._mark, self._received = time.perf_counter_ns(), None

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        begin = time.perf_counter_ns()
        frame = self._ring.recv(timeout_s)
        self._mark, self._received = time.perf_counter_ns(), frame
        if frame is not None:
            self._recorder.buffer.add(Span(Activity.WAIT, begin, self._mark, frame.number))
        return frame

    def poll(self) -> Frame | None:
        frame = self._ring.poll()
        if frame is not None:  # it was waited for since the last one left
            begin, now = self._mark, time.perf_counter_ns()
            self._mark, self._received = now, frame
            self._recorder.buffer.add(Span(Activity.WAIT, now if begin is None else begin, now, frame.number))
        return frame

    def release(self, frame: Frame) -> None:
        if self._sends_first and self._mark is not None:
            now = time.perf_counter_ns()
            self._recorder.add(Activity.BLOCKS, self._mark, now, frame)
            self._mark = now
        if frame is self._received and self._mark is not None:
            now = time.perf_counter_ns()
            self._recorder.add(Activity.HEAD, self._mark, now, frame)
            self._mark, self._received = now, None
        self._ring.release(frame)

    def wake(self) -> None:
        self._ring.wake()
