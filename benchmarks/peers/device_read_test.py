"""How fast a device reads its memory: products of a matrix that no cache holds with a vector, as decoding does.

Options: {"device": "cuda:0"}
"""

from __future__ import annotations

import time
from typing import Any

from mdi.placement.profiling import reader
from peers.protocol import Case, serve

N_BYTES = {"cpu": 1 << 28}  # a GPU's cache is larger
DEFAULT_BYTES = 1 << 32
N_PASSES = 20  # the best counts, for a limit is what can be reached


class DeviceReadTest:
    """A "system" whose only number is `read_bytes_per_s`."""

    def __init__(self, options: dict[str, Any]) -> None:
        device = options["device"]
        self._read, self._n_bytes = reader(N_BYTES.get(device, DEFAULT_BYTES), device)

    def run(self, case: Case) -> dict[str, Any]:
        taken = []
        for _ in range(N_PASSES):
            begin = time.perf_counter()
            self._read()
            taken.append(time.perf_counter() - begin)
        return {"times_s": [], "read_bytes_per_s": self._n_bytes / min(taken)}

    def end(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(DeviceReadTest)
