"""Cuts parts out of a packed weight without rounding again: rows are outputs, columns are inputs.

Scales belong to groups of inputs. A cut within a group keeps the group's scale: the piece that is wanted stays at its place in
the group, and the rest of the group becomes zero. Inputs before the first one that is wanted are then the matrix's `skip`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mdi.kernels.layout import (
    Bytes,
    Matrix,
    aligned_bytes,
    int4_bytes,
    lines_of,
    matrix_bytes,
    padded,
    records_of,
    rows_of_lines,
    split_records,
)
from mdi.weight_formats import LAYOUTS, PANEL, Layout

Range = tuple[int, int]

_ZERO = {"int8": 128, "int4": 8}  # the code of a weight that is zero
# For formats without scales: the type of a number's bits, and how many numbers of one output are adjacent.
_NUMBERS = {"float32": (np.uint32, 1), "bf16": (np.uint16, 2), "fp16": (np.uint16, 1)}


def cut(matrix: Matrix, rows: Sequence[Range] | None = None, columns: Range | None = None) -> Matrix:
    """The weights of some outputs and inputs.

    Args:
        rows: ranges of outputs, which follow each other in the result; None is all.
        columns: a range of inputs; None is all.
    """
    assert matrix.skip == 0, "cut already"
    rows = [(0, matrix.n_out)] if rows is None else [r for r in rows if r[0] < r[1]]
    first, last = columns or (0, matrix.n_in)
    n_out, skip = sum(b - a for a, b in rows), skipped(matrix.format, first, last)
    n_in = skip + last - first if last > first else 0
    data = aligned_bytes(matrix_bytes(matrix.format, n_out, n_in))
    if n_out and n_in:
        data[:] = _bytes_of(matrix, rows, first - skip, first, last)
    return Matrix(matrix.format, n_out, n_in, data, skip)


def skipped(form: str, first: int, last: int) -> int:
    """How many inputs of zeros precede input `first` of a weight that is cut there."""
    group = LAYOUTS[form].group
    return first % group if group and last > first else 0


def _bytes_of(matrix: Matrix, rows: Sequence[Range], start: int, first: int, last: int) -> Bytes:
    """The packed bytes of the inputs [start, last); those before `first` become zero."""
    layout = LAYOUTS[matrix.format]
    n_records = padded(matrix.n_in, layout.record_inputs) // layout.record_inputs
    are_panels = (
        all(a % PANEL == 0 and (b % PANEL == 0 or b == matrix.n_out) for a, b in rows)
        and len([b for _, b in rows[:-1] if b % PANEL]) == 0
    )
    are_records = first % layout.record_inputs == 0 and (last % layout.record_inputs == 0 or last == matrix.n_in)
    panels = matrix.data.reshape(-1, n_records, layout.record_bytes)
    if are_records:  # the inputs, as they lie
        panels = panels[:, first // layout.record_inputs : -(-last // layout.record_inputs)]
    if are_panels:
        panels = _joined([panels[a // PANEL : -(-b // PANEL)] for a, b in rows])
    if are_records and are_panels:
        return panels.reshape(-1)
    width = panels.shape[1] * layout.record_inputs
    chosen = [(0, len(panels) * PANEL)] if are_panels else rows
    columns = (0, width, 0) if are_records else (start, last, first - start)
    repack = _scaled if layout.group else _plain
    return repack(
        matrix.format, layout, np.ascontiguousarray(panels).reshape(-1), len(panels) * PANEL, width, chosen, columns
    )


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _plain(
    form: str, layout: Layout, data: Bytes, n_rows: int, width: int, rows: Sequence[Range], columns: tuple[int, int, int]
) -> Bytes:  # fmt: skip
    dtype, per_line = _NUMBERS[form]
    numbers = rows_of_lines(
        data.view(dtype).reshape(n_rows // PANEL, width // per_line, PANEL, per_line), n_rows, width
    )
    start, last, _ = columns
    chosen = _joined([numbers[a:b] for a, b in rows])[:, start:last]
    block = np.zeros((padded(len(chosen), PANEL), padded(last - start, layout.record_inputs)), dtype=dtype)
    block[: len(chosen), : last - start] = chosen
    return np.ascontiguousarray(lines_of(block, per_line)).view(np.uint8).reshape(-1)


def _scaled(
    form: str, layout: Layout, data: Bytes, n_rows: int, width: int, rows: Sequence[Range], columns: tuple[int, int, int]
) -> Bytes:  # fmt: skip
    """`columns`: start and end, and how many from the start on become zero."""
    scales, lines = split_records(data, n_rows, width, form)
    codes = _codes(form, lines, n_rows, width)
    start, last, n_zero = columns
    codes, scales = (_joined([array[a:b] for a, b in rows]) for array in (codes, scales))
    n_groups = -(-(last - start) // layout.group)
    shape = padded(len(codes), PANEL), padded(last - start, layout.record_inputs)
    new_codes = np.full(shape, _ZERO[form], dtype=np.uint8)
    new_codes[: len(codes), n_zero : last - start] = codes[:, start + n_zero : last]
    new_scales = np.zeros((shape[0], shape[1] // layout.group), dtype=np.float16)
    new_scales[: len(codes), :n_groups] = scales[:, start // layout.group : start // layout.group + n_groups]
    if form == "int4":
        return int4_bytes(new_scales, new_codes)
    return records_of(new_scales, lines_of(new_codes, 4), 32)


def _codes(form: str, lines: np.ndarray, n_rows: int, width: int) -> np.ndarray:
    """uint8 (rows, inputs): a number as it is stored, without its scale."""
    if form == "int8":
        return rows_of_lines(lines, n_rows, width)
    both = rows_of_lines(lines, n_rows, width // 2).reshape(n_rows, width // 8, 4)
    return np.stack((both & 15, both >> 4), axis=2).reshape(n_rows, width)
