"""Rows in the block types of GGUF files, of random numbers."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mdi.kernels.weight_formats import BLOCK_TYPES


def halves_of(form: str) -> list[int]:
    """Where a block has its numbers in half precision."""
    kind = BLOCK_TYPES[form]
    return [208] if form == "q6_k" else list(range(0, 2 * kind.halves, 2))


def with_halves(form: str, blocks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Blocks (..., bytes) with halves `values` (..., number of halves), float16."""
    for i, at in enumerate(halves_of(form)):
        blocks[..., at : at + 2] = np.ascontiguousarray(values[..., i]).reshape(*blocks.shape[:-1], 1).view(np.uint8)
    return blocks


def random_rows(form: str, n_out: int, n_in: int, seed: int = 0) -> np.ndarray:
    """uint8 (n_out, bytes of a row)"""
    kind, random = BLOCK_TYPES[form], np.random.default_rng(seed)
    shape = n_out, n_in // kind.inputs
    blocks = random.integers(0, 256, (*shape, kind.block_bytes), np.uint8)
    values = random.uniform(-0.02, 0.02, (*shape, kind.halves)).astype(np.float16)
    return with_halves(form, blocks, values).reshape(n_out, -1)


def extreme_rows(form: str) -> np.ndarray:
    """Zeros, the largest and smallest numbers, denormal scales, negative ones; all bytes 0, 127, 128, 255 or random."""
    kind, random = BLOCK_TYPES[form], np.random.default_rng(9)
    scales = np.array([0, -0.0, 65504, -65504, 6e-8, -6e-8, 6.1e-5, 1e-3, -1], dtype=np.float16)
    rows = []
    for byte in (0, 127, 128, 255, None):
        for scale in scales:
            for other in scales if kind.halves == 2 else scales[:1]:
                block = np.full(kind.block_bytes, byte or 0, dtype=np.uint8)
                if byte is None:
                    block = random.integers(0, 256, kind.block_bytes, np.uint8)
                rows.append(with_halves(form, block, np.array([scale, other][: kind.halves])))
    return np.stack(rows)


def numbers(form: str, rows: np.ndarray) -> np.ndarray:
    """By the gguf package: float32 (n_out, n_in)"""
    return np.asarray(dequantize(rows, GGMLQuantizationType(BLOCK_TYPES[form].type_id)))
