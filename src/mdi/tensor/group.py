"""Groups: nodes of a ring that compute the blocks of one stage together.

The nodes of a group are neighbours in the ring. A `Group` is all that a node must know about its own: its rank, the others'
addresses, the shares, and how to sum. It travels in the extensions of `POST /init`, and is checked field by field: it came from
another node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from mdi.block_ranges import split_layers
from mdi.checkpoint.packing import Packing
from mdi.errors import ControlError, SplitError
from mdi.kernels.weight_formats import LAYOUTS
from mdi.spec.cluster import N_NODES_LIMIT, PortOrAny
from mdi.spec.decode import Meta, Text, Whole, decode, one_of
from mdi.spec.options import SUM_CHOICES
from mdi.tensor.shares import Share, Shares, why_not_shared_out
from mdi.tensor.sums import REDUCE_DTYPES


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


def counts_after(before: Mapping[str, int], stages: Sequence[RingStage]) -> tuple[int, ...]:
    """Blocks of each stage of the next ring: as before if the stages are the same, else by their numbers of nodes.

    Args:
        before: blocks of each stage of the ring that broke, by its name.

    Raises:
        SplitError: there are more stages than blocks.
    """
    if [stage.name for stage in stages] == list(before):
        return tuple(before.values())
    n_layer, sizes = sum(before.values()), [len(stage.members) for stage in stages]
    if len(stages) > n_layer:
        raise SplitError(f"{len(stages)} stages cannot each have one of {n_layer} blocks")
    if len(set(sizes)) == 1:
        return split_layers(n_layer, len(sizes))
    bounds = [round(n_layer * sum(sizes[:i]) / sum(sizes)) for i in range(len(sizes) + 1)]
    counts = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    while 0 in counts:  # a large one gives
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


EXTENSION = "tensor"
N_RANKS_LIMIT = 256


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

    def share(self, config: Mapping[str, Any]) -> Share:
        """`config` is litgpt's Config of the whole model."""
        return Share(self.shares, self.rank, config)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "members": [[m.name, m.addr, m.port] for m in self.members],
            "heads": list(self.shares.heads),
            "columns": list(self.shares.columns),
            "vocabulary": None if self.shares.vocabulary is None else list(self.shares.vocabulary),
            "packing": [self.packing.blocks, self.packing.head],
            "algorithm": self.algorithm,
            "reduce_dtype": self.reduce_dtype,
            "n_here": list(self.n_here),
            "name": self.name,
            "is_last": self.is_last,
        }


Bounds = Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 31)], ...], Meta(min_length=2, max_length=N_RANKS_LIMIT + 1)]
Layout = Annotated[str, one_of(LAYOUTS)]


@dataclass(frozen=True)
class _Told:
    """A group as it travels; see Group.to_json. Earlier versions do not say `is_last`."""

    rank: Whole
    members: Annotated[tuple[tuple[Text, Text, PortOrAny], ...], Meta(max_length=N_RANKS_LIMIT)]
    heads: Bounds
    columns: Bounds
    vocabulary: Bounds | None
    packing: tuple[Layout, Layout]
    algorithm: Annotated[str, one_of(SUM_CHOICES)]
    reduce_dtype: Annotated[str, one_of(REDUCE_DTYPES)]
    n_here: tuple[Annotated[int, Meta(ge=0, le=N_NODES_LIMIT)], ...]
    name: Text
    is_last: bool | None = None


def group_of(extensions: Mapping[str, Any], config: Mapping[str, Any]) -> Group | None:
    """The group that an /init tells of; None if the node computes its blocks alone.

    Raises:
        ControlError: it cannot be read, or does not fit the model.
    """
    data = extensions.get(EXTENSION)
    if data is None:
        return None
    where = f"extensions.{EXTENSION}"
    told = decode(_Told, data, where, _refused)
    size = len(told.members)
    try:
        shares = Shares(told.heads, told.columns, told.vocabulary)
        if not told.rank < size == shares.n_nodes == len(told.n_here):
            raise ValueError("fields that contradict each other")
        if (reason := why_not_shared_out(config)) is not None:
            raise ValueError(f"a model with {reason}")
        shares.check(config)
    except (KeyError, TypeError, ValueError, AttributeError) as e:  # of the config, which is another's as well
        raise _refused(f"{where}: {str(e)[:200]}") from None
    return Group(
        told.rank, tuple(Member(*member) for member in told.members), shares, Packing(*told.packing), told.algorithm,
        told.reduce_dtype, told.n_here, told.name, told.rank == size - 1 if told.is_last is None else told.is_last,
    )  # fmt: skip


def _refused(message: str) -> ControlError:
    return ControlError(message, 400)
