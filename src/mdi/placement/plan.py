"""A plan: a placement, the memory of every node, the speed of the ring, its limit, what would help, and its table.

Pure: a cluster's profile and a model's shape in, a report out. Nothing runs, so a cluster can be planned before it is
bought; live nodes bring a profile that they have measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdi.block_ranges import span
from mdi.columns import table
from mdi.engine.prices import MORE_ROW
from mdi.engine.speculation import MOST_ROWS, most_frames, tokens_per_s
from mdi.errors import PlacementError
from mdi.kernels.format_maps import shown
from mdi.placement.clients import Clients
from mdi.placement.cost import CostModel, MemoryUse, Prediction
from mdi.placement.methods import by_hand, place
from mdi.placement.model import ModelShape, Workload
from mdi.placement.parallel import GroupPlan, ParallelChoice, choose_parallel, merged
from mdi.placement.placement import Placement, excess_bytes
from mdi.placement.profile import ClusterProfile
from mdi.placement.prompts import ring_first_token_s, tensor_first_token_s
from mdi.placement.search import ring_of, spread
from mdi.placement.tensor_plan import TensorPlan, plan_tensor
from mdi.placement.windows import NodeWindows
from mdi.spec.options import DEFAULT_PLACEMENT
from mdi.units import duration, size

WORTH = 1.05  # what makes less difference is not worth a word
ENOUGH = 4  # pieces of advice
LOOKED_AT = 16  # nodes of a large ring that are tried without


def limit_of(placement: Placement, prediction: Prediction) -> str:
    """Name the limit of a ring."""
    name = placement.names[prediction.slowest]
    count = placement.counts[prediction.slowest]
    if len(placement.names) == 1:
        return f"{name}, which does all the work"
    if prediction.limit == "stage":
        own = " with embedding and head" if prediction.slowest == 0 else ""
        return f"the stage of {name} ({count} blocks{own}, {duration(max(prediction.stage_s))} per frame)"
    if prediction.limit == "link":
        target = placement.names[(prediction.slowest + 1) % len(placement.names)]
        return f"the link from {name} to {target}, busy for {duration(max(prediction.busy_s))} per frame"
    links = sum(prediction.link_s)
    return (
        f"the way round the ring, {duration(prediction.round_s)}: stages {duration(sum(prediction.stage_s))} and links "
        f"{duration(links)} one after the other"
    )


def advice(cost: CostModel, placement: Placement, prediction: Prediction, smaller: Sequence[ModelShape]) -> list[str]:
    """Advice that would help, at most ENOUGH lines."""
    found = [
        *_other_placement(cost, placement, prediction),
        *_without(cost, placement, prediction),
        *_smaller(cost, smaller, prediction),
        *_more_sequences(cost, placement, prediction),
        *_tight(cost, placement),
    ]
    return found[:ENOUGH]


def help_for_misfit(cost: CostModel, smaller: Sequence[ModelShape], method: str | None) -> list[str]:
    """Advice for a model that does not fit."""
    hints = []
    if method not in ("throughput", "latency") and _fits(cost):
        hints.append("--placement throughput fits")
    for shape in smaller:
        if shape.weight_bytes < cost.shape.weight_bytes and _fits(CostModel(cost.profile, shape, cost.workload)):
            hints.append(f"--quantize {shape.format} fits")
            break
    workload = _largest_that_fits(cost)
    if workload is not None:
        which = f"--n-samples {workload.n_sequences}" if workload.n_sequences < cost.workload.n_sequences else ""
        length = f"--sequence-length {workload.sequence_length}"
        shorter = length if workload.sequence_length < cost.workload.sequence_length else ""
        hints.append(f"{' '.join(filter(None, [which, shorter]))} fits")
    return hints


def _fits(cost: CostModel) -> bool:
    try:
        place(cost, "throughput")
    except PlacementError:
        return False
    return True


def _largest_that_fits(cost: CostModel) -> Workload | None:
    """Fewer sequences, else shorter ones, halved until the caches fit; None if even the smallest do not."""
    workload = cost.workload
    while workload.n_sequences > 1 or workload.sequence_length > 64:
        if workload.n_sequences > 1:
            workload = replace(workload, n_sequences=workload.n_sequences // 2)
        else:
            workload = replace(workload, sequence_length=max(64, workload.sequence_length // 2))
        if _fits(CostModel(cost.profile, cost.shape, workload)):
            return workload
    return None


def _other_placement(cost: CostModel, placement: Placement, prediction: Prediction) -> Iterator[str]:
    if placement.method == "throughput":
        return
    best = place(cost, "throughput")
    gain = cost.predict(best.order, best.counts).tokens_s / prediction.tokens_s
    if gain >= WORTH:
        yield f"with --placement throughput the ring is {gain:.1f}x faster"


def _without(cost: CostModel, placement: Placement, prediction: Prediction) -> Iterator[str]:
    """Nodes that only slow the ring down; a placement that looked for the fastest ring has left them out already."""
    if placement.method == "throughput":
        return
    gains = []
    for i in placement.order[1:][:LOOKED_AT]:
        order = [j for j in placement.order if j != i]
        found = spread(cost, ring_of(cost, order, cost.terms(len(order)).n_rows))
        if found is not None:
            gains.append((prediction.round_s / found.round_s, cost.profile.nodes[i].name))
    gain, name = max(gains, default=(0.0, ""))
    if gain >= WORTH:
        yield f"without {name} the ring is {gain:.1f}x faster, if the others share its blocks well"


def _smaller(cost: CostModel, smaller: Sequence[ModelShape], prediction: Prediction) -> Iterator[str]:
    """A format with fewer bytes is faster about as much as it reads less."""
    for shape in smaller:
        ratio = cost.shape.reference.weight_bytes / shape.reference.weight_bytes
        if ratio >= 1.5 and all(node.device == "cpu" for node in cost.profile.nodes):
            text = f"--quantize {shape.format} reads {ratio:.1f}x fewer bytes per token"
            if prediction.limit == "stage" or prediction.n_frames == 1:
                text += ", and the stages are what the ring waits for"
            yield text
            return


def _more_sequences(cost: CostModel, placement: Placement, prediction: Prediction) -> Iterator[str]:
    """More sequences at once fill the ring and share the reading of weights: with this placement, or another one."""
    more = max(2 * len(placement.order), 2 * cost.workload.n_sequences)
    wider = CostModel(cost.profile, cost.shape, replace(cost.workload, n_sequences=more))
    rates = []
    if not excess_bytes(wider, placement):
        rates.append((wider.predict(placement.order, placement.counts).tokens_s, ""))
    if placement.method == "throughput" and cost.n_nodes <= LOOKED_AT:
        with contextlib.suppress(PlacementError):
            other = place(wider, "throughput")
            where = "" if other.names == placement.names else f" over {' and '.join(other.names)}"
            rates.append((wider.predict(other.order, other.counts).tokens_s, where))
    rate, where = max(rates, default=(0.0, ""))
    if rate >= 1.2 * prediction.tokens_s:
        yield f"{more} sequences at once would give {rate / prediction.tokens_s:.1f}x the tokens per second{where}"


def _tight(cost: CostModel, placement: Placement) -> Iterator[str]:
    for i, (start, stop) in zip(placement.order, placement.ranges, strict=True):
        node = cost.profile.nodes[i]
        left = node.memory_bytes - cost.memory(i, start, stop, len(placement.order)).total
        if left < 0.05 * node.memory_bytes:
            yield f"{node.name} will have only {size(left)} of memory left: another program may make it fail"
            return


# What one frame more than nodes must be predicted to gain: the transfers that it hides were measured in a moment.
FRAME_GAIN = 1.05


@dataclass(frozen=True)
class NodePlan:
    """One node of the ring: its blocks, memory in bytes, times of one frame in seconds; `computed_by` as in its profile.

    Attributes:
        read_bytes, read_s: with a window of weights, what it reads from its disk for each frame.
        expert_hits: share of the experts that rows choose which are in memory, where they are read one by one.
    """

    name: str
    device: str
    start: int
    stop: int
    memory: MemoryUse
    free_bytes: int
    stage_s: float
    link_s: float
    computed_by: str = ""
    read_bytes: int = 0
    read_s: float = 0.0
    expert_hits: float | None = None

    @property
    def left_bytes(self) -> int:
        return self.free_bytes - self.memory.total


@dataclass(frozen=True)
class DraftPlan:
    """One text with guesses (mdi.engine.speculation).

    Attributes:
        rate: of its guesses that are right; n_frames: of it under way; n_rows: of each frame.
        beats_tensor: the rate from which on it is faster than all nodes computing every block together; None: at none, or that
            is not known.
    """

    rate: float
    n_frames: int
    n_rows: int
    tokens_s: float
    beats_tensor: float | None


@dataclass(frozen=True)
class FirstToken:
    """Seconds to the first token of a prompt of `n_tokens` that is alone; `tensor_s` with every block on all nodes; `read_s` to
    read its caches, of `kept_bytes`, from the nodes' disks: None: that was not asked, or a disk's speed is not known.
    """

    n_tokens: int
    seconds: float
    tensor_s: float | None = None
    kept_bytes: int = 0
    read_s: float | None = None


@dataclass(frozen=True)
class PlanReport:
    """The plan of a run.

    Attributes:
        more_frames: in flight beyond one per node, because the links take long beside computing.
        tokens_s: of all sequences together; tokens_s_one: of one sequence alone on the same placement.
        limit: what limits the ring, in words.
        advice: what would help, in words, most useful first.
        tensor: all nodes computing every block together, for one text (--parallel tensor).
        parallel: what --parallel auto would take for all texts; None of one node.
        groups: stages whose nodes compute their blocks together; `nodes` has them by the names of the groups.
        notes: where the numbers are less sure than they look, and why the starter has no block.
        stage_s_one, all_stages_s_one: of the slowest node, and of all nodes together, for one row.
        draft: the speed of one text whose next tokens are guessed; None: no rate of right guesses was given.
        first_token: of a prompt; None: none was given.
        clients: the most texts at a pace, which `workload` has; None: that was not asked.
    """

    model: str
    format: str
    kv_dtype: str
    workload: Workload
    placement: Placement
    nodes: tuple[NodePlan, ...]
    n_rows: int
    n_frames: int
    more_frames: int
    tokens_s: float
    tokens_s_one: float
    limit: str
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    tensor: TensorPlan | None = None
    parallel: ParallelChoice | None = None
    groups: tuple[GroupPlan, ...] = ()
    stage_s_one: float = 0.0
    all_stages_s_one: float = 0.0
    draft: DraftPlan | None = None
    first_token: FirstToken | None = None
    clients: Clients | None = None

    def with_draft(self, rate: float, most_rows: int = MOST_ROWS) -> PlanReport:
        """The report with the speed of one text whose guesses are right with this probability; `stage_s_one` is known.

        Args:
            most_rows: that a frame of one text may have; the number that makes it fastest is taken.
        """

        def fastest(p: float) -> tuple[float, int, int]:
            """Tokens per second, rows, frames."""
            found = []
            for n_rows in range(1, most_rows + 1):
                more = MORE_ROW * (n_rows - 1)  # of the time of one row
                round_s = 1 / self.tokens_s_one + more * self.all_stages_s_one
                stage_s = (1 + more) * self.stage_s_one
                n_frames = most_frames(round_s, stage_s) if len(self.nodes) > 1 else 1
                found.append((tokens_per_s(p, n_rows, n_frames, round_s, stage_s), n_rows, n_frames))
            return max(found)

        def speed(p: float) -> float:
            return fastest(p)[0]

        tokens_s, n_rows, n_frames = fastest(rate)
        beats = None
        if self.tensor is not None:
            beats = next((n / 100 for n in range(100) if speed(n / 100) > self.tensor.tokens_s), None)
        return dataclasses.replace(self, draft=DraftPlan(rate, n_frames, n_rows, tokens_s, beats))

    def with_kept(self, profile: ClusterProfile, shape: ModelShape) -> PlanReport:
        """The report with what a kept prompt takes: machines read their files at once. Not for nodes that share blocks."""
        if self.first_token is None or self.groups:
            return self
        speeds = {node.name: node.disk_read_bytes_s for node in profile.nodes}
        n = self.first_token.n_tokens
        n_bytes = {
            node.name: sum(block.cache_bytes(n) for block in shape.blocks[node.start : node.stop])
            for node in self.nodes
        }
        is_known = all(speeds[name] for name, each in n_bytes.items() if each)
        of_machine: dict[str, float] = defaultdict(float)  # nodes of one machine read one disk, and their times add up
        for node in profile.nodes if is_known else ():
            if each := n_bytes.get(node.name):
                of_machine[node.machine or node.name] += each / speeds[node.name]
        read_s = max(of_machine.values(), default=0.0) if is_known else None
        first = dataclasses.replace(self.first_token, kept_bytes=sum(n_bytes.values()), read_s=read_s)
        return dataclasses.replace(self, first_token=first)

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in seconds, sizes in bytes, ranges half-open."""
        return {
            "model": self.model,
            "format": self.format,
            "kv_dtype": self.kv_dtype,
            "n_sequences": self.workload.n_sequences,
            "sequence_length": self.workload.sequence_length,
            "placement": self.placement.method,
            "nodes": [
                {
                    "name": node.name,
                    "device": node.device,
                    "computed_by": node.computed_by or None,
                    "blocks": [node.start, node.stop],
                    "bytes": {**dataclasses.asdict(node.memory), "total": node.memory.total},
                    "free_bytes": node.free_bytes,
                    "left_bytes": node.left_bytes,
                    "stage_s": node.stage_s,
                    "link_s": node.link_s,
                    "read_bytes": node.read_bytes,
                    "read_s": node.read_s,
                    "expert_hits": node.expert_hits,
                }
                for node in self.nodes
            ],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.placement.left_out],
            "rows_per_frame": self.n_rows,
            "frames": self.n_frames,
            "tokens_per_s": self.tokens_s,
            "tokens_per_s_one_sequence": self.tokens_s_one,
            "limit": self.limit,
            "advice": list(self.advice),
            "notes": list(self.notes),
            "tensor": None if self.tensor is None else self.tensor.to_json(),
            "parallel": None if self.parallel is None else self.parallel.to_json(),
            "groups": [dataclasses.asdict(group) for group in self.groups],
            "draft": None if self.draft is None else dataclasses.asdict(self.draft),
            "first_token": None if self.first_token is None else dataclasses.asdict(self.first_token),
            "clients": None if self.clients is None else dataclasses.asdict(self.clients),
        }


def plan(
    profile: ClusterProfile,
    shape: ModelShape,
    workload: Workload,
    *,
    method: str = DEFAULT_PLACEMENT,
    layers: Sequence[int] | None = None,
    measured: ModelShape | None = None,
    smaller: Sequence[ModelShape] = (),
    may_share: bool = True,
    windows: NodeWindows | None = None,
    prompt_tokens: int | None = None,
) -> PlanReport:
    """Place a model on a cluster and say what that means.

    Args:
        profile: nodes, starter first, and links.
        shape: the model in the format that it is to run in.
        method: see `mdi.spec.options.PLACEMENTS`.
        layers: blocks of each node by hand, as they are listed; then `method` does not matter.
        measured: the shape that the profile's times belong to, if it is not `shape`: they are scaled by what a block
            reads. None without such a shape: then times come from the nodes' reading speed.
        smaller: the same model in formats that take less, for advice.
        may_share: whether several nodes can compute a block of it together.
        windows: of the profile's nodes; None: none reads weights from its disk. With them blocks are shared out evenly, as
            `mdi run` does.
        prompt_tokens: of a prompt whose first token is asked for.

    Raises:
        PlacementError: it does not fit; the message says where how much is missing, and what would help.
        UsageError: the placement is unknown.
    """
    notes: list[str] = []
    if not any(node.block_s for node in profile.nodes):
        notes.append("no block was timed: times are guessed from how fast the nodes read memory")
    elif (profile.config_hash, profile.format) != (shape.config_hash, shape.format):
        profile, note = rescaled(profile, shape, measured)
        notes.append(note)
    if windows is not None:
        return _with_windows(windows, shape, workload, layers, prompt_tokens, tuple(notes))
    stages, groups = merged(profile, shape, workload)
    cost = CostModel(stages, shape, workload)
    try:
        placement = place(cost, method) if layers is None else by_hand(cost, layers)
    except PlacementError as e:
        hints = help_for_misfit(cost, smaller, method if layers is None else None)
        if len(profile.nodes) > 1 and may_share and _for_one_text(profile, shape, workload) is not None:
            hints.append("--parallel tensor fits")
        raise PlacementError("; ".join([str(e), *hints]), e.missing) from None
    found = report(cost, placement, smaller, tuple(notes))
    if prompt_tokens is not None:
        first_s = ring_first_token_s(cost, placement.order, placement.counts, prompt_tokens)
        found = replace(found, first_token=FirstToken(prompt_tokens, first_s))
    if len(profile.nodes) == 1 or not may_share:
        return found
    parallel, tensor = (
        choose_parallel(profile, shape, workload, found.tokens_s),
        _for_one_text(profile, shape, workload),
    )
    if tensor is not None and found.first_token is not None:
        shared_s = tensor_first_token_s(CostModel(profile, shape, workload), tensor, found.first_token.n_tokens)
        found = replace(found, first_token=replace(found.first_token, tensor_s=shared_s))
    return replace(found, tensor=tensor, parallel=parallel, groups=groups)


def _with_windows(
    windows: NodeWindows, shape: ModelShape, workload: Workload, layers: Sequence[int] | None, prompt_tokens: int | None,
    notes: tuple[str, ...],
) -> PlanReport:  # fmt: skip
    """As `plan`, where nodes read weights from their disks. One frame is under way: each is a pass over the weights."""
    cost = CostModel(windows.without_limits, shape, workload, windows=windows)
    placement = place(cost, "even") if layers is None else by_hand(cost, layers)
    found = report(cost, placement, (), notes, more_frames=1 - len(placement.order))
    nodes = []
    for i, node in zip(placement.order, found.nodes, strict=True):
        window, limit = windows.plan(i, node.start, node.stop), cost.profile.nodes[i].window_bytes
        if window is not None:
            memory = replace(node.memory, weights=window.resident_bytes)
            of = i, node.start, node.stop
            node = replace(
                node, memory=memory, free_bytes=limit, read_bytes=windows.read_bytes(*of, found.n_rows),
                read_s=windows.reads_s(*of, found.n_rows), expert_hits=windows.hits(i, window),
            )  # fmt: skip
        nodes.append(node)
    first = None
    if prompt_tokens is not None:
        first_s = ring_first_token_s(cost, placement.order, placement.counts, prompt_tokens, n_frames=1)
        first = FirstToken(prompt_tokens, first_s)
    return replace(found, nodes=tuple(nodes), first_token=first, advice=())  # which knows no windows


def report(
    cost: CostModel, placement: Placement, smaller: Sequence[ModelShape] = (), notes: tuple[str, ...] = (),
    more_frames: int | None = None,
) -> PlanReport:  # fmt: skip
    """The report on a placement that fits.

    Args:
        more_frames: in flight beyond one per node; None: one or none, whichever is faster.
    """
    is_free, more_frames = more_frames is None and len(placement.order) > 1, more_frames or 0
    prediction = cost.predict(placement.order, placement.counts, more_frames=more_frames)
    if is_free:
        another = cost.predict(placement.order, placement.counts, more_frames=1)
        if another.tokens_s > FRAME_GAIN * prediction.tokens_s:
            prediction, more_frames = another, 1
    one = cost.predict(placement.order, placement.counts, n_sequences=1, more_frames=min(0, more_frames))
    links = prediction.link_s or (0.0,) * len(placement.order)
    nodes = []
    for k, (i, (start, stop)) in enumerate(zip(placement.order, placement.ranges, strict=True)):
        node = cost.profile.nodes[i]
        need = cost.memory(i, start, stop, len(placement.order))
        nodes.append(
            NodePlan(
                node.name, node.device, start, stop, need, node.memory_bytes, prediction.stage_s[k], links[k],
                node.computed_by,
            )
        )  # fmt: skip
    return PlanReport(
        model=cost.shape.name,
        format=cost.shape.format,
        kv_dtype=cost.shape.kv_dtype,
        workload=cost.workload,
        placement=placement,
        nodes=tuple(nodes),
        n_rows=prediction.n_rows,
        n_frames=prediction.n_frames,
        more_frames=more_frames,
        tokens_s=prediction.tokens_s,
        tokens_s_one=one.tokens_s,
        limit=limit_of(placement, prediction),
        advice=tuple(advice(cost, placement, prediction, smaller)) if more_frames >= 0 else (),
        notes=(*notes, *_idle_starter(cost, placement), *_refused_caches(cost.shape.kv_dtype, nodes)),
        stage_s_one=max(one.stage_s),
        all_stages_s_one=sum(one.stage_s),
    )


def _idle_starter(cost: CostModel, placement: Placement) -> list[str]:
    """Why this machine, of all, gets no block."""
    if len(placement.order) == 1 or placement.counts[0]:
        return []
    terms = cost.terms(len(placement.order))
    times = [f"{placement.names[k]} {duration(terms.unit_s(i))}" for k, i in enumerate(placement.order)]
    return [
        f"{placement.names[0]} computes no block, since it is not faster with any: a block takes {', '.join(times)}"
    ]


def _refused_caches(kv_dtype: str, nodes: Sequence[NodePlan]) -> list[str]:
    """Torch has no caches in int8."""
    in_torch = [node.name for node in nodes if node.computed_by.startswith("torch")]
    if kv_dtype != "int8" or not in_torch:
        return []
    return [f"caches in int8 are for the kernels: {', '.join(in_torch)} will refuse them (--kv-dtype bf16 or fp16)"]


def _for_one_text(profile: ClusterProfile, shape: ModelShape, workload: Workload) -> TensorPlan | None:
    """The plan of shares of all blocks on all nodes, for one text; None if they do not fit."""
    try:
        return plan_tensor(CostModel(profile, shape, workload, timed=1))
    except PlacementError:
        return None


def rescaled(profile: ClusterProfile, shape: ModelShape, measured: ModelShape | None) -> tuple[ClusterProfile, str]:
    """The profile with its times brought to another model or format, and a note that says so.

    Reading the weights is most of a block's time, so times go with the bytes; that is a guess.
    """
    what = f"{profile.model or 'another model'} in {shown(profile.format)}"
    if measured is None:
        nodes = tuple(dataclasses.replace(node, head_s=()) for node in profile.nodes)
        if all(node.read_bytes_s for node in nodes):
            nodes = tuple(dataclasses.replace(node, block_s=()) for node in nodes)
            note = f"the times were measured with {what}; these are guessed from the nodes' reading speed"
        else:
            note = f"the times were measured with {what}, and taken as they are: they may be far off"
        return dataclasses.replace(profile, nodes=nodes), note
    per_head = shape.head_bytes / measured.head_bytes
    scaled = tuple(
        dataclasses.replace(
            node,
            block_s=tuple((rows, s * _reads(shape, rows) / _reads(measured, rows)) for rows, s in node.block_s),
            head_s=tuple((rows, s * per_head) for rows, s in node.head_s),
        )
        for node in profile.nodes
    )
    changed = dataclasses.replace(
        profile, nodes=scaled, model=shape.name, config_hash=shape.config_hash, format=shape.format
    )
    return changed, f"the times were measured with {what} and scaled by the bytes of a block: a guess"


def _reads(shape: ModelShape, n_rows: int) -> float:
    return shape.reference.weights_read(n_rows)


MOST_LEFT_OUT = 8  # nodes that are named
_HEADS = ("node", "device", "computed by", "blocks", "weights", "caches", "other", "free", "left", "stage", "link")


def format_plan(report: PlanReport) -> str:
    """Table, speed, limit, advice and notes."""
    workload = report.workload
    n, columns = workload.n_sequences, _columns(report.nodes)
    lines = [
        f"{report.model or 'model'} in {shown(report.format)}, {n} sequence{'s' * (n > 1)} of up to {workload.sequence_length} "
        f"tokens, caches in {report.kv_dtype}, placement {report.placement.method}",
        "",
        *table(columns, left=range(columns[0].index("weights"))),
        "",
    ]
    lines += _torch_lines(report.nodes)
    lines += left_out_lines(report.placement)
    one = f"{_rate(report.tokens_s_one)} tokens/s for one sequence"
    many = f", {_rate(report.tokens_s)} for {n} ({report.n_frames} frames of {report.n_rows} rows)" if n > 1 else ""
    lines += [f"speed:    {one}{many}", f"limit:    {report.limit}"]
    if report.clients is not None:
        lines.append(_clients_line(report.clients))
    if report.first_token is not None:
        lines.append(_prompt_line(report.first_token))
        lines += _kept_lines(report.first_token)
    lines += [
        f"window:   {node.name} keeps {size(node.memory.weights)} of weights, and reads {size(node.read_bytes)} for each frame "
        f"in {duration(node.read_s)}"
        f"{'' if node.expert_hits is None else f' ({100 * node.expert_hits:.0f} % of the chosen experts are in memory)'}"
        for node in report.nodes
        if node.read_bytes
    ]
    if report.tensor is not None:
        shared = report.tensor
        lines.append(
            f"tensor:   {_rate(shared.tokens_s)} tokens/s for one sequence with every block on all nodes (--parallel tensor); "
            f"of {duration(shared.token_s)} a token, sums ({shared.algorithm}) take {duration(shared.sums_s)}"
        )
    if report.draft is not None:
        lines.append(_draft_line(report.draft, report.tensor))
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


def _clients_line(clients: Clients) -> str:
    shared = f", {clients.tensor_n} with every block on all nodes" if clients.tensor_n is not None else ""
    more = f"; {clients.limit} allows no more" if clients.limit else ""
    return (
        f"clients:  {clients.n} texts of up to {clients.length} tokens have {clients.tokens_s:g} tokens/s each or more"
        f"{shared}{more}"
    )


def _prompt_line(first: FirstToken) -> str:
    shared = f", {duration(first.tensor_s)} with every block on all nodes" if first.tensor_s is not None else ""
    return f"prompt:   {duration(first.seconds)} to the first token of {first.n_tokens} tokens{shared}"


def _kept_lines(first: FirstToken) -> list[str]:
    if not first.kept_bytes:
        return []
    if first.read_s is None:
        return ["prefixes: nobody knows how fast the disks are: nodes measure it with the first prefix that they read"]
    faster = (
        "read, which is faster than computing"
        if first.read_s < first.seconds
        else "computed, which is faster than reading"
    )
    return [
        f"prefixes: {size(first.kept_bytes)} of caches of such a prompt are read from the disks in {duration(first.read_s)}: "
        f"a kept one is {faster}"
    ]


def _draft_line(draft: DraftPlan, tensor: TensorPlan | None) -> str:
    line = (
        f"guesses:  {_rate(draft.tokens_s)} tokens/s for one sequence, if {draft.rate:.0%} of its guessed tokens are right "
        f"(--draft): {draft.n_frames} frame{'s' * (draft.n_frames > 1)} of it under way, with {draft.n_rows} "
        f"row{'s' * (draft.n_rows > 1)}{' each' * (draft.n_frames > 1)}"
    )
    if tensor is None:
        return line
    if draft.beats_tensor is None:
        return f"{line}; --parallel tensor is faster at any rate"
    return f"{line}; faster than --parallel tensor from {draft.beats_tensor:.0%} on"


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


def _columns(nodes: Sequence[NodePlan]) -> list[tuple[str, ...]]:
    """The table, without what nobody knows."""
    rows = [_HEADS, *(_row(node) for node in nodes)]
    unknown = set() if any(node.computed_by for node in nodes) else {_HEADS.index("computed by")}
    return [tuple(cell for i, cell in enumerate(row) if i not in unknown) for row in rows]


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
