"""How fast threads read memory: sums over an array that no cache holds, with the fastest of torch's and numpy's loops.

On huge pages (Linux), where memory is read fastest: a processor looks up one page for 2 MB instead of 512.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from peers.protocol import Case, serve

N_BYTES = 1 << 29
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)  # a 32-bit integer sum makes a copy first
N_PASSES = 4  # per format and case; the best counts, for a limit is what can be reached


class ReadTest:
    """A "system" whose only number is `read_bytes_per_s`: of so many threads together."""

    def __init__(self, n_threads: int = 1) -> None:
        torch.set_num_threads(n_threads)
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        memory = mmap.mmap(-1, N_BYTES, **private)  # what is shared has no huge pages
        with contextlib.suppress(AttributeError, OSError):  # other systems, and kernels that have none
            memory.madvise(mmap.MADV_HUGEPAGE)
        data = torch.frombuffer(memory, dtype=torch.uint8)
        data.fill_(0x3F)  # so that every page is a page of its own; ordinary numbers in all the formats
        floats, numbers = data.view(torch.float32), data.numpy().view(np.int64)
        self._loops: list[Callable[[], Any]] = [data.view(dtype).sum for dtype in DTYPES]
        self._loops += [lambda: torch.dot(floats, floats), numbers.max]
        self._fastest = self._loops[0]

    def run(self, case: Case) -> dict[str, Any]:
        times = [_best_s(loop) for loop in self._loops]
        self._fastest = self._loops[times.index(min(times))]
        return {"times_s": [], "read_bytes_per_s": N_BYTES / min(times)}

    def bytes_per_s(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """By the loop that was the fastest in the last run, in a small part of its time."""
        return N_BYTES / _best_s(self._fastest, clock)

    def end(self) -> dict[str, Any]:
        return {}


def _best_s(read: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    for _ in range(N_PASSES):
        begin = clock()
        read()
        times.append(clock() - begin)
    return min(times)


if __name__ == "__main__":
    serve(lambda options: ReadTest())
