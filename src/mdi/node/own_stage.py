"""The starter's own stage, from the same store as a secondary's, and what the other nodes of its ring get.

In a ring with groups, `groups` says of each node which share of its blocks it has; the starter may be the first node of one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from mdi.cancel import Cancel, Periodic
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import PartInfo, stage_parts
from mdi.checkpoint.weights import WeightSource
from mdi.control.messages import PartSpec
from mdi.engine.rows import ArrayRows
from mdi.engine.worker import StarterFrameStage, StarterRows
from mdi.files import default_cache_dir
from mdi.host.computing import Computing
from mdi.metrics import ShareMetrics
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.node.group_member import may_look_busily, run_check, share_metrics
from mdi.node.part_sending import PartSource
from mdi.node.starter_weights import StarterWeights
from mdi.spec.options import StarterOptions
from mdi.stages.building import StageSpec
from mdi.stages.kernel_stage import KernelStage, WeightUse
from mdi.stages.model_family import ModelFamily
from mdi.stages.store import CacheReport, Claim, HeldStage, StageStore
from mdi.stages.window_budget import window_of
from mdi.tensor.group import EXTENSION, Group
from mdi.tensor.joining import GroupLinks, LeaderRing
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share
from mdi.units import duration

if TYPE_CHECKING:
    from mdi.stages.building import AnyStage

logger = logging.getLogger("mdi")


class ShardWeights:
    """What the starter can send to one node of a group: its shards, cut out of the starter's own weights."""

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


class OwnSupply:
    """The starter's weights for its own stage, see mdi.stages.store.Supply.

    Args:
        shards: its share of them, if it is in a group.
    """

    def __init__(
        self, weights: StarterWeights, shards: ShardWeights | None, family: ModelFamily, options: StarterOptions
    ) -> None:
        self._weights, self._shards = weights, shards
        self.family, self.memory = family, options.weight_memory
        self.cache_dir = options.cache_dir or default_cache_dir()

    def holder_of(self, part: str, group: Group | None) -> StarterWeights | ShardWeights:
        """Who has a part: the head is whole unless the group shares it, and the embedding always is."""
        is_cut = part.startswith("block.") or (part == "head" and group is not None and group.shares.vocabulary)
        return self._shards if self._shards is not None and is_cut else self._weights

    @contextlib.contextmanager
    def reading(self, spec: StageSpec, cancel: Cancel) -> Iterator[Callable[[str], WeightSource]]:
        self._weights.verify([part.name for part in spec.parts], cancel)
        yield lambda part: self.holder_of(part, spec.group).source_of(part)


class OwnStage:
    """See the module.

    Args:
        name: of the starter.
        family, config: of the model.
        options: the user's choices.
        store: of all stages of this process.
        groups: see `regroup`.

    Attributes:
        stage: as the engine calls it, after `load`.
        loaded: the same, as a node has it.
    """

    stage: StarterFrameStage
    loaded: AnyStage

    def __init__(
        self, name: str, family: ModelFamily, config: Any, options: StarterOptions, store: StageStore | None = None,
        groups: Sequence[Group | None] = (),
    ) -> None:  # fmt: skip
        self._store = store or StageStore()
        self._name, self._family, self._config, self._options = name, family, config, options
        self._id = secrets.token_hex(8)  # instead of hashes of its weights, which nobody else needs
        self._held: HeldStage | None = None
        self._next: HeldStage | None = None  # in memory for a later ring
        self._links: GroupLinks | None = None
        self._ring: LeaderRing | None = None
        self._groups = tuple(groups)
        self._shards: dict[int, ShardWeights] = {}

    def regroup(self, groups: Sequence[Group | None]) -> None:
        """Other nodes in the ring, or other groups of them.

        Args:
            groups: of each node of the ring, as that node sees it; None for one whose stage is its own. Empty: there are none.
        """
        self._groups = tuple(groups)
        self._shards = {}

    @property
    def is_shared(self) -> bool:
        """Whether nodes compute the same blocks, each a share of them."""
        return bool(self._groups)

    @property
    def _group(self) -> Group | None:
        """The starter's own."""
        return self._groups[0] if self._groups else None

    # For the other nodes

    def weights_of(self, weights: StarterWeights, index: int) -> PartSource:
        """Where node `index` of the ring gets its parts from."""
        return self._shards_of(weights, index) or weights

    def _shards_of(self, weights: StarterWeights, index: int) -> ShardWeights | None:
        group = self._groups[index] if self._groups else None
        if group is None:
            return None
        if index not in self._shards:
            self._shards[index] = ShardWeights(weights, group.share(weights.config), group.packing)
        return self._shards[index]

    def parts_of(self, index: int, n_nodes: int, blocks: tuple[int, int]) -> list[str]:
        """What node `index` of the ring needs."""
        if not self._groups:
            return self._family.secondary_parts(index, n_nodes, *blocks)
        group = self._groups[index]
        parts = stage_parts(*blocks, starter=False)
        return parts if group is None or group.shares.vocabulary is None else [*parts, "head"]

    def share_of(self, index: int) -> Any:
        """What node `index` of the ring has of its blocks: rank and shares of its group; None for one that has them whole."""
        group = self._groups[index] if self._groups else None
        return None if group is None else (group.rank, group.shares.heads, group.shares.columns)

    def extensions(self, index: int) -> dict[str, Any]:
        """What only node `index` of the ring must know."""
        group = self._groups[index] if self._groups else None
        return {} if group is None else {EXTENSION: group.to_json()}

    # Its own weights and memory

    def _spec(
        self, weights: StarterWeights, computing: Computing, n_nodes: int, max_length: int = 1, n_sequences: int = 1,
        kv_memory: int | None = None,
    ) -> StageSpec:  # fmt: skip
        group, blocks, supply = self._group, weights.blocks[0], self._supply(weights)
        share = "" if group is None else f"{group.rank} of {group.shares} {group.packing}"
        parts = tuple(
            PartInfo(part, f"{self._id} {share} {part}", supply.holder_of(part, group).part_bytes(part))
            for part in self._family.starter_parts(blocks[1], n_nodes)
        )
        return StageSpec(
            self._name, weights.model, weights.config_hash, weights.config, blocks, parts, computing, weights.dtype,
            weights.stored_format, window_of(self._options.weight_memory), group, n_nodes, max_length, n_sequences,
            kv_memory,
        )  # fmt: skip

    def _supply(self, weights: StarterWeights) -> OwnSupply:
        return OwnSupply(weights, self._shards_of(weights, 0), self._family, self._options)

    def check_memory(self, weights: StarterWeights, computing: Computing, n_nodes: int) -> None:
        """Weights that will not fit are not loaded in the first place. Raises NoMemoryError."""
        self._store.check_memory(self._spec(weights, computing, n_nodes), self._held)

    def load_next(
        self, weights: StarterWeights, computing: Computing, n_nodes: int, max_length: int, n_sequences: int,
        kv_memory: int | None, cancel: Cancel,
    ) -> None:  # fmt: skip
        """Have the stage of another cut in memory, besides the one that is in use: `load` of that cut then reads no weights.

        Raises as `load`; NoMemoryError if there is no room for both. The present stage stays as it is in any case.
        """
        self.drop_next()
        spec = self._spec(weights, computing, n_nodes, max_length, n_sequences, kv_memory)
        if self._held is None or self._held.spec.key != spec.key:
            claim = Claim(self._id, self._id, share=self._options.cache_share)
            self._next = self._store.acquire(spec, claim, self._supply(weights), cancel, on_part=self._reports(spec))
            self._store.release(self._next, self._id)

    def drop_next(self) -> None:
        """Give the memory of a stage back that `load_next` got and no ring uses; harmless if there is none."""
        held, self._next = self._next, None
        if held is not None and held is not self._held:
            self._store.remove(held)

    def _reports(self, spec: StageSpec) -> Callable[[], None]:
        """A line now and then about the parts that are loaded; to be called before each."""
        report, n_parts = Periodic(), len(spec.parts)
        done = iter(range(n_parts + 1))

        def tell() -> None:
            n_done = next(done)
            if report.is_due():
                passed = duration(report.passed_s)
                logger.info("%s loads its weights: %d of %d parts (%s)", self._name, n_done, n_parts, passed)

        return tell

    def load(
        self, weights: StarterWeights, computing: Computing, n_nodes: int, max_length: int, n_sequences: int,
        kv_memory: int | None, cancel: Cancel,
    ) -> None:  # fmt: skip
        """Have the stage of this cut, with caches for `max_length`; one that is the same stays, with what its caches hold.

        Args:
            weights: with the cut.
            n_nodes: of the ring; n_sequences: at the same time.
            kv_memory: limit for the caches; None: the free memory.

        Raises:
            UsageError: the caches of one text do not fit into memory; CheckpointError: the weights cannot be read.
        """
        spec = self._spec(weights, computing, n_nodes, max_length, n_sequences, kv_memory)
        supply, held = self._supply(weights), self._held
        if held is not None and held.stage is not None and held.spec.key == spec.key:
            if held.stage.max_length >= max_length:
                return
            held.spec, held.has_caches = spec, False
            self._store.complete(held, supply, cancel)
        else:
            self._held = None
            if held is not None:
                self._forget_stage()
            claim = Claim(self._id, self._id, share=self._options.cache_share)
            self._held = held = self._store.acquire(spec, claim, supply, cancel, held, self._reports(spec))
        self.drop_next()
        stage = held.stage
        assert stage is not None
        self.loaded = stage
        if not isinstance(stage, KernelStage):
            self.stage = cast(StarterFrameStage, stage.inner)
        else:
            assert stage.ends is not None
            self.stage = stage if stage.group is None else stage.ends

    def grant(self, device: str, by_hand: int | None, rows_bytes: int) -> CacheReport:
        """What its caches may have.

        Args:
            by_hand: the limit that the user set, for all of the process together.
            rows_bytes: memory for the rows that were sent.
        """
        assert self._held is not None
        self._held.replay_bytes, self._held.sent = rows_bytes, None
        return self._store.grant(self._held, by_hand)

    def close(self) -> None:
        """Free its memory, but keep its description."""
        self.drop_next()
        if self._held is not None:
            self._store.remove(self._held)

    def drop(self) -> None:
        """Give its memory back; harmless if there is none."""
        self.close()
        self._forget_stage()
        self._held = self._ring = None

    def _forget_stage(self) -> None:
        for name in ("stage", "loaded"):
            self.__dict__.pop(name, None)

    @property
    def is_loaded(self) -> bool:
        return self._held is not None

    @property
    def weight_use(self) -> WeightUse:
        return self.loaded.weight_use if self.is_loaded else WeightUse(0, 0, 0.0)

    @property
    def rows(self) -> StarterRows:
        """As `stage` has them."""
        return ArrayRows() if isinstance(self.loaded, KernelStage) else self.loaded.rows

    # In a ring

    def expect(self, listener: RingListener | None, epoch: int, placement: str, process: str) -> None:
        """Let the other nodes of the group connect, from before a ring is closed on."""
        if self._group is not None:
            assert listener is not None
            self._links = GroupLinks(self._group, listener, epoch, placement, process, self._options.silence_s)

    def over(self, ring: LoopbackRing | TcpRing) -> LoopbackRing | TcpRing:
        """A closed ring for the engine. Raises RingError if nodes cannot do their part in it."""
        if self._group is None:
            return ring
        assert self._links is not None and isinstance(ring, TcpRing) and isinstance(self.loaded, KernelStage)
        assert self.loaded.group is not None
        try:
            is_busy = may_look_busily(self._group.n_neighbours)
            self.loaded.group.join(self._group.name, self._links.connect(run_check(ring), is_busy))
        finally:
            self._links.close()
        self._ring = LeaderRing(ring, self.loaded, self._group.size == len(self._groups))
        return cast(TcpRing, self._ring)

    def leave(self) -> None:
        """Called when a ring is over; harmless if repeated."""
        if self._links is not None:
            self._links.close()
        if self.is_loaded and isinstance(self.loaded, KernelStage) and self.loaded.group is not None:
            self.loaded.group.leave()

    @property
    def compute_s(self) -> float:
        """Seconds that this node has computed besides the engine."""
        return 0.0 if self._ring is None else self._ring.compute_s

    @property
    def share(self) -> ShareMetrics | None:
        """Of every block, where all nodes have one."""
        return share_metrics(self.loaded) if self.is_loaded else None
