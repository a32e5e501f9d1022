"""The best use of nodes: a ring, every block on all of them, or a ring of groups; by texts, links and memory.

Nodes with fast links between them are candidates for groups. A ring sees each group as one node, as fast as its nodes with
their sums; so the placements, which know nodes alone, place groups as well.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mdi.errors import PlacementError
from mdi.placement.cost import CostModel, LinkSpeed, seconds
from mdi.placement.methods import place
from mdi.placement.model import ModelShape, Workload
from mdi.placement.profile import ClusterProfile, LinkProfile, Links, NodeProfile
from mdi.placement.tensor_plan import SUMS_PER_BLOCK, TensorPlan, plan_tensor, row_bytes, slowest_link
from mdi.spec.options import DEFAULT_SUM
from mdi.units import duration, size

ROWS = (1, 8, 64)  # for which the time of a block is reckoned, where nothing was timed


@dataclass(frozen=True)
class GroupPlan:
    """A stage whose nodes compute its blocks together.

    Attributes:
        parts: of each node, of every block; together 1.
        algorithm: of the sums; sum_s of one, for the rows of one text.
    """

    name: str
    members: tuple[str, ...]
    parts: tuple[float, ...]
    algorithm: str
    sum_s: float


def stage_places(profile: ClusterProfile) -> list[list[int]]:
    """Places of the nodes of each stage, in the order of their first nodes."""
    found: dict[str, list[int]] = {}
    for i, node in enumerate(profile.nodes):
        found.setdefault(f"group {node.group}" if node.group else node.name, []).append(i)
    return list(found.values())


def merged(
    profile: ClusterProfile, shape: ModelShape, workload: Workload
) -> tuple[ClusterProfile, tuple[GroupPlan, ...]]:
    """The cluster with a node for each stage, and what its groups are; the same cluster if it has none."""
    places = stage_places(profile)
    if all(len(members) == 1 for members in places):
        return profile, ()
    cost = CostModel(profile, shape, workload)
    nodes, plans = [], []
    for members in places:
        if len(members) == 1:
            nodes.append(replace(profile.nodes[members[0]], group=""))
            continue
        node, plan = _group(cost, members)
        nodes.append(node)
        plans.append(plan)
    ways = [(i, j) for i in range(len(places)) for j in range(len(places)) if i != j]
    links = tuple(_link(cost, nodes[i].name, nodes[j].name, places[i], places[j]) for i, j in ways)
    return replace(profile, nodes=tuple(nodes), links=links), tuple(plans)


def _group(cost: CostModel, members: Sequence[int]) -> tuple[NodeProfile, GroupPlan]:
    """A group as one node, with shares in proportion to how fast its nodes compute."""
    nodes = [cost.profile.nodes[i] for i in members]
    speeds = [1 / cost.block_s(i, 1) for i in members]
    parts = [speed / sum(speeds) for speed in speeds]
    link = slowest_link(cost, members)
    rows = sorted({rows for node in nodes for rows, _ in node.block_s} or ROWS)
    block_s = tuple(
        (n, max(part * cost.block_s(i, n) for i, part in zip(members, parts, strict=True)) + _sums_s(cost, nodes, n, link))
        for n in rows
    )  # fmt: skip
    reads = [node.read_bytes_s / part for node, part in zip(nodes, parts, strict=True)]
    n_bytes = row_bytes(cost)
    node = replace(
        nodes[0], name=nodes[0].group, group="", block_s=block_s, read_bytes_s=min(reads), device="cpu",
        attention_macs_s=min(node.attention_macs_s / part for node, part in zip(nodes, parts, strict=True)),
        n_cores=sum(node.n_cores for node in nodes), memory_bytes=_memory_bytes(cost, members, parts), held_bytes=0,
        shared_bytes=0, cached_parts=(), machine="",
    )  # fmt: skip
    names = tuple(node.name for node in nodes)
    return node, GroupPlan(
        nodes[0].group, names, tuple(parts), DEFAULT_SUM, seconds(DEFAULT_SUM, len(nodes), n_bytes, link)
    )


def _sums_s(cost: CostModel, nodes: Sequence[NodeProfile], n_rows: int, link: LinkSpeed) -> float:
    n_bytes = n_rows * row_bytes(cost)
    return SUMS_PER_BLOCK * seconds(DEFAULT_SUM, len(nodes), n_bytes, link)


def _memory_bytes(cost: CostModel, members: Sequence[int], parts: Sequence[float]) -> int:
    """Memory of the group, so that each node holds its share of the blocks and what it has whole."""
    free = [max(0, cost.profile.nodes[i].memory_bytes - cost.fixed_bytes(i)) for i in members]
    held = min(_held(cost, n, part) for n, part in zip(free, parts, strict=True))
    return int(held) + cost.fixed_bytes(members[0])


def _held(cost: CostModel, free: int, part: float) -> float:
    """Bytes of whole blocks, so that of all blocks in a row that are no more, a node with `part` of each has `free` bytes."""
    n, held = cost.n_layer, cost.held
    own = [whole + part * (of_all - whole) for of_all, whole in zip(held, cost.whole, strict=True)]
    found = [held[n] / own[n]]
    for start in range(n):  # where they end that are just too many
        stop = bisect.bisect_right(own, own[start] + free)
        if stop <= n:
            found.append((held[stop] - held[start]) / (own[stop] - own[start]))
    return free * min(found)


def _link(cost: CostModel, source: str, target: str, members: Sequence[int], others: Sequence[int]) -> LinkProfile:
    """From the last node of a stage to the first one of another, and through that to its last."""
    way = [(members[-1], others[0]), *zip(others, others[1:], strict=False)]
    found = [cost.links.of(a, b) for a, b in way]
    return LinkProfile(source, target, sum(round_trip_s for round_trip_s, _ in found), min(rate for _, rate in found))


MUCH = 2  # so many times shorter, because links behind one switch differ by chance

Stages = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Grouping:
    """Stages of a ring by the names of their nodes.

    Attributes:
        within_s, between_s: the longest delay of a link within a group, and the shortest between two stages.
        tokens_s: of all texts together.
        used: names of the stages that have blocks, in ring order; the others are left out.
    """

    stages: Stages
    within_s: float
    between_s: float
    tokens_s: float = 0.0
    used: tuple[str, ...] = ()

    @property
    def groups(self) -> Mapping[str, str]:
        """The group of each node that is in one, named after its nodes."""
        return {name: "+".join(stage) for stage in self.stages if len(stage) > 1 for name in stage}


def fastest_grouping(profile: ClusterProfile, shape: ModelShape, workload: Workload) -> Grouping | None:
    """The grouping with the most tokens per second; None if no links were measured, or the model fits none."""
    found = []
    for grouping in candidates(profile):
        one, _ = merged(with_groups(profile, grouping.groups), shape, workload)
        cost = CostModel(one, shape, workload)
        try:
            placement = place(cost)
        except PlacementError:
            continue
        tokens_s = cost.predict(placement.order, placement.counts).tokens_s
        found.append(replace(grouping, tokens_s=tokens_s, used=placement.names))
    return max(found, key=lambda grouping: grouping.tokens_s, default=None)


def candidates(profile: ClusterProfile) -> Iterator[Grouping]:
    """Groupings whose links within groups are all much shorter than those between stages, of two stages or more.

    One after the other, the two stages with the shortest links between them are joined.
    """
    links = Links(profile)
    if links.are_equal:
        return

    def farthest_s(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
        return max(max(links.of(a, b)[0], links.of(b, a)[0]) for a, b in itertools.product(*pair))

    stages: list[tuple[int, ...]] = [(i,) for i in range(len(profile.nodes))]
    while len(stages) > 2:
        shared = [stage for stage in stages if all(_can_share(profile.nodes[i]) for i in stage)]
        nearest = min(itertools.combinations(shared, 2), key=farthest_s, default=None)
        if nearest is None:
            return
        joined = tuple(sorted(nearest[0] + nearest[1]))
        stages = sorted([joined, *(stage for stage in stages if stage not in nearest)])
        named = tuple(tuple(profile.nodes[i].name for i in stage) for stage in stages)
        within_s, between_s = _delays(profile, named)
        if MUCH * within_s <= between_s:
            yield Grouping(named, within_s, between_s)


def with_groups(profile: ClusterProfile, groups: Mapping[str, str]) -> ClusterProfile:
    """The cluster with these groups, and no others."""
    return replace(profile, nodes=tuple(replace(node, group=groups.get(node.name, "")) for node in profile.nodes))


def _can_share(node: NodeProfile) -> bool:
    """Shares of blocks are computed in the kernels."""
    return node.device == "cpu" and not node.computed_by.startswith("torch")


def _delays(profile: ClusterProfile, stages: Sequence[Sequence[str]]) -> tuple[float, float]:
    """In seconds, one way: see Grouping."""
    links, index = Links(profile), {node.name: i for i, node in enumerate(profile.nodes)}
    stage_of = {name: k for k, stage in enumerate(stages) for name in stage}
    within: list[float] = []
    between: list[float] = []
    for a, b in itertools.permutations(index, 2):
        (within if stage_of[a] == stage_of[b] else between).append(links.of(index[a], index[b])[0] / 2)
    return max(within), min(between)


RING, TENSOR, GROUPS = "ring", "tensor", "groups"


@dataclass(frozen=True)
class ParallelChoice:
    """The choice of `--parallel auto`, and its reason.

    Attributes:
        mode: RING, of nodes or of the groups that the user named; TENSOR; GROUPS: a ring of the groups of `grouping`.
        ring_tokens_s, tensor_tokens_s: of all texts together; None where the model does not fit.
        tensor: of these texts, where it fits.
        grouping: the best one, where nodes are in no group yet and the model fits one.
    """

    mode: str
    reason: str
    ring_tokens_s: float | None
    tensor_tokens_s: float | None
    tensor: TensorPlan | None
    grouping: Grouping | None

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["tensor"]
        return fields


def choose_measured(profile: ClusterProfile, shape: ModelShape, workload: Workload) -> ParallelChoice:
    """The fastest of the best ring of a cluster's nodes or groups, and the other ways; needs at least two nodes.

    Raises:
        PlacementError: the model fits none.
    """
    stages, _ = merged(profile, shape, workload)
    cost = CostModel(stages, shape, workload)
    try:
        placement = place(cost)
    except PlacementError as e:
        return choose_parallel(profile, shape, workload, e)
    return choose_parallel(profile, shape, workload, cost.predict(placement.order, placement.counts).tokens_s)


def choose_parallel(
    profile: ClusterProfile, shape: ModelShape, workload: Workload, ring: float | PlacementError
) -> ParallelChoice:
    """The fastest of a ring, of shares on all nodes, and of a ring of groups, which is tried where the user named none.

    Args:
        ring: tokens per second of all texts together as a ring, or why the model does not fit one.

    Raises:
        PlacementError: it fits none.
    """
    tensor = _tensor(profile, shape, workload)
    has_groups = any(node.group for node in profile.nodes)
    return _fastest(ring, tensor, None if has_groups else fastest_grouping(profile, shape, workload), workload)


def of_two(ring: float, tensor: TensorPlan, workload: Workload) -> ParallelChoice:
    """As `choose_parallel`, of a ring with so many tokens per second, and of shares on all nodes."""
    return _fastest(ring, tensor, None, workload)


def _fastest(
    ring: float | PlacementError, tensor: TensorPlan | PlacementError, grouping: Grouping | None, workload: Workload
) -> ParallelChoice:
    speeds = {RING: ring, TENSOR: tensor.tokens_s if isinstance(tensor, TensorPlan) else tensor}
    if grouping is not None:
        speeds[GROUPS] = grouping.tokens_s
    rates = {mode: rate for mode, rate in speeds.items() if not isinstance(rate, PlacementError)}
    if not rates:
        assert isinstance(ring, PlacementError)
        raise ring
    best = max(rates, key=lambda mode: rates[mode])
    plan = tensor if isinstance(tensor, TensorPlan) else None
    reason = "; ".join(_reasons(best, speeds, workload, plan, grouping))
    return ParallelChoice(best, reason, rates.get(RING), rates.get(TENSOR), plan, grouping)


def _tensor(profile: ClusterProfile, shape: ModelShape, workload: Workload) -> TensorPlan | PlacementError:
    try:
        return plan_tensor(CostModel(profile, shape, workload))
    except PlacementError as e:
        return e


def _reasons(
    best: str, speeds: dict[str, float | PlacementError], workload: Workload, tensor: TensorPlan | None,
    grouping: Grouping | None,
) -> list[str]:  # fmt: skip
    """In words: the speed of each way, and what makes the difference."""
    words = {RING: "as a ring", TENSOR: "with every block on all nodes", GROUPS: "as a ring of groups"}
    rates = [f"{rate:.3g} {words[mode]}" for mode, rate in speeds.items() if not isinstance(rate, PlacementError)]
    texts = "one text" if workload.n_sequences == 1 else f"{workload.n_sequences} texts"
    lines = [f"tokens/s for {texts}: {', '.join(rates)}"]
    lines += [f"{words[mode]} it does not fit: {e}" for mode, e in speeds.items() if isinstance(e, PlacementError)]
    if best == GROUPS and grouping is not None:
        lines.append(
            f"links within a group take at most {duration(grouping.within_s)}, others at least {duration(grouping.between_s)}: "
            f"the stages are {', '.join(grouping.used)}"
        )
    elif tensor is not None:
        lines.append(
            f"{duration(tensor.sums_s)} of {duration(tensor.token_s)} a token with every block on all nodes are sums over "
            f"links of {duration(tensor.link.delay_s)} and {size(int(tensor.link.bytes_s))}/s"
        )
    return lines
