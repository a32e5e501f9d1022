"""Reads memory as decoding does: a product of matrix and vector, which uses each number once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mdi.kernels import library
from mdi.kernels.blocks import Context, Linear, MdiModel
from mdi.kernels.layout import Matrix, aligned_bytes, matrix_bytes
from mdi.machine.threads import n_threads

WIDTH = 1024  # numbers in a row


def reader(n_bytes: int, device: str) -> tuple[Callable[[], object], int]:
    """A function that reads about so many bytes of a device's memory on the node's threads, and their number.

    Uses the kernels if there are some, else torch.
    """
    n_rows = max(16, n_bytes // (4 * WIDTH) // 16 * 16)
    is_ready = device == "cpu" and library.load() is not None
    return (_in_kernels(n_rows) if is_ready else _in_torch(n_rows, device)), 4 * WIDTH * n_rows


def _in_kernels(n_rows: int) -> Callable[[], object]:
    data = aligned_bytes(matrix_bytes("float32", n_rows, WIDTH))
    data.view(np.float32)[:] = 0.5
    matrix = Matrix("float32", n_rows, WIDTH, data)
    context, vector = Context(n_threads()), np.ones((1, WIDTH), dtype=np.float32)
    linear = Linear(context, MdiModel(), None, matrix, None)
    return lambda: linear(vector)


def _in_torch(n_rows: int, device: str) -> Callable[[], object]:
    import torch

    matrix = torch.full((n_rows, WIDTH), 0.5, device=device)
    vector = torch.ones(WIDTH, device=device)

    def read() -> None:
        torch.mv(matrix, vector)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    return read
