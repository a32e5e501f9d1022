"""The tables that end a run: what each sample and each node did."""

from __future__ import annotations

from mdi.block_ranges import span
from mdi.columns import clip, table
from mdi.metrics import RunMetrics
from mdi.units import counted, duration, size

REPORT_COLUMNS = 100


def format_report(run: RunMetrics) -> str:
    """The tables printed when a run ends, at most 100 columns wide, without a final newline."""
    n_nodes, n_samples = run.n_nodes, len(run.samples)
    title = (
        f"{run.model}: {counted(n_samples, 'sample')} on {counted(n_nodes, 'node')}, {counted(run.n_tokens, 'token')}"
    )
    head = clip(f"{title} in {duration(run.duration_s)}, {run.tokens_per_s:.1f} tokens/s", REPORT_COLUMNS)
    samples = "\n".join(table(_sample_rows(run), left=(4, 5)))
    if differing := _differing(run):
        samples = f"{samples}\n{differing}"
    if not run.nodes:
        return f"{head}\n\n{samples}"
    nodes = "\n".join(table(_node_rows(run), left=(0,)))
    return f"{head}\n\n{samples}\n\n{nodes}"


def format_comparison(ring: RunMetrics, alone: RunMetrics, n_cores: int) -> str:
    """A ring on one machine compared with a single node, in a few lines.

    Args:
        n_cores: of the machine, which all nodes of the ring share.
    """
    held = max(stop - start for start, stop in (node.layers for node in ring.nodes))
    n_blocks = max(node.layers[1] for node in ring.nodes)
    n_same = sum(a.token_ids == b.token_ids for a, b in zip(ring.samples, alone.samples, strict=True))
    texts = "the same texts, token for token"
    if n_same < len(ring.samples):
        texts = f"{n_same} of {counted(len(ring.samples), 'text')} the same: another order of sums rounds differently"
    return (
        f"{counted(ring.n_nodes, 'node')}: {ring.tokens_per_s:.1f} tokens/s, "
        f"at most {held} of {counted(n_blocks, 'block')} on a node\n"
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
        why = f"{counted(ring.n_nodes, 'node')} share {counted(n_cores, 'core')}"
    slower = alone.tokens_per_s / ring.tokens_per_s
    return (
        f"The ring was {slower:.1f} times slower: {why}.\n"
        "It pays with a machine for each node: plan.py predicts how much (docs/distributing.md)."
    )


def _sample_rows(run: RunMetrics) -> list[list[str]]:
    rows = [["sample", "tokens", "tokens/s", "first token", "ended by", "prompt"]]
    for i, sample in enumerate(run.samples):
        rows.append(
            [
                str(i),
                str(len(sample.token_ids)),
                f"{sample.tokens_per_s:.1f}",
                duration(sample.ttft_s),
                clip(sample.finish_reason or "unfinished", 16),
                clip(sample.prompt, 36),
            ]
        )
    known = [sample.ttft_s for sample in run.samples if sample.ttft_s is not None]
    mean_ttft_s = sum(known) / len(known) if known else None
    rows.append(
        ["total", str(run.n_tokens), f"{run.tokens_per_s:.1f}", duration(mean_ttft_s), "", "(first token: mean)"]
    )
    return rows


def _differing(run: RunMetrics) -> str:
    """A line for each sample that may differ from an undisturbed run's."""
    return "\n".join(
        f"sample {i} may differ from an undisturbed run from its token {sample.may_differ_from} on"
        for i, sample in enumerate(run.samples)
        if sample.may_differ_from is not None
    )


def _node_rows(run: RunMetrics) -> list[list[str]]:
    rows = [["node", "blocks", "peak mem", "compute", "wait", "send", "frames", "sent/token"]]
    for node in run.nodes:
        rows.append(
            [
                clip(node.name, 12),
                span(*node.layers),
                size(node.peak_rss_bytes),
                *(_shared(part_s, run.duration_s) for part_s in (node.compute_s, node.wait_s, node.send_s)),
                str(node.frames),
                size(node.bytes_sent / run.n_tokens) if run.n_tokens else "-",
            ]
        )
    return rows


def _shared(part_s: float, whole_s: float) -> str:
    """A time and its share of the run: a node's times overlap, so shares need not add up to 100 %."""
    return duration(part_s) + (f" {100 * part_s / whole_s:3.0f}%" if whole_s > 0 else "")
