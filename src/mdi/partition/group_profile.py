"""A cluster with groups as a ring sees it: each group as one node, as fast as its nodes with their sums.

So the placements, which know nodes alone, place groups as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mdi.partition.cost import CostModel
from mdi.partition.model import ModelShape, Workload
from mdi.partition.profile import ClusterProfile, LinkProfile, NodeProfile
from mdi.partition.sum_cost import DEFAULT, LinkSpeed, seconds
from mdi.partition.tensor_plan import SUMS_PER_BLOCK, row_bytes, slowest_link

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
        n_cores=sum(node.n_cores for node in nodes), memory_bytes=_memory_bytes(cost, members, parts), held_bytes=0,
        shared_bytes=0, cached_parts=(), machine="",
    )  # fmt: skip
    names = tuple(node.name for node in nodes)
    return node, GroupPlan(nodes[0].group, names, tuple(parts), DEFAULT, seconds(DEFAULT, len(nodes), n_bytes, link))


def _sums_s(cost: CostModel, nodes: Sequence[NodeProfile], n_rows: int, link: LinkSpeed) -> float:
    n_bytes = n_rows * row_bytes(cost)
    return SUMS_PER_BLOCK * seconds(DEFAULT, len(nodes), n_bytes, link)


def _memory_bytes(cost: CostModel, members: Sequence[int], parts: Sequence[float]) -> int:
    """Memory of the group, so that each node holds its share of the blocks and what it has whole."""
    free = [cost.profile.nodes[i].memory_bytes - cost.fixed_bytes(i) for i in members]
    held = min(max(0, n) / part for n, part in zip(free, parts, strict=True))
    return int(held) + cost.fixed_bytes(members[0])


def _link(cost: CostModel, source: str, target: str, members: Sequence[int], others: Sequence[int]) -> LinkProfile:
    """From the last node of a stage to the first one of another, and through that to its last."""
    way = [(members[-1], others[0]), *zip(others, others[1:], strict=False)]
    found = [cost.links.of(a, b) for a, b in way]
    return LinkProfile(source, target, sum(round_trip_s for round_trip_s, _ in found), min(rate for _, rate in found))
