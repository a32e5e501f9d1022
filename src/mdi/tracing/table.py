"""An explanation, as it is printed."""

from __future__ import annotations

from collections.abc import Sequence

from mdi.tracing.explain import Explanation
from mdi.tracing.trace import Trace


def format_explanation(trace: Trace, explanation: Explanation) -> str:
    """The findings, numbered, and then the figures that they come from."""
    summary = explanation.summary
    rate = trace.n_tokens / summary.duration_s
    head = (
        f"{trace.model}: {trace.n_tokens} tokens, {summary.n_frames} frames in {summary.duration_s:.2f} s "
        f"({rate:.1f} tokens/s), {summary.n_nodes} nodes"
    )
    lines = [head, ""]
    lines += [f"{i}. {finding.words}." for i, finding in enumerate(explanation.findings, 1)]
    rows = [["node", "computing", "per frame", "waits before it", "with prompts"]]
    rows += [
        [s.name, f"{s.busy:.0%}", _ms(s.frame_s), _ms(s.queue_s), f"{s.prompt:.0%}"] for s in summary.stages
    ]  # fmt: skip
    lines += ["", *_table(rows)]
    if summary.ways:
        rows = [["link", "busy", "quickest", "mean", "bytes a frame"]]
        rows += [
            [f"{w.source} -> {w.target}", f"{w.busy:.0%}", _ms(w.delay_s), _ms(w.transit_s), f"{w.frame_bytes:.0f}"]
            for w in summary.ways
        ]
        lines += ["", *_table(rows)]
        error_s = max(way.error_s for way in summary.ways)
        lines.append(f"Times of links come from two clocks, and may be wrong by {_ms(error_s)}.")
    if any(node.is_cut for node in trace.nodes):
        lines.append("Not all of the run was kept: these are its last frames.")
    without = [node.name for node in trace.nodes if not node.spans]
    if without:
        lines.append(f"Nothing is known of {', '.join(without)}: the node was lost, or kept nothing.")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(n) if i == 0 else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
