"""Groups: nodes of a ring that compute the blocks of one stage together.

The nodes of a group are neighbours in the ring. A `Group` is all that a node must know about its own: its rank, the others'
addresses, the shares, and how to sum. It travels in `POST /init` (control.messages.ToldGroup).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mdi.block_ranges import check_n_nodes, default_split, ranges, split_at, split_layers
from mdi.checkpoint.packing import Packing
from mdi.control.messages import ToldGroup, refused
from mdi.errors import SplitError, UsageError
from mdi.kernels.weight_formats import check_packed
from mdi.model.plain import ModelConfig, spec_of
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import ParallelOptions
from mdi.tensor.shares import Share, Shares, share_out, why_not_shared_out


@dataclass(frozen=True)
class RingStage:
    """One stage: the name of the group, or of the node that is alone, and its nodes in ring order."""

    name: str
    members: tuple[str, ...]

    @property
    def is_group(self) -> bool:
        return len(self.members) > 1


def stages_of(groups: Mapping[str, str | None]) -> tuple[RingStage, ...]:
    """The stages of a ring, in the order of their first nodes.

    Args:
        groups: of each node, in the order in which they are listed, the name of its group; None for one that is alone.
    """
    found: dict[tuple[str, bool], list[str]] = {}
    for name, group in groups.items():
        found.setdefault((name, False) if group is None else (group, True), []).append(name)
    return tuple(RingStage(stage, tuple(members)) for (stage, _), members in found.items())


def groups_after(before: Mapping[str, str | None], names: Sequence[str]) -> dict[str, str | None]:
    """The groups of the next ring's nodes: those that are new in it take the places of those that are not in it any more.

    Args:
        before: the groups of the ring that broke, in ring order.
        names: of the next ring's nodes, in ring order, as mdi.run.policy chooses them.
    """
    lost = iter([group for name, group in before.items() if name not in names])
    return {name: before[name] if name in before else next(lost, None) for name in names}


def counts_after(
    before: Mapping[str, int], stages: Sequence[RingStage], cuts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Blocks of each stage of the next ring: as before if the stages are the same, else by their numbers of nodes.

    Args:
        before: blocks of each stage of the ring that broke, by its name.
        cuts: where the model may be cut; None is everywhere.

    Raises:
        SplitError: there are more stages than blocks.
    """
    if [stage.name for stage in stages] == list(before):
        return tuple(before.values())
    n_layer, sizes = sum(before.values()), [len(stage.members) for stage in stages]
    if len(stages) > n_layer:
        raise SplitError(f"{len(stages)} stages cannot each have one of {n_layer} blocks")
    if len(set(sizes)) == 1:
        return split_layers(n_layer, len(sizes), cuts=cuts)
    if cuts is not None and len(cuts) <= n_layer:
        check_n_nodes(n_layer, len(sizes), cuts)
        return split_at(cuts, sizes)
    bounds = [round(n_layer * sum(sizes[:i]) / sum(sizes)) for i in range(len(sizes) + 1)]
    counts = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    while 0 in counts:  # a large one gives
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


logger = logging.getLogger("mdi")

Range = tuple[int, int]


@dataclass(frozen=True)
class Member:
    """How to reach a node of the group: its ring port."""

    name: str
    addr: str
    port: int


@dataclass(frozen=True)
class Group:
    """A group, as one of its nodes sees it.

    Attributes:
        rank: of the node.
        members: all nodes of the group, by rank; neighbours in the ring, in any order.
        packing: the formats of all shards.
        algorithm: one of spec.options.SUM_CHOICES; `reduce_dtype` one of sums.REDUCE_DTYPES.
        name: of the group, for people.
        n_here: nodes of the ring, in this group or in others, at the address of each member.
        is_last: whether the node is the last of the group that a frame goes through.
    """

    rank: int
    members: tuple[Member, ...]
    shares: Shares
    packing: Packing
    algorithm: str = "auto"
    reduce_dtype: str = "float32"
    n_here: tuple[int, ...] = ()
    name: str = ""
    is_last: bool = False

    @property
    def n_neighbours(self) -> int:
        """Nodes of the ring that share this node's machine, itself among them, as far as addresses say."""
        return self.n_here[self.rank] if self.n_here else 1

    @property
    def size(self) -> int:
        return len(self.members)

    def share(self, config: ModelConfig) -> Share:
        """`config` is that of the whole model."""
        return Share(self.shares, self.rank, config)

    @property
    def told(self) -> ToldGroup:
        """As a node is told of it."""
        members = tuple((m.name, m.addr, m.port) for m in self.members)
        shares, packing = self.shares, (self.packing.blocks, self.packing.head)
        return ToldGroup(
            self.rank, members, shares.heads, shares.columns, shares.vocabulary, packing, self.algorithm, self.reduce_dtype,
            self.n_here, self.name, self.is_last, self.packing.folds,
        )  # fmt: skip


def group_of(told: ToldGroup | None, config: ModelConfig) -> Group | None:
    """The group that an /init tells of; None if the node computes its blocks alone.

    Raises:
        ControlError: it contradicts itself, or does not fit the model.
    """
    if told is None:
        return None
    size = len(told.members)
    try:
        shares = Shares(told.heads, told.columns, told.vocabulary)
        if not told.rank < size == shares.n_nodes == len(told.n_here):
            raise ValueError("fields that contradict each other")
        if (reason := why_not_shared_out(config)) is not None:
            raise ValueError(f"a model with {reason}")
        shares.check(config)
        for form in told.packing:
            check_packed(form)
    except (
        UsageError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as e:  # of the config, which is another's as well
        raise refused(f"request.group: {str(e)[:200]}") from None
    packing = Packing(*told.packing, folds=told.folds)
    return Group(
        told.rank, tuple(Member(*member) for member in told.members), shares, packing, told.algorithm,
        told.reduce_dtype, told.n_here, told.name, told.is_last,
    )  # fmt: skip


# Shares of the nodes of a ring


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
    stages: tuple[RingStage, ...],
    config: ModelConfig,
    blocks: Sequence[Range],
    options: ParallelOptions,
    names: Sequence[str],
) -> Division:
    """Blocks as already cut, else evenly; shares by hand (--shares), else equal.

    Args:
        config: of the model; `blocks` as they are cut.
        names: of all nodes, as they are listed.

    Raises:
        UsageError: there are shares for other nodes. SplitError: there are more stages than blocks.
    """
    if options.parts is not None and len(options.parts) != len(names):
        raise UsageError(f"--shares names {len(options.parts)} nodes, but there are {len(names)}")
    counts = tuple(stop - start for start, stop in blocks)
    if len(counts) != len(stages):
        counts = default_split(spec_of(config), len(stages))
    return Division(stages, counts, dict(zip(names, options.parts or [1.0] * len(names), strict=True)))


def node_blocks(stages: Sequence[RingStage], counts: Sequence[int]) -> list[Range]:
    """The blocks of each node of these stages."""
    return [span for stage, span in zip(stages, ranges(counts), strict=True) for _ in stage.members]


class SharingOut:
    """Gives the nodes of a ring their blocks and shares: at first all nodes, later fewer or others.

    A copy can be asked for a ring that may never be formed.

    Args:
        config: of the model.
        ring_port: the starter's own, as it really is.
        packing: the formats of all shards.
        division: the first ring.
    """

    def __init__(
        self, config: ModelConfig, ring_port: int, parallel: ParallelOptions, packing: Packing, division: Division
    ) -> None:  # fmt: skip
        self._config, self._ring_port, self._parallel, self._packing = config, ring_port, parallel, packing
        self._parts = dict(division.parts)
        self._mean = sum(self._parts.values()) / len(self._parts)
        self._groups = {
            name: stage.name if stage.is_group else None for stage in division.stages for name in stage.members
        }
        self._counts = {stage.name: n for stage, n in zip(division.stages, division.counts, strict=True)}
        # Of each stage and number of nodes, the nodes by rank and their shares: who replaces a lost node gets what that had.
        self._shared: dict[tuple[str, int], tuple[tuple[str, ...], Shares]] = {}

    def __call__(
        self, cluster: ClusterConfig, processes: Mapping[str, str]
    ) -> tuple[ClusterConfig, list[Range], list[Group | None]]:
        """The nodes in the order of the ring, and of each its blocks and its group, which is None if it is alone.

        Without other nodes there are no groups.

        Args:
            processes: by name of each secondary, the number that its process drew.

        Raises:
            SplitError: there are more stages than blocks.
        """
        groups = groups_after(self._groups, [node.name for node in cluster.nodes])
        cluster = in_common_order(cluster, stages_of(groups), processes)
        self._groups = {node.name: groups[node.name] for node in cluster.nodes}
        stages = stages_of(self._groups)
        counts = counts_after(self._counts, stages, spec_of(self._config).allowed_cuts())
        self._counts = {stage.name: n for stage, n in zip(stages, counts, strict=True)}
        blocks = node_blocks(stages, counts)
        if cluster.n_nodes == 1:
            return cluster, blocks, []
        return cluster, blocks, [group for stage in stages for group in self._groups_of(cluster, stage)]

    def _groups_of(self, cluster: ClusterConfig, stage: RingStage) -> list[Group | None]:
        """The group as each of its nodes sees it."""
        if not stage.is_group:
            return [None]
        parallel = self._parallel
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
                names.index(name), members, shares, self._packing, parallel.algorithm, parallel.reduce_dtype, n_here,
                stage.name, is_last=name == stage.members[-1],
            )
            for name in stage.members
        ]  # fmt: skip

    def _ranks(self, stage: RingStage) -> tuple[tuple[str, ...], Shares]:
        """The nodes of a stage by rank, which is not their order in the ring, and their shares.

        Ranks are as nodes are listed, whichever numbers processes draw: nodes that are started again have the shares whose
        prefixes they keep. With as many nodes as before, all shares stay, so that sums keep their order and their bits.
        """
        place = stage.name, len(stage.members)
        if place in self._shared:
            before, shares = self._shared[place]
            new = iter([name for name in stage.members if name not in before])
            names = tuple(name if name in stage.members else next(new) for name in before)
        else:
            listed = {name: i for i, name in enumerate(self._parts)}
            names = tuple(sorted(stage.members, key=lambda name: (listed.get(name, len(listed)), name)))
            parts = [self._parts.get(name, self._mean) for name in names]
            if not any(parts):  # those that had all are lost
                parts = [1.0] * len(parts)
            shares = share_out(self._config, parts, self._parallel.is_head_shared)
        self._shared = {**self._shared, place: (names, shares)}  # a new table: copies keep the old one
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
