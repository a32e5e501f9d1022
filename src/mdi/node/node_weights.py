"""Weights from which a secondary can build stages: its own, and received parts."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from mdi.block_ranges import block_span
from mdi.cancel import Cancel
from mdi.checkpoint.adapters import AdapterFile
from mdi.checkpoint.chunks import ChunkFile
from mdi.checkpoint.derived import own_bits
from mdi.checkpoint.kept_packed import KeptPacked
from mdi.checkpoint.part_users import note_user
from mdi.checkpoint.parts import Part
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weights import WeightSource
from mdi.control.messages import InitRequest, PartSpec, ProfileRequest
from mdi.errors import Code, ControlError, UsageError
from mdi.host.computing import Computing, choose_computing
from mdi.host.device import check_format, choose_device, choose_dtype, load_torch, why_torch
from mdi.kernels.weight_formats import ROUNDED
from mdi.spec.options import Requested, WeightMemory
from mdi.spec.window import window_of
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec, check_gradients, check_spec
from mdi.tensor.group import group_of
from mdi.tensor.shard_source import ShardFile, ShardSource
from mdi.units import size

logger = logging.getLogger("mdi")


class NodeWeights:
    """The `Supply` (mdi.stages.store) of a secondary.

    Args:
        name: of the node.
        weights: a chunk or checkpoint on this machine, or None.
        store: parts that were received.
        own: what the node was started with, which overrides the starter's request.
        family: of the models.
        memory: how weights in files are read.
    """

    def __init__(
        self,
        name: str,
        weights: WeightSource | None,
        store: BlockStore,
        own: Requested,
        family: ModelFamily,
        memory: WeightMemory,
    ) -> None:
        self._name = name
        self._weights = weights
        self._own_bits = None if weights is None else own_bits(weights)
        self.store, self.cache_dir = store, store.directory
        self._kept = KeptPacked(store)
        self.own = own
        self.device = choose_device(own.device)
        self.memory = memory
        self.family = family
        check_format(own.quantize, self.device)
        choose_dtype(own.dtype, "float32", self.device)  # reports mistakes before any port is bound
        self._lock = threading.Lock()  # of weights: a source is for one reader at a time
        self._shards: tuple[object, WeightSource | None] | None = None  # of the latest group's stage

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
        """The device and formats that this node computes in: what it was started with overrides the starter's request.

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
        config = self.family.kernel_config(request.model.config)
        if (reason := why_torch(config, device, asked.dtype)) is not None:
            load_torch(f"{self._name}: {reason}")
        return choose_computing(
            config, asked, request.model.dtype, request.model.format, is_rounded=request.model.is_rounded
        )

    def spec(self, request: InitRequest) -> StageSpec:
        """The stage that a run asks for. Raises ControlError, UsageError."""
        computing = self.computing(request)
        spec = StageSpec(
            self._name, request.model, request.blocks, request.parts, computing,
            window_of(self.memory, request.window), group_of(request.group, request.model.config),
            len(request.names), computing.extent(request.extent),
        )  # fmt: skip
        if spec.adapter_parts:  # before they are sent
            check_spec(spec)
        if request.gradients:
            check_gradients(spec)
        return spec

    def refuse_misfit_chunk(self, request: InitRequest) -> None:
        """A chunk that was named on the command line is a promise for its own weights. ControlError if it has other blocks.

        In a run of other weights it is ignored, like a checkpoint or a cache that does not fit: missing parts are sent.
        """
        chunk = self._weights
        if not isinstance(chunk, ChunkFile) or chunk.config_hash != request.model.config_hash:
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
        self, spec: StageSpec, loaded: Collection[str], cancel: Cancel, on_part: Callable[[], None] = lambda: None
    ) -> list[Part]:
        """Parts that are not here.

        Args:
            loaded: names of those that are in memory, and need not be looked for.
            on_part: called after each part that was looked for.
        """
        others = []
        with self._alone(cancel):
            source = self._own_weights(spec)
            for part in spec.parts:
                cancel.check()
                if part.name in loaded or (source is not None and _holds(source, part)):
                    on_part()
                else:
                    others.append(part)
        here = self.store.have([part.sha256 for part in others], cancel, on_part)
        return [part for part in others if part.sha256 not in here]

    def pieces(self, part: PartSpec) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a part, for another node. Raises ControlError (404) if it is not here."""
        if self.store.has(part.sha256):
            return self.store.pieces(part.sha256)
        for own in (self._own_bits, self._weights):
            if own is not None and _holds(own, part):
                return own.pieces(part.name)
        raise ControlError(f"{self._name} does not have {part.name}", 404, code=Code.WEIGHTS)

    def check_disk(self, spec: StageSpec, missing: list[Part]) -> None:
        """Free disk space for the parts that will come. Raises ControlError if there is too little."""
        needed = sum(part.n_bytes - self.store.partial_bytes(part.sha256) for part in missing)
        if needed:
            removed = self.store.free_space(needed, {part.sha256 for part in spec.parts})
            if removed:
                logger.info("%s removed %s of weights of earlier runs", self._name, size(removed))
        free = self.store.free_bytes()
        if needed > free:
            raise ControlError(
                f"{self._name} has {size(free)} free on the disk of its cache, but {size(needed)} of "
                "weights would come: free some space, or choose another place with --cache-dir",
                507,
                code=Code.DISK,
            )

    @contextlib.contextmanager
    def reading(self, spec: StageSpec, cancel: Cancel) -> Iterator[Callable[[str], WeightSource]]:
        """See Supply.reading; no other thread reads weights meanwhile."""
        keep = {part.sha256 for part in spec.parts}
        parts = {part.name: part for part in spec.parts}

        def source(name: str) -> WeightSource:
            cancel.check()
            of = self.source_of(parts[name], spec)
            if not spec.keeps_packed or name in spec.adapter_parts:
                return of
            return self._kept.part(of, parts[name], spec.packing, keep, cancel)

        with self._alone(cancel), self.store.in_use(keep):
            if isinstance(self._weights, ChunkFile):  # its manifest is only a claim
                verified = [part.name for part in spec.parts if _holds(self._weights, part)]
                self._weights.verify(verified, self.store.checked, cancel)
            try:
                yield source
            finally:
                own = self._weights
                is_own = own is not None and own.config_hash == spec.model.config_hash
                note_user(self.store, keep, spec.model.name, Path(str(own)) if is_own else None)
        self.device = spec.computing.device

    @contextlib.contextmanager
    def _alone(self, cancel: Cancel) -> Iterator[None]:
        """Prevents other threads from reading weights meanwhile."""
        while not self._lock.acquire(timeout=0.2):
            cancel.check()
        try:
            yield
        finally:
            self._lock.release()

    def source_of(self, part: Part, spec: StageSpec) -> WeightSource:
        """The source of a part: this machine's own weights if they have it, else the received part."""
        source = self._own_weights(spec)
        if source is not None:
            source.release()  # parts are needed one after the other
        if source is not None and _holds(source, part):
            return source
        file = self.store.part(part, spec.model.config, spec.model.config_hash)
        if part.name in spec.adapter_parts:
            return AdapterFile(file.path, part, spec.model.config, spec.model.config_hash)
        if spec.group is not None:  # a shard that the starter sent
            return ShardFile(file.path, part, spec.group.share(spec.model.config), spec.model.config_hash)
        return file

    def _own_weights(self, spec: StageSpec) -> WeightSource | None:
        """This machine's own weights of the run's model, or this node's share of them; None if there are none.

        In a run at a file's own bits they have these, too, so that a node with such a file needs no part of another's.
        """
        source = self._weights
        if self._own_bits is not None and self._own_bits.packing.blocks == spec.model.format:
            source = self._own_bits
        if source is None or source.config_hash != spec.model.config_hash:
            return None
        if spec.group is None:
            return source
        key = source is self._own_bits, spec.model.config_hash, spec.group, spec.computing.allow_clipping
        if self._shards is None or self._shards[0] != key:
            self._shards = key, _own_shards(spec, source)
        return self._shards[1]


def _own_shards(spec: StageSpec, source: WeightSource) -> WeightSource | None:
    """This node's share of weights that it has whole; None if it has none in the formats of the run.

    Plain weights are packed to see whether they are the same, which is quick only where nothing is rounded.
    """
    assert spec.group is not None
    packing, share = spec.group.packing, spec.group.share(spec.model.config)
    if source.packing is not None:
        return ShardSource(source, share, packing) if source.packing.untied == packing else None
    is_quick = packing.blocks not in ROUNDED
    return ShardSource(source, share, replace(packing, clips=spec.computing.allow_clipping)) if is_quick else None


def _holds(source: WeightSource, part: Part) -> bool:
    """Its length is known at once; its hash may have to be computed of all its bytes."""
    is_as_long = part.name in source.part_names() and source.n_bytes(part.name) == part.n_bytes
    return is_as_long and source.info(part.name).sha256 == part.sha256
