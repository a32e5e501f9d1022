"""Why a ring was not faster, in words: the slowest stage, a link, prompts, too few texts, memory. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from mdi.block_ranges import block_span
from mdi.tracing.summary import LinkLoad, NodeLoad, Summary
from mdi.units import counted, duration, size

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
    """What kept the ring from being faster."""
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
    """What the ring waited for."""
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
        return _stage(stage, summary)
    if 0 < summary.running < summary.n_nodes:
        words = (
            f"at most {counted(summary.running, 'text')} ran, on {summary.n_nodes} nodes. A text has one token on its way: "
            f"at least {summary.n_nodes} texts keep all nodes busy. The busiest, {stage.name}, computed "
            f"for {stage.busy:.0%} of the time. More texts at once (--n-samples) make the ring faster, and no text slower"
        )
        return Finding("texts", "", words)
    return _round_trip(summary, stage)


def _stage(stage: NodeLoad, summary: Summary) -> Finding:
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
