"""Key/value caches as pages of 32 positions, from one pool for all sequences of a stage.

Blocks with the same sliding window have the same pages: a page holds 32 positions of all of them. A sequence is a table of
pages for each such class, so that cutting, copying and freeing it moves no keys or values. Pages are counted by reference;
one that several sequences share is copied before rows are written into it. (The idea is that of PagedAttention, Kwon et al.
2023, section 4.)

A page has one slot for each block of its class and each group of heads: keys, then values, each 32 positions; int8 has
32 scales of keys and of values behind them. How keys and values lie within a slot is the matter of who computes with them.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdi.errors import EngineError

PAGE = 32  # positions
WINDOW_SLACK = 64  # positions that a class with a window keeps beyond it, for slices that go back
KEPT_FREE_BYTES = 32 << 20  # free pages that stay in memory; what is free beyond them goes back to the system

CACHE_TYPES = {"float32": 4, "bf16": 2, "fp16": 2, "int8": 1}  # bytes of a number


def slot_bytes(k_size: int, v_size: int, cache_type: str) -> int:
    """Bytes of one block and group in a page: keys of k_size and values of v_size numbers, the latter in whole vectors."""
    numbers = (k_size + -(-v_size // 16) * 16) * PAGE
    scales = 2 * PAGE * 4 if cache_type == "int8" else 0
    return -(-(numbers * CACHE_TYPES[cache_type] + scales) // 64) * 64


@dataclass(frozen=True)
class CacheClass:
    """Blocks that share their pages.

    Attributes:
        window: positions that a row sees, itself included; None is all of them.
        n_blocks: of the stage, in this class.
        block_bytes: of one block in a page: all its groups.
    """

    window: int | None
    n_blocks: int
    block_bytes: int

    @property
    def page_bytes(self) -> int:
        """A whole number of the system's pages, so that a free one can be given back."""
        return -(-self.n_blocks * self.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def n_pages(self, length: int) -> int:
        """Pages that a sequence of `length` positions takes at most."""
        pages = -(-length // PAGE)
        if self.window is None:
            return pages
        return min(pages, -(-(self.window + WINDOW_SLACK) // PAGE) + 1 + -(-WINDOW_SLACK // PAGE))


def classes_of(windows: Sequence[int | None], block_bytes: int) -> tuple[list[CacheClass], list[tuple[int, int]]]:
    """The classes of a stage, and for each block its class and its number there.

    Args:
        windows: of each block, in order.
    """
    kinds = list(dict.fromkeys(windows))
    classes = [CacheClass(window, windows.count(window), block_bytes) for window in kinds]
    seen = [0] * len(kinds)
    places = []
    for window in windows:
        c = kinds.index(window)
        places.append((c, seen[c]))
        seen[c] += 1
    return classes, places


class Pool:
    """Pages of one class.

    The memory is reserved once and taken from the system as pages are written.

    Attributes:
        memory: uint8, (capacity, page_bytes).
    """

    def __init__(self, page_bytes: int, capacity: int) -> None:
        self.page_bytes, self.capacity = page_bytes, capacity
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(-1, max(1, capacity) * page_bytes, flags=flags)
        self.memory = np.frombuffer(self._map, dtype=np.uint8).reshape(-1, page_bytes)
        self._references = np.zeros(capacity, dtype=np.int32)
        self._free: list[int] = []  # that were used before
        self._n_given_back = 0  # of those, the first ones hold no memory
        self._next = 0  # the first page that was never used

    @property
    def n_used(self) -> int:
        return self._next - len(self._free)

    @property
    def n_free(self) -> int:
        return self.capacity - self.n_used

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def take(self) -> int:
        """A page for one sequence. Raises EngineError if all are taken."""
        if self._free:
            page = self._free.pop()
            self._n_given_back = min(self._n_given_back, len(self._free))
        elif self._next < self.capacity:
            page = self._next
            self._next += 1
        else:
            raise EngineError(f"all {self.capacity} cache pages of this node are in use")
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        self._references[page] += 1

    def is_shared(self, page: int) -> bool:
        return bool(self._references[page] > 1)

    def copy(self, page: int) -> int:
        """A page of one's own with the same bytes."""
        other = self.take()
        self.memory[other] = self.memory[page]
        return other

    def release(self, pages: Sequence[int]) -> None:
        """One sequence less has these."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
        kept = KEPT_FREE_BYTES // self.page_bytes
        while len(self._free) - self._n_given_back > kept and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, self._free[self._n_given_back] * self.page_bytes, self.page_bytes)
            self._n_given_back += 1

    def close(self) -> None:
        """Give the memory back, if nothing refers to it any more."""
        del self.memory
        with contextlib.suppress(BufferError):
            self._map.close()


class Table:
    """Pages of one sequence in one class: position p lies in page `ids[p // 32 - first]`, at p % 32."""

    def __init__(self) -> None:
        self.first = 0
        self.n = 0
        self._ids = np.zeros(8, dtype=np.int32)

    @property
    def ids(self) -> np.ndarray:
        """int32, (n)"""
        return self._ids[: self.n]

    @property
    def address(self) -> int:
        return int(self._ids.ctypes.data)

    def append(self, page: int) -> None:
        if self.n == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
        self._ids[self.n] = page
        self.n += 1

    def replace(self, at: int, page: int) -> None:
        self._ids[at] = page

    def cut(self, n: int) -> list[int]:
        """Keep the first n pages; the others."""
        gone: list[int] = self._ids[n : self.n].tolist()
        self.n = min(self.n, n)
        return gone

    def drop(self, n: int) -> list[int]:
        """Forget the first n pages; which they are."""
        gone: list[int] = self._ids[:n].tolist()
        self._ids[: self.n - n] = self._ids[n : self.n].copy()
        self.n -= n
        self.first += n
        return gone

    def copied(self) -> Table:
        other = Table()
        other.first, other.n, other._ids = self.first, self.n, self._ids.copy()
        return other


class _Sequence:
    def __init__(self, n_classes: int) -> None:
        self.end = 0  # position after the last row
        self.tables = [Table() for _ in range(n_classes)]


class CachePages:
    """The caches of all sequences of one stage.

    Args:
        capacities: pages of each class.
    """

    def __init__(self, classes: Sequence[CacheClass], capacities: Sequence[int]) -> None:
        self.classes = list(classes)
        self.pools = [Pool(c.page_bytes, n) for c, n in zip(classes, capacities, strict=True)]
        self._sequences: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def n_bytes(self) -> int:
        """In pages that sequences have."""
        return sum(pool.n_used * pool.page_bytes for pool in self.pools)

    def tables(self, seq_id: int) -> list[Table]:
        return self._sequences[seq_id].tables

    def extend(self, seq_id: int, start: int, n_rows: int) -> list[Table]:
        """Have pages for the positions [start, start + n_rows), which the caller then writes; what was there from `start` on
        is cut off. Returns the sequence's tables.

        Raises:
            EngineError: `start` is beyond the end, or a window has moved on, or all pages are in use.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            sequence = self._sequences[seq_id] = _Sequence(len(self.classes))
        if start != sequence.end:
            self._cut(sequence, start)
        for cache_class, pool, table in zip(self.classes, self.pools, sequence.tables, strict=True):
            if start % PAGE and pool.is_shared(page := int(table.ids[-1])):
                table.replace(table.n - 1, pool.copy(page))
                pool.release([page])
            if cache_class.window is not None:
                unseen = (start - cache_class.window - WINDOW_SLACK) // PAGE - table.first
                if unseen > 0:
                    pool.release(table.drop(min(unseen, table.n)))
            while (table.first + table.n) * PAGE < start + n_rows:
                table.append(pool.take())
        sequence.end = start + n_rows
        return sequence.tables

    def _cut(self, sequence: _Sequence, start: int) -> None:
        if start > sequence.end:
            raise EngineError(f"a slice starts at position {start}, but its cache ends at {sequence.end}")
        for cache_class, table in zip(self.classes, sequence.tables, strict=True):
            lowest = 0 if cache_class.window is None else max(0, start - cache_class.window + 1)
            if lowest < table.first * PAGE:
                raise EngineError(
                    f"a slice goes back to position {start}, but the window kept only what follows {table.first * PAGE}"
                )
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.cut(max(0, -(-start // PAGE) - table.first)))
        sequence.end = start

    def end(self, seq_id: int) -> int:
        """Positions that a sequence has; 0 if it is not known."""
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else sequence.end

    def copy(self, seq_id: int, new_id: int) -> None:
        """Let another sequence go on from the same prefix. What it had before is freed."""
        source = self._sequences[seq_id]
        self.free(new_id)
        other = self._sequences[new_id] = _Sequence(0)
        other.end, other.tables = source.end, [table.copied() for table in source.tables]
        for pool, table in zip(self.pools, other.tables, strict=True):
            for page in table.ids:
                pool.share(int(page))

    def free(self, seq_id: int) -> None:
        """Forget a sequence; one that this stage has not seen (it was cancelled early) is no error."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                pool.release(table.ids.tolist())

    def clear(self) -> None:
        for seq_id in list(self._sequences):
            self.free(seq_id)

    def close(self) -> None:
        self.clear()
        for pool in self.pools:
            pool.close()
