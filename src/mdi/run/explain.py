"""Why a ring was not faster: loads of nodes and links from a trace, the reasons in words, and both as a table. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from mdi.block_ranges import block_span
from mdi.columns import table
from mdi.engine.recorder import Activity, Span
from mdi.run.trace import NodeTrace, Trace
from mdi.units import counted, duration, size

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
        if s.activity == Activity.HEAD or s.frame not in begun:
            # The starter has a frame twice. It arrives before the head.
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


BUSY = 0.75  # a node that is busy for so much of the time makes the others wait
UNEVEN = 1.15  # so much slower than the mean stage: blocks are worth moving
PROMPTS = 0.25
FEW_ROWS = 4.0  # weights are read once for a frame: so few rows cost about as much as one
IDLE = 0.2


@dataclass(frozen=True)
class Finding:
    """One reason.

    Attributes:
        code: "stage", "link", "round trip", "texts", "prompts", "memory", "machine", "idle" or "rows".
        node: whom it concerns; of a link, where it begins. "" is the whole ring.
        words: the reason and what to do.
    """

    code: str
    node: str
    words: str


@dataclass(frozen=True)
class Explanation:
    """Findings, the most important first. The first one is what limited the ring."""

    summary: Summary
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        return {"findings": [asdict(finding) for finding in self.findings], "summary": asdict(self.summary)}


def explain(summary: Summary) -> Explanation:
    """Name the reasons that kept the ring from being faster."""
    found = [_limit(summary)]
    if summary.waiting or summary.put_out:
        found.append(_memory(summary))
    prompt = max(stage.prompt for stage in summary.stages)
    if prompt >= PROMPTS:
        found.append(_prompts(summary, prompt))
    if (sharing := _machine(summary)) is not None:
        found.append(sharing)
    if found[0].code != "texts" and found[0].code != "idle" and summary.rows < FEW_ROWS:
        found.append(_rows(summary))
    return Explanation(summary, tuple(found))


def _limit(summary: Summary) -> Finding:
    """The cause that the ring waited for."""
    stage = max(summary.stages, key=lambda s: s.busy)
    way = max(summary.ways, key=lambda w: w.busy, default=None)
    if summary.idle >= IDLE:
        words = (
            f"for {summary.idle:.0%} of the time there was no frame in the ring: nobody asked for a text, or the reading of "
            "requests was slow; the nodes were not the limit"
        )
        return Finding("idle", "", words)
    if way is not None and way.busy >= BUSY and way.busy >= stage.busy:
        return _link(way)
    if stage.busy >= BUSY or not summary.ways:
        return _slowest_stage(stage, summary)
    if 0 < summary.running < summary.n_nodes:
        words = (
            f"at most {counted(summary.running, 'text')} ran, on {summary.n_nodes} nodes. A text has one token on its way: "
            f"at least {summary.n_nodes} texts keep all nodes busy. The busiest, {stage.name}, computed "
            f"for {stage.busy:.0%} of the time. More texts at once (--n-samples) make the ring faster, and no text slower"
        )
        return Finding("texts", "", words)
    return _round_trip(summary, stage)


def _slowest_stage(stage: NodeLoad, summary: Summary) -> Finding:
    others = [s for s in summary.stages if s is not stage]
    words = (
        f"{stage.name} ({block_span(*stage.blocks)}) is the slowest stage: it computes for {stage.busy:.0%} of the time, "
        f"{duration(stage.frame_s)} for each frame"
    )
    mean_s = sum(s.frame_s for s in summary.stages) / len(summary.stages)
    if not others:
        return Finding(
            "stage", stage.name, f"{words}. More nodes, or a smaller weight format (--quantize), make it faster"
        )
    words += ", and the others wait for it"
    if stage.frame_s > UNEVEN * mean_s:
        words += (
            f". With blocks moved to the others until all take {duration(mean_s)}, the ring would be up to "
            f"{stage.frame_s / mean_s:.1f} times as fast (--placement throughput measures and does that; --layers by hand)"
        )
    else:
        words += (
            ". All stages take about as long: only faster or more nodes, or a smaller weight format (--quantize), help"
        )
    return Finding("stage", stage.name, words)


def _link(way: LinkLoad) -> Finding:
    words = (
        f"the link from {way.source} to {way.target} is the limit: for {way.busy:.0%} of the time frames wait behind one "
        f"another on it; one of {size(way.frame_bytes)} takes {duration(way.transit_s)}. Send less over it (--wire-dtype "
        "fp16 or int8), use a faster link, or give the ring another order"
    )
    return Finding("link", way.source, words)


def _round_trip(summary: Summary, stage: NodeLoad) -> Finding:
    on_links = sum(way.transit_s for way in summary.ways)
    slow = max(summary.ways, key=lambda w: w.transit_s)
    words = (
        f"no node and no link is busy all the time ({stage.name}, the busiest, computes for {stage.busy:.0%}): a frame's way "
        f"takes {duration(summary.round_s)}, {duration(on_links)} of it on links (the slowest: {slow.source} to {slow.target}, "
        f"{duration(slow.transit_s)}), and {summary.in_flight:.1f} frames are on their way. More frames (--frames) hide links, "
        "as far as there are texts to fill them"
    )
    return Finding("round trip", slow.source, words)


def _memory(summary: Summary) -> Finding:
    put_out = f", and {counted(summary.put_out, 'time')} one had to give its caches back" if summary.put_out else ""
    words = (
        f"there was no cache memory for all texts: up to {summary.waiting} waited while {summary.running} ran{put_out}. "
        "Smaller caches (--kv-dtype), more of them (--kv-memory), or fewer blocks on the node with least memory let more run"
    )
    return Finding("memory", "", words)


def _prompts(summary: Summary, share: float) -> Finding:
    stage = max(summary.stages, key=lambda s: s.prompt)
    words = (
        f"{share:.0%} of the computing of {stage.name} went into frames with prompts, which hold up the texts that share them. "
        "Shorter prompts, or longer answers to each, raise the tokens per second"
    )
    return Finding("prompts", stage.name, words)


def _machine(summary: Summary) -> Finding | None:
    """The finding that nodes compete for the cores of one machine; None if each has its own."""
    counts = Counter(stage.addr for stage in summary.stages if stage.addr)
    addr, n = counts.most_common(1)[0] if counts else ("", 0)
    if n < 2:
        return None
    names = [stage.name for stage in summary.stages if stage.addr == addr]
    words = (
        f"{', '.join(names[:-1])} and {names[-1]} share a machine, its cores and its memory: while one computes, the others "
        "may wait for a core, which looks like a long way. A ring pays with a machine for each node"
    )
    return Finding("machine", names[0], words)


def _rows(summary: Summary) -> Finding:
    words = (
        f"a frame carried {summary.rows:.1f} rows on average. A node reads its weights once for a frame, so that a few more "
        "rows cost next to nothing: more texts at once give more tokens per second"
    )
    return Finding("rows", "", words)


def format_explanation(trace: Trace, explanation: Explanation) -> str:
    """The findings, numbered, and then the figures that they come from."""
    summary = explanation.summary
    is_cut = any(node.is_cut for node in trace.nodes)
    rate = "" if is_cut else f" ({trace.n_tokens / summary.duration_s:.1f} tokens/s)"
    head = (
        f"{trace.model}: {trace.n_tokens} tokens, {summary.n_frames} frames in {summary.duration_s:.2f} s"
        f"{rate}, {counted(summary.n_nodes, 'node')}"
    )
    lines = [head, ""]
    lines += [f"{i}. {finding.words}." for i, finding in enumerate(explanation.findings, 1)]
    rows = [["node", "computing", "per frame", "waits before it", "with prompts"]]
    rows += [
        [s.name, f"{s.busy:.0%}", duration(s.frame_s), duration(s.queue_s), f"{s.prompt:.0%}"] for s in summary.stages
    ]  # fmt: skip
    lines += ["", *table(rows, left=(0,))]
    if summary.ways:
        rows = [["link", "busy", "quickest", "mean", "a frame"]]
        rows += [
            [
                f"{w.source} -> {w.target}",
                f"{w.busy:.0%}",
                duration(w.delay_s),
                duration(w.transit_s),
                size(w.frame_bytes),
            ]
            for w in summary.ways
        ]
        lines += ["", *table(rows, left=(0,))]
        error_s = max(way.error_s for way in summary.ways)
        lines.append(f"Times of links come from two clocks, and may be wrong by {duration(error_s)}.")
    if is_cut:
        lines.append("Not all of the run was kept: these are its last frames.")
    without = [node.name for node in trace.nodes if not node.spans]
    if without:
        lines.append(f"Nothing is known of {', '.join(without)}: the node was lost, or kept nothing.")
    return "\n".join(lines)
