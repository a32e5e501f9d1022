"""Which nodes of a ring form a stage: a single node, or a group whose nodes compute its blocks together.

Pure. The nodes of a group are neighbours in the ring, so that a frame goes through them one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mdi.block_ranges import split_layers
from mdi.errors import SplitError


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
