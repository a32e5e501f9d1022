"""A plan with windows: what stays in memory on each node, and whether computing waits for the disk. Reads nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import BLOCKS, shapes_of
from mdi.errors import LimitError, UsageError
from mdi.kernels.page_sizes import cache_classes
from mdi.partition.group_profile import GroupPlan
from mdi.partition.model import ModelShape
from mdi.partition.node_window import NodeWindow, WindowChoice
from mdi.partition.parallel import of_two
from mdi.partition.plan import PlanReport
from mdi.partition.profile import ClusterProfile, NodeProfile
from mdi.partition.steady import HalfTimes, UnitTimes, is_loose, is_tight, simulate
from mdi.partition.tensor_plan import TensorPlan
from mdi.stages.window_budget import RunMemory, WindowPlan, choose_window, work_bytes
from mdi.stages.window_files import PAGE_BYTES, StoredMatrix, Unit, WeightBytes, block_units
from mdi.stages.window_options import WindowOptions
from mdi.tensor.shares import Share, share_out
from mdi.weight_formats import LAYOUTS, OWN_FORMAT

UNLIMITED = 1 << 60
_NOWHERE = cast(WeightBytes, None)  # the file of units that only their sizes matter of
_TRIED = (1, 2, 4, 6, 8)  # windows


def without_limits(profile: ClusterProfile) -> ClusterProfile:
    """The cluster as if memory limited nothing: windows are fitted into what there is."""
    return replace(profile, nodes=tuple(replace(n, memory_bytes=UNLIMITED, shared_bytes=0) for n in profile.nodes))


@dataclass(frozen=True)
class _Stage:
    """A node's stage, whose weights a window would hold.

    Attributes:
        blocks, head: units to read: halves of blocks or of a node's shares of them; the head of a starter.
        compute_s: of a frame; sum_s: of what follows each half of a block where it is shared; pause_s: between two frames.
    """

    node: NodeProfile
    blocks: list[Unit]
    head: StoredMatrix | None
    run: RunMemory
    rate: float
    compute_s: float
    sum_s: float = 0.0
    pause_s: float = 0.0


def with_windows(
    report: PlanReport, profile: ClusterProfile, config: Mapping[str, Any], shape: ModelShape, options: WindowOptions,
    disk_bytes_s: float | None,
) -> PlanReport:  # fmt: skip
    """A plan that was made without limits of memory, with the windows of its nodes: in the ring, and with every block on all.

    Args:
        profile: with the nodes' memory.
        shape: of the model, with the format of weights and caches.
        options: the user's choices; the best window is searched within `memory`, else within a node's free memory.
        disk_bytes_s: what disks give; None: what each node measured.

    Raises:
        UsageError: nothing fits, or a disk was not measured.
    """
    form = OWN_FORMAT.get(shape.format, shape.format)
    if form not in LAYOUTS:
        raise UsageError(f"a window is for the kernels, which do not have the format {form}")
    known = {node.name: node for node in profile.nodes}
    rates = {name: _rate(node, disk_bytes_s) for name, node in known.items()}
    windows: list[list[NodeWindow]] = []
    nodes = []
    for place, planned in enumerate(report.nodes):
        group = next((group for group in report.groups if group.name == planned.name), None)
        if group is None:
            stages = [_in_ring(report, place, known[planned.name], rates[planned.name], config, form, shape.kv_dtype)]
        else:
            stages = _in_group(report, place, group, known, rates, config, form, shape.kv_dtype)
        found = [_planned(stage, options) for stage in stages]
        windows.append([window for window, _ in found])
        memory = replace(planned.memory, weights=sum(plan.resident_bytes for _, plan in found))
        free_bytes = sum(options.memory or stage.node.memory_bytes for stage in stages)
        nodes.append(replace(planned, memory=memory, free_bytes=free_bytes))
    waiting = _with_waits(report, [max(stage, key=lambda window: window.chosen.times.wait_s) for stage in windows])
    in_ring = replace(waiting, nodes=tuple(nodes), windows=tuple(window for stage in windows for window in stage))
    return _with_shares(in_ring, known, rates, config, form, shape.kv_dtype, options)


def _rate(node: NodeProfile, disk_bytes_s: float | None) -> float:
    if rate := disk_bytes_s or node.disk_read_bytes_s:
        return rate
    raise UsageError(f"the disk of {node.name} was not measured: give its rate with --disk-rate, such as 500M")


def _with_waits(report: PlanReport, windows: Sequence[NodeWindow]) -> PlanReport:
    """The speeds with what nodes wait for their disks: one frame is in flight, and has a row of every text.

    Args:
        windows: of each stage the one that waits longest.
    """
    n, first = report.workload.n_sequences, windows[0].chosen.times
    round_s = first.pass_s - first.wait_s + sum(window.chosen.times.wait_s for window in windows)
    read_s = max(window.pass_bytes / window.disk_bytes_s for window in windows)
    one = n / round_s if n == 1 else min(report.tokens_s_one, 1 / read_s if read_s else report.tokens_s_one)
    return replace(report, n_frames=1, n_rows=n, more_frames=0, tokens_s=n / round_s, tokens_s_one=one)


def _with_shares(
    report: PlanReport, known: Mapping[str, NodeProfile], rates: Mapping[str, float], config: Mapping[str, Any], form: str,
    kv_dtype: str, options: WindowOptions,
) -> PlanReport:  # fmt: skip
    """The same with windows over each node's share of every block, and what --parallel auto is to take then."""
    tensor = None if report.parallel is None else report.parallel.tensor
    if tensor is None:
        return report
    shares = share_out(config, tensor.parts)
    windows = []
    try:
        for rank, name in enumerate(tensor.names):
            share = Share(shares, rank, config)
            stage = _of_share(report, tensor, share, known[name], rates[name], form, kv_dtype)
            windows.append(_planned(stage, options)[0])
    except LimitError:  # a ring of few blocks needs less
        return replace(report, tensor=None, parallel=None)
    token_s = max(window.chosen.times.pass_s for window in windows)  # of the slowest node, for which all others wait
    timed = replace(tensor, token_s=token_s)
    return replace(
        report, tensor=None, share_windows=tuple(windows), parallel=of_two(report.tokens_s, timed, report.workload)
    )


def _in_group(
    report: PlanReport, place: int, group: GroupPlan, known: Mapping[str, NodeProfile], rates: Mapping[str, float],
    config: Mapping[str, Any], form: str, kv_dtype: str,
) -> list[_Stage]:  # fmt: skip
    """The shares of a group's nodes in the blocks of a stage."""
    planned, shares = report.nodes[place], share_out(config, group.parts)
    alone = _in_ring(report, place, known[group.members[0]], 1.0, config, form, kv_dtype)
    sums_s = len(alone.blocks) * group.sum_s
    found = []
    for rank, name in enumerate(group.members):
        own = Share(shares, rank, config).shard_config()
        blocks, head = units_of(own, form, planned.start, planned.stop, is_starter=place == rank == 0)
        run = _run_memory(report, own, planned.start, planned.stop, kv_dtype)
        compute_s = max(0.0, alone.compute_s - sums_s)
        found.append(_Stage(known[name], blocks, head, run, rates[name], compute_s, group.sum_s, alone.pause_s))
    return found


def _in_ring(
    report: PlanReport, place: int, node: NodeProfile, rate: float, config: Mapping[str, Any], form: str, kv_dtype: str
) -> _Stage:
    planned = report.nodes[place]
    blocks, head = units_of(config, form, planned.start, planned.stop, is_starter=place == 0)
    run = _run_memory(report, config, planned.start, planned.stop, kv_dtype)
    # This node's disk goes on while other nodes compute and rows are on links.
    pause_s = (
        sum(other.stage_s for other in report.nodes) - planned.stage_s + sum(other.link_s for other in report.nodes)
    )
    return _Stage(node, blocks, head, run, rate, planned.stage_s, pause_s=pause_s)


def _of_share(
    report: PlanReport, tensor: TensorPlan, share: Share, node: NodeProfile, rate: float, form: str, kv_dtype: str
) -> _Stage:
    """All nodes compute as long as the slowest, for they wait for it at the next sum; the head is the first node's."""
    config, n_layer = share.shard_config(), share.config["n_layer"]
    blocks, head = units_of(config, form, 0, n_layer, is_starter=share.rank == 0)
    run = _run_memory(report, config, 0, n_layer, kv_dtype)
    head_s = tensor.head_s
    own_s, pause_s = (tensor.blocks_s + head_s, 0.0) if share.rank == 0 else (tensor.blocks_s, head_s)
    return _Stage(node, blocks, head, run, rate, own_s, tensor.sums_s / len(blocks), pause_s)


def _run_memory(report: PlanReport, config: Mapping[str, Any], start: int, stop: int, kv_dtype: str) -> RunMemory:
    length, n_texts = report.workload.sequence_length, report.workload.n_sequences
    classes, _ = cache_classes(config, start, stop, kv_dtype)
    return RunMemory(sum(c.n_bytes(length) for c in classes), n_texts, work_bytes(config, 64 + n_texts, n_texts))


def _planned(stage: _Stage, options: WindowOptions) -> tuple[NodeWindow, WindowPlan]:
    """The window of a stage that was asked for, and the best one. LimitError if nothing fits."""
    node, blocks = stage.node, stage.blocks

    def choice(asked: WindowOptions) -> tuple[WindowPlan, WindowChoice]:
        plan = choose_window(node.name, asked, blocks, stage.head, stage.run, node.process_bytes)
        times = simulate(_times(plan, stage), max(1, plan.n_slots), stage.pause_s)
        return plan, WindowChoice(plan.n_slots, plan.retain, times)

    limit = options.memory or node.memory_bytes
    plan, chosen = choice(options)
    if options.memory is None:  # it has to fit in any case
        choice(WindowOptions(plan.n_slots or options.units, plan.retain, limit))
    tried = [chosen]
    for units in _TRIED:
        for retain in [*range(1, len(blocks) // 2 + 1), None]:
            with contextlib.suppress(LimitError):
                tried.append(choice(WindowOptions(units, retain, limit))[1])
    best = min(tried, key=lambda one: (one.times.pass_s, one.units))
    halves = _halves(plan, stage)
    tight, loose = is_tight(halves), is_loose(halves, len(blocks) // 2, plan.retain)
    window = NodeWindow(
        node.name, chosen, plan.resident_bytes, plan.pass_bytes, stage.rate, tight, loose or not plan.pass_bytes, best
    )
    return window, plan


def units_of(
    config: Mapping[str, Any], form: str, start: int, stop: int, is_starter: bool
) -> tuple[list[Unit], StoredMatrix | None]:
    """Units of the blocks [start, stop) and, on a starter, the head, as a chunk in this format would have them."""
    packing, at = Packing(form, form), 0
    parts: dict[str, dict[str, StoredMatrix]] = {f"block.{i}": {} for i in range(start, stop)}
    head = None
    for name, shape in shapes_of(config).items():
        if (packed := packing.format_of(name, shape)) is None:
            continue
        stored = StoredMatrix(name, packed, shape[0], shape[1], _NOWHERE, at)
        part = part_of(name)
        if part in parts:
            parts[part][name] = stored
        elif is_starter and not name.startswith(BLOCKS):
            head = stored
        at += -(-stored.n_bytes // PAGE_BYTES) * PAGE_BYTES
    return block_units(parts), head


def _times(plan: WindowPlan, stage: _Stage) -> list[UnitTimes]:
    """Time is proportional to the bytes of weights. For few rows this is true, because reading them takes most of it."""
    total = sum(unit.n_bytes for unit in plan.units)
    times = []
    for i, unit in enumerate(plan.units):
        load_s = 0.0 if i in plan.kept else unit.n_bytes / stage.rate
        sum_s = stage.sum_s if i < len(stage.blocks) else 0.0
        times.append(UnitTimes(load_s, stage.compute_s * unit.n_bytes / total, sum_s))
    return times


def _halves(plan: WindowPlan, stage: _Stage) -> HalfTimes:
    """Of a block in the middle. A starter's head is none of them: `simulate` knows of it."""
    if not stage.blocks:
        return HalfTimes(0.0, 0.0, 0.0, 0.0)
    middle = len(stage.blocks) // 4 * 2
    attention, mlp = stage.blocks[middle].n_bytes, stage.blocks[middle + 1].n_bytes
    per_byte, rate = stage.compute_s / sum(unit.n_bytes for unit in plan.units), stage.rate
    return HalfTimes(attention * per_byte, mlp * per_byte, attention / rate, mlp / rate, stage.sum_s)
