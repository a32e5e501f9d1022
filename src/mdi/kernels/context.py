"""The threads and the working memory of one stage, and single layers outside of blocks."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mdi.control_groups import n_cores
from mdi.errors import EngineError, KernelError
from mdi.kernels.layout import Matrix
from mdi.kernels.library import load
from mdi.kernels.structures import MdiMatrix, MdiModel, MdiNorm, check_matrix

MOST_THREADS = 256  # csrc/stage.h
SPINS = 2000  # looks of an idle thread before it sleeps: tens of microseconds
SPAN_S = 1.0  # between two measurements
OTHERS_SHARE = 0.1  # share of each used core that other programs may take


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


class Linear:
    """A norm, if there is one, and a linear layer: float32 (N, n_in) -> (N, n_out); with `softcap`, of the results.

    Args:
        norm: weight and bias (n_in); the memory of all is used without copying.

    Raises:
        KernelError: the matrix has other bytes than its shape says.
    """

    def __init__(
        self, context: Context, model: MdiModel, norm: tuple[np.ndarray, np.ndarray | None] | None, matrix: Matrix,
        bias: np.ndarray | None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        check_matrix(matrix)
        self._context = context
        self._kept = norm, matrix, bias
        self._n_in, self._n_out = matrix.n_in, matrix.n_out
        self._model = MdiModel.from_buffer_copy(model)
        self._model.softcap = softcap or 0.0
        weight, norm_bias = norm if norm is not None else (None, None)
        addresses = (None if one is None else one.ctypes.data for one in (weight, norm_bias))
        self._norm, self._matrix = MdiNorm(*addresses), MdiMatrix.of(matrix, bias)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Raises EngineError: no memory is left."""
        assert x.shape[1] == self._n_in and x.dtype == np.float32 and x.flags.c_contiguous
        y = np.empty((len(x), self._n_out), dtype=np.float32)
        done = self._context.library.mdi_linear(
            self._context.handle, ctypes.byref(self._model), ctypes.byref(self._norm), ctypes.byref(self._matrix),
            ctypes.c_void_p(x.ctypes.data), len(x), ctypes.c_void_p(y.ctypes.data),
        )  # fmt: skip
        if done:
            raise EngineError(f"no memory is left to compute {len(x)} rows", "memory")
        return y


class FreeCores:
    """Whether this process has its cores to itself: only then may its idle threads spin.

    Measures about once a second, when it is asked, what other processes take of this one's cores.

    Args:
        n_threads: that compute.
        clock, own_s: seconds, and processor seconds of this process.
        busy_s: processor seconds of all processes on this one's cores; None where the system does not tell.
    """

    def __init__(
        self,
        n_threads: int,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] = time.process_time,
        busy_s: Callable[[], float | None] | None = None,
    ) -> None:
        self._n_threads = n_threads
        self._clock, self._own_s, self._busy_s = clock, own_s, busy_s or busy_core_s
        self._can_spin = 1 < n_threads <= n_cores()
        self._begin, self._before = clock(), self._others_s()
        self._spins = 0

    def spins(self) -> int:
        """How often an idle thread of the kernels may poll for work before it sleeps; 0 beside other work or under a quota."""
        now = self._clock()
        if not self._can_spin or now - self._begin < SPAN_S:
            return self._spins
        others, span, before = self._others_s(), now - self._begin, self._before
        self._begin, self._before = now, others
        is_free = before is not None and others is not None and others - before <= OTHERS_SHARE * self._n_threads * span
        self._spins = SPINS if is_free else 0
        return self._spins

    def _others_s(self) -> float | None:
        busy = self._busy_s() if self._can_spin else None
        return None if busy is None else busy - self._own_s()


def busy_core_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds that the cores which this process may use were busy since the system's start; None if it does not say."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy, n_found = 0, 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in cores:
            user, nice, system, _idle, _iowait, *interrupted = map(int, fields[:8])
            busy += user + nice + system + sum(interrupted)
            n_found += 1
    return busy / os.sysconf("SC_CLK_TCK") if n_found == len(cores) else None  # a sandbox may show fewer
