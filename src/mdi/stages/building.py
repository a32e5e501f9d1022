"""Stages by their description: the same path for a starter's, a secondary's and a group member's, with and without a window.

The weights of a part come into memory packed for the kernels, mapped or copied, or as torch needs them.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mdi.cancel import Cancel
from mdi.checkpoint.packing import Packing, PartWeights, arrays_of
from mdi.checkpoint.weights import WeightSource
from mdi.engine.worker import Backend
from mdi.errors import CheckpointError
from mdi.host.computing import Computing
from mdi.host.threads import n_threads
from mdi.kernels import library
from mdi.kernels.blocks import Weights
from mdi.kernels.layout import MOST, Matrix, aligned_bytes, check_range
from mdi.model.caches import CHUNK_ROWS
from mdi.model.spec import ModelSpec
from mdi.spec.options import WeightMemory
from mdi.spec.window import window_of
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec, check_spec
from mdi.stages.window import open_window
from mdi.stages.window_budget import RunMemory, absorbed_bytes, work_bytes
from mdi.tensor.shard_blocks import GroupSum

if TYPE_CHECKING:
    import torch

    from mdi.stages.torch_packed import Weights as TorchWeights

PROMPT_ROWS = 256  # of prompts in a frame: every frame costs a pass over the weights, so few of them are to do

_FOLDER = "window"  # in the cache folder, for weights that have to be packed


def build_stage(
    spec: StageSpec, source: Callable[[str], WeightSource], loaded: Mapping[str, Weights], family: ModelFamily,
    memory: WeightMemory, cache_dir: Path, cancel: Cancel, promised: int = 0,
) -> Backend:  # fmt: skip
    """A stage with its weights, which is not prepared for a run yet.

    Args:
        source: gives that of each part; called before each part that is not in memory.
        loaded: weights of parts that are in memory already, as the kernels have them.
        memory: how weights in files are read.
        cache_dir: of the node, for weights that must be packed for a window.
        promised: bytes that other stages of this process will take.

    Raises:
        UsageError: kernels and torch cannot do this. LimitError: it does not fit into the memory.
        CheckpointError: the weights cannot be read.
    """
    check_spec(spec)
    adapter_parts = spec.adapter_parts
    computing, names = spec.computing, [part.name for part in spec.parts if part.name not in adapter_parts]
    if spec.is_torch:
        from mdi.stages.torch_stage import TorchStage

        inner = family.stage(spec.model.config, spec.blocks, spec.has_ends, spec.n_nodes, cancel)
        stage = TorchStage(inner, computing, spec.extent.kv_dtype, None if spec.model.formats else spec.model.dtype)
        stage.load(names, lambda name: torch_weights(source(name), name, computing))
        if computing.compile:
            stage.compile()
        return stage
    weights: Resident | Any
    if spec.window is not None:
        n_rows = spec.extent.n_sequences * spec.n_rows
        work = work_bytes(spec.model.spec if spec.has_ends else spec.own_spec, PROMPT_ROWS + n_rows, n_rows)
        absorbed = absorbed_bytes(spec.own_spec.blocks[slice(*spec.blocks)])
        run = RunMemory(
            spec.run_bytes(family), spec.extent.n_sequences, work + spec.adapter_bytes, spec.kv_memory,
            promised + spec.beside + absorbed,
        )  # fmt: skip
        folder = cache_dir / _FOLDER
        weights = open_window(
            spec.name, spec.window, names, source, spec.packing, folder, run, cancel, may_be_apart=spec.group is None
        )
    else:
        placer, packing = WeightPlacer(memory, computing.mlock, spec.name), spec.packing

        def part_weights(name: str) -> Weights:
            if name not in loaded:
                return kernel_weights(source(name), name, packing, placer, cancel)
            placer.lock(loaded[name])
            return loaded[name]

        weights = Resident([*names, *adapter_parts], part_weights)
    try:
        adapters = {name: weights[name] if name in weights else source(name).weights(name) for name in adapter_parts}
        group = None if spec.group is None else GroupSum(spec.group.share(spec.model.config))
        return KernelStage(spec.model.spec, *spec.blocks, weights, n_threads(), spec.extent.kv_dtype, group, adapters)
    except BaseException:
        weights.close()
        raise


def prompt_rows(memory: WeightMemory, spec: ModelSpec) -> int:
    """Rows of prompts in a frame at most; of a model with windows of attention or states, what is counted for its caches."""
    return CHUNK_ROWS if window_of(memory) is None or spec.has_window or spec.has_states else PROMPT_ROWS


POPULATE_BYTES = 64 << 20  # bytes that are loaded between two looks at whether it goes on
SLOWER = 1.1  # a mapping that is so many times slower than a copy is not used

_SAMPLE_BYTES = 32 << 20  # of a weight that is read to compare
_MADV_POPULATE_READ = 22  # Linux 5.14 and later; elsewhere a byte of each page is read
_BAD = (errno.EFAULT, errno.EIO, getattr(errno, "EHWPOISON", errno.EIO))

logger = logging.getLogger("mdi")


def kernel_weights(
    source: WeightSource, part: str, packing: Packing, placer: WeightPlacer, cancel: Cancel
) -> PartWeights:
    """The weights of a part in memory, or in their file if that has the right form.

    Args:
        placer: decides whether mapped weights are copied and kept in memory.

    Raises:
        CheckpointError: the source cannot be read, or does not have the part.
    """
    weights = source.weights(part, packing)
    arrays = arrays_of(weights)
    populate(arrays, str(source), lambda n_bytes: cancel.check())
    label_for_fault_reports(library.load(), arrays, str(source))
    return placer.place(weights)


def torch_weights(source: WeightSource, part: str, computing: Computing) -> TorchWeights:
    """The weights of a part for torch: packed in the format that was asked for, else plain.

    Raises:
        CheckpointError: as `kernel_weights`; or they are too large for the type that is computed in.
    """
    form = computing.quantize if part.startswith("block.") else computing.quantize_head
    if form is not None:
        return dict(
            source.weights(part, Packing(form, form, computing.allow_clipping, folds=not computing.is_rounded).untied)
        )
    tensors = source.tensors(part)
    if computing.dtype != "float16":
        return dict(tensors)
    return {name: _within_half(tensor, name, computing.allow_clipping) for name, tensor in tensors.items()}


def _within_half(tensor: torch.Tensor, name: str, clips: bool) -> torch.Tensor:
    """A tensor that half precision holds. Raises CheckpointError as `torch_weights`."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return tensor
    low, high = tensor.aminmax()
    if check_range("float16", max(float(high), -float(low)), name, clips):
        return tensor.float().clamp(-MOST["float16"], MOST["float16"]).half()
    return tensor


class WeightPlacer:
    """Puts the weights of one stage into the memory from which they are read, part by part.

    Args:
        locks: whether the system must keep them in memory. If it does not, that is said once, and they are used all the same.
        name: of the node, for that message.
    """

    def __init__(self, memory: WeightMemory, locks: bool = False, name: str = "") -> None:
        self._mode, self._locks, self._name = memory.mode, locks, name

    def place(self, weights: PartWeights) -> PartWeights:
        """The same weights, or copies of those that are mapped."""
        mapped = [w for w in weights.values() if isinstance(w, Matrix) and not w.data.flags.writeable]
        if self._mode == "auto" and mapped:
            self._mode = "copy" if is_mapping_slow(max(mapped, key=lambda w: w.data.nbytes).data) else "map"
            logger.debug("weights in files: %s", self._mode)
        if self._mode == "copy" and mapped:
            weights = {name: _copied(weight) for name, weight in weights.items()}
        self.lock(weights)
        return weights

    def lock(self, weights: Weights) -> None:
        """Keep weights in memory, also those of another stage, if that is asked for."""
        if self._locks and not all(lock_pages(array) for array in arrays_of(dict(weights))):
            self._locks = False
            logger.warning(
                "%s: --mlock: the system does not let this process lock all weights in memory; it goes on, and they may be "
                "swapped out: raise its limit (ulimit -l, of a service LimitMEMLOCK=)", self._name,
            )  # fmt: skip


def is_mapping_slow(data: np.ndarray) -> bool:
    """Whether a copy of mapped bytes is read faster than they are, by more than a tenth: the best of five turns each."""
    sample = data[: min(data.size, _SAMPLE_BYTES) // 64 * 64]
    copy = aligned_bytes(sample.size)
    copy[:] = sample
    best = {"mapped": float("inf"), "copied": float("inf")}
    for _ in range(5):
        for name, array in (("mapped", sample), ("copied", copy)):
            begin = time.perf_counter()
            array.view(np.int64).max(initial=0)
            best[name] = min(best[name], time.perf_counter() - begin)
    return best["mapped"] > SLOWER * best["copied"]


def _copied(weight: Matrix | np.ndarray) -> Matrix | np.ndarray:
    """All of them, small ones too: a single view keeps the whole file's pages in memory."""
    if not isinstance(weight, Matrix):
        return weight.copy()
    data = aligned_bytes(weight.data.size)
    data[:] = weight.data
    return replace(weight, data=data)


def lock_pages(array: np.ndarray) -> bool:
    """Keep an array's pages in memory; whether the system does."""
    try:
        function = ctypes.CDLL(None, use_errno=True).mlock
    except (OSError, AttributeError, TypeError):  # another system
        return False
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return bool(function(array.ctypes.data, array.nbytes) == 0)


def populate(arrays: Iterable[np.ndarray], where: str, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """Load mapped pages now, so that the first token does not wait for them, and find out whether they can be read.

    Args:
        where: the file, for the error.
        on_bytes: called with the size of each loaded piece; its exceptions pass through.

    Raises:
        CheckpointError: the file was cut short since it was mapped, or the disk cannot read it.
    """
    for array in arrays:
        data = array.reshape(-1).view(np.uint8)
        for first in range(0, data.size, POPULATE_BYTES):
            piece = data[first : first + POPULATE_BYTES]
            _populate(piece, where)
            on_bytes(piece.size)


def _populate(data: np.ndarray, where: str) -> None:
    """Load the pages of some bytes."""
    start = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    error = ask_for(start, data.ctypes.data + data.size - start)
    if error in _BAD:
        raise CheckpointError(
            f"{where} cannot be read: it was cut short, or the disk is damaged ({os.strerror(error)})"
        )
    if error:  # a system that does not know of this
        data[:: mmap.PAGESIZE].max(initial=0)


def ask_for(address: int, n_bytes: int) -> int:
    """Have the system bring pages; 0, or its error number."""
    madvise = madvise_function()
    if madvise is None:
        return errno.ENOSYS
    while madvise(address, n_bytes, _MADV_POPULATE_READ) != 0:
        error = ctypes.get_errno()
        if error not in (errno.EINTR, errno.EAGAIN):
            return error
    return 0


@functools.cache
def madvise_function() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):  # another system
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def label_for_fault_reports(library: Any, arrays: Iterable[np.ndarray], where: str) -> None:
    """Have the kernels end this process with a line that names the file, if a page of its mapping cannot be read later on.

    Without it, the system ends the process with SIGBUS and no word.

    Args:
        library: of kernels; what it does not know is left out.
        arrays: views of mappings; others are ignored.
    """
    if not hasattr(library, "mdi_watch_mapping"):
        return
    library.mdi_watch_mapping.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    library.mdi_unwatch_mapping.argtypes = [ctypes.c_int]
    message = f"error: {where} cannot be read any more: it was cut short, or the disk is damaged\n".encode()
    for whole in {id(whole): whole for whole in map(_mapping_of, arrays) if whole is not None}.values():
        slot = library.mdi_watch_mapping(whole.ctypes.data, whole.nbytes, message)
        if slot >= 0:
            weakref.finalize(whole, library.mdi_unwatch_mapping, slot)


def _mapping_of(array: np.ndarray) -> np.ndarray | None:
    """The array over the whole mapping that this one is a view of."""
    base = array.base
    while isinstance(base, np.ndarray):
        array, base = base, base.base
    owner = base.obj if isinstance(base, memoryview) else base
    return array if isinstance(owner, mmap.mmap) else None
