"""Which node gets which share of which blocks, in the first ring of a run and after losses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdi.block_ranges import default_split, ranges
from mdi.errors import UsageError
from mdi.host.computing import Computing
from mdi.node.own_stage import OwnStage
from mdi.node.starter_weights import StarterWeights
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.stages.model_family import ModelFamily
from mdi.tensor.group import Group, Member, RingStage, counts_after, groups_after, stages_of
from mdi.tensor.shares import Shares, share_out

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Division:
    """The plan of a run's first ring.

    Attributes:
        stages: in ring order; `counts` are the blocks of each.
        parts: what each node's share of its stage is proportional to, by name.
    """

    stages: tuple[RingStage, ...]
    counts: tuple[int, ...]
    parts: Mapping[str, float]


def division_by_hand(
    stages: tuple[RingStage, ...], weights: StarterWeights, options: ParallelOptions, names: Sequence[str]
) -> Division:
    """Blocks as already cut, else evenly; shares by hand (--shares), else equal.

    Args:
        names: of all nodes, as they are listed.

    Raises:
        UsageError: there are shares for other nodes. SplitError: there are more stages than blocks.
    """
    if options.parts is not None and len(options.parts) != len(names):
        raise UsageError(f"--shares names {len(options.parts)} nodes, but there are {len(names)}")
    counts = tuple(stop - start for start, stop in weights.blocks)
    if len(counts) != len(stages):
        counts = default_split(weights.config, len(stages))
    return Division(stages, counts, dict(zip(names, options.parts or [1.0] * len(names), strict=True)))


class SharingOut:
    """Makes the starter's stage for the nodes of a ring: at first all of them, later fewer or others.

    Args:
        family, config: of the model.
        ring_port: the starter's own, as it really is.
        division: the first ring.
    """

    def __init__(
        self, family: ModelFamily, config: Any, ring_port: int, options: StarterOptions, weights: StarterWeights,
        computing: Computing, division: Division,
    ) -> None:  # fmt: skip
        self._family, self._config = family, config
        self._ring_port, self._options = ring_port, options
        self._weights, self._computing = weights, computing
        self._parts = dict(division.parts)
        self._mean = sum(self._parts.values()) / len(self._parts)
        self._groups = {
            name: stage.name if stage.is_group else None for stage in division.stages for name in stage.members
        }
        self._counts = {stage.name: n for stage, n in zip(division.stages, division.counts, strict=True)}
        # Of each stage and number of nodes, the nodes by rank and their shares: who replaces a lost node gets what that had.
        self._shared: dict[tuple[str, int], tuple[tuple[str, ...], Shares]] = {}
        self._own: OwnStage | None = None
        self._cut(division.stages, division.counts)

    def __call__(self, cluster: ClusterConfig, processes: Mapping[str, str]) -> tuple[ClusterConfig, OwnStage]:
        """The stage, and the nodes in the order of the ring.

        Args:
            processes: by name of each secondary, the number that its process drew.

        Raises:
            SplitError: there are more stages than blocks.
        """
        groups = groups_after(self._groups, [node.name for node in cluster.nodes])
        cluster = in_common_order(cluster, stages_of(groups), processes)
        self._groups = {node.name: groups[node.name] for node in cluster.nodes}
        stages = stages_of(self._groups)
        counts = counts_after(self._counts, stages)
        self._counts = {stage.name: n for stage, n in zip(stages, counts, strict=True)}
        self._cut(stages, counts)
        if cluster.n_nodes == 1:
            return cluster, OwnStage(cluster.starter.name, self._family, self._config, self._options)
        of_nodes = [group for stage in stages for group in self._groups_of(cluster, stage)]
        if self._own is None:
            self._own = OwnStage(cluster.starter.name, self._family, self._config, self._options)
        self._own.regroup(of_nodes)  # it keeps its weights as far as they are the same
        return cluster, self._own

    def _cut(self, stages: Sequence[RingStage], counts: Sequence[int]) -> None:
        self._weights.take_blocks(
            [span for stage, span in zip(stages, ranges(counts), strict=True) for _ in stage.members]
        )

    def _groups_of(self, cluster: ClusterConfig, stage: RingStage) -> list[Group | None]:
        """The group as each of its nodes sees it."""
        if not stage.is_group:
            return [None]
        parallel, packing = self._options.parallel, self._computing.packing
        assert packing is not None
        nodes = {node.name: node for node in cluster.nodes}
        names, shares = self._ranks(stage)
        logger.info("every block of %s: %s", stage.name, told_shares(names, shares))
        members = tuple(
            Member(name, nodes[name].addr, self._ring_port if name == cluster.starter.name else nodes[name].port_in)
            for name in names
        )
        addresses = [node.addr for node in cluster.nodes]
        n_here = tuple(addresses.count(member.addr) for member in members)
        return [
            Group(
                names.index(name), members, shares, packing, parallel.algorithm, parallel.reduce_dtype, n_here, stage.name,
                is_last=name == stage.members[-1],
            )
            for name in stage.members
        ]  # fmt: skip

    def _ranks(self, stage: RingStage) -> tuple[tuple[str, ...], Shares]:
        """The nodes of a stage by rank, which need not be their order in the ring, and their shares.

        With as many nodes as before, all shares stay, so that sums keep their order and their bits.
        """
        place = stage.name, len(stage.members)
        if place in self._shared:
            before, shares = self._shared[place]
            new = iter([name for name in stage.members if name not in before])
            names = tuple(name if name in stage.members else next(new) for name in before)
        else:
            names = stage.members
            parts = [self._parts.get(name, self._mean) for name in names]
            if not any(parts):  # those that had all are lost
                parts = [1.0] * len(parts)
            shares = share_out(self._weights.config, parts, self._options.parallel.is_head_shared)
        self._shared[place] = names, shares
        return names, shares


def in_common_order(cluster: ClusterConfig, stages: Sequence[RingStage], processes: Mapping[str, str]) -> ClusterConfig:
    """The nodes of each group in the same order for all runs, whatever their nodes files say.

    A node takes a frame, passes it on and computes it before it takes another one. So two groups that have nodes in
    common wait for each other at the first of these, and can never hold one each that the other needs.
    """
    nodes = {node.name: node for node in cluster.nodes}
    starter, *others = [
        name
        for stage in stages
        for name in sorted(stage.members, key=lambda name: (name != cluster.starter.name, processes.get(name, "")))
    ]
    assert starter == cluster.starter.name
    return replace(cluster, secondaries=tuple(nodes[name] for name in others))


def told_shares(names: Sequence[str], shares: Shares) -> str:
    """In words, for the log."""
    bounds = zip(names, shares.heads, shares.heads[1:], shares.columns, shares.columns[1:], strict=False)
    return ", ".join(f"{name} {b - a} heads and {d - c} columns" for name, a, b, c, d in bounds)
