"""A run's frames on all nodes and one time axis, and its file in Chrome's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mdi.block_ranges import span as block_words
from mdi.errors import UsageError
from mdi.spec.decode import Meta, Number, Whole, decode_text, one_of
from mdi.tracing.recorder import Activity, Span
from mdi.whole_files import replacing


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
    """What `to_chrome` makes, as far as it is read."""

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
