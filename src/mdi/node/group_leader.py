"""The starter's part in a group that computes its blocks together: its share, and its connections to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from mdi.cache_dir import default_cache_dir
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.weight_memory import WeightPlacer
from mdi.checkpoint.weights import WeightSource
from mdi.errors import EngineError, UsageError
from mdi.kernels.kernel_stage import KernelStarterStage, WeightUse
from mdi.machine.computing import Computing
from mdi.machine.resources import device_free_bytes
from mdi.machine.threads import n_threads
from mdi.metrics import ShareMetrics
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.node.cache_budget import check_capacity
from mdi.node.group_member import may_look_busily, run_check, share_metrics
from mdi.node.loading import kernel_weights
from mdi.node.model_family import ModelFamily
from mdi.node.own_stage import RunLimits
from mdi.node.ring_of_groups import RingOfGroups
from mdi.node.starter_weights import StarterWeights
from mdi.node.windowed import with_window
from mdi.spec.options import StarterOptions
from mdi.tensor.group import Group
from mdi.tensor.group_ring import LeaderRing
from mdi.tensor.joining import GroupLinks
from mdi.tensor.mesh import Mesh
from mdi.tensor.shard_stage import ShardStage
from mdi.tensor.shared_head import SharedHeadStage
from mdi.tensor.window_shards import leader_stages
from mdi.units import size


class GroupLeader(RingOfGroups):
    """The starter as the first node of a group: `stage` has embedding and head, `loaded` a share of the blocks.

    Args: see RingOfGroups.
    """

    stage: KernelStarterStage
    loaded: ShardStage

    def __init__(
        self, name: str, family: ModelFamily, config: Any, options: StarterOptions, groups: Sequence[Group | None],
        fields: Mapping[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(name, family, config, options, groups, fields)
        assert groups[0] is not None
        self.group = groups[0]
        self._is_whole = self.group.size == len(groups)
        self._links: GroupLinks | None = None
        self._ring: LeaderRing | None = None
        self._is_loaded = False

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded

    @property
    def is_head_shared(self) -> bool:
        return self.group.shares.vocabulary is not None

    def check_memory(self, weights: StarterWeights, computing: Computing, n_nodes: int) -> None:
        if self._window is not None:  # which is fitted into the memory
            return
        own = self._shards_of(weights, 0)
        blocks = stage_parts(*weights.blocks[0], starter=False)
        needed = sum(map(own.part_bytes, blocks)) + weights.part_bytes("embedding")
        needed += (own if self.is_head_shared else weights).part_bytes("head")
        free = device_free_bytes(computing.device)
        if needed > free and not self._is_loaded:
            raise UsageError(
                f"the starter has {size(free)} of memory free, but embedding, head and its share of the blocks take "
                f"{size(needed)}: give it a smaller share (--shares), or use a smaller format (--quantize)"
            )

    def load(
        self, weights: StarterWeights, computing: Computing, n_nodes: int, max_length: int, n_sequences: int,
        kv_memory: int | None, check: Callable[[], None],
    ) -> None:  # fmt: skip
        if not self._is_loaded:
            self._load_shares(weights, computing, RunLimits(max_length, n_sequences, kv_memory), check)
            self._is_loaded = True
        check_capacity(self._name, self.loaded, max_length, computing.device)
        self.stage.prepare(max_length)
        self.loaded.prepare(max_length, kv_memory)

    def _load_shares(
        self, weights: StarterWeights, computing: Computing, run: RunLimits, check: Callable[[], None]
    ) -> None:
        own, packing = self._shards_of(weights, 0), computing.packing
        assert packing is not None
        placer = WeightPlacer(self._options.weight_memory)
        weights.verify(stage_parts(*weights.blocks[0], starter=True), check)

        def source(part: str) -> WeightSource:
            check()
            is_cut = part.startswith("block.") or (part == "head" and self.is_head_shared)
            return own.source_of(part) if is_cut else weights.source_of(part)

        if self._window is not None:
            blocks, kv_dtype = weights.blocks[0], computing.kv_dtype
            both = leader_stages(self.group.share(self._fields), blocks, n_threads(), kv_dtype, self._mesh)
            folder, parts = self._options.cache_dir or default_cache_dir(), stage_parts(*blocks, starter=True)
            with_window(both, self._name, self._window, parts, source, packing, folder, *run, check)
            self.loaded, self.stage = both.share, both.ends
            return

        def of_part(part: str) -> Any:
            return kernel_weights(source(part), part, packing, placer, check)

        share = self.group.share(self._fields)
        self.loaded = ShardStage(share, *weights.blocks[0], n_threads(), computing.kv_dtype)
        self.loaded.load(stage_parts(*weights.blocks[0], starter=False), of_part)
        self.stage = self._engine_stage(computing.kv_dtype)
        self.stage.load(["embedding", "head"], of_part)

    def _engine_stage(self, kv_dtype: str) -> KernelStarterStage:
        """Embedding and head, or the starter's rows of it; no blocks."""
        if not self.is_head_shared:
            return KernelStarterStage(self._fields, 0, n_threads(), kv_dtype)
        share = self.group.share(self._fields)
        return SharedHeadStage(self._fields, share, self._mesh, n_threads(), kv_dtype)

    def _mesh(self) -> Mesh:
        group = self.loaded.group
        if group is None:
            raise EngineError("the nodes of the group are not connected")
        return group.mesh

    def expect(self, listener: RingListener | None, epoch: int, placement: str, process: str) -> None:
        """Let the other nodes connect, from before the ring is closed on."""
        assert listener is not None
        self._links = GroupLinks(self.group, listener, epoch, placement, process, self._options.silence_s)

    def over(self, ring: LoopbackRing | TcpRing) -> LoopbackRing | TcpRing:
        """The ring as the engine sees it. Raises RingError if a node of the group is not there."""
        assert self._links is not None and isinstance(ring, TcpRing)
        try:
            is_busy = may_look_busily(self.group.n_neighbours)
            self.loaded.join(self.group.name, self._links.connect(run_check(ring), is_busy))
        finally:
            self._links.close()
        self._ring = LeaderRing(ring, self.loaded, self._is_whole)
        return cast(TcpRing, self._ring)

    def drop(self) -> None:
        """Give the weights back, for another group's sake."""
        if self._is_loaded:
            self.loaded.close()
            self._is_loaded = False
            self._ring = None
            del self.stage, self.loaded

    def leave(self) -> None:
        if self._links is not None:
            self._links.close()
        if self._is_loaded:
            self.loaded.leave()

    @property
    def compute_s(self) -> float:
        return 0.0 if self._ring is None else self._ring.compute_s

    @property
    def weight_use(self) -> WeightUse:
        """Weights of the share, and of embedding and head."""
        share = super().weight_use
        if not self._is_loaded or self._window is not None:  # a window holds them all
            return share
        ends = self.stage.weight_use
        return WeightUse(share.resident_bytes + ends.resident_bytes, share.read_bytes + ends.read_bytes, share.wait_s)

    @property
    def share(self) -> ShareMetrics | None:
        return share_metrics(self.loaded) if self._is_loaded else None
