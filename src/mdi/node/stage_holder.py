"""What a secondary holds: weights of its own, parts that it was sent, and the stage that was built of them last."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mdi.block_ranges import block_span
from mdi.checkpoint.chunkfile import ChunkFile
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weight_memory import WeightPlacer
from mdi.checkpoint.weights import WeightSource
from mdi.config import WeightMemory
from mdi.control.messages import InitRequest, PartSpec, ProfileRequest
from mdi.errors import ControlError, UsageError
from mdi.kernels.kernel_stage import KernelStage
from mdi.machine.computing import Computing, choose_computing
from mdi.machine.device import check_format, choose_device, choose_dtype, told_path, why_torch
from mdi.machine.threads import n_spins, n_threads
from mdi.machine.torch_use import load_torch
from mdi.model.array_stage import ArrayStage
from mdi.node.loading import kernel_weights, torch_weights
from mdi.node.model_family import ModelFamily
from mdi.node.windowed import refuse_torch, with_window
from mdi.units import size
from mdi.weight_formats import held_bytes
from mdi.window.options import window_of
from mdi.window.stage import WindowStage

if TYPE_CHECKING:
    from mdi.node.torch_stage import TorchStage

    NodeStage = ArrayStage | TorchStage

logger = logging.getLogger("mdi")


class StageHolder:
    """See the module.

    Args:
        name: of the node.
        weights: a chunk or checkpoint on this machine, or None.
        store: parts that were received.
        device, dtype, quantize, threads: what the user asked for; None leaves it to the starter, or to this machine.
        compile_stage: compile stages, whatever the starter asks for.
        family: of the models.
        weight_memory: where weights that lie in files are read from.
    """

    def __init__(
        self,
        name: str,
        weights: WeightSource | None,
        store: BlockStore,
        device: str | None,
        dtype: str | None,
        quantize: str | None,
        threads: int | None,
        compile_stage: bool,
        family: ModelFamily,
        weight_memory: WeightMemory,
    ) -> None:
        self._name = name
        self._weights = weights
        self.store = store
        self._default_device = self.device = choose_device(device)
        self.own = {"device": device, "threads": threads}
        self._dtype = dtype
        self._quantize = quantize
        self._compile = compile_stage
        self._weight_memory = weight_memory
        self.family = family
        check_format(quantize, self.device)
        choose_dtype(dtype, "float32", self.device)  # what cannot be is told before anything is bound
        self._stage: NodeStage | None = None
        self._stage_key: tuple[Any, ...] | None = None
        self.blocks: tuple[int, int] | None = None
        self.model: str | None = None

    def check_folder(self) -> None:
        """A place for weights that cannot be written to is told now, not in the middle of the first run: UsageError."""
        try:
            self.store.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.store.directory):
                pass
        except OSError as e:
            raise UsageError(
                f"cannot keep weights in {self.store.directory} ({e.strerror or e}): choose a place with --cache-dir"
            ) from None

    def drop_stage(self) -> bool:
        """Give the memory of the last run's stage back; whether there was one."""
        was_there = self._stage is not None
        if self._stage is not None:
            self._stage.close()
        self._stage = self._stage_key = None
        return was_there

    def computing(self, request: InitRequest | ProfileRequest) -> Computing:
        """What this node computes with: what it was started with goes before what the starter asks for.

        Raises:
            UsageError: there is no such device here, or it cannot do that, or it takes torch, which is not here.
        """
        device = self._default_device
        if self.own["device"] is None and request.device is not None:
            device = choose_device(request.device)
        quantize = self._format(request.quantize, device)
        wanted = self._dtype or request.dtype
        config = self.family.kernel_config(request.config)
        if (reason := why_torch(config, device, wanted)) is not None:
            load_torch(f"{self._name}: {reason}")
        kv_dtype, stored_format = "auto", None
        if isinstance(request, InitRequest):
            kv_dtype, stored_format = request.kv_dtype, request.stored_format
        return choose_computing(
            config, device, wanted, request.stored_dtype, quantize, kv_dtype=kv_dtype, stored_format=stored_format,
            threads=request.threads if self.own["threads"] is None else None,  # its own are set already
        )  # fmt: skip

    def _format(self, wanted: str | None, device: str) -> str | None:
        """The weight format of a run: this node's own choice, else the starter's if the device has kernels for it."""
        if self._quantize is not None:
            check_format(self._quantize, device)
        if self._quantize is not None or wanted is None:
            return self._quantize
        try:
            check_format(wanted, device)
        except UsageError as e:
            logger.warning("%s: %s", self._name, e)
            return None
        return wanted

    def refuse_misfit_chunk(self, request: InitRequest) -> None:
        """A chunk that was named on the command line is a promise for its own weights. ControlError if it has other blocks.

        In a run of other weights it is only of no use, as a checkpoint or a cache is: what is missing will be sent.
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
                f"{self._name} was started with a chunk of {block_span(start, stop)}, but is to hold "
                f"{block_span(*request.blocks)}: start it with the right chunk, or without --chunk to have the weights sent",
                409,
            )

    def missing(
        self, request: InitRequest, check: Callable[[], None], on_part: Callable[[], None] = lambda: None
    ) -> list[PartSpec]:
        """Parts that are not here.

        Args:
            check: called again and again, for hashing weights may take a while.
            on_part: called after each part that was looked for.
        """
        source = self._weights
        if source is not None and source.config_hash != request.config_hash:
            source = None
        others = []
        for part in request.parts:
            check()
            if source is not None and _holds(source, part):
                on_part()
            else:
                others.append(part)
        here = self.store.have([part.sha256 for part in others], check, on_part)
        return [part for part in others if part.sha256 not in here]

    def check_disk(self, request: InitRequest, missing: list[PartSpec]) -> None:
        """Make room for what is to come. Raises ControlError if there is too little."""
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

    def check_memory(self, request: InitRequest, computing: Computing, free: int) -> None:
        """Weights that will not fit into `free` bytes are not sent in the first place. Raises ControlError."""
        if window_of(self._weight_memory, request.extensions) is not None:  # which is fitted into the memory
            return
        needed = held_bytes(
            [part.n_bytes for part in request.parts], request.stored_dtype, computing.format, request.stored_format
        )
        needed += self._run_bytes(request, computing)
        if needed > free:
            start, stop = request.blocks
            raise ControlError(
                f"{self._name} has {size(free)} of memory free, but {block_span(start, stop)} and the caches of "
                f"one sequence take {size(needed)} in {computing.format}: give it fewer blocks (--layers, --placement), or "
                "use a smaller format (--quantize, --dtype)",
                507,
                code="memory",
            )

    def stage(
        self, request: InitRequest, computing: Computing, check: Callable[[], None], on_part: Callable[[], None]
    ) -> NodeStage:
        """The stage of a run; the one in memory, if it is the same.

        Args:
            check: called between the blocks, while they are built.
            on_part: called before each part that is loaded.
        """
        compiled = self._compile or request.compile
        window = window_of(self._weight_memory, request.extensions)
        parts = {part.name: part for part in request.parts}
        key = (
            request.config_hash, request.blocks, request.parts, compiled, n_threads(),
            replace(computing, threads=None), request.stored_format, window,
            None if window is None else (request.max_length, request.n_sequences),
        )  # fmt: skip
        if self._stage is not None and self._stage_key == key:
            return self._stage
        self.drop_stage()  # give the memory back before the next one takes it
        if isinstance(self._weights, ChunkFile):  # its manifest is only a claim
            own = [part.name for part in request.parts if _holds(self._weights, part)]
            self._weights.verify(own, self.store.checked, check)

        def source(name: str) -> WeightSource:
            on_part()
            return self._source_of(parts[name], request)

        stage: NodeStage
        why = why_torch(self.family.kernel_config(request.config), computing.device, request.dtype)
        refuse_torch(window, computing.packing, why)
        if computing.packing is not None and window is not None:
            inner = WindowStage(request.config, *request.blocks, n_threads(), computing.kv_dtype, n_spins())
            stage = ArrayStage(
                with_window(
                    inner, self._name, window, list(parts), source, computing.packing, self.store.directory,
                    request.max_length, request.n_sequences, None, check,
                )
            )  # fmt: skip
        elif computing.packing is not None:
            packing = computing.packing
            stage = self._kernel_stage(request, computing)
            placer = WeightPlacer(self._weight_memory)
            stage.load(list(parts), lambda name: kernel_weights(source(name), name, packing, placer, check))
        else:
            from mdi.node.torch_stage import TorchStage

            stored = None if request.stored_format else request.stored_dtype
            stage = TorchStage(self.family.secondary_stage(request, check), computing, stored)
            stage.load(list(parts), lambda name: torch_weights(source(name), name, computing.quantize, None))
        logger.debug("%s", told_path(self._name, *request.blocks, why if computing.packing is None else None))
        if compiled:
            stage.compile()
        self._stage, self._stage_key = stage, key
        self.blocks, self.model, self.device = request.blocks, request.model, computing.device
        return stage

    def _run_bytes(self, request: InitRequest, computing: Computing) -> int:
        """What a stage takes beside its weights, with the caches of one sequence; no weights are there yet."""
        if computing.packing is None:
            return self.family.stage_bytes(request, computing.kv_dtype)
        return self._kernel_stage(request, computing).run_bytes(request.max_length)

    def _kernel_stage(self, request: InitRequest, computing: Computing) -> ArrayStage:
        """A stage for the kernels, without weights."""
        return ArrayStage(KernelStage(request.config, *request.blocks, n_threads(), computing.kv_dtype, n_spins()))

    def _source_of(self, part: PartSpec, request: InitRequest) -> WeightSource:
        """Where a part is read from: this machine's own weights if it is there, else what was received."""
        source = self._weights
        if source is not None:
            source.release()  # parts are needed one after the other
        if source is not None and _holds(source, part):
            return source
        return self.store.part(part, request.config, request.config_hash)


def _holds(source: WeightSource, part: PartSpec) -> bool:
    return part.name in source.part_names() and source.info(part.name).sha256 == part.sha256
