"""A placement: which node has which blocks, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mdi.errors import PlacementError
from mdi.kernels.format_maps import shown
from mdi.placement.cost import CostModel
from mdi.placement.profile import ClusterProfile
from mdi.units import size


@dataclass(frozen=True)
class Placement:
    """Nodes in ring order with their blocks.

    Attributes:
        method: how it was found: "throughput", "latency", "even", "layers".
        order: places of the nodes in the profile, starter (0) first.
        counts: blocks of each; the starter may have none.
        names: of the nodes, in ring order.
        left_out: name of each node that has no part in the ring, and why.
    """

    method: str
    order: tuple[int, ...]
    counts: tuple[int, ...]
    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Blocks of each node, half-open, global numbers."""
        result, start = [], 0
        for count in self.counts:
            result.append((start, start + count))
            start += count
        return tuple(result)

    @classmethod
    def of(
        cls,
        method: str,
        profile: ClusterProfile,
        order: Sequence[int],
        counts: Sequence[int],
        reasons: Mapping[int, str] | None = None,
    ) -> Placement:
        nodes = profile.nodes
        given = reasons or {}
        used = set(order)
        left = ((node.name, given.get(i, "not needed")) for i, node in enumerate(nodes) if i not in used)
        return cls(method, tuple(order), tuple(counts), tuple(nodes[i].name for i in order), tuple(left))


def excess_bytes(cost: CostModel, placement: Placement) -> list[tuple[str, int]]:
    """Nodes that have too little memory for their blocks, and how many bytes too little."""
    found = []
    for i, (start, stop) in zip(placement.order, placement.ranges, strict=True):
        need = cost.memory(i, start, stop, len(placement.order)).total
        node = cost.profile.nodes[i]
        if need > node.memory_bytes:
            found.append((node.name, need - node.memory_bytes))
    return found


def check_fits(cost: CostModel, placement: Placement) -> None:
    """Raises PlacementError that names each node with too little memory, and how much it lacks."""
    excess = excess_bytes(cost, placement)
    if excess:
        lacking = ", ".join(f"{name} has {size(n)} too little" for name, n in excess)
        raise PlacementError(
            f"{describe(cost)} does not fit the placement {placement.method!r}: {lacking}", tuple(excess)
        )


def check_counts(cost: CostModel, order: Sequence[int], counts: Sequence[int]) -> None:
    """Our own invariants: every block once, each secondary at least one."""
    assert order[0] == 0 and len(set(order)) == len(order) == len(counts)
    assert sum(counts) == cost.n_layer and counts[0] >= 0 and all(count >= 1 for count in counts[1:])


def describe(cost: CostModel) -> str:
    n, length = cost.workload.n_sequences, cost.workload.sequence_length
    sequences = "one sequence" if n == 1 else f"{n} sequences"
    return f"{cost.shape.name or 'the model'} in {shown(cost.shape.format)} with {sequences} of {length} tokens"
