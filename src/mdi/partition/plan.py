"""A plan: a placement, the memory of every node, the speed of the ring, its limit, and what would help.

Pure: a cluster's profile and a model's shape in, a report out. Nothing runs, so a cluster can be planned before it is
bought; live nodes bring a profile that they have measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdi.errors import PlacementError
from mdi.partition.advice import advice, help_for_misfit, limit_of
from mdi.partition.cost import CostModel, MemoryUse
from mdi.partition.group_profile import GroupPlan, merged
from mdi.partition.methods import DEFAULT_METHOD, by_hand, place
from mdi.partition.model import ModelShape, Workload
from mdi.partition.parallel import ParallelChoice, choose_parallel
from mdi.partition.placement import Placement
from mdi.partition.profile import ClusterProfile
from mdi.partition.tensor_plan import TensorPlan, plan_tensor

# What one frame more than nodes must be predicted to gain: the transfers that it hides were measured in a moment.
FRAME_GAIN = 1.05


@dataclass(frozen=True)
class NodePlan:
    """One node of the ring: its blocks, memory in bytes, times of one frame in seconds; `computed_by` as in its profile."""

    name: str
    device: str
    start: int
    stop: int
    memory: MemoryUse
    free_bytes: int
    stage_s: float
    link_s: float
    computed_by: str = ""

    @property
    def left_bytes(self) -> int:
        return self.free_bytes - self.memory.total


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
        notes: where the numbers are less sure than they look.
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
        }


def plan(
    profile: ClusterProfile,
    shape: ModelShape,
    workload: Workload,
    *,
    method: str = DEFAULT_METHOD,
    layers: Sequence[int] | None = None,
    measured: ModelShape | None = None,
    smaller: Sequence[ModelShape] = (),
    may_share: bool = True,
) -> PlanReport:
    """Place a model on a cluster and say what that means.

    Args:
        profile: nodes, starter first, and links.
        shape: the model in the format that it is to run in.
        method: see `mdi.partition.methods.METHODS`.
        layers: blocks of each node by hand, as they are listed; then `method` does not matter.
        measured: the shape that the profile's times belong to, if it is not `shape`: they are scaled by what a block
            reads. None without such a shape: then times come from the nodes' reading speed.
        smaller: the same model in formats that take less, for advice.
        may_share: whether several nodes can compute a block of it together.

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
    if len(profile.nodes) == 1 or not may_share:
        return found
    parallel = choose_parallel(profile, shape, workload, found.tokens_s)
    return dataclasses.replace(found, tensor=_for_one_text(profile, shape, workload), parallel=parallel, groups=groups)


def report(
    cost: CostModel, placement: Placement, smaller: Sequence[ModelShape] = (), notes: tuple[str, ...] = ()
) -> PlanReport:
    """The report on a placement that fits."""
    prediction = cost.predict(placement.order, placement.counts)
    more_frames = 0
    if len(placement.order) > 1:
        another = cost.predict(placement.order, placement.counts, more_frames=1)
        if another.tokens_s > FRAME_GAIN * prediction.tokens_s:
            prediction, more_frames = another, 1
    one = cost.predict(placement.order, placement.counts, n_sequences=1)
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
        advice=tuple(advice(cost, placement, prediction, smaller)),
        notes=(*notes, *_refused_caches(cost.shape.kv_dtype, nodes)),
    )


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
    what = f"{profile.model or 'another model'} in {profile.format}"
    if measured is None:
        nodes = tuple(dataclasses.replace(node, head_s=()) for node in profile.nodes)
        if all(node.read_bytes_s for node in nodes):
            nodes = tuple(dataclasses.replace(node, block_s=()) for node in nodes)
            note = f"the times were measured with {what}; these are guessed from the nodes' reading speed"
        else:
            note = f"the times were measured with {what}, and taken as they are: they may be far off"
        return dataclasses.replace(profile, nodes=nodes), note
    per_block = shape.reference.weight_bytes / measured.reference.weight_bytes
    per_head = shape.head_bytes / measured.head_bytes
    scaled = tuple(
        dataclasses.replace(
            node,
            block_s=tuple((rows, s * per_block) for rows, s in node.block_s),
            head_s=tuple((rows, s * per_head) for rows, s in node.head_s),
        )
        for node in profile.nodes
    )
    changed = dataclasses.replace(
        profile, nodes=scaled, model=shape.name, config_hash=shape.config_hash, format=shape.format
    )
    return changed, f"the times were measured with {what} and scaled by the bytes of a block: a guess"
