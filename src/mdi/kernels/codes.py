"""The whole numbers and scales of an int8 or int4 weight, row by row, as a GPU multiplies them.

The same bits as in `kernels.layout`, in another order: nothing is rounded again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mdi.kernels.layout import Matrix, padded, rows_of_lines, split_records
from mdi.weight_formats import LAYOUTS, PANEL


class Codes(NamedTuple):
    """weight[o, i] = number[o, i] * scales[o, i // group], where `group` is that of the format's layout.

    Attributes:
        numbers: of int8, int8 (n_out, width). Of int4, uint8 (n_out, width / 2): byte 16 g + j of a row holds inputs 32 g + j
            in its low half and 32 g + 16 + j in its high one, each 8 too large.
        scales: float16 (n_out, width / group).
        width: inputs, padded with zeros to whole records.
    """

    numbers: np.ndarray
    scales: np.ndarray
    width: int


def codes_of(matrix: Matrix) -> Codes:
    """Numbers and scales of a packed weight in int8 or int4."""
    layout = LAYOUTS[matrix.format]
    n_rows, width = padded(matrix.n_out, PANEL), padded(matrix.n_in, layout.record_inputs)
    scales, lines = split_records(matrix.data, n_rows, width, matrix.format)
    if matrix.format == "int8":
        numbers = (rows_of_lines(lines, n_rows, width) ^ 128).view(np.int8)  # b - 128 in two's complement
    else:
        both = rows_of_lines(lines, n_rows, width // 2).reshape(n_rows, -1, 4, 4)  # (rows, groups, 4 bytes of 4)
        halves = np.stack((both & 15, both >> 4), axis=3).reshape(n_rows, -1, 2, 16)
        numbers = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(n_rows, width // 2)
    kept = slice(0, matrix.n_out)
    return Codes(np.ascontiguousarray(numbers[kept]), scales[kept].astype(np.float16), width)
