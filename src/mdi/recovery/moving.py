"""Cuts a model again over nodes that hold parts of it, by their measurements or cautious guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mdi.partition.cost import CostModel
from mdi.partition.model import ModelShape, Workload
from mdi.partition.profile import DEFAULT_BYTES_S, ClusterProfile, NodeProfile
from mdi.recovery.new_cut import Holder, cut, slowest_s
from mdi.recovery.replacement import Stage

# Where nothing was measured: how fast weights are read from memory by computing, and from disk by loading.
READ_BYTES_S = 5e9
LOAD_BYTES_S = 5e8


class MovingCut:
    """See the module; the first node is the starter, which has all weights on its disk.

    Args:
        shape: the model, in the format that it runs in.
        profile: measurements of nodes and links; None if there are none.
        workload: texts at the same time, and their lengths.
        part_bytes: of a block, as it is sent.
        n_rounds: how many rounds the texts still need.
    """

    def __init__(
        self, shape: ModelShape, profile: ClusterProfile | None, workload: Workload, part_bytes: float,
        n_rounds: Callable[[], int],
    ) -> None:  # fmt: skip
        self._shape = shape
        self._workload = workload
        # The two together, because another thread may plan while a node is learnt.
        self._measured = None if profile is None else (profile, CostModel(profile, shape, workload))
        self._part_bytes = part_bytes
        self._n_rounds = n_rounds
        self._speeds: dict[str, float] = {}

    def learn(self, node: NodeProfile) -> None:
        """A node that has come was measured. Its links are guessed."""
        if self._measured is not None:
            profile = replace(self._measured[0], nodes=(*self._measured[0].nodes, node))
            self._measured = profile, CostModel(profile, self._shape, self._workload)

    def expected_s(self, ring: Sequence[Stage]) -> dict[str, float]:
        """Seconds of a frame on each node of a ring, by the measurements before it ran."""
        found = {}
        for place, stage in enumerate(ring):
            block_s, base_s, _ = self._times(place, stage.name, len(ring))
            found[stage.name] = base_s + block_s * (stage.stop - stage.start)
        return found

    def set_pace(self, name: str, factor: float) -> None:
        """A node takes `factor` times as long as it was measured."""
        self._speeds[name] = factor

    def __call__(self, stages: Sequence[Stage], most: Mapping[str, int]) -> tuple[int, ...] | None:
        """Blocks of each of these nodes, whose stages are their present ones; None if the model does not fit them.

        Args:
            most: blocks that a node can hold at most, where it has said so.
        """
        n_frames = max(1, self._n_rounds()) * self._n_frames(len(stages))
        return cut(self.holders(stages, most), self._block_bytes, n_frames)

    def round_s(self, stages: Sequence[Stage], counts: Sequence[int]) -> float:
        """Seconds of a round of these nodes with `counts` blocks; without measurements, of a frame.

        What more nodes bring without smaller frames is guessed in no other way than by an even placement: the slowest node
        gets as little as possible.
        """
        return slowest_s(self.holders(stages, {}), counts) * self._n_frames(len(stages))

    def moving_s(self, stages: Sequence[Stage], counts: Sequence[int]) -> float:
        """How long it takes to move the weights for such a cut."""
        seconds, start = 0.0, 0
        for holder, count in zip(self.holders(stages, {}), counts, strict=True):
            seconds += holder.move_s * holder.n_moved(start, start + count)
            start += count
        return seconds

    def _n_frames(self, n_nodes: int) -> int:
        """Frames of a round."""
        return self._workload.frames(n_nodes) if self._measured is not None else 1

    def holders(self, stages: Sequence[Stage], most: Mapping[str, int]) -> list[Holder]:
        return [self._holder(k, stage, len(stages), most.get(stage.name)) for k, stage in enumerate(stages)]

    @property
    def _block_bytes(self) -> list[float]:
        n, length = self._workload.n_sequences, self._workload.sequence_length
        return [block.weight_bytes + n * block.cache_bytes(length) for block in self._shape.blocks]

    def _holder(self, place: int, stage: Stage, n_used: int, most: int | None) -> Holder:
        block_s, base_s, most_bytes = self._times(place, stage.name, n_used)
        move_s = self._part_bytes / LOAD_BYTES_S
        if place:
            move_s += self._part_bytes / self._link_bytes_s(stage.name)
        factor = self._speeds.get(stage.name, 1.0)
        return Holder(
            stage.name, (stage.start, stage.stop), block_s * factor, base_s * factor, move_s, most_bytes,
            least=min(place, 1), most=most,
        )  # fmt: skip

    def _times(self, place: int, name: str, n_used: int) -> tuple[float, float, float]:
        """Seconds per block and beside blocks, and bytes that there are for blocks."""
        head_s = 0.0 if place else self._shape.head_bytes / READ_BYTES_S
        if (measured := self._measured) is None:
            return self._shape.reference.weight_bytes / READ_BYTES_S, head_s, float("inf")
        profile, cost = measured
        terms, known = cost.terms(n_used), _index(profile, name)
        if known is not None:
            return terms.unit_s(known), terms.base_s[known], min(terms.capacity(known))
        return fmean(terms.unit_s(i) for i in range(len(profile.nodes))), head_s, float("inf")

    def _link_bytes_s(self, name: str) -> float:
        if (measured := self._measured) is None:
            return DEFAULT_BYTES_S
        profile, cost = measured
        known = _index(profile, name)
        return DEFAULT_BYTES_S if known is None else cost.links.of(0, known)[1]


def _index(profile: ClusterProfile, name: str) -> int | None:
    return next((i for i, node in enumerate(profile.nodes) if node.name == name), None)
