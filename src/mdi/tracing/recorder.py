"""Records what a node does with each frame, from outside: it wraps the ring and notes receiving and sending."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from mdi.net.ring import LoopbackRing, Ring, TcpRing
from mdi.net.wire import Frame
from mdi.tracing.spans import N_SPANS, Activity, Span, SpanBuffer, pack

LIVE_SPANS = 256  # reported during a run: enough for the last frames of its links
SERVE_SPANS = 1024  # that a node of a server keeps, where no trace is asked for
_FIELD = "spans"  # of the extensions of a run: how many each node keeps

# How many texts run, how many wait for memory, and how often one was evicted so far.
Texts = Callable[[], tuple[int, int, int]]


class Recorder:
    """The spans of one node.

    Args:
        n_spans: kept at most.
        texts: asked with each frame that leaves, on the starter.
    """

    def __init__(self, n_spans: int = N_SPANS, texts: Texts | None = None) -> None:
        self.buffer = SpanBuffer(n_spans)
        self.texts = texts

    def over(self, ring: TcpRing | LoopbackRing) -> RecordedRing:
        """The ring as the node's loop is to see it."""
        if isinstance(ring, TcpRing):
            ring.observe(self)
        return RecordedRing(ring, self)

    def add(self, activity: Activity, begin_ns: int, end_ns: int, frame: Frame) -> None:
        """Something was done with a frame's rows."""
        n_rows = sum(s.n_rows for s in frame.slices)
        n_decoding = sum(s.n_rows == 1 and s.n_logits == 1 for s in frame.slices)
        self.buffer.add(Span(activity, begin_ns, end_ns, frame.number, n_rows, n_rows - n_decoding))

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


def extensions_of(n_spans: int) -> dict[str, Any]:
    """The extension of a node's request that makes it keep so many spans."""
    return {_FIELD: n_spans} if n_spans else {}


def recorder_of(extensions: Mapping[str, Any]) -> Recorder | None:
    """The recorder of a node with that extension; it keeps at most N_SPANS."""
    wanted = extensions.get(_FIELD)
    return Recorder(min(wanted, N_SPANS)) if type(wanted) is int and wanted > 0 else None


class RecordedRing:
    """A ring whose calls are noted; for one loop, in one thread.

    From the return of `recv` to `send` is computing. The starter gives a frame back (`release`) before it sends another: until
    then it was the head, from then on its blocks.
    """

    def __init__(self, ring: Ring, recorder: Recorder) -> None:
        self._ring = ring
        self._recorder = recorder
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
        if self._mark is not None:
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
        if frame is self._received and self._mark is not None:
            now = time.perf_counter_ns()
            self._recorder.add(Activity.HEAD, self._mark, now, frame)
            self._mark, self._received = now, None
        self._ring.release(frame)

    def wake(self) -> None:
        self._ring.wake()
