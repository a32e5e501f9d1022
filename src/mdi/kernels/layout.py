"""The layout of a linear layer's weights in files and in memory: the bytes that the kernels read.

One layout for all processors. A weight (n_out, n_in) is cut into panels of 16 outputs. Panel after panel, the inputs follow
each other in lines of 64 bytes, which hold the same few inputs of all 16 outputs, so that one linear stream of bytes feeds
sixteen sums. Outputs are padded to whole panels, inputs to whole records, both with weights that are zero.

format   record                                                               inputs of a record
float32  1 line: 16 outputs                                                   1
bf16     1 line: 16 outputs x 2 inputs                                        2
fp16     1 line: 2 inputs x 16 outputs                                        2
int8     1 line of scales, 32 lines of 16 outputs x 4 inputs                  128, in two groups of 64
int4     1 line of scales, 8 lines of 16 outputs x 8 inputs                   64, in two groups of 32
mxfp4    1 line of scales, 16 lines of 16 outputs x 8 inputs                  128, in four groups of 32

A scale belongs to one output and one group, in half precision; the line of scales holds the first group's sixteen, then
the second's, and so on. A byte b of int8 stands for (b - 128) * scale, and b - 128 stays within +-127. A half h of a byte of
int4 stands for (h - 8) * scale; of inputs 8i to 8i + 7 the line holds the first four in the low halves and the others in the
high ones. So does mxfp4 (Open Compute Project, Microscaling Formats 1.0): a half is a sign, two bits of an exponent and one of
a fraction (0, 0.5, 1, 1.5, 2, 3, 4, 6), and a byte s is the scale 2^(s - 127). Where s is 0 the kernels count zeros.

Block types of GGUF files lie otherwise: csrc/block_types.h, `block_rows`.

A part is cut out of a packed weight without rounding again. Scales belong to groups of inputs: a cut within a group keeps the
group's scale, the piece that is wanted stays at its place in the group, and the rest of the group becomes zero. Inputs before
the first one that is wanted are then the matrix's `skip`. Of a block type whole records are kept, and nothing becomes
zero: rows have zeros there.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mdi.control_groups import n_cores
from mdi.errors import CheckpointError, UsageError
from mdi.kernels import library
from mdi.kernels.block_rows import chosen_rows, numbers_of, pack_rows, unpack_rows
from mdi.kernels.block_search import quantize_rows
from mdi.kernels.format_maps import is_word, matrix_pieces, rows_form, runs_of_rows
from mdi.kernels.lazy_rows import LazyRows, Rows, part_of_rows, stacked
from mdi.kernels.memory_nodes import spread
from mdi.kernels.weight_formats import BLOCK_TYPES, HALVES, LAYOUTS, MADE, PACKED_ROWS, PANEL, Layout, layout_of

_HALF, _BF16, _FLOAT = 65504.0, 3.3895313892515355e38, 3.4028234663852886e38  # the largest finite numbers

# The largest absolute value of a weight. A scale of int8 and int4 is in half precision, and stands for 127 or 8 steps.
MOST = {
    "float32": _FLOAT, "bf16": _BF16, "fp16": _HALF, "int8": 127 * _HALF, "int4": 8 * _HALF, "mxfp4": 6.0 * 2.0**125,
    "bfloat16": _BF16, "float16": _HALF,
    "q8_0": 127 * _HALF, "q5_0": 15 * _HALF, "q4_k": 15 * 63 * _HALF, "q6_k": 31 * 127 * _HALF,
}  # fmt: skip


def largest_of(weight: np.ndarray) -> float:
    """The largest absolute value; NaN or infinity if a number is not finite.

    Args:
        weight: of any floating-point type, or uint16 that holds the bits of bfloat16.
    """
    if not weight.size:
        return 0.0
    if weight.dtype == np.uint16:  # the bits of positive numbers are in their order, then come infinity and NaN
        return float((np.uint32((weight & 0x7FFF).max()) << np.uint32(16)).view(np.float32))
    if weight.dtype == np.float16:
        return float((weight.view(np.uint16) & 0x7FFF).max().view(np.float16))
    return max(float(weight.max()), -float(weight.min()))  # both are NaN if one number is


def check_range(form: str, most: float, name: str, clips: bool) -> bool:
    """Whether a weight must be clipped to `MOST` to be held.

    Args:
        form: a key of MOST.
        most: largest absolute value.
        name: of the tensor.
        clips: whether weights may be clipped.

    Raises:
        CheckpointError: it is not finite, or larger than the format holds and may not be clipped.
    """
    if most <= MOST[form]:
        return False
    if not math.isfinite(most):
        raise CheckpointError(
            f"{name} has numbers that are not finite: the checkpoint is damaged, fetch or convert it again"
        )
    if not clips:
        wider = [f for f in _WIDER.get(form, ("bf16", "float32")) if most <= MOST[f]]
        instead = f"choose {wider[0]}" if wider else "no format holds that"
        raise CheckpointError(
            f"{name} has numbers up to {most:.5g}, and {form} holds {MOST[form]:.5g} at most: {instead}, or clip them with "
            "--allow-clipping"
        )
    return True


_WIDER = {"int4": ("int8", "bf16", "float32"), "float16": ("bfloat16", "float32"), "bfloat16": ("float32",)}


LINE_BYTES = 64
ALIGN_BYTES = 64
_BYTES_AT_A_TIME = 1 << 20  # of blocks that are read and brought into panels
_OWN_PAGES = 4 << 20  # bytes from which on numpy asks for huge pages
_LEAST_SHARED, _SHARED_BYTES = 1 << 18, 32 << 20  # of an array that lies beside others, and of their memory

# Scales that are tried for a group of int4, over its largest weight: the one that just holds that, and some for which a few
# weights that are cut off are worth finer steps for the others.
_FACTORS = np.array((1.0, 0.93, 0.86, 0.79, 0.72), dtype=np.float32) / np.float32(-8)

Bytes = np.ndarray  # of uint8
Floats = np.ndarray  # of float32


@dataclass(frozen=True)
class Matrix:
    """A packed weight of a linear layer.

    Attributes:
        format: a word, or one for each of several ranges of rows, whose bytes follow each other (format_maps).
        data: uint8, (matrix_bytes(...)), on a 64-byte boundary; may be a view of a mapped file.
        skip: of n_in, the first ones, which are zero and which rows lack: see the module.
    """

    format: str
    n_out: int
    n_in: int
    data: Bytes
    skip: int = 0

    @property
    def pieces(self) -> list[Matrix]:
        """Its ranges of rows, each in one format, in the memory of this one; itself if there is one."""
        if is_word(self.format):
            return [self]
        found, start = [], 0
        for piece in matrix_pieces(self.format, self.n_out):
            stop = start + matrix_bytes(piece.word, piece.n, self.n_in)
            found.append(Matrix(piece.word, piece.n, self.n_in, self.data[start:stop], self.skip))
            start = stop
        return found


def padded(n: int, to: int) -> int:
    return -(-n // to) * to


def matrix_bytes(form: str, n_out: int, n_in: int) -> int:
    """Bytes of a packed weight."""
    if not is_word(form):
        return sum(matrix_bytes(piece.word, piece.n, n_in) for piece in matrix_pieces(form, n_out))
    layout = layout_of(form)
    n_records = padded(n_in, layout.record_inputs) // layout.record_inputs
    return padded(n_out, PANEL) // PANEL * n_records * layout.record_bytes


def aligned_bytes(n_bytes: int) -> Bytes:
    """Memory for the kernels, (n_bytes) of uint8 on a 64-byte boundary; not filled."""
    if _LEAST_SHARED <= n_bytes < _OWN_PAGES:
        return _shared.take(n_bytes)
    raw = np.empty(n_bytes + ALIGN_BYTES, dtype=np.uint8)
    spread(raw)
    first = -raw.ctypes.data % ALIGN_BYTES
    return raw[first : first + n_bytes]


class _SharedMemory:
    """Memory in large pieces, of which each is freed with the last array in it.

    numpy asks Linux for huge pages for arrays of 4 MB and more. The shares of a weight, and experts, are smaller: on small
    pages a processor spends part of the time that it reads them on finding the pages.
    """

    def __init__(self) -> None:
        self._lock, self._used = threading.Lock(), 0
        self._last: Callable[[], Bytes | None] = lambda: None

    def take(self, n_bytes: int) -> Bytes:
        with self._lock:
            piece = self._last()
            if piece is None or self._used + n_bytes > piece.size:
                piece = np.empty(_SHARED_BYTES, dtype=np.uint8)
                spread(piece)
                self._used = -piece.ctypes.data % ALIGN_BYTES
                self._last = weakref.ref(piece)  # arrays in it keep it
            first = self._used
            self._used += padded(n_bytes, ALIGN_BYTES)
            return piece[first : first + n_bytes]


_shared = _SharedMemory()


def bf16_from_float32(x: Floats) -> np.ndarray:
    """Rounded to the nearest, ties to even, as uint16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def float32_from_bf16(bits: np.ndarray) -> Floats:
    """uint16 -> float32"""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def empty(form: str, n_out: int, n_in: int) -> Matrix:
    """A matrix whose memory is not filled."""
    return Matrix(form, n_out, n_in, aligned_bytes(matrix_bytes(form, n_out, n_in)))


def pack(
    form: str, weight: Rows, name: str = "a weight", clips: bool = False, importance: Floats | None = None
) -> Matrix:
    """A weight (n_out, n_in) in a format, `PACKED_ROWS` at a time, so that temporary memory stays small.

    Args:
        weight: float32, float16, or uint16 that holds the bits of bfloat16.
        name: of the tensor, for errors.
        clips: whether numbers that are too large for the format become the largest that it holds.
        importance: how much the error of each input counts, see `block_search.quantize_rows`; other formats do not ask.

    Raises:
        CheckpointError: a number is not finite, or too large for the format.
    """
    n_out, n_in = weight.shape
    whole = empty(form, n_out, n_in)
    first = 0
    for piece in whole.pieces:
        rows = part_of_rows(weight, first, piece.n_out)
        if piece.format in BLOCK_TYPES:
            _search_into(piece, rows, name, clips, importance)
        else:
            pack_into(piece, rows, name, clips)
        first += piece.n_out
    return whole


def pack_into(into: Matrix, weight: Rows, name: str, clips: bool = False) -> None:
    """A weight into the memory of a matrix of one format. Raises CheckpointError as `pack`."""
    form, n_out, n_in = into.format, into.n_out, into.n_in
    layout = LAYOUTS[form]
    panels = into.data.reshape(padded(n_out, PANEL) // PANEL, -1)
    width = padded(n_in, layout.record_inputs)
    for first in range(0, n_out, PACKED_ROWS):
        rows = weight[first : first + PACKED_ROWS]
        n_rows = padded(len(rows), PANEL)
        block = np.zeros((n_rows, width), dtype=rows.dtype)
        block[: len(rows), :n_in] = rows
        del rows  # which may have memory of their own
        if not largest_of(block) <= MOST[form]:
            most = max(largest_of(weight[i : i + PACKED_ROWS]) for i in range(0, n_out, PACKED_ROWS))
            block = _clipped(form, block, most, name, clips)
        panels[first // PANEL : (first + n_rows) // PANEL] = _PACKERS[form](block).reshape(n_rows // PANEL, -1)


def _search_into(into: Matrix, weight: Rows, name: str, clips: bool, importance: Floats | None) -> None:
    """A weight into the memory of a matrix in a block type. Raises CheckpointError as `pack`; UsageError."""
    form = into.format
    if form not in MADE:
        raise UsageError(f"{name}: {form} holds what a GGUF file has in it, other numbers are not brought into it")
    if into.n_in % BLOCK_TYPES[form].inputs:
        raise UsageError(
            f"{name}: its rows of {into.n_in} are no multiple of the {BLOCK_TYPES[form].inputs} of a block in {form}"
        )

    def read(at: slice) -> np.ndarray:
        block = weight[at]
        if not (most := largest_of(block)) <= MOST[form]:
            block = _clipped(form, block, most, name, clips)
        return quantize_rows(form, floats(block), importance)

    pack_blocks(into, read, name)


def _clipped(form: str, block: np.ndarray, most: float, name: str, clips: bool) -> np.ndarray:
    """Some rows of a weight whose largest number is `most`. Raises CheckpointError as `pack`."""
    check_range(form, largest_of(block), name, clips=True)  # not finite
    check_range(form, most, name, clips)
    return np.clip(floats(block), np.float32(-MOST[form]), np.float32(MOST[form]))


def unpack(matrix: Matrix) -> Floats:
    """A packed weight as float32 (n_out, n_in)."""
    if not is_word(matrix.format):
        return np.concatenate([unpack(piece) for piece in matrix.pieces])
    if matrix.format in BLOCK_TYPES:
        return numbers_of(matrix.format, block_rows(matrix))[:, : matrix.n_in]
    layout = LAYOUTS[matrix.format]
    width = padded(matrix.n_in, layout.record_inputs)
    whole = _UNPACKERS[matrix.format](matrix.data, padded(matrix.n_out, PANEL), width)
    return np.ascontiguousarray(whole[: matrix.n_out, : matrix.n_in])


def unpacked_rows(matrix: Matrix) -> LazyRows:
    """A packed weight as float32 (n_out, n_in), whose rows are unpacked when they are asked for."""
    if not is_word(matrix.format):
        return stacked([unpacked_rows(piece) for piece in matrix.pieces])
    panels = matrix.data.reshape(padded(matrix.n_out, PANEL) // PANEL, -1)

    def read(at: slice) -> Floats:
        first, last = at.start // PANEL, -(-at.stop // PANEL)
        n_rows = min(last * PANEL, matrix.n_out) - first * PANEL
        some = unpack(Matrix(matrix.format, n_rows, matrix.n_in, panels[first:last].reshape(-1)))
        return some[at.start - first * PANEL : at.stop - first * PANEL]

    return LazyRows((matrix.n_out, matrix.n_in), read)


class PackedRows:
    """Rows of a packed weight by their numbers, as of an embedding."""

    _AT_A_TIME = 64  # rows that are unpacked

    def __init__(self, matrix: Matrix) -> None:
        self._pieces, self.shape = matrix.pieces, (matrix.n_out, matrix.n_in)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: np.ndarray) -> Floats:
        """(N,) numbers of rows -> float32 (N, n_in)"""
        found, first = np.empty((len(ids), self.shape[1]), dtype=np.float32), 0
        for piece in self._pieces:
            own = np.flatnonzero((first <= ids) & (ids < first + piece.n_out))
            numbers = _block_numbers if piece.format in BLOCK_TYPES else _row_numbers
            for at in range(0, len(own), self._AT_A_TIME):
                places = own[at : at + self._AT_A_TIME]
                found[places] = numbers(piece, ids[places] - first)
            first += piece.n_out
        return found


def pack_blocks(into: Matrix, read: Callable[[slice], np.ndarray], name: str = "a weight") -> None:
    """A weight in a type of GGUF files, with the same numbers, on all cores.

    Args:
        into: of a format that `pack_rows` makes, and of whole blocks; its memory is filled.
        read: gives rows of the weight as in the file, uint8 (n, bytes of a row).
        name: of the tensor, for errors.

    Raises:
        CheckpointError: a scale is not finite.
    """
    panels = _panels_of(into)
    n_rows = max(1, _BYTES_AT_A_TIME // panels[0].nbytes) * PANEL if len(panels) else PANEL

    def fill(first: int) -> bool:
        rows = read(slice(first, min(first + n_rows, into.n_out)))
        return pack_rows(into.format, rows, panels[first // PANEL : (first + padded(len(rows), PANEL)) // PANEL])

    starts = range(0, into.n_out, n_rows)
    n_threads = min(len(starts), math.ceil(n_cores()))
    if n_threads < 2:
        is_finite = all(map(fill, starts))
    else:
        with ThreadPoolExecutor(n_threads, "pack") as pool:
            is_finite = all(pool.map(fill, starts))
    if not is_finite:
        check_range("float32", math.nan, name, clips=False)


def block_rows(matrix: Matrix) -> Bytes:
    """The rows of a weight in a block type as in the file: uint8 (n_out, bytes of a row)."""
    return unpack_rows(matrix.format, _panels_of(matrix), _n_blocks(matrix))[: matrix.n_out]


def _block_numbers(matrix: Matrix, rows: np.ndarray) -> Floats:
    """Some rows of a weight in a block type, by their numbers (n) -> float32 (n, n_in)."""
    found = chosen_rows(matrix.format, _panels_of(matrix), _n_blocks(matrix), rows)
    return numbers_of(matrix.format, found)[:, : matrix.n_in]


def _row_numbers(matrix: Matrix, rows: np.ndarray) -> Floats:
    """The same of a format that weights are packed in. Only these rows are read, for a prompt has many."""
    panel, place, panels = rows // PANEL, rows % PANEL, _panels_of(matrix)
    if matrix.format in HALVES:
        some = Matrix(matrix.format, PANEL * len(rows), matrix.n_in, panels[panel].reshape(-1))
        return unpack(some)[np.arange(len(rows)) * PANEL + place]
    if matrix.format in _NUMBERS:
        bits, per_line = _NUMBERS[matrix.format]
        own = panels.view(bits).reshape(len(panels), -1, PANEL, per_line)[panel, :, place]
        numbers = own.reshape(len(rows), -1)[:, : matrix.n_in]
        return floats(
            numbers
            if matrix.format == "bf16"
            else numbers.view(np.float32 if matrix.format == "float32" else np.float16)
        )
    words = panels.view(np.uint32).reshape(len(panels), -1, 33, PANEL)[panel, :, 1:, place]
    scales = panels.view(np.float16).reshape(len(panels), -1, 33, 2, PANEL)[panel, :, 0, :, place]
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(len(rows), -1) ^ np.uint8(128)
    return _times_scales(codes.view(np.int8), scales.reshape(len(rows), -1), 64)[:, : matrix.n_in]


def _panels_of(matrix: Matrix) -> Bytes:
    return matrix.data.reshape(padded(matrix.n_out, PANEL) // PANEL, -1)


def _n_blocks(matrix: Matrix) -> int:
    return -(-matrix.n_in // BLOCK_TYPES[matrix.format].inputs)


def floats(weight: np.ndarray) -> Floats:
    """float32 numbers of a weight as `pack` takes it."""
    return float32_from_bf16(weight) if weight.dtype == np.uint16 else np.asarray(weight, dtype=np.float32)


def lines_of(values: np.ndarray, per_line: int) -> np.ndarray:
    """(rows, inputs) -> (panels, lines, 16, per_line): the order of the bytes."""
    n_rows, n_in = values.shape
    return values.reshape(n_rows // PANEL, PANEL, n_in // per_line, per_line).transpose(0, 2, 1, 3)


def rows_of_lines(lines: np.ndarray, n_rows: int, n_in: int) -> np.ndarray:
    """The other way round: (panels, lines, 16, per_line) -> (rows, inputs)"""
    if lines.dtype == np.uint8 and lines.shape[-1] == 4:  # as words, which is faster
        words = np.ascontiguousarray(lines).view(np.uint32)[..., 0].transpose(0, 2, 1)
        return np.ascontiguousarray(words).view(np.uint8).reshape(n_rows, n_in)
    return lines.transpose(0, 2, 1, 3).reshape(n_rows, n_in)


def _bytes(values: np.ndarray) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def _pack_float32(block: np.ndarray) -> Bytes:
    return _bytes(lines_of(floats(block), 1))


def _pack_bf16(block: np.ndarray) -> Bytes:
    bits = block if block.dtype == np.uint16 else bf16_from_float32(floats(block))
    return _bytes(lines_of(bits, 2))


def _pack_fp16(block: np.ndarray) -> Bytes:
    half = block if block.dtype == np.float16 else floats(block).astype(np.float16)
    return _bytes(lines_of(half, 1))


def _pack_int8(block: np.ndarray) -> Bytes:
    groups = floats(block).reshape(len(block), -1, 64)
    scale = _half_up(np.abs(groups).max(axis=2) / 127)
    q = np.clip(np.rint(groups / np.where(scale == 0, 1, scale).astype(np.float32)[..., None]), -127, 127)
    stored = (q + 128).astype(np.uint8).reshape(block.shape)
    return records_of(scale, lines_of(stored, 4), 32)


def _half_up(x: Floats) -> np.ndarray:
    """Half precision, never below x, so that no weight is cut off."""
    half = np.minimum(x, 65504).astype(np.float16)
    return np.where(half.astype(np.float32) < x, np.nextafter(half, np.float16(65504)), half)


def _pack_int4(block: np.ndarray) -> Bytes:
    """Uses the kernels if there are any, ten times as fast; numpy gives the same bits."""
    values, kernels = np.ascontiguousarray(floats(block)), library.load()
    if kernels is None:
        return pack_int4_in_numpy(values)
    n_rows, width = values.shape
    made = np.empty(matrix_bytes("int4", n_rows, width), dtype=np.uint8)
    kernels.mdi_pack_int4(
        ctypes.c_void_p(values.ctypes.data), n_rows // PANEL, width, ctypes.c_void_p(_FACTORS.ctypes.data), len(_FACTORS),
        ctypes.c_void_p(made.ctypes.data),
    )  # fmt: skip
    return made


def pack_int4_in_numpy(values: Floats) -> Bytes:
    """Whole panels and records."""
    scale, q = quantize_int4(values.reshape(len(values), -1, 32))
    return bytes_of_halves("int4", scale, q.reshape(values.shape))


def quantize_int4(groups: Floats) -> tuple[np.ndarray, np.ndarray]:
    """(rows, n, 32) -> scales float16 (rows, n) and halves of bytes uint8 (rows, n, 32).

    Of each group, the scale with the least squared error is taken among a few, each improved by least squares for the numbers
    that it led to. The largest weight stands for -8, which has no counterpart.
    """
    at = np.abs(groups).argmax(axis=2)[..., None]
    largest = np.take_along_axis(groups, at, axis=2)
    best = np.full(largest.shape, np.inf, dtype=np.float32)
    best_scale, best_q = np.zeros_like(largest), np.zeros_like(groups)
    for factor in _FACTORS:
        scale = _usable(largest * factor)
        q = np.clip(np.rint(groups / scale), -8, 7)
        scale = _usable(_sums(q * groups) / np.maximum(_sums(q * q), 1e-30))
        q = np.clip(np.rint(groups / scale), -8, 7)
        error = _sums(np.square(q * scale - groups))
        better = error < best
        best = np.where(better, error, best)
        best_scale, best_q = np.where(better, scale, best_scale), np.where(better, q, best_q)
    return best_scale[..., 0].astype(np.float16), (best_q + 8).astype(np.uint8)


def _sums(x: Floats) -> Floats:
    """(rows, n, 32) -> (rows, n, 1), added in an order that is the same everywhere: numbers 16 apart, 8 apart, and so on."""
    for half in (16, 8, 4, 2, 1):
        x = x[..., :half] + x[..., half:]
    return x


def _usable(scale: Floats) -> Floats:
    """As half precision will store it, and never zero."""
    half = np.clip(scale, -65504, 65504).astype(np.float16).astype(np.float32)
    return np.where(half == 0, np.float32(1), half)


def bytes_of_halves(form: str, scale: np.ndarray, halves: np.ndarray) -> Bytes:
    """Whole panels and records of int4 or mxfp4: scales (rows, n) as stored, and halves of bytes uint8 (rows, 32 * n)."""
    n_rows, n_in = halves.shape
    pairs = halves.reshape(n_rows, n_in // 8, 2, 4)
    lines = lines_of((pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(n_rows, n_in // 2), 4)
    return records_of(scale, lines, LAYOUTS[form].record_bytes // LINE_BYTES - 1)


class Halves(NamedTuple):
    """Rows of a weight in half bytes.

    Attributes:
        scales: (n, n_in / 32), float16 of int4, uint8 of mxfp4.
        halves: uint8 (n, n_in / 2): a byte has input 2i in its low half, and 2i + 1 in its high one.
    """

    scales: np.ndarray
    halves: np.ndarray


def pack_halves(into: Matrix, read: Callable[[slice], Halves]) -> Matrix:
    """A weight of halves of bytes and scales that come from a file, as they are, without rounding.

    Args:
        into: in int4 or mxfp4, of a multiple of 32 inputs; its memory is filled.
        read: gives rows of the weight.
    """
    form, n_out, n_in = into.format, into.n_out, into.n_in
    layout, n_groups = LAYOUTS[form], n_in // 32
    panels, width = _panels_of(into), padded(n_in, layout.record_inputs)
    for first in range(0, n_out, PACKED_ROWS):
        scales, some = read(slice(first, min(first + PACKED_ROWS, n_out)))
        n_rows = padded(len(some), PANEL)
        numbers = np.full((n_rows, width), _ZERO[form], dtype=np.uint8)
        numbers[: len(some), 0:n_in:2], numbers[: len(some), 1:n_in:2] = some & 15, some >> 4
        own = np.zeros((n_rows, width // 32), dtype=_SCALES[form])
        own[: len(some), :n_groups] = scales
        made = bytes_of_halves(form, own, numbers)
        panels[first // PANEL : (first + n_rows) // PANEL] = made.reshape(n_rows // PANEL, -1)
    return into


# Twice the magnitude of the eight halves of mxfp4 without their sign, and the middles between two of them.
_TWICE_E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12), dtype=np.float32)
_MIDDLES = (_TWICE_E2M1[1:] + _TWICE_E2M1[:-1]) / 2
LARGEST_SCALE = 252  # of mxfp4: six times 2^125 is the largest multiple that float32 holds


def e2m1(halves: np.ndarray) -> Floats:
    """The numbers that halves of bytes of mxfp4 stand for, without their scale."""
    return np.concatenate((_TWICE_E2M1, -_TWICE_E2M1))[halves] / 2


def power_scale(scales: np.ndarray) -> Floats:
    """2^(s - 127) of bytes s, float32"""
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)


def quantize_mxfp4(groups: Floats) -> tuple[np.ndarray, np.ndarray]:
    """(rows, n, 32) -> scales uint8 (rows, n) and halves of bytes uint8 (rows, n, 32).

    Of two powers of two, the one that leaves the smaller squared error: the smaller one cuts off what is above six times it.
    Numbers that are in mxfp4 already stay as they are.
    """
    largest = np.abs(groups).max(axis=2)
    low = np.clip(np.frexp(largest)[1] - 3, -126, LARGEST_SCALE - 127)  # none that the kernels count as zero
    best = np.full(largest.shape, np.inf, dtype=np.float32)
    best_scale, best_q = np.zeros(largest.shape, dtype=np.uint8), np.zeros(groups.shape, dtype=np.uint8)
    for power in (low, np.minimum(low + 1, LARGEST_SCALE - 127)):
        steps = np.ldexp(groups, 1 - power[..., None])
        magnitude = np.searchsorted(_MIDDLES, np.abs(steps)).astype(np.uint8)
        # of a number in the middle between two, the one whose last bit is zero
        magnitude += (magnitude & 1) & np.isin(np.abs(steps), _MIDDLES)
        error = _sums(
            np.square(_TWICE_E2M1[magnitude] - np.abs(steps)) * np.ldexp(np.float32(1), 2 * (power - low))[..., None]
        )
        better = error[..., 0] < best
        best = np.where(better, error[..., 0], best)
        best_scale = np.where(better, power + 127, best_scale).astype(np.uint8)
        q = np.where((groups < 0) & (magnitude > 0), magnitude | 8, magnitude)
        best_q = np.where(better[..., None], q, best_q)
    return best_scale, best_q


def _pack_mxfp4(block: np.ndarray) -> Bytes:
    values = floats(block)
    scale, q = quantize_mxfp4(values.reshape(len(values), -1, 32))
    return bytes_of_halves("mxfp4", scale, q.reshape(values.shape))


def records_of(scale: np.ndarray, lines: np.ndarray, per_record: int) -> Bytes:
    """Scales (rows, groups), as they are stored, before the lines that they belong to, (panels, lines, 16, 4)."""
    n_panels, n_lines = lines.shape[:2]
    n_records = n_lines // per_record
    records = np.empty((n_panels, n_records, 1 + per_record, LINE_BYTES), dtype=np.uint8)
    by_panel = scale.reshape(n_panels, PANEL, n_records, -1).transpose(0, 2, 3, 1)
    records[:, :, 0] = _bytes(by_panel).reshape(n_panels, n_records, LINE_BYTES)
    records[:, :, 1:] = lines.reshape(n_panels, n_records, per_record, LINE_BYTES)
    return records.reshape(-1)


def split_records(data: Bytes, n_rows: int, n_in: int, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Records -> scales as they are stored (rows, groups), lines uint8 (panels, lines, 16, 4)"""
    layout = LAYOUTS[form]
    n_panels, n_records = n_rows // PANEL, n_in // layout.record_inputs
    records = data.reshape(n_panels, n_records, layout.record_bytes // LINE_BYTES, LINE_BYTES)
    stored = np.ascontiguousarray(records[:, :, 0]).view(_SCALES[form])
    scales = stored.reshape(n_panels, n_records, -1, PANEL).transpose(0, 3, 1, 2).reshape(n_rows, -1)
    return scales, records[:, :, 1:].reshape(n_panels, -1, PANEL, 4)


def _unpack_float32(data: Bytes, n_rows: int, n_in: int) -> Floats:
    return rows_of_lines(data.view(np.float32).reshape(n_rows // PANEL, n_in, PANEL, 1), n_rows, n_in)


def _unpack_bf16(data: Bytes, n_rows: int, n_in: int) -> Floats:
    return float32_from_bf16(
        rows_of_lines(data.view(np.uint16).reshape(n_rows // PANEL, n_in // 2, PANEL, 2), n_rows, n_in)
    )


def _unpack_fp16(data: Bytes, n_rows: int, n_in: int) -> Floats:
    return rows_of_lines(data.view(np.float16).reshape(n_rows // PANEL, n_in, PANEL, 1), n_rows, n_in).astype(
        np.float32
    )


def _unpack_int8(data: Bytes, n_rows: int, n_in: int) -> Floats:
    scales, lines = split_records(data, n_rows, n_in, "int8")
    return _times_scales(rows_of_lines(lines ^ np.uint8(128), n_rows, n_in).view(np.int8), scales, 64)


def _unpack_int4(data: Bytes, n_rows: int, n_in: int) -> Floats:
    scales, lines = split_records(data, n_rows, n_in, "int4")
    return _times_scales(_codes("int4", lines, n_rows, n_in).view(np.int8) - np.int8(8), scales, 32)


def _times_scales(numbers: np.ndarray, scales: np.ndarray, group: int) -> Floats:
    """int8 (rows, inputs), and the scale of each `group` of inputs -> float32, in one pass"""
    grouped = numbers.reshape(len(numbers), -1, group)
    return np.multiply(grouped, scales.astype(np.float32)[..., None], dtype=np.float32).reshape(numbers.shape)


def _unpack_mxfp4(data: Bytes, n_rows: int, n_in: int) -> Floats:
    scales, lines = split_records(data, n_rows, n_in, "mxfp4")
    numbers = e2m1(_codes("mxfp4", lines, n_rows, n_in))
    return (numbers.reshape(n_rows, -1, 32) * power_scale(scales)[..., None]).reshape(n_rows, n_in)


_PACKERS = {
    "float32": _pack_float32,
    "bf16": _pack_bf16,
    "fp16": _pack_fp16,
    "int8": _pack_int8,
    "int4": _pack_int4,
    "mxfp4": _pack_mxfp4,
}
_UNPACKERS = {
    "float32": _unpack_float32,
    "bf16": _unpack_bf16,
    "fp16": _unpack_fp16,
    "int8": _unpack_int8,
    "int4": _unpack_int4,
    "mxfp4": _unpack_mxfp4,
}


class Codes(NamedTuple):
    """weight[o, i] = number[o, i] * scales[o, i // group], where `group` is that of the format's layout.

    Attributes:
        numbers: of int8, int8 (n_out, width). Of int4 and mxfp4, uint8 (n_out, width / 2): byte 16 g + j of a row holds
            inputs 32 g + j in its low half and 32 g + 16 + j in its high one, as they are stored.
        scales: (n_out, width / group) as they are stored: float16, or uint8 of mxfp4.
        width: inputs, padded with zeros to whole records.
    """

    numbers: np.ndarray
    scales: np.ndarray
    width: int


def codes_of(matrix: Matrix) -> Codes:
    """Numbers and scales of a packed weight in int8, int4 or mxfp4."""
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
    return Codes(np.ascontiguousarray(numbers[kept]), np.ascontiguousarray(scales[kept]), width)


Range = tuple[int, int]

_ZERO = {"int8": 128, "int4": 8, "mxfp4": 0}  # the code of a weight that is zero
_SCALES = {"int8": np.float16, "int4": np.float16, "mxfp4": np.uint8}
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
    if not is_word(matrix.format):
        return _cut_pieces(matrix, rows, columns or (0, matrix.n_in))
    first, last = columns or (0, matrix.n_in)
    n_out, skip = sum(b - a for a, b in rows), skipped(matrix.format, first, last)
    n_in = skip + last - first if last > first else 0
    data = aligned_bytes(matrix_bytes(matrix.format, n_out, n_in))
    if n_out and n_in:
        data[:] = _bytes_of(matrix, rows, first - skip, first, last)
    return Matrix(matrix.format, n_out, n_in, data, skip)


def _cut_pieces(matrix: Matrix, rows: Sequence[Range], columns: Range) -> Matrix:
    """As `cut`, of a matrix in several formats."""
    first, last = columns
    skip = skipped(matrix.format, first, last)
    n_out, n_in = sum(b - a for a, b in rows), skip + last - first if last > first else 0
    form = rows_form(matrix.format, matrix.n_out, rows)
    data = aligned_bytes(matrix_bytes(form, n_out, n_in))
    start, pieces = 0, matrix.pieces
    for i, own in runs_of_rows(matrix.format, matrix.n_out, rows):
        piece, n = pieces[i], sum(b - a for a, b in own)
        stop = start + matrix_bytes(piece.format, n, n_in)
        if n and n_in:
            data[start:stop] = _bytes_of(piece, own, first - skip, first, last)
        start = stop
    return Matrix(form, n_out, n_in, data, skip)


def skipped(form: str, first: int, last: int) -> int:
    """How many inputs of zeros precede input `first` of a weight that is cut there.

    So the groups of 64 activations that are rounded together begin where those of the whole do, but in int4 and mxfp4: there
    they begin with the first input of the share.
    """
    group = max(layout_of(piece.word).group for piece in matrix_pieces(form))
    return first % group if group and last > first else 0


def _bytes_of(matrix: Matrix, rows: Sequence[Range], start: int, first: int, last: int) -> Bytes:
    """The packed bytes of the inputs [start, last); those before `first` become zero, in a block type they stay."""
    layout = layout_of(matrix.format)
    n_records = padded(matrix.n_in, layout.record_inputs) // layout.record_inputs
    are_panels = (
        all(a % PANEL == 0 and (b % PANEL == 0 or b == matrix.n_out) for a, b in rows)
        and len([b for _, b in rows[:-1] if b % PANEL]) == 0
    )
    is_block = matrix.format in BLOCK_TYPES
    ends_record = last % layout.record_inputs == 0 or last == matrix.n_in
    are_records = is_block or (start == first and first % layout.record_inputs == 0 and ends_record)
    panels = matrix.data.reshape(-1, n_records, layout.record_bytes)
    if are_records:  # the inputs, as they lie
        panels = panels[:, start // layout.record_inputs : -(-last // layout.record_inputs)]
    if are_panels:
        panels = _joined([panels[a // PANEL : -(-b // PANEL)] for a, b in rows])
    if are_records and are_panels:
        return panels.reshape(-1)
    width = panels.shape[1] * layout.record_inputs
    if is_block:
        return _repacked(matrix.format, panels, rows)
    chosen = [(0, len(panels) * PANEL)] if are_panels else rows
    columns = (0, width, 0) if are_records else (start, last, first - start)
    repack = _scaled if layout.group else _plain
    return repack(
        matrix.format, layout, np.ascontiguousarray(panels).reshape(-1), len(panels) * PANEL, width, chosen, columns
    )


def _repacked(form: str, panels: np.ndarray, rows: Sequence[Range]) -> Bytes:
    """Rows that are no whole panels, of panels of whole records."""
    kind = BLOCK_TYPES[form]
    found = unpack_rows(form, panels, panels.shape[1] * kind.blocks)
    chosen = _joined([found[a:b] for a, b in rows])
    made = np.empty((padded(len(chosen), PANEL) // PANEL, panels[0].size), dtype=np.uint8)
    pack_rows(form, chosen, made)
    return made.reshape(-1)


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _plain(
    form: str, layout: Layout, data: Bytes, n_rows: int, width: int, rows: Sequence[Range], columns: tuple[int, int, int]
) -> Bytes:  # fmt: skip
    dtype, per_line = _NUMBERS[form]
    numbers = rows_of_lines(
        data.view(dtype).reshape(n_rows // PANEL, width // per_line, PANEL, per_line), n_rows, width
    )
    start, last, n_zero = columns
    chosen = _joined([numbers[a:b] for a, b in rows])[:, start + n_zero : last]
    block = np.zeros((padded(len(chosen), PANEL), padded(last - start, layout.record_inputs)), dtype=dtype)
    block[: len(chosen), n_zero : last - start] = chosen
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
    new_scales = np.zeros((shape[0], shape[1] // layout.group), dtype=scales.dtype)
    new_scales[: len(codes), :n_groups] = scales[:, start // layout.group : start // layout.group + n_groups]
    if form != "int8":
        return bytes_of_halves(form, new_scales, new_codes)
    return records_of(new_scales, lines_of(new_codes, 4), 32)


def _codes(form: str, lines: np.ndarray, n_rows: int, width: int) -> np.ndarray:
    """uint8 (rows, inputs): a number as it is stored, without its scale."""
    if form == "int8":
        return rows_of_lines(lines, n_rows, width)
    both = rows_of_lines(lines, n_rows, width // 2).reshape(n_rows, width // 8, 4)
    return np.stack((both & 15, both >> 4), axis=2).reshape(n_rows, width)
