"""The starter's own stage: loaded once, and used by all following rings for which it is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mdi.block_ranges import block_span
from mdi.cache_dir import default_cache_dir
from mdi.checkpoint.weight_memory import WeightPlacer
from mdi.checkpoint.weights import WeightSource
from mdi.engine.rows import ArrayRows
from mdi.engine.starter_part import StarterFrameStage, StarterRows
from mdi.errors import NoMemoryError
from mdi.kernels.kernel_stage import KernelStage, KernelStarterStage, Weights, WeightUse
from mdi.machine.computing import Computing
from mdi.machine.resources import device_free_bytes
from mdi.machine.threads import n_threads
from mdi.metrics import ShareMetrics
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.node.cache_budget import CacheReport, SharedCaches, check_capacity
from mdi.node.loading import kernel_weights, torch_weights
from mdi.node.model_family import ModelFamily
from mdi.node.part_sending import PartSource
from mdi.node.starter_weights import StarterWeights
from mdi.node.windowed import refuse_torch, with_window
from mdi.periodic import Periodic
from mdi.spec.options import StarterOptions
from mdi.units import duration, size
from mdi.weight_formats import held_bytes
from mdi.window.window_options import window_of
from mdi.window.window_stage import WindowStarterStage

if TYPE_CHECKING:
    from mdi.node.torch_stage import TorchStage

logger = logging.getLogger("mdi")


class RunLimits(NamedTuple):
    """Of a run: tokens of a text, texts at the same time, bytes of caches by hand."""

    max_length: int
    n_sequences: int
    kv_memory: int | None


class OwnStage:
    """See the module.

    Args:
        name: of the starter.
        family, config: of the model.
        options: the user's choices.
        caches: of all runs of this process.

    Attributes:
        stage: as the engine calls it, after `load`.
        loaded: the same, as a node has it.
    """

    stage: StarterFrameStage
    loaded: TorchStage | KernelStage
    is_shared = False  # whether the other nodes compute the same blocks, each a share of them

    def __init__(
        self, name: str, family: ModelFamily, config: Any, options: StarterOptions, caches: SharedCaches | None = None
    ) -> None:  # fmt: skip
        self._caches = caches or SharedCaches()
        self._name = name
        self._family = family
        self._config = config
        self._options = options
        self._key: tuple[Any, ...] | None = None
        self._computing: Computing | None = None
        self._window = window_of(options.weight_memory)

    def weights_of(self, weights: StarterWeights, index: int) -> PartSource:
        """Where node `index` of the ring gets its parts from."""
        return weights

    def parts_of(self, index: int, n_nodes: int, blocks: tuple[int, int]) -> list[str]:
        """What node `index` of the ring needs."""
        return self._family.secondary_parts(index, n_nodes, *blocks)

    def share_of(self, index: int) -> Any:
        """What node `index` of the ring has of its blocks: rank and shares of its group; None for one that has them whole."""
        return None

    def extensions(self, index: int) -> dict[str, Any]:
        """What only node `index` of the ring must know."""
        return {}

    def expect(self, listener: RingListener | None, epoch: int, placement: str, process: str) -> None:
        """Called before a ring is closed."""

    def over(self, ring: LoopbackRing | TcpRing) -> LoopbackRing | TcpRing:
        """A closed ring for the engine. Raises RingError if nodes cannot do their part in it."""
        return ring

    def leave(self) -> None:
        """Called when a ring is over; harmless if repeated."""

    @property
    def compute_s(self) -> float:
        """What this node has computed besides the engine."""
        return 0.0

    @property
    def share(self) -> ShareMetrics | None:
        """Of every block, where all nodes have one."""
        return None

    def load(
        self, weights: StarterWeights, computing: Computing, n_nodes: int, max_length: int, n_sequences: int,
        kv_memory: int | None, check: Callable[[], None],
    ) -> None:  # fmt: skip
        """Have the stage of this cut, with caches for `max_length`; one that is the same stays, with what its caches hold.

        Args:
            weights: with the cut.
            n_nodes: of the ring; n_sequences: at the same time.
            kv_memory: limit for the caches; None: the free memory.
            check: called before each part, for loading may take long.

        Raises:
            UsageError: the caches of one text do not fit into memory; CheckpointError: the weights cannot be read.
        """
        parts = self._family.starter_parts(weights.blocks[0][1], n_nodes)
        key = self._key_of(weights, computing, parts)
        if key != self._key:
            shared = self._shared(parts, computing)
            self.drop()  # frees what is not shared before the next stage takes memory
            run = RunLimits(max_length, n_sequences, kv_memory)
            self._load(weights, computing, n_nodes, parts, shared, run, check)
            self._key, self._computing = key, computing
        elif self.loaded.max_length >= max_length:
            return
        promised = self._caches.promised(computing.device)
        check_capacity(self._name, self.loaded, max_length, computing.device, promised)
        self.loaded.prepare(max_length, kv_memory)
        if computing.compile:
            self.loaded.compile()

    def check_memory(self, weights: StarterWeights, computing: Computing, n_nodes: int) -> None:
        """Weights that will not fit are not loaded in the first place. Raises UsageError."""
        parts = self._family.starter_parts(weights.blocks[0][1], n_nodes)
        if self._window is not None or self._key_of(weights, computing, parts) == self._key:
            return  # a window is fitted into the memory
        shared, needed = self._shared(parts, computing), 0
        for part in parts:
            held = computing.format if part.startswith("block.") else computing.head_format
            if part not in shared:
                needed += held_bytes([weights.part_bytes(part)], weights.dtype, held, weights.stored_format)
        free = device_free_bytes(computing.device) - self._caches.promised(computing.device)
        if needed > free:
            raise NoMemoryError(
                f"the starter has {size(free)} of memory free, but embedding, head and {block_span(*weights.blocks[0])} take "
                f"{size(needed)} in {computing.format}: give it fewer blocks (--layers, --placement, more nodes), or use a "
                "smaller format (--quantize, --dtype)"
            )

    def close(self) -> None:
        """Free its memory, but keep its description."""
        if self.is_loaded:
            self._caches.give_back(self.loaded)
            self.loaded.close()

    @staticmethod
    def _key_of(weights: StarterWeights, computing: Computing, parts: Sequence[str]) -> tuple[Any, ...]:
        return weights.config_hash, weights.blocks[0][1], tuple(parts), computing

    def grant(self, device: str, by_hand: int | None, rows_bytes: int) -> CacheReport:
        """What its caches may take; see SharedCaches."""
        return self._caches.grant(self.loaded, device, by_hand, self._options.cache_share, rows_bytes)

    def drop(self) -> None:
        """Give its memory back; harmless if there is none."""
        if self._key is not None:
            self.close()
            self._key = None
            del self.stage, self.loaded

    def _shared(self, parts: Sequence[str], computing: Computing) -> dict[str, Weights]:
        """Weights that the stage of another cut has in memory."""
        is_alike = self._key is not None and self._computing == computing and self._window is None
        if not is_alike or not isinstance(self.loaded, KernelStarterStage):
            return {}
        assert self._key is not None
        had: tuple[str, ...] = self._key[2]
        return {part: self.loaded.weights_of(part) for part in parts if part in had}

    @property
    def is_loaded(self) -> bool:
        return self._key is not None

    @property
    def weight_use(self) -> WeightUse:
        return self.loaded.weight_use if self.is_loaded else WeightUse(0, 0, 0.0)

    @property
    def rows(self) -> StarterRows:
        """As `stage` has them."""
        return ArrayRows() if isinstance(self.loaded, KernelStage) else self.loaded.rows

    def _load(
        self, weights: StarterWeights, computing: Computing, n_nodes: int, parts: list[str], shared: dict[str, Weights],
        run: RunLimits, check: Callable[[], None],
    ) -> None:  # fmt: skip
        options, stop = self._options, weights.blocks[0][1]
        report = Periodic()

        def source(part: str) -> WeightSource:
            check()
            if report.is_due():
                done, passed = parts.index(part), duration(report.passed_s)
                logger.info("%s loads its weights: %d of %d parts (%s)", self._name, done, len(parts), passed)
            return weights.source_of(part)

        refuse_torch(self._window, computing)
        weights.verify(parts, check)
        if computing.packing is not None and self._window is not None:
            empty = WindowStarterStage(weights.config, stop, n_threads(), computing.kv_dtype)
            self.stage = self.loaded = with_window(
                empty, self._name, self._window, parts, source, computing.packing,
                options.cache_dir or default_cache_dir(), *run, check,
            )  # fmt: skip
        elif computing.packing is not None:
            packing, placer = computing.packing, WeightPlacer(options.weight_memory)
            stage = KernelStarterStage(weights.config, stop, n_threads(), computing.kv_dtype)
            stage.load(
                parts, lambda part: shared.get(part) or kernel_weights(source(part), part, packing, placer, check)
            )
            self.stage = self.loaded = stage
        else:
            from mdi.node.torch_stage import TorchStage

            self.stage = of_torch = self._family.starter_stage(self._config, stop, n_nodes)
            loaded = TorchStage(of_torch, computing, None if weights.stored_format else weights.dtype)
            loaded.load(parts, lambda part: torch_weights(source(part), part, computing))
            self.loaded = loaded
        logger.debug("%s", computing.told(self._name, 0, stop))
