"""Sizes of key/value caches, in pages of 32 positions, for all code that counts cache memory: stages of the kernels and of
torch, admission, nodes, plans. Pure numbers; neither numpy nor torch is needed.

Blocks with the same sliding window form a class: a page holds 32 positions of all of them.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from mdi.spec.model import ModelConfig

PAGE = 32  # positions
WINDOW_SLACK = 64  # positions that a class with a window keeps beyond it, for slices that go back
CHUNK_ROWS = 64  # prompt rows that a frame takes at most: few enough that stages overlap while prompts are computed

CACHE_TYPES = {"float32": 4, "bf16": 2, "fp16": 2, "int8": 1}  # what caches can hold: bytes of a number
ALIASES = {"fp32": "float32", "bfloat16": "bf16", "float16": "fp16"}  # as types to compute in are called


def cache_type_named(name: str) -> str:
    """The name in CACHE_TYPES of a type that may be called as one to compute in; any other name as it is."""
    return ALIASES.get(name.lower(), name.lower())


def slot_bytes(k_size: int, v_size: int, cache_type: str) -> int:
    """Bytes of one block and group in a page: keys of k_size and values of v_size numbers, the latter in whole vectors."""
    numbers = (k_size + -(-v_size // 16) * 16) * PAGE
    scales = 2 * PAGE * 4 if cache_type == "int8" else 0
    return -(-(numbers * CACHE_TYPES[cache_type] + scales) // 64) * 64


@functools.lru_cache(maxsize=1024)  # running texts ask for every node and class
def n_pages(window: int | None, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
    """Pages that a sequence of `length` positions has at most, from its first token to its last.

    Args:
        window: positions that a row sees, itself included; None is all of them.
        chunk_rows: rows that come at once, at most.
    """
    pages = -(-length // PAGE)
    if window is None:
        return pages
    # The first page that is kept may begin up to PAGE - 1 positions before the first one that is still needed.
    return min(pages, -(-(window + WINDOW_SLACK + chunk_rows + PAGE - 1) // PAGE))


@dataclass(frozen=True)
class CacheClass:
    """Blocks of one stage that share their pages: their window, and the bytes of a page of all of them."""

    window: int | None
    page_bytes: int

    def n_pages(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        return n_pages(self.window, length, chunk_rows)

    def n_bytes(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        """Most bytes of a sequence of `length` positions."""
        return self.n_pages(length, chunk_rows) * self.page_bytes


def classes_of(windows: Sequence[int | None], block_bytes: int) -> tuple[list[CacheClass], list[tuple[int, int]]]:
    """The classes of a stage, and for each block its class and its number there.

    Args:
        windows: of each block, in order.
        block_bytes: of one block in a page. A page is a whole number of the system's, so that a free one can be given back.
    """
    distinct = list(dict.fromkeys(windows))
    classes = []
    for window in distinct:
        n_bytes = windows.count(window) * block_bytes
        classes.append(CacheClass(window, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE))
    seen = [0] * len(distinct)
    places = []
    for window in windows:
        c = distinct.index(window)
        places.append((c, seen[c]))
        seen[c] += 1
    return classes, places


def windows_of(config: ModelConfig, start: int, stop: int) -> list[int | None]:
    """How many positions back the blocks [start, stop) of a model see, themselves included; None is all of them."""
    size, indices = config.sliding_window_size, config.sliding_window_indices
    if size is None or indices is None:
        return [None] * (stop - start)
    return [size if indices[i] else None for i in range(start, stop)]


@dataclass(frozen=True)
class CacheShape:
    """The cache of one block and one position: `n_groups` keys of `k_size` numbers and values of `v_size`.

    With `v_size` 0 values are not stored: they are part of the keys (latent attention).
    """

    n_groups: int
    k_size: int
    v_size: int

    def block_bytes(self, cache_type: str) -> int:
        """Of one block in a page."""
        return self.n_groups * slot_bytes(self.k_size, self.v_size, cache_type)


def cache_shape(config: ModelConfig) -> CacheShape:
    """The same for all blocks of a model."""
    if latent := config.latent_attention:
        return CacheShape(1, latent["kv_lora_rank"] + latent["qk_rope_head_dim"], 0)
    return CacheShape(config.n_query_groups, config.head_size, config.head_size)


def cache_classes(
    config: ModelConfig, start: int, stop: int, cache_type: str
) -> tuple[list[CacheClass], list[tuple[int, int]]]:
    """The classes of the blocks [start, stop) of a model, and each block's class and number there."""
    return classes_of(windows_of(config, start, stop), cache_shape(config).block_bytes(cache_type))
