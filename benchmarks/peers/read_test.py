"""How fast one thread reads memory: sums over an array that no cache holds, with the fastest of torch's and numpy's loops.

On huge pages, where memory is read fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from peers.huge_pages import use_huge_pages
from peers.protocol import Case, serve

N_BYTES = 1 << 29
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)  # a 32-bit integer sum makes a copy first
N_PASSES = 4  # per format and case; the best counts, for a limit is what can be reached


class ReadTest:
    """A "system" whose only number is `read_bytes_per_s`."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        # Written, so that every page is a page of its own; ordinary numbers in all the formats.
        self._bytes = torch.full((N_BYTES,), 0x3F, dtype=torch.uint8)
        use_huge_pages()

    def run(self, case: Case) -> dict[str, Any]:
        best_s = float("inf")
        for dtype in DTYPES:
            data = self._bytes.view(dtype)
            best_s = min(best_s, *(_time(data.sum) for _ in range(N_PASSES)))
        floats = self._bytes.view(torch.float32)
        best_s = min(best_s, *(_time(lambda: torch.dot(floats, floats)) for _ in range(N_PASSES)))
        numbers = self._bytes.numpy().view(np.int64)
        best_s = min(best_s, *(_time(numbers.max) for _ in range(N_PASSES)))
        return {"times_s": [], "read_bytes_per_s": N_BYTES / best_s}

    def end(self) -> dict[str, Any]:
        return {}


def _time(read: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    read()
    return time.perf_counter() - begin


if __name__ == "__main__":
    serve(lambda options: ReadTest())
