"""How fast one thread reads memory: sums over an array that no cache holds, with the fastest of torch's kernels."""

from __future__ import annotations

import time
from typing import Any

import torch

from peers.protocol import Case, serve

N_BYTES = 1 << 29
DTYPES = (torch.float32, torch.int32, torch.int64)
N_PASSES = 4  # per format and case; the best counts, for a limit is what can be reached


class ReadTest:
    """A "system" whose only number is `read_bytes_per_s`."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._bytes = torch.ones(N_BYTES, dtype=torch.uint8)

    def run(self, case: Case) -> dict[str, Any]:
        best_s = float("inf")
        for dtype in DTYPES:
            data = self._bytes.view(dtype)
            for _ in range(N_PASSES):
                begin = time.perf_counter()
                data.sum()
                best_s = min(best_s, time.perf_counter() - begin)
        return {"times_s": [], "read_bytes_per_s": N_BYTES / best_s}

    def end(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(lambda options: ReadTest())
