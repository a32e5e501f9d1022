"""The starter as a node of its own ring: what its stage is, and where the weights of it come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mdi.cancel import Cancel
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.kept_packed import KeptPacked
from mdi.checkpoint.part_users import note_user
from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weights import WeightSource
from mdi.engine.speculation import most_rows_of
from mdi.files import default_cache_dir
from mdi.host.computing import Computing
from mdi.spec.extent import Extent
from mdi.spec.options import StarterOptions
from mdi.spec.window import window_of
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec
from mdi.stages.starter_weights import ShardWeights, StarterWeights


class StarterSupply:
    """A `Supply` (mdi.stages.store) of the starter's own stage, which it describes as well.

    Args:
        name: of the starter.
        weights: with the cut.
    """

    def __init__(self, name: str, weights: StarterWeights, family: ModelFamily, options: StarterOptions) -> None:
        self._name, self._weights = name, weights
        self.family, self.memory, self._has_guesses = family, options.weight_memory, options.guesses
        self.cache_dir = options.cache_dir or default_cache_dir()

    def spec(
        self, computing: Computing, extent: Extent, kv_memory: int | None = None, node: int = 0, beside: int = 0
    ) -> StageSpec:
        """The starter's stage.

        Args:
            node: another one of the ring, whose blocks the starter computes as well; none of a group.
            extent: of the run.
            kv_memory: limit for the caches; None: the free memory.
            beside: see StageSpec.
        """
        weights, group = self._weights, self._weights.group_of(0)
        n_rows = most_rows_of(weights.model.spec.has_experts, True) if self._has_guesses else 1
        share = "" if group is None else f"{group.rank} of {group.shares} {group.packing}"
        parts = tuple(
            PartInfo(part, f"{share} {weights.own_id(part)}", self._holder_of(part).part_bytes(part))
            for part in self.family.parts_of(weights, node)
        )
        return StageSpec(
            self._name, weights.model, weights.blocks[node], parts, computing, window_of(self.memory), group,
            len(weights.blocks), computing.extent(extent), kv_memory, n_rows, beside,
        )  # fmt: skip

    def _holder_of(self, part: str) -> StarterWeights | ShardWeights:
        """The head is whole unless the group shares it, and the embedding always is."""
        group = self._weights.group_of(0)
        is_cut = part.startswith("block.") or (part == "head" and group is not None and group.shares.vocabulary)
        return self._weights.of_node(0) if is_cut else self._weights

    @contextlib.contextmanager
    def reading(self, spec: StageSpec, cancel: Cancel) -> Iterator[Callable[[str], WeightSource]]:
        self._weights.verify([part.name for part in spec.parts], cancel)
        store, keep = BlockStore(self.cache_dir), set[str]()
        kept = KeptPacked(store, lambda: sum(packed_bytes(part.name) for part in spec.parts))

        def is_kept(part: str, of: WeightSource) -> bool:
            return spec.keeps_packed and part not in spec.adapter_parts and kept.may_take(of, of.n_bytes(part))

        def packed_bytes(part: str) -> int:
            of = self._holder_of(part).source_of(part)
            return PackedSource(of, spec.packing).n_bytes(part) if is_kept(part, of) else 0

        def source(part: str) -> WeightSource:
            of = self._holder_of(part).source_of(part)
            if not is_kept(part, of):
                return of
            return kept.part(of, of.info(part), spec.packing, keep, cancel)

        with store.in_use(keep):
            try:
                yield source
            finally:
                note_user(store, keep, spec.model.name, self._weights.directory)
