"""The trace of a run: spans of all nodes, what is written to the file, and the comparison of their clocks by round trips."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from mdi.block_ranges import span as block_words
from mdi.control.client import ControlClient
from mdi.engine.recorder import SERVE_SPANS, Activity, Recorder, Span, unpack, ways_ns
from mdi.errors import ControlError, UsageError
from mdi.files import replacing
from mdi.spec.cluster import NodeConfig
from mdi.spec.decode import Meta, Number, Whole, decode_text, one_of

N_ROUND_TRIPS = 16
# Timers of real machines run apart by less than this; what looks like more is a round trip that took long one way.
DRIFT_LIMIT = 2e-4


@dataclass(frozen=True)
class Reading:
    """At `here_s` of this node's timer the other one showed `there_s`, give or take `error_s`: half the round trip."""

    here_s: float
    there_s: float
    error_s: float


def read_clock(ask: Callable[[], float], n_round_trips: int = N_ROUND_TRIPS) -> Reading:
    """Ask another node for its time several times; the quickest answer counts. What `ask` raises goes through."""
    readings = []
    for _ in range(n_round_trips):
        begin = time.perf_counter()
        there = ask()
        end = time.perf_counter()
        readings.append(Reading((begin + end) / 2, there, (end - begin) / 2))
    return min(readings, key=lambda reading: reading.error_s)


def settled(delays_s: Sequence[float], errors_s: Sequence[float]) -> list[float]:
    """Corrections of the nodes' clocks that make the links of a ring as equal as the clocks' errors allow.

    What all links take together is known well, for the first node sees frames leave and come back; how it is shared out is
    known as well as the clocks are. Of all clocks that may be right, those are taken that make no link odd without a reason.

    Args:
        delays_s: of the quickest frame from each node to the next, the last one's to the first; may be negative.
        errors_s: of each node's clock against the first one's, whose own is 0.
    """
    n = len(delays_s)
    moved = [0.0] * n
    for _ in range(20 * n):
        for i in range(1, n):
            before, after = (delays_s[j] + moved[(j + 1) % n] - moved[j] for j in (i - 1, i))
            moved[i] = min(errors_s[i], max(-errors_s[i], moved[i] + (after - before) / 2))
    return moved


class Clock:
    """Turns another node's times into this one's.

    Args:
        readings: one or more, in the order of time: between the first and the last, the timers may drift.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        first, last = readings[0], readings[-1]
        best = min(readings, key=lambda reading: reading.error_s)
        self.error_s = max(first.error_s, last.error_s)
        self._there, self._here, self._rate = best.there_s, best.here_s, 1.0
        gone = last.there_s - first.there_s
        if gone > 0:
            rate = (last.here_s - first.here_s) / gone
            if abs(rate - 1.0) <= DRIFT_LIMIT:
                self._there, self._here, self._rate = first.there_s, first.here_s, rate

    def here_ns(self, there_ns: int) -> int:
        """A moment of the other node's timer, on this node's."""
        return round(self._here * 1e9 + (there_ns - self._there * 1e9) * self._rate)


@dataclass(frozen=True)
class NodeTrace:
    """Spans of one node.

    Attributes:
        blocks: [start, stop) with global numbers.
        spans: on the time axis of the trace.
        clock_error_s: by so much its times may be wrong against the starter's.
        is_cut: the oldest spans were not kept.
        addr: of its machine; "" is one of its own.
    """

    name: str
    blocks: tuple[int, int]
    spans: tuple[Span, ...]
    clock_error_s: float = 0.0
    is_cut: bool = False
    addr: str = ""

    def of(self, *activities: Activity) -> list[Span]:
        """The spans of some activities, in the order of time."""
        return sorted((s for s in self.spans if s.activity in activities), key=lambda s: s.begin_ns)


@dataclass(frozen=True)
class Trace:
    """A run.

    Attributes:
        nodes: in ring order, the starter first.
        n_tokens: generated, of all texts.
    """

    model: str
    nodes: tuple[NodeTrace, ...]
    n_tokens: int


FORMAT = "mdi-trace-1"
FILE_LIMIT_BYTES = 1 << 30
COMPUTING, SENDING, RECEIVING = 1, 2, 3  # rows of a node in the picture
_ROWS = {COMPUTING: "computing", SENDING: "sending", RECEIVING: "receiving"}
_ROW_OF = {
    Activity.WAIT: COMPUTING,
    Activity.BLOCKS: COMPUTING,
    Activity.HEAD: COMPUTING,
    Activity.SEND: SENDING,
    Activity.ARRIVAL: RECEIVING,
    Activity.TEXTS: COMPUTING,
}


def write_trace(path: Path, trace: Trace) -> None:
    """Raises UsageError if it cannot be written; an older file of that name is then still whole."""
    with replacing(path, UsageError) as file:
        file.write(json.dumps(to_chrome(trace)).encode())


def read_trace(path: Path) -> Trace:
    """Raises UsageError if the file cannot be read, or is not a trace of `write_trace`."""
    try:
        if path.stat().st_size > FILE_LIMIT_BYTES:
            raise UsageError(f"{path} is larger than any trace that --trace writes")
        text = path.read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror or e}") from None
    try:
        return from_chrome(decode_text(_File, text, "trace", UsageError))
    except (UsageError, KeyError, TypeError, ValueError, IndexError):
        raise UsageError(f"{path} is not a trace of MDI-LLM: give the file that --trace wrote") from None


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The object that the file holds."""
    origin = min((span.begin_ns for node in trace.nodes for span in node.spans), default=0)
    events: list[dict[str, Any]] = []
    for pid, node in enumerate(trace.nodes):
        events += _names(pid, node)
        events += (_event(pid, span, origin) for span in node.spans)
    events += _arrows(trace, origin)
    nodes = [
        {"name": n.name, "blocks": list(n.blocks), "clock_error_s": n.clock_error_s, "is_cut": n.is_cut, "addr": n.addr}
        for n in trace.nodes
    ]
    about = {"format": FORMAT, "model": trace.model, "n_tokens": trace.n_tokens, "nodes": nodes}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


@dataclass(frozen=True)
class _Node:
    name: str
    blocks: tuple[Whole, Whole]
    clock_error_s: Number
    is_cut: bool
    addr: str


@dataclass(frozen=True)
class _About:
    format: Annotated[str, one_of([FORMAT])]
    model: str
    n_tokens: int
    nodes: Annotated[tuple[_Node, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class _Event:
    pid: Whole
    ts: Annotated[float, Meta(ge=-1e300, le=1e300)] = 0.0
    name: str = ""
    cat: str = ""
    dur: Number = 0.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    """A file that `to_chrome` made, as far as it is read."""

    traceEvents: tuple[_Event, ...]
    otherData: _About


def from_chrome(file: _File) -> Trace:
    """Raises KeyError, TypeError, ValueError or IndexError for an event of no node or no known activity."""
    about = file.otherData
    spans: list[list[Span]] = [[] for _ in about.nodes]
    for event in file.traceEvents:
        if event.cat == "frame":
            spans[event.pid].append(_span(event))
    nodes = tuple(
        NodeTrace(node.name, node.blocks, tuple(mine), node.clock_error_s, node.is_cut, node.addr)
        for node, mine in zip(about.nodes, spans, strict=True)
    )
    return Trace(about.model, nodes, about.n_tokens)


def _names(pid: int, node: NodeTrace) -> Iterator[dict[str, Any]]:
    title = f"{node.name} ({block_words(*node.blocks)})"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in _ROWS.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(pid: int, span: Span, origin: int) -> dict[str, Any]:
    activity = Activity(span.activity)
    event: dict[str, Any] = {
        "name": activity.name.lower(), "cat": "frame", "pid": pid, "tid": _ROW_OF[activity],
        "ts": (span.begin_ns - origin) / 1e3,
    }  # fmt: skip
    if activity is Activity.TEXTS:
        args = {"running": span.n_rows, "waiting": span.n_prompt_rows, "put out": span.n_bytes}
        return {**event, "ph": "C", "args": args}
    args = {"frame": span.frame, "rows": span.n_rows, "prompt_rows": span.n_prompt_rows, "bytes": span.n_bytes}
    if activity is Activity.ARRIVAL:
        return {**event, "ph": "i", "s": "t", "args": args}
    return {**event, "ph": "X", "dur": span.duration_ns / 1e3, "args": args}


def _span(event: _Event) -> Span:
    activity, args = Activity[event.name.upper()], event.args
    begin = round(event.ts * 1e3)
    if activity is Activity.TEXTS:
        return Span(activity, begin, begin, 0, int(args["running"]), int(args["waiting"]), int(args["put out"]))
    end = begin + round(event.dur * 1e3)
    return Span(
        activity, begin, end, int(args["frame"]), int(args["rows"]), int(args["prompt_rows"]), int(args["bytes"])
    )


def _arrows(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    """From where a frame leaves to where it arrives."""
    n_nodes = len(trace.nodes)
    for pid, node in enumerate(trace.nodes):
        following = (pid + 1) % n_nodes
        arrived = {span.frame: span for span in trace.nodes[following].of(Activity.ARRIVAL)}
        for sent in node.of(Activity.SEND):
            arrival = arrived.get(sent.frame)
            if arrival is None:
                continue
            shared = {"name": "frame", "cat": "way", "id": sent.frame * n_nodes + pid}
            yield {**shared, "ph": "s", "pid": pid, "tid": SENDING, "ts": (sent.begin_ns - origin) / 1e3}
            end = {"pid": following, "tid": RECEIVING, "ts": (arrival.begin_ns - origin) / 1e3}
            yield {**shared, "ph": "f", "bp": "e", **end}


ANSWER_S = 2.0  # a node that is silent for so long may be lost

logger = logging.getLogger("mdi")


class RunTrace:
    """Clocks are read before the ring is closed and after the run: between the two they may drift.

    Args:
        n_spans: that each node keeps at most.
    """

    def __init__(self, n_spans: int) -> None:
        self.recorder = Recorder(n_spans)
        self._n_spans = n_spans
        self._readings: dict[str, list[Reading]] = {}

    def read_clocks(self, clients: Sequence[ControlClient]) -> None:
        """Compare the clocks of all nodes with this one's, if there will be a trace; nodes that do not answer are left out."""
        if self._n_spans <= SERVE_SPANS:
            return
        for client in clients:
            try:
                reading = read_clock(lambda client=client: timer_of(client.status(timeout_s=ANSWER_S)))  # type: ignore[misc]
            except ControlError as e:
                logger.warning("the clock of %s cannot be read: %s", client.node.name, e)
            else:
                self._readings.setdefault(client.node.name, []).append(reading)

    def trace(
        self, model: str, configs: Sequence[NodeConfig], blocks: Sequence[tuple[int, int]],
        measured: Sequence[Mapping[str, Any]], n_tokens: int,
    ) -> Trace:  # fmt: skip
        """Everything on the starter's time axis.

        Args:
            configs, blocks: of all nodes, the starter first.
            measured: the metrics of each secondary; one without has no spans.
        """
        own, starter = self.recorder.buffer, configs[0]
        prompts = {s.frame: s.n_prompt_rows for s in own.last() if s.activity == Activity.BLOCKS}
        nodes = [NodeTrace(starter.name, blocks[0], tuple(own.last()), is_cut=own.is_full, addr=starter.addr)]
        for config, held, values in zip(configs[1:], blocks[1:], measured, strict=False):  # a lost node says nothing
            nodes.append(replace(self._node(config.name, held, values, prompts), addr=config.addr))
        return Trace(model, tuple(_with_settled_clocks(nodes)), n_tokens)

    def _node(
        self, name: str, blocks: tuple[int, int], values: Mapping[str, Any], prompts: Mapping[int, int]
    ) -> NodeTrace:  # fmt: skip
        """Args:
        prompts: rows of prompts in each frame: the starter alone knows which they are.
        """
        readings = self._readings.get(name)
        try:
            spans = unpack(values["spans"], name) if readings and "spans" in values else []
        except ControlError as e:  # a trace without one node is still of use
            logger.warning("%s", e)
            spans = []
        if not readings or not spans:
            return NodeTrace(name, blocks, ())
        clock, computing = Clock(readings), (Activity.BLOCKS, Activity.HEAD)
        moved = (
            s._replace(
                begin_ns=clock.here_ns(s.begin_ns),
                end_ns=clock.here_ns(s.end_ns),
                n_prompt_rows=prompts.get(s.frame, s.n_prompt_rows) if s.activity in computing else s.n_prompt_rows,
            )
            for s in spans
        )
        return NodeTrace(name, blocks, tuple(moved), clock.error_s, values.get("spans_cut") is True)


def _with_settled_clocks(nodes: list[NodeTrace]) -> list[NodeTrace]:
    """Nodes whose links are as alike as what is known of their clocks allows."""
    delays = [_quickest_s(node, following) for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
    known = [delay for delay in delays if delay is not None]
    if len(nodes) < 2 or len(known) < len(nodes):
        return nodes
    moves = settled(known, [node.clock_error_s for node in nodes])
    return [_moved(node, round(move * 1e9)) for node, move in zip(nodes, moves, strict=True)]


def _quickest_s(source: NodeTrace, target: NodeTrace) -> float | None:
    ways = ways_ns(source.spans, target.spans)
    return min(ways) / 1e9 if ways else None


def _moved(node: NodeTrace, move_ns: int) -> NodeTrace:
    spans = (s._replace(begin_ns=s.begin_ns + move_ns, end_ns=s.end_ns + move_ns) for s in node.spans)
    return replace(node, spans=tuple(spans))


def timer_of(status: Mapping[str, Any]) -> float:
    """Read a node's timer from its status. Raises ControlError if it does not say."""
    timer = status.get("timer_s")
    if isinstance(timer, bool) or not isinstance(timer, int | float) or not abs(timer) < 1e12:
        raise ControlError(f"{status.get('name')!r:.40} does not report its timer")
    return float(timer)
