"""Quantized blocks of a GGUF file in the kernels' format, if both have the same numbers: no second rounding.

Q4_0 is int4: 32 weights share a scale in half precision, and a half byte h stands for (h - 8) * scale. Q8_0 is not int8:
its scales are for 32 weights, the kernels' for 64.
"""

from __future__ import annotations

import numpy as np

from mdi.kernels.layout import Matrix, aligned_bytes, int4_bytes, matrix_bytes
from mdi.kernels.weight_range import check_range, largest_of
from mdi.weight_formats import LAYOUTS, PANEL

CARRIED_OVER = {"Q4_0": "int4"}  # ggml's name -> the kernels'

_BLOCK = 32  # weights of a block
_BLOCK_BYTES = 18  # a scale, then 16 bytes: the low halves are the first 16 weights, the high ones the others
_ROWS_AT_ONCE = 16 * PANEL


def carry_over(rows: np.ndarray, n_in: int, name: str) -> Matrix:
    """A weight in Q4_0 as a packed one in int4.

    Args:
        rows: uint8 (n_out, bytes of a row).
        name: of the tensor, for errors.

    Raises:
        CheckpointError: a scale is not finite.
    """
    n_out, layout = len(rows), LAYOUTS["int4"]
    data = aligned_bytes(matrix_bytes("int4", n_out, n_in))
    panels = data.reshape(-(-n_out // PANEL), -1)
    width = -(-n_in // layout.record_inputs) * layout.record_inputs
    for first in range(0, n_out, _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE].reshape(-1, n_in // _BLOCK, _BLOCK_BYTES)
        n_rows = -(-len(some) // PANEL) * PANEL
        scale = np.zeros((n_rows, width // _BLOCK), dtype=np.float16)
        scale[: len(some), : n_in // _BLOCK] = np.ascontiguousarray(some[..., :2]).view(np.float16)[..., 0]
        check_range("fp16", largest_of(scale), name, clips=False)
        halves = np.full((n_rows, width), 8, dtype=np.uint8)
        both = some[..., 2:]
        halves[: len(some), :n_in] = np.concatenate((both & 15, both >> 4), axis=2).reshape(len(some), n_in)
        panels[first // PANEL : (first + n_rows) // PANEL] = int4_bytes(scale, halves).reshape(n_rows // PANEL, -1)
    return Matrix("int4", n_out, n_in, data)
