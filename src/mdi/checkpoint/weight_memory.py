"""Chooses how weights in a file are read while computing: from the file's pages, or from a copy in memory."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import replace

import numpy as np

from mdi.checkpoint.packing import PartWeights, arrays_of
from mdi.config import WeightMemory
from mdi.kernels.layout import Matrix, aligned_bytes

logger = logging.getLogger("mdi")

SLOWER = 1.1  # a mapping that is so many times slower than a copy is not used
_SAMPLE_BYTES = 32 << 20  # of a weight that is read to compare


class WeightPlacer:
    """Puts the weights of one stage into the memory from which they are read, part by part."""

    def __init__(self, memory: WeightMemory) -> None:
        self._memory = memory
        self._mode = memory.mode
        self._could_lock = True

    def place(self, weights: PartWeights) -> PartWeights:
        """The same weights, or copies of those that are mapped."""
        mapped = [w for w in weights.values() if isinstance(w, Matrix) and not w.data.flags.writeable]
        if self._mode == "auto" and mapped:
            self._mode = "copy" if is_mapping_slow(max(mapped, key=lambda w: w.data.nbytes).data) else "map"
            logger.debug("weights in files: %s", self._mode)
        if self._mode == "copy" and mapped:
            weights = {name: _copied(weight) for name, weight in weights.items()}
        if self._memory.lock and self._could_lock:
            self._could_lock = all(lock_pages(array) for array in arrays_of(weights))
            if not self._could_lock:
                logger.warning(
                    "--mlock: the system does not let this process lock all weights in memory: raise its limit (ulimit -l)"
                )
        return weights


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
