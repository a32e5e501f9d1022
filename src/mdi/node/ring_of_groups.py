"""A ring with groups as its starter sees it: which weights and which data each node gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.weights import WeightSource
from mdi.control.messages import PartSpec
from mdi.node.model_family import ModelFamily
from mdi.node.own_stage import OwnStage
from mdi.node.setup import PartSource
from mdi.node.starter_weights import StarterWeights
from mdi.spec.options import StarterOptions
from mdi.tensor.group import EXTENSION, Group
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share


class ShardWeights:
    """What the starter can send to one node: its shards, cut out of the starter's own weights."""

    def __init__(self, weights: StarterWeights, share: Share, packing: Packing) -> None:
        self._weights, self._share, self._packing = weights, share, packing
        self._sources: dict[int, tuple[WeightSource, ShardSource]] = {}

    def source_of(self, part: str) -> ShardSource:
        """Where a shard is read from. CheckpointError if its part is in none of the starter's files."""
        whole = self._weights.source_of(part)
        if id(whole) not in self._sources:
            self._sources[id(whole)] = whole, ShardSource(whole, self._share, self._packing)
        return self._sources[id(whole)][1]

    def spec(self, part: str) -> PartSpec:
        info = self.source_of(part).info(part)
        return PartSpec(info.name, info.sha256, info.n_bytes)

    def part_bytes(self, part: str) -> int:
        return self.source_of(part).n_bytes(part)

    def pieces(self, part: str) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a shard, to be sent."""
        return self.source_of(part).pieces(part)


class RingOfGroups(OwnStage):
    """The starter's own stage, which is of itself alone, in a ring with groups.

    Args:
        name, family, config, options: see OwnStage.
        groups: of each node of the ring, as that node sees it; None for one whose stage is its own.
        fields: litgpt's Config as a plain dict.
    """

    is_shared = True
    _groups: tuple[Group | None, ...]
    _shards: dict[int, ShardWeights]

    def __init__(
        self, name: str, family: ModelFamily, config: Any, options: StarterOptions, groups: Sequence[Group | None],
        fields: Mapping[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(name, family, config, options)
        self._fields = dict(fields)
        self.regroup(groups)

    def regroup(self, groups: Sequence[Group | None]) -> None:
        """Other nodes in the ring, or other groups of them."""
        self._groups = tuple(groups)
        self._shards = {}

    def weights_of(self, weights: StarterWeights, index: int) -> PartSource:
        return weights if self._groups[index] is None else self._shards_of(weights, index)

    def _shards_of(self, weights: StarterWeights, index: int) -> ShardWeights:
        group = self._groups[index]
        assert group is not None
        if index not in self._shards:
            self._shards[index] = ShardWeights(weights, group.share(self._fields), group.packing)
        return self._shards[index]

    def parts_of(self, index: int, n_nodes: int, blocks: tuple[int, int]) -> list[str]:
        group = self._groups[index]
        parts = stage_parts(*blocks, starter=False)
        return parts if group is None or group.shares.vocabulary is None else [*parts, "head"]

    def share_of(self, index: int) -> Any:
        group = self._groups[index]
        return None if group is None else (group.rank, group.shares.heads, group.shares.columns)

    def extensions(self, index: int) -> dict[str, Any]:
        group = self._groups[index]
        return {} if group is None else {EXTENSION: group.to_json()}
