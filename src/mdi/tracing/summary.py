"""Sums up the spans of a trace: how busy each node and link was, and how long a frame took. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from mdi.tracing.spans import Activity, Span
from mdi.tracing.trace import NodeTrace, Trace

COMPUTING = (Activity.BLOCKS, Activity.HEAD)


@dataclass(frozen=True)
class NodeLoad:
    """One node.

    Attributes:
        busy: share of the time in which it computed.
        frame_s: computing for one frame, on average.
        queue_s: a frame's stay on the node before its computing begins, on average.
        prompt: share of its computing that went into frames with rows of prompts.
    """

    name: str
    blocks: tuple[int, int]
    addr: str
    busy: float
    frame_s: float
    queue_s: float
    prompt: float


@dataclass(frozen=True)
class LinkLoad:
    """The link from one node to the next.

    Attributes:
        busy: share of the time in which frames had to wait behind one another on it.
        delay_s: the quickest frame's time from the socket of one node to that of the other.
        transit_s: the same on average.
        frame_bytes: on average.
        error_s: by so much the times may be wrong, for they come from two clocks.
    """

    source: str
    target: str
    busy: float
    delay_s: float
    transit_s: float
    frame_bytes: float
    error_s: float


@dataclass(frozen=True)
class Summary:
    """A run from its first frame to its last, as far as all nodes have kept it.

    Attributes:
        n_frames: that went all the way round.
        in_flight: frames on their way, on average.
        idle: share of the time in which none was.
        round_s: a frame's way round, on average.
        rows: of a frame, on average.
        running, waiting, put_out: texts; the most at a time, the most at a time that there was no memory for, how often one
            had to give its caches back.
    """

    n_nodes: int
    duration_s: float
    n_frames: int
    in_flight: float
    idle: float
    round_s: float
    rows: float
    running: int
    waiting: int
    put_out: int
    stages: tuple[NodeLoad, ...]
    ways: tuple[LinkLoad, ...]

    @property
    def path_s(self) -> float:
        """A frame's way if it never waits."""
        return sum(stage.frame_s for stage in self.stages) + sum(way.transit_s for way in self.ways)


def summarize(trace: Trace) -> Summary | None:
    """None if no frame went all the way round."""
    starter = trace.nodes[0]
    begins = {s.frame: s.begin_ns for s in starter.of(Activity.BLOCKS)}
    heads = [s for s in starter.of(Activity.HEAD) if s.frame in begins]
    kept_from = max(
        (min((s.begin_ns for s in node.spans), default=0) for node in trace.nodes if node.is_cut), default=0
    )
    heads = [s for s in heads if begins[s.frame] >= kept_from]
    if not heads:
        return None
    flights = [(begins[s.frame], s.end_ns) for s in heads]
    window = (min(begin for begin, _ in flights), max(end for _, end in flights))
    seconds = max(window[1] - window[0], 1) / 1e9
    texts = [s for s in starter.of(Activity.TEXTS) if window[0] <= s.begin_ns <= window[1]]
    flown_s = sum(end - begin for begin, end in flights) / 1e9
    pairs = zip(trace.nodes, trace.nodes[1:] + trace.nodes[:1], strict=True) if len(trace.nodes) > 1 else ()
    return Summary(
        n_nodes=len(trace.nodes),
        duration_s=seconds,
        n_frames=len(flights),
        in_flight=flown_s / seconds,
        idle=1.0 - _covered_ns(flights) / 1e9 / seconds,
        round_s=flown_s / len(flights),
        rows=fmean(s.n_rows for s in starter.of(Activity.BLOCKS)),
        running=max((s.n_rows for s in texts), default=0),
        waiting=max((s.n_prompt_rows for s in texts), default=0),
        put_out=max((s.n_bytes for s in texts), default=0),
        stages=tuple(_stage(node, window) for node in trace.nodes),
        ways=tuple(_way(a, b, seconds) for a, b in pairs),
    )


def _stage(node: NodeTrace, window: tuple[int, int]) -> NodeLoad:
    spans = [s for s in node.of(*COMPUTING) if window[0] <= s.begin_ns < window[1]]
    busy_ns = sum(s.duration_ns for s in spans)
    n_frames = max(1, len({s.frame for s in spans}))
    arrived = {s.frame: s.begin_ns for s in node.of(Activity.ARRIVAL)}
    begun: dict[int, int] = {}
    for s in spans:
        if (
            s.activity == Activity.HEAD or s.frame not in begun
        ):  # the starter has a frame twice; it arrives before the head
            begun[s.frame] = s.begin_ns
    stays = [max(0, begun[frame] - at) for frame, at in arrived.items() if frame in begun]
    return NodeLoad(
        name=node.name,
        blocks=node.blocks,
        addr=node.addr,
        busy=min(1.0, busy_ns / (window[1] - window[0])),
        frame_s=busy_ns / n_frames / 1e9,
        queue_s=fmean(stays) / 1e9 if stays else 0.0,
        prompt=sum(s.duration_ns for s in spans if s.n_prompt_rows) / busy_ns if busy_ns else 0.0,
    )


def _way(source: NodeTrace, target: NodeTrace, seconds: float) -> LinkLoad:
    """A frame that comes later than the quickest one would have, because another came just before it, had to wait: that much
    the link was busy."""
    arrived = {s.frame: s.begin_ns for s in target.of(Activity.ARRIVAL)}
    sent = [s for s in source.of(Activity.SEND) if s.frame in arrived]
    error_s = source.clock_error_s + target.clock_error_s
    if not sent:
        return LinkLoad(source.name, target.name, 0.0, 0.0, 0.0, 0.0, error_s)
    transits = [arrived[s.frame] - s.begin_ns for s in sent]
    quickest = min(transits)
    return LinkLoad(
        source=source.name,
        target=target.name,
        busy=min(1.0, _service_ns(sent, arrived, quickest) / 1e9 / seconds),
        delay_s=max(0, quickest) / 1e9,
        transit_s=max(0.0, fmean(transits)) / 1e9,
        frame_bytes=fmean(s.n_bytes for s in sent),
        error_s=error_s,
    )


def _service_ns(sent: list[Span], arrived: dict[int, int], quickest: int) -> int:
    busy, before = 0, None
    for s in sent:
        at, due = arrived[s.frame], s.begin_ns + quickest
        busy += max(0, at - max(due, before if before is not None else due))
        before = at
    return busy


def _covered_ns(intervals: list[tuple[int, int]]) -> int:
    """Length of the union."""
    covered, until = 0, None
    for begin, end in sorted(intervals):
        if until is None or begin > until:
            covered += end - begin
            until = end
        elif end > until:
            covered += end - until
            until = end
    return covered
