"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from mdi.block_ranges import span
from mdi.columns import table
from mdi.partition.group_profile import GroupPlan
from mdi.partition.placement import Placement
from mdi.partition.plan import NodePlan, PlanReport
from mdi.units import duration, size

MOST_LEFT_OUT = 8  # nodes that are named
_HEADS = ("node", "device", "computed by", "blocks", "weights", "caches", "other", "free", "left", "stage", "link")


def format_plan(report: PlanReport) -> str:
    """Table, speed, limit, advice and notes."""
    workload = report.workload
    n = workload.n_sequences
    lines = [
        f"{report.model or 'model'} in {report.format}, {n} sequence{'s' * (n > 1)} of up to {workload.sequence_length} "
        f"tokens, caches in {report.kv_dtype}, placement {report.placement.method}",
        "",
        *table([_HEADS, *(_row(node) for node in report.nodes)], left=range(4)),
        "",
    ]
    lines += _torch_lines(report.nodes)
    lines += left_out_lines(report.placement)
    one = f"{_rate(report.tokens_s_one)} tokens/s for one sequence"
    many = f", {_rate(report.tokens_s)} for {n} ({report.n_frames} frames of {report.n_rows} rows)" if n > 1 else ""
    lines += [f"speed:    {one}{many}", f"limit:    {report.limit}"]
    if report.tensor is not None:
        shared = report.tensor
        lines.append(
            f"tensor:   {_rate(shared.tokens_s)} tokens/s for one sequence with every block on all nodes (--parallel tensor); "
            f"of {duration(shared.token_s)} a token, sums ({shared.algorithm}) take {duration(shared.sums_s)}"
        )
    lines += [_group_line(group) for group in report.groups]
    if report.parallel is not None:
        lines.append(f"auto:     --parallel auto takes {report.parallel.mode}: {report.parallel.reason}")
    lines += [f"advice:   {text}" for text in report.advice]
    lines += [f"note:     {text}" for text in report.notes]
    return "\n".join(lines)


def _torch_lines(nodes: Sequence[NodePlan]) -> list[str]:
    """Lines about nodes that compute in torch, one for each reason."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        path, _, reason = node.computed_by.partition(": ")
        if path == "torch":
            names.setdefault(reason, []).append(node.name)
    return [f"torch:    {', '.join(who)}: {reason}" for reason, who in names.items()]


def _group_line(group: GroupPlan) -> str:
    shares = ", ".join(f"{name} {part:.0%}" for name, part in zip(group.members, group.parts, strict=True))
    return f"group:    {group.name} is {shares} of each of its blocks; a sum ({group.algorithm}) takes {duration(group.sum_s)}"


def left_out_lines(placement: Placement) -> list[str]:
    """Lines about nodes that are left out of the ring, with reasons, and how to use all of them."""
    left = placement.left_out
    lines = [f"left out: {name} ({reason})" for name, reason in left[:MOST_LEFT_OUT]]
    if len(left) > MOST_LEFT_OUT:
        lines.append(f"left out: {len(left) - MOST_LEFT_OUT} more")
    can_all_have_blocks = len(left) + len(placement.order) <= sum(placement.counts) + 1
    if left and can_all_have_blocks:
        lines.append("          --placement even uses all nodes, if they have the memory")
    return lines


def _row(node: NodePlan) -> tuple[str, ...]:
    memory = node.memory
    return (
        node.name,
        node.device,
        node.computed_by.partition(":")[0] or "-",
        f"{span(node.start, node.stop)} ({node.stop - node.start})" if node.stop > node.start else "none",
        size(memory.weights),
        size(memory.caches),
        size(memory.activations + memory.process),
        size(node.free_bytes),
        size(node.left_bytes),
        duration(node.stage_s),
        duration(node.link_s) if node.link_s else "-",
    )


def _rate(tokens_s: float) -> str:
    return f"{tokens_s:.3g}" if tokens_s < 100 else f"{tokens_s:.0f}"
