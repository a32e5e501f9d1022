"""An explanation as text for a terminal."""

from __future__ import annotations

from mdi.columns import table
from mdi.tracing.explain import Explanation
from mdi.tracing.trace import Trace
from mdi.units import duration, size


def format_explanation(trace: Trace, explanation: Explanation) -> str:
    """The findings, numbered, and then the figures that they come from."""
    summary = explanation.summary
    is_cut = any(node.is_cut for node in trace.nodes)
    rate = "" if is_cut else f" ({trace.n_tokens / summary.duration_s:.1f} tokens/s)"
    head = (
        f"{trace.model}: {trace.n_tokens} tokens, {summary.n_frames} frames in {summary.duration_s:.2f} s"
        f"{rate}, {summary.n_nodes} nodes"
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
