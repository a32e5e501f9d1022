"""The threads and the working memory of one stage, and single layers outside of blocks."""

from __future__ import annotations

import ctypes

import numpy as np

from mdi.errors import EngineError, KernelError
from mdi.kernels.cores import FreeCores
from mdi.kernels.layout import Matrix
from mdi.kernels.library import load
from mdi.kernels.structures import MdiMatrix, MdiModel, MdiNorm, check_matrix

MOST_THREADS = 256  # csrc/stage.h


class Context:
    """The threads and the working memory of one stage. One call computes at a time."""

    def __init__(self, n_threads: int = 1) -> None:
        library = load()
        if library is None:
            raise KernelError("the kernels are not available")
        self.library = library
        library.mdi_context_new.restype = ctypes.c_void_p
        n_threads = max(1, min(n_threads, MOST_THREADS))
        self.n_threads = n_threads
        handle = library.mdi_context_new(n_threads, 0)
        if not handle:
            raise KernelError(f"the system refused {n_threads} threads for the kernels: ask for fewer with --threads")
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(handle)
        self._free_cores, self._spins = FreeCores(n_threads), 0

    @property
    def handle(self) -> ctypes.c_void_p:
        assert self._handle is not None, "closed"
        return self._handle

    def look_around(self) -> None:
        """Let idle threads look for work, or sleep at once, as other processes leave the cores free now."""
        spins = self._free_cores.spins()
        if spins != self._spins:
            self._spins = spins
            self.library.mdi_context_spins(self.handle, spins)

    def close(self) -> None:
        if self._handle is not None:
            self.library.mdi_context_delete(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def linear(
    context: Context, model: MdiModel, norm: tuple[np.ndarray, np.ndarray | None] | None, matrix: Matrix,
    bias: np.ndarray | None, x: np.ndarray, softcap: float | None = None,
) -> np.ndarray:  # fmt: skip
    """A norm, if there is one, and a linear layer: float32 (N, n_in) -> (N, n_out); with `softcap`, of the results."""
    check_matrix(matrix)
    assert x.shape[1] == matrix.n_in and x.dtype == np.float32 and x.flags.c_contiguous
    own = MdiModel.from_buffer_copy(model)
    own.softcap = softcap or 0.0
    weight, norm_bias = norm if norm is not None else (None, None)
    spec = MdiNorm(None if weight is None else weight.ctypes.data, None if norm_bias is None else norm_bias.ctypes.data)
    y = np.empty((len(x), matrix.n_out), dtype=np.float32)
    packed = MdiMatrix.of(matrix, bias)
    done = context.library.mdi_linear(
        context.handle, ctypes.byref(own), ctypes.byref(spec), ctypes.byref(packed), ctypes.c_void_p(x.ctypes.data),
        len(x), ctypes.c_void_p(y.ctypes.data),
    )  # fmt: skip
    if done:
        raise EngineError(f"no memory is left to compute {len(x)} rows", "memory")
    return y
