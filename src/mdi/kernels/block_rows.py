"""Weights in the block types of GGUF files: a file's rows of bytes into packed panels, back, and into numbers.

No number changes on this way: csrc/block_types.h says how blocks lie in a panel.
"""

from __future__ import annotations

import ctypes

import numpy as np

from mdi.kernels import library
from mdi.kernels.weight_formats import BLOCK_TYPES, PANEL, BlockType, layout_of

LINE_BYTES = 64


def pack_rows(form: str, rows: np.ndarray, to: np.ndarray) -> bool:
    """Rows of bytes (n_rows, n_blocks * block_bytes) into whole panels `to`; whether all scales are finite.

    Uses the kernels if there are any; numpy gives the same bytes.

    Args:
        form: a block type; with kernels also int4 and mxfp4, of rows in Q4_0 and MXFP4.
    """
    kernels = library.load()
    if kernels is None:
        return pack_rows_in_numpy(form, rows, to)
    rows, n_blocks = np.ascontiguousarray(rows), rows.shape[1] // file_block_bytes(form)
    done: int = kernels.mdi_pack_blocks(
        layout_of(form).number, ctypes.c_void_p(rows.ctypes.data), ctypes.c_int64(len(rows)), ctypes.c_int64(n_blocks),
        ctypes.c_void_p(to.ctypes.data),
    )  # fmt: skip
    return done == 0


def file_block_bytes(form: str) -> int:
    """Of a block in a GGUF file."""
    return BLOCK_TYPES[form].block_bytes if form in BLOCK_TYPES else {"int4": 18, "mxfp4": 17}[form]


def pack_rows_in_numpy(form: str, rows: np.ndarray, to: np.ndarray) -> bool:
    kind = BLOCK_TYPES[form]
    n_panels, n_blocks = -(-len(rows) // PANEL), rows.shape[1] // kind.block_bytes
    n_records = -(-n_blocks // kind.blocks)
    padded = np.zeros((n_panels * PANEL, n_records * kind.blocks, kind.block_bytes), dtype=np.uint8)
    there = padded[:, :n_blocks]
    there[: len(rows)] = rows.reshape(len(rows), n_blocks, kind.block_bytes)
    halves, some, words = _parts(form, there)
    if not np.isfinite(np.ascontiguousarray(halves).view(np.float16)).all():
        return False
    words[:] = _stored_words(form, words)
    records = to.reshape(n_panels, n_records, -1)
    records[:] = 0
    first = 0
    for part, size in zip(_parts(form, padded), (2, 1, 4), strict=True):
        by_output = part.reshape(n_panels, PANEL, n_records, -1, size).transpose(0, 2, 3, 1, 4)
        n_bytes = PANEL * size * by_output.shape[2]
        if size == 4:
            first = records.shape[2] - n_bytes  # what precedes the words fills whole lines
        records[:, :, first : first + n_bytes] = by_output.reshape(n_panels, n_records, n_bytes)
        first += n_bytes
    return True


def unpack_rows(form: str, panels: np.ndarray, n_blocks: int) -> np.ndarray:
    """The other way round: (n_panels, bytes of a panel) -> rows of bytes (16 * n_panels, n_blocks * block_bytes)."""
    records = panels.reshape(len(panels), -1, BLOCK_TYPES[form].layout.record_bytes)
    return _file_rows(form, np.ascontiguousarray(records), n_blocks).reshape(len(panels) * PANEL, -1)


def chosen_rows(form: str, panels: np.ndarray, n_blocks: int, rows: np.ndarray) -> np.ndarray:
    """Some of these rows, by their numbers (n) -> (n, n_blocks * block_bytes)."""
    records = panels.reshape(len(panels), -1, BLOCK_TYPES[form].layout.record_bytes)
    found = _file_rows(form, records[rows // PANEL], n_blocks)
    return found[np.arange(len(rows)), rows % PANEL]


def _file_rows(form: str, records: np.ndarray, n_blocks: int) -> np.ndarray:
    """(n_panels, n_records, bytes) -> (n_panels, 16, bytes of a row)"""
    kind = BLOCK_TYPES[form]
    n_panels, n_records, record_bytes = records.shape
    blocks = np.empty((n_panels, PANEL, n_records * kind.blocks, kind.block_bytes), dtype=np.uint8)
    parts, first = _parts(form, blocks), 0
    for part, size, count in zip(parts, (2, 1, 4), (kind.halves, kind.bytes, kind.words), strict=True):
        n_bytes = PANEL * size * count * kind.blocks
        if size == 4:
            first = record_bytes - n_bytes
        stored = records[:, :, first : first + n_bytes].reshape(n_panels, n_records, kind.blocks, count, PANEL, size)
        part[:] = stored.transpose(0, 4, 1, 2, 3, 5).reshape(part.shape)
        first += n_bytes
    words = parts[2]
    words[:] = _file_words(form, words)
    return blocks[:, :, :n_blocks].reshape(n_panels, PANEL, -1)


def numbers_of(form: str, rows: np.ndarray) -> np.ndarray:
    """Rows of bytes, as in the file -> float32 (n, n_blocks * inputs)"""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(rows, GGMLQuantizationType(BLOCK_TYPES[form].type_id)), dtype=np.float32)


def drawn_rows(form: str, n_rows: int, n_in: int, generator: np.random.Generator) -> np.ndarray:
    """Rows of numbers by chance, with small scales: uint8 (n_rows, bytes of a row); for measurements.

    Their mean is zero: products with others would have large numbers, which the kernels multiply apart.
    """
    kind = BLOCK_TYPES[form]
    middle = (2 ** (32 * kind.words // kind.inputs) - 1) / 2
    halves = [1e-4, 1e-4 * middle if kind.bytes else -1e-4 * middle][: kind.halves]
    blocks = generator.integers(0, 256, (n_rows, -(-n_in // kind.inputs), kind.block_bytes), dtype=np.uint8)
    _parts(form, blocks)[0][:] = np.frombuffer(np.array(halves, dtype=np.float16).tobytes(), dtype=np.uint8)
    return blocks.reshape(n_rows, -1)


def _parts(form: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The halves, bytes and words of blocks as in the file: views (..., bytes of them)."""
    kind: BlockType = BLOCK_TYPES[form]
    n_halves, n_words = 2 * kind.halves, 4 * kind.words
    if form == "q6_k":
        return blocks[..., -n_halves:], blocks[..., n_words:-n_halves], blocks[..., :n_words]
    return blocks[..., :n_halves], blocks[..., n_halves:-n_words], blocks[..., -n_words:]


def _stored_words(form: str, words: np.ndarray) -> np.ndarray:
    """What block_types.h has otherwise than the file: bytes of q8_0 with an offset, and the order of the fifth bits."""
    if form == "q8_0":
        return words ^ np.uint8(128)
    if form in ("q5_0", "q5_1"):
        bits = np.unpackbits(words[..., :4], axis=-1, bitorder="little").reshape(*words.shape[:-1], 8, 4)
        fifth = np.packbits(bits.swapaxes(-1, -2).reshape(*words.shape[:-1], 32), axis=-1, bitorder="little")
        return np.concatenate((fifth, words[..., 4:]), axis=-1)
    return words


def _file_words(form: str, words: np.ndarray) -> np.ndarray:
    if form in ("q5_0", "q5_1"):
        bits = np.unpackbits(words[..., :4], axis=-1, bitorder="little").reshape(*words.shape[:-1], 4, 8)
        fifth = np.packbits(bits.swapaxes(-1, -2).reshape(*words.shape[:-1], 32), axis=-1, bitorder="little")
        return np.concatenate((fifth, words[..., 4:]), axis=-1)
    return _stored_words(form, words)
