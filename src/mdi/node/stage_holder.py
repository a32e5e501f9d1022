"""Weights from which a secondary can build stages: its own, and received parts. `stage_slots` has the built stages."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mdi.block_ranges import block_span
from mdi.checkpoint.chunks import ChunkFile
from mdi.checkpoint.kept_packed import KeptPacked
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weight_memory import WeightPlacer
from mdi.checkpoint.weights import WeightSource
from mdi.config import WeightMemory
from mdi.control.messages import InitRequest, PartSpec, ProfileRequest
from mdi.control.requested import Requested
from mdi.errors import ControlError, UsageError
from mdi.kernels.blocks import Weights
from mdi.kernels.kernel_stage import KernelStage
from mdi.machine.computing import Computing, choose_computing
from mdi.machine.device import check_format, choose_device, choose_dtype, why_torch
from mdi.machine.threads import n_threads
from mdi.machine.torch_use import load_torch
from mdi.node.group_member import group_in, own_shards, sent_shard, share_stage
from mdi.node.loading import kernel_weights, torch_weights
from mdi.node.model_family import ModelFamily
from mdi.node.windowed import refuse_torch, with_window
from mdi.tensor.shard_stage import ShardStage
from mdi.tensor.window_shards import WindowShardStage
from mdi.units import size
from mdi.weight_formats import held_bytes
from mdi.window.window_options import window_of
from mdi.window.window_stage import WindowStage

if TYPE_CHECKING:
    from mdi.node.torch_stage import TorchStage

    NodeStage = KernelStage | TorchStage

logger = logging.getLogger("mdi")


class StageHolder:
    """See the module.

    Args:
        name: of the node.
        weights: a chunk or checkpoint on this machine, or None.
        store: parts that were received.
        own: what the node was started with, which overrides the starter's request.
        family: of the models.
        weight_memory: how weights in files are read.
    """

    def __init__(
        self,
        name: str,
        weights: WeightSource | None,
        store: BlockStore,
        own: Requested,
        family: ModelFamily,
        weight_memory: WeightMemory,
    ) -> None:
        self._name = name
        self._weights = weights
        self.store = store
        self._kept = KeptPacked(store)
        self.own = own
        self.device = choose_device(own.device)
        self._weight_memory = weight_memory
        self.family = family
        check_format(own.quantize, self.device)
        choose_dtype(own.dtype, "float32", self.device)  # reports mistakes before any port is bound
        self._reading = threading.Lock()  # of weights: a source is for one reader at a time
        self._shards: tuple[str, WeightSource | None] | None = None  # of the latest group's run, by its placement

    def check_folder(self) -> None:
        """Raises UsageError if the folder for weights cannot be written, instead of failing in the first run."""
        try:
            self.store.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.store.directory):
                pass
        except OSError as e:
            raise UsageError(
                f"cannot keep weights in {self.store.directory} ({e.strerror or e}): choose a place with --cache-dir"
            ) from None

    def computing(self, request: InitRequest | ProfileRequest) -> Computing:
        """What this node computes with: what it was started with overrides the starter's request.

        Raises:
            UsageError: the device does not exist here or does not support the request, or torch is needed and missing.
        """
        asked = self.own.over(request)
        device = choose_device(asked.device)
        threads = request.threads if self.own.threads is None else None  # its own are set already
        asked = replace(asked, device=device, threads=threads)
        if asked.quantize is not None and self.own.quantize is None:
            try:
                check_format(asked.quantize, device)
            except UsageError as e:  # the starter need not know of this device
                logger.warning("%s: %s", self._name, e)
                asked = replace(asked, quantize=None)
        config = self.family.kernel_config(request.config)
        if (reason := why_torch(config, device, asked.dtype)) is not None:
            load_torch(f"{self._name}: {reason}")
        stored_format = request.stored_format if isinstance(request, InitRequest) else None
        return choose_computing(config, asked, request.stored_dtype, stored_format)

    def refuse_misfit_chunk(self, request: InitRequest) -> None:
        """A chunk that was named on the command line is a promise for its own weights. ControlError if it has other blocks.

        In a run of other weights it is ignored, like a checkpoint or a cache that does not fit: missing parts are sent.
        """
        chunk = self._weights
        if not isinstance(chunk, ChunkFile) or chunk.config_hash != request.config_hash:
            return
        own = {part.name: part.sha256 for part in chunk.manifest.parts}
        if any(own.get(part.name, part.sha256) != part.sha256 for part in request.parts):
            return
        start, stop = chunk.manifest.blocks
        if not (start <= request.blocks[0] and request.blocks[1] <= stop):
            raise ControlError(
                f"{self._name} was started with a chunk of {block_span(start, stop)}, but was asked to hold "
                f"{block_span(*request.blocks)}: start it with the right chunk, or without --chunk to have the weights sent",
                409,
            )

    def missing(
        self, request: InitRequest, loaded: Collection[str], check: Callable[[], None],
        on_part: Callable[[], None] = lambda: None,
    ) -> list[PartSpec]:  # fmt: skip
        """Parts that are not here.

        Args:
            loaded: names of those that are in memory, and need not be looked for.
            check: called again and again, for hashing weights may take a while.
            on_part: called after each part that was looked for.
        """
        source = self._own_weights(request)
        others = []
        with self._alone(check):
            for part in request.parts:
                check()
                if part.name in loaded or (source is not None and _holds(source, part)):
                    on_part()
                else:
                    others.append(part)
        here = self.store.have([part.sha256 for part in others], check, on_part)
        return [part for part in others if part.sha256 not in here]

    def pieces(self, part: PartSpec) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a part, for another node. Raises ControlError (404) if it is not here."""
        own = self._weights
        if self.store.has(part.sha256):
            return self.store.pieces(part.sha256)
        if own is None or not _holds(own, part):
            raise ControlError(f"{self._name} does not have {part.name}", 404, code="weights")
        return own.pieces(part.name)

    def check_disk(self, request: InitRequest, missing: list[PartSpec]) -> None:
        """Free disk space for the parts that will come. Raises ControlError if there is too little."""
        needed = sum(part.n_bytes - self.store.partial_bytes(part.sha256) for part in missing)
        if needed:
            removed = self.store.free_space(needed, {part.sha256 for part in request.parts})
            if removed:
                logger.info("%s removed %s of weights of earlier runs", self._name, size(removed))
        free = self.store.free_bytes()
        if needed > free:
            raise ControlError(
                f"{self._name} has {size(free)} free on the disk of its cache, but {size(needed)} of "
                "weights would come: free some space, or choose another place with --cache-dir",
                507,
                code="disk",
            )

    def needed_bytes(self, request: InitRequest, computing: Computing, loaded: Collection[str] = ()) -> int:
        """What a stage takes with the caches of one sequence, and while it is built; parts that are `loaded` take nothing."""
        new = [part.n_bytes for part in request.parts if part.name not in loaded]
        if window_of(self._weight_memory, request.extensions) is not None:  # which is fitted into the memory
            new = []
        if group_in(request) is not None:  # shares are packed already
            return sum(new) + self._kernel_stage(request, computing).run_bytes(request.max_length)
        weights = held_bytes(new, request.stored_dtype, computing.format, request.stored_format)
        if computing.packing is None:
            return weights + self.family.stage_bytes(request, computing.kv_dtype)
        return weights + self._kernel_stage(request, computing).run_bytes(request.max_length)

    def key(self, request: InitRequest, computing: Computing) -> tuple[Any, ...]:
        """Two requests with the same key have the same stage."""
        window = window_of(self._weight_memory, request.extensions)
        return (
            request.config_hash, request.blocks, request.parts, computing.threads or n_threads(),
            replace(computing, threads=None), request.stored_format, window,
            None if window is None else (request.max_length, request.n_sequences),
        )  # fmt: skip

    def build(
        self, request: InitRequest, computing: Computing, loaded: Mapping[str, Weights], check: Callable[[], None],
        on_part: Callable[[], None],
    ) -> NodeStage:  # fmt: skip
        """The stage of a run, with its weights.

        Args:
            loaded: weights of parts that are in memory already, as the kernels have them.
            check: called repeatedly meanwhile; its exceptions pass through.
            on_part: called before each part that is loaded.
        """
        keep = {part.sha256 for part in request.parts}
        with self._alone(check), self.store.in_use(keep):
            return self._build(request, computing, loaded, keep, check, on_part)

    @contextlib.contextmanager
    def _alone(self, check: Callable[[], None]) -> Iterator[None]:
        """Prevents other threads from reading weights meanwhile; `check` is called while waiting for one."""
        while not self._reading.acquire(timeout=0.2):
            check()
        try:
            yield
        finally:
            self._reading.release()

    def _build(
        self, request: InitRequest, computing: Computing, loaded: Mapping[str, Weights], keep: set[str],
        check: Callable[[], None], on_part: Callable[[], None],
    ) -> NodeStage:  # fmt: skip
        window = window_of(self._weight_memory, request.extensions)
        parts = {part.name: part for part in request.parts}
        if isinstance(self._weights, ChunkFile):  # its manifest is only a claim
            own = [part.name for part in request.parts if _holds(self._weights, part)]
            self._weights.verify(own, self.store.checked, check)

        is_limited = window is not None and window.memory is not None  # which packs with more care

        def source(name: str) -> WeightSource:
            on_part()
            of = self.source_of(parts[name], request)
            if computing.packing is None or is_limited:
                return of
            return self._kept.part(of, parts[name], computing.packing, keep, check)

        stage: NodeStage
        refuse_torch(window, computing)
        if computing.packing is not None and window is not None:
            inner, packing = self._window_stage(request, computing), computing.packing
            if (group := group_in(request)) is not None:
                packing = group.packing  # a node's own wish for another format does not count
            stage = with_window(
                inner, self._name, window, list(parts), source, packing, self.store.directory, request.max_length,
                request.n_sequences, None, check,
            )  # fmt: skip
        elif computing.packing is not None:
            packing = computing.packing
            stage = self._kernel_stage(request, computing)
            placer = WeightPlacer(self._weight_memory)
            stage.load(
                list(parts),
                lambda name: loaded.get(name) or kernel_weights(source(name), name, packing, placer, check),
            )
        else:
            from mdi.node.torch_stage import TorchStage

            stored = None if request.stored_format else request.stored_dtype
            stage = TorchStage(self.family.secondary_stage(request, check), computing, stored)
            stage.load(list(parts), lambda name: torch_weights(source(name), name, computing))
        logger.debug("%s", computing.told(self._name, *request.blocks))
        if computing.compile:
            stage.compile()
        self.device = computing.device
        return stage

    def _kernel_stage(self, request: InitRequest, computing: Computing) -> KernelStage:
        """A stage for the kernels, without weights."""
        if (group := group_in(request)) is not None:
            return share_stage(ShardStage, group, request, computing)
        return KernelStage(request.config, *request.blocks, n_threads(), computing.kv_dtype)

    def _window_stage(self, request: InitRequest, computing: Computing) -> WindowStage:
        """A stage whose weights a window will hold."""
        if (group := group_in(request)) is not None:
            return share_stage(WindowShardStage, group, request, computing)
        return WindowStage(request.config, *request.blocks, n_threads(), computing.kv_dtype)

    def source_of(self, part: PartSpec, request: InitRequest) -> WeightSource:
        """The source of a part: this machine's own weights if they have it, else the received part."""
        source = self._own_weights(request)
        if source is not None:
            source.release()  # parts are needed one after the other
        if source is not None and _holds(source, part):
            return source
        if (group := group_in(request)) is not None:
            return sent_shard(group, self.store, part, request)
        return self.store.part(part, request.config, request.config_hash)

    def _own_weights(self, request: InitRequest) -> WeightSource | None:
        """This machine's own weights of the run's model, or this node's share of them; None if there are none."""
        source = self._weights
        if source is None or source.config_hash != request.config_hash:
            return None
        if (group := group_in(request)) is None:
            return source
        shards = self._shards
        if shards is None or shards[0] != request.placement:
            self._shards = shards = request.placement, own_shards(group, request, source)
        return shards[1]


def _holds(source: WeightSource, part: PartSpec) -> bool:
    return part.name in source.part_names() and source.info(part.name).sha256 == part.sha256
