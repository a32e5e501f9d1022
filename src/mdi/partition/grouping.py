"""Finds groups of a ring: nodes with fast links between them. Candidates, and the fastest of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mdi.errors import PlacementError
from mdi.partition.cost import CostModel
from mdi.partition.group_profile import merged
from mdi.partition.links import Links
from mdi.partition.methods import place
from mdi.partition.model import ModelShape, Workload
from mdi.partition.profile import ClusterProfile, NodeProfile

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
