"""How fast packed weights are read from memory by a processor that does nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mdi.kernels.layout import Matrix


def read_packed(matrices: Sequence[Matrix], n_threads: int, n_times: int = 8) -> float:
    """Bytes per second of all packed pages, of so many times the best.

    Each thread has a range of the panels of each matrix, as in the kernels.
    """
    pieces: list[list[np.ndarray]] = [[] for _ in range(n_threads)]
    for matrix in matrices:
        words = matrix.data.reshape(-1).view(np.uint8)
        words = words[: words.size // 64 * 64].view(np.int64)
        for thread, piece in enumerate(np.array_split(words, n_threads)):
            pieces[thread].append(piece)

    def read(own: list[np.ndarray]) -> None:
        for piece in own:
            piece.max()

    best_s = float("inf")
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(n_times):
            begin = time.perf_counter()
            list(pool.map(read, pieces))
            best_s = min(best_s, time.perf_counter() - begin)
    return sum(matrix.data.nbytes for matrix in matrices) / best_s
