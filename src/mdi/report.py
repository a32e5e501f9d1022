"""The tables that end a run: what each sample and each node did."""

from __future__ import annotations

from collections.abc import Sequence

from mdi.block_ranges import span
from mdi.columns import clip, width
from mdi.metrics import RunMetrics

REPORT_COLUMNS = 100


def format_report(run: RunMetrics) -> str:
    """The tables printed when a run ends, at most 100 columns wide, without a final newline."""
    n_nodes, n_samples = run.n_nodes, len(run.samples)
    title = f"{run.model}: {_n(n_samples, 'sample')} on {_n(n_nodes, 'node')}, {_n(run.n_tokens, 'token')}"
    head = clip(f"{title} in {_seconds(run.duration_s)}, {run.tokens_per_s:.1f} tokens/s", REPORT_COLUMNS)
    samples = _table(_sample_rows(run), left=(4, 5))
    if not run.nodes:
        return f"{head}\n\n{samples}"
    return f"{head}\n\n{samples}\n\n{_table(_node_rows(run), left=(0,))}"


def format_comparison(ring: RunMetrics, alone: RunMetrics, n_cores: int) -> str:
    """What a ring on one machine brought against one node of it that did the same, in a few honest lines.

    Args:
        n_cores: of the machine, which all nodes of the ring share.
    """
    held = max(stop - start for start, stop in (node.layers for node in ring.nodes))
    n_blocks = max(node.layers[1] for node in ring.nodes)
    n_same = sum(a.token_ids == b.token_ids for a, b in zip(ring.samples, alone.samples, strict=True))
    texts = "the same texts, token for token"
    if n_same < len(ring.samples):
        texts = f"{n_same} of {_n(len(ring.samples), 'text')} the same: another order of sums rounds differently"
    return (
        f"{_n(ring.n_nodes, 'node')}: {ring.tokens_per_s:.1f} tokens/s, at most {held} of {_n(n_blocks, 'block')} on a node\n"
        f"1 node:  {alone.tokens_per_s:.1f} tokens/s, all blocks on it; {texts}\n"
        f"{_gain(ring, alone, n_cores)}"
    )


def _gain(ring: RunMetrics, alone: RunMetrics, n_cores: int) -> str:
    if not ring.tokens_per_s or not alone.tokens_per_s:
        return "Too few tokens to compare the speed."
    if ring.tokens_per_s >= alone.tokens_per_s:
        return f"The ring was {ring.tokens_per_s / alone.tokens_per_s:.2f} times as fast."
    why = "all nodes share one memory"
    if ring.n_nodes > n_cores:
        why = f"{_n(ring.n_nodes, 'node')} share {_n(n_cores, 'core')}"
    slower = alone.tokens_per_s / ring.tokens_per_s
    return f"The ring was {slower:.1f} times slower: {why}. It pays with a machine for each node."


def _sample_rows(run: RunMetrics) -> list[list[str]]:
    rows = [["sample", "tokens", "tokens/s", "first token", "ended by", "prompt"]]
    for i, sample in enumerate(run.samples):
        rows.append(
            [
                str(i),
                str(len(sample.token_ids)),
                f"{sample.tokens_per_s:.1f}",
                _seconds(sample.ttft_s),
                clip(sample.finish_reason or "unfinished", 16),
                clip(sample.prompt, 36),
            ]
        )
    known = [sample.ttft_s for sample in run.samples if sample.ttft_s is not None]
    mean_ttft_s = sum(known) / len(known) if known else None
    rows.append(
        ["total", str(run.n_tokens), f"{run.tokens_per_s:.1f}", _seconds(mean_ttft_s), "", "(first token: mean)"]
    )
    return rows


def _node_rows(run: RunMetrics) -> list[list[str]]:
    rows = [["node", "blocks", "peak mem", "compute", "wait", "send", "frames", "sent/token"]]
    for node in run.nodes:
        rows.append(
            [
                clip(node.name, 13),
                span(*node.layers),
                _size(node.peak_rss_bytes),
                *(_shared(part_s, run.duration_s) for part_s in (node.compute_s, node.wait_s, node.send_s)),
                str(node.frames),
                _size(node.bytes_sent / run.n_tokens) if run.n_tokens else "-",
            ]
        )
    return rows


def _table(rows: Sequence[Sequence[str]], left: tuple[int, ...]) -> str:
    """Columns as wide as their widest cell; those in `left` begin, the others end together."""
    widths = [max(width(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        pads = [" " * (n - width(cell)) for cell, n in zip(row, widths, strict=True)]
        cells = [cell + pad if i in left else pad + cell for i, (cell, pad) in enumerate(zip(row, pads, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _seconds(time_s: float | None) -> str:
    if time_s is None:
        return "-"
    if time_s < 0.9995:
        return f"{time_s * 1000:.0f} ms"
    return f"{time_s:.{1 if time_s < 100 else 0}f} s" if time_s < 10_000 else f"{time_s / 3600:.1f} h"


def _shared(part_s: float, whole_s: float) -> str:
    """A time and its share of the run: a node's times overlap, so shares need not add up to 100 %."""
    return _seconds(part_s) + (f" {100 * part_s / whole_s:3.0f}%" if whole_s > 0 else "")


def _size(n_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size * 0.9995:
            return f"{n_bytes / size:.{1 if n_bytes < 100 * size else 0}f} {unit}"
    return f"{n_bytes:.0f} B"
