"""Keys and values that were not computed, in the form in which csrc/attention.h reads them from pages of caches.

A page has a slot for each block and each group of heads: keys (head_size, 32), values (32, head_size in whole vectors of 16),
and for int8 the 32 scales of keys and of values behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mdi.kernels.layout import bf16_from_float32, padded
from mdi.kernels.pages import CachePages, Pool
from mdi.model.caches import CACHE_TYPES, PAGE, slot_bytes


class CacheRows:
    """Keys and values of the first positions of sequences, in all blocks of a stage, which have one class of pages.

    Args:
        keys, values: float32 (n, query groups, head_size), of each block.
        cache_type: what the caches hold, one of model.caches.CACHE_TYPES.
    """

    def __init__(self, keys: Sequence[np.ndarray], values: Sequence[np.ndarray], cache_type: str) -> None:
        self._keys, self._values = keys, values  # not copied: they are the adapter's, and a page takes a few rows
        self._n_slots, self._size = len(keys) * keys[0].shape[1], keys[0].shape[2]
        self._wide = padded(self._size, 16)
        self._slot_bytes = slot_bytes(self._size, self._size, cache_type)
        self._cache_type = cache_type

    def write(self, caches: CachePages, seq_id: int, start: int, n: int) -> None:
        """Have the caches of a sequence end with the positions [start, start + n) of these. Raises EngineError as `extend`."""
        (table,), (pool,) = caches.extend(seq_id, start, n), caches.pools
        assert isinstance(pool, Pool)
        for page in range(start // PAGE, (start + n - 1) // PAGE + 1):
            first, end = max(start, page * PAGE), min(start + n, (page + 1) * PAGE)
            self._write(pool.memory[table.ids[page - table.first]], first, end)

    def _write(self, page: np.ndarray, first: int, end: int) -> None:
        """Positions [first, end), which are all in this page."""
        keys, key_scales = _encoded(_slots(self._keys, first, end), self._cache_type)
        values = np.pad(_slots(self._values, first, end), ((0, 0), (0, 0), (0, self._wide - self._size)))
        values, value_scales = _encoded(values, self._cache_type)
        item, at = CACHE_TYPES[self._cache_type], slice(first % PAGE, first % PAGE + end - first)

        def view(offset: int, shape: tuple[int, int], like: np.ndarray) -> np.ndarray:
            """Of all slots: (slots, *shape)"""
            strides = self._slot_bytes, shape[1] * like.itemsize, like.itemsize
            return np.ndarray((self._n_slots, *shape), like.dtype, page, offset, strides)

        keys_end = self._size * PAGE * item
        view(0, (self._size, PAGE), keys)[:, :, at] = keys.transpose(0, 2, 1)
        view(keys_end, (PAGE, self._wide), values)[:, at] = values
        if key_scales is not None and value_scales is not None:
            scales = view(keys_end + self._wide * PAGE * item, (2, PAGE), key_scales)
            scales[:, 0, at], scales[:, 1, at] = key_scales, value_scales


def _slots(rows: Sequence[np.ndarray], first: int, end: int) -> np.ndarray:
    """Rows [first, end) of all blocks: (slots, rows, head_size)"""
    return np.concatenate([one[first:end] for one in rows], axis=1).transpose(1, 0, 2)


def _encoded(rows: np.ndarray, cache_type: str) -> tuple[np.ndarray, np.ndarray | None]:
    """float32 (slots, n, size) -> numbers of the caches, the same shape; and for int8 their scales (slots, n)"""
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
