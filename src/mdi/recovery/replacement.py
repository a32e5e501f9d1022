"""Which nodes take the blocks of lost ones. Pure: from the old ring and the present nodes to the next ring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# A cut over these nodes, given what each of them has in memory, and how many blocks some of them can hold at most; None if the
# model does not fit them.
Cut = Callable[[Sequence["Stage"], Mapping[str, int]], "tuple[int, ...] | None"]


@dataclass(frozen=True)
class Stage:
    """A node of a ring with its blocks, half-open; (0, 0) for one that has none yet."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Next:
    """The next ring.

    Attributes:
        stages: starter first.
        is_moved: whether nodes of the old ring get other blocks.
        fresh: nodes that were not in the old ring, or were started again: they have no caches.
        beside: present nodes that are not in the ring; they may have weights that others need.
    """

    stages: tuple[Stage, ...]
    is_moved: bool
    fresh: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stage.stop - stage.start for stage in self.stages)


def in_place(ring: Sequence[Stage], present: frozenset[str], spares: Sequence[str]) -> Next | None:
    """The same cut, where spares take the places of nodes that are not present; None if there are too few of them.

    Args:
        present: nodes of the ring that live, with their memory or started again.
        spares: best first.
    """
    free = [name for name in spares if name not in {stage.name for stage in ring}]
    stages = []
    for stage in ring:
        if stage.name not in present:
            if not free:
                return None
            stage = Stage(free.pop(0), stage.start, stage.stop)
        stages.append(stage)
    return Next(tuple(stages), is_moved=False)


def with_the_rest(
    ring: Sequence[Stage], present: frozenset[str], spares: Sequence[str], most: Mapping[str, int], cut: Cut
) -> Next | None:
    """A new cut over the nodes that are present, and all spares in the places of lost ones; None if nothing fits."""
    free = [name for name in spares if name not in {stage.name for stage in ring}]
    holders = []
    for stage in ring:
        if stage.name in present:
            holders.append(stage)
        elif free:
            holders.append(Stage(free.pop(0), stage.start, stage.stop))
    return cut_over(holders, most, cut)


def cut_over(holders: Sequence[Stage], most: Mapping[str, int], cut: Cut) -> Next | None:
    """These nodes with another cut."""
    counts = cut(holders, most)
    if counts is None:
        return None
    stages, start = [], 0
    for holder, count in zip(holders, counts, strict=True):
        stages.append(Stage(holder.name, start, start + count))
        start += count
    return Next(tuple(stages), is_moved=True)


def takers(lost: Stage, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Which nodes have the blocks of a lost one now."""
    if lost.start == lost.stop:
        return ()
    return tuple(s.name for s in stages if max(s.start, lost.start) < min(s.stop, lost.stop))
