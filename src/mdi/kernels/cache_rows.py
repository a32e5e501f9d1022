"""Keys and values in the form in which csrc/attention.h reads them from pages of caches, and back.

A page has a slot for each block and each group of heads: keys (head_size, 32), values (32, head_size in whole vectors of 16),
and for int8 the 32 scales of keys and of values behind them. Rows of latent attention, which has no values beside, are one
behind the other (32, numbers); their scales are those of the first numbers, which are values, too, and of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mdi.errors import EngineError
from mdi.kernels.layout import bf16_from_float32, float32_from_bf16, padded
from mdi.kernels.pages import Pool
from mdi.kernels.stage_caches import Piece
from mdi.model.caches import CACHE_TYPES, PAGE, Paged, slot_bytes

TYPES = {"float32": np.float32, "bf16": np.uint16, "fp16": np.float16, "int8": np.int8}


class KernelLayout:
    """Of the blocks of one class.

    Args:
        kind: of each of them.
        n_blocks: how many they are.
    """

    def __init__(self, kind: Paged, n_blocks: int, cache_type: str, pool: Pool) -> None:
        self._kind, item, dtype = kind, CACHE_TYPES[cache_type], TYPES[cache_type]
        wide, slot = padded(kind.v_size, 16), slot_bytes(kind.k_size, kind.v_size, cache_type)
        n_slots = n_blocks * kind.n_groups

        def view(offset: int, shape: tuple[int, int], dtype: type) -> np.ndarray:
            """Of all slots: (pages, slots, *shape)"""
            size = np.dtype(dtype).itemsize
            strides = pool.page_bytes, slot, shape[1] * size, size
            return np.ndarray((len(pool.memory), n_slots, *shape), dtype, pool.memory, offset, strides)

        values_at, scales_at = kind.k_size * PAGE * item, (kind.k_size + wide) * PAGE * item
        # (pages, slots, positions, numbers)
        if kind.v_size:
            self._rows = [view(0, (kind.k_size, PAGE), dtype).swapaxes(2, 3), view(values_at, (PAGE, wide), dtype)]
        else:
            self._rows = [view(0, (PAGE, kind.k_size), dtype)]
        self._scales = []
        if cache_type == "int8":
            scales = view(scales_at, (2, PAGE), np.float32)  # (pages, slots, keys or values, positions)
            self._scales = [scales[:, :, half] for half in range(2)]

    def read(self, number: int, pages: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """See `pages.Layout`."""
        _, whole, rest = self._at(number, pages, positions)

        def lines(view: np.ndarray) -> np.ndarray:
            found = view[whole].swapaxes(1, 2)
            return np.concatenate((found.reshape(-1, *found.shape[2:]), view[rest]))

        sizes = self._kind.k_size, self._kind.v_size
        rows = [lines(view)[..., :size] for view, size in zip(self._rows, sizes, strict=False)]
        return (*rows, *map(lines, self._scales))

    def write(self, number: int, pages: np.ndarray, positions: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        """See `pages.Layout`. Values are padded with zeros, as the kernels do it."""
        kind, views = self._kind, [*self._rows, *self._scales]
        rows = [(len(pages), kind.n_groups, size) for size in (kind.k_size, kind.v_size) if size]
        check_arrays(arrays, [*rows, *(rows[0][:2] for _ in self._scales)], [view.dtype for view in views])
        n, whole, rest = self._at(number, pages, positions)
        for view, array in zip(views, arrays, strict=True):
            wide = view.shape[3] - array.shape[2] if array.ndim == 3 else 0
            lines = np.pad(array, ((0, 0), (0, 0), (0, wide))) if wide else array
            view[whole] = lines[:n].reshape(-1, PAGE, *lines.shape[1:]).swapaxes(1, 2)
            view[rest] = lines[n:]

    def _at(
        self, number: int, pages: np.ndarray, positions: np.ndarray
    ) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
        """Of one block: how many of the rows are those of whole pages, what selects these (pages, groups, PAGE), and what
        selects the other rows (rows, groups): numpy copies row by row several times slower than page by page.
        """
        first, groups = number * self._kind.n_groups, self._kind.n_groups
        n = 0 if positions[:1].any() else len(pages) - len(pages) % PAGE
        rest = pages[n:, None], np.arange(first, first + groups), positions[n:, None]
        return n, (pages[:n:PAGE], slice(first, first + groups)), rest


def check_arrays(
    arrays: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]
) -> None:
    """Raises EngineError for rows of another model, or of another type: numpy would convert these without a word."""
    given, wanted = [(one.shape, str(one.dtype)) for one in arrays], [*zip(shapes, map(str, dtypes), strict=True)]
    if given != wanted:
        raise EngineError(f"rows of caches of {given}, where {wanted} are needed")


def encoded(rows: np.ndarray, cache_type: str) -> tuple[np.ndarray, np.ndarray | None]:
    """float32 (n, groups, size) -> numbers of the caches, the same shape; and for int8 their scales (n, groups)"""
    if cache_type == "float32":
        return rows, None
    if cache_type == "bf16":
        return bf16_from_float32(rows), None
    if cache_type == "fp16":
        with np.errstate(over="ignore"):
            return rows.astype(np.float16), None
    most = np.abs(rows).max(axis=2)
    inverse = np.where(most > 1e-35, np.float32(127) / np.maximum(most, np.float32(1e-35)), np.float32(0))
    return np.rint(rows * inverse[:, :, None]).astype(np.int8), (most / np.float32(127)).astype(np.float32)


def decoded(rows: np.ndarray, scales: np.ndarray | None, cache_type: str) -> np.ndarray:
    """The reverse of `encoded`, float32."""
    if cache_type == "bf16":
        return float32_from_bf16(rows)
    found = rows.astype(np.float32)
    return found if scales is None else found * scales[:, :, None]


def piece_of(keys: np.ndarray, values: np.ndarray, cache_type: str) -> Piece:
    """Of a sequence's first positions.

    Args:
        keys, values: float32 (n, groups, size).
    """
    found = [encoded(rows, cache_type) for rows in (keys, values)]
    return Piece(0, (*(rows for rows, _ in found), *(scales for _, scales in found if scales is not None)))
