"""Key/value caches as pages of 32 positions, from one pool for all sequences of a stage.

Blocks with the same sliding window have the same pages (`model.caches`). A sequence is a table of
pages for each such class, so that cutting, copying and freeing it moves no keys or values. Pages have reference
counts; a shared page is copied before rows are written into it. (The idea is that of PagedAttention, Kwon et al.
2023, section 4.)

A page has one slot for each block of its class and each group of heads: keys, then values, each 32 positions; int8 has
32 scales of keys and of values behind them. The code that computes decides the layout of keys and values within a slot.
"""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import psutil

from mdi.errors import Code, EngineError
from mdi.kernels.memory_nodes import spread
from mdi.model.caches import PAGE, SLACK, PageClass

# Reserved memory must not count as taken, or a process that holds it cannot start another one. Python 3.13 knows the name.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
KEPT_FREE_BYTES = 32 << 20  # free pages that stay in memory; more free pages go back to the system


class Pages(ABC):
    """Pages of one class, with reference counts. Subclasses provide their memory.

    Args:
        page_bytes: of one.
        capacity: how many there can be.
    """

    def __init__(self, page_bytes: int, capacity: int) -> None:
        self.page_bytes, self.capacity = page_bytes, capacity
        self.references: list[int] = []  # of the pages that were ever used: there can be millions, and few are
        self.unused: list[int] = []  # unused ones among them

    @property
    def n_used(self) -> int:
        return len(self.references) - len(self.unused)

    @property
    def n_free(self) -> int:
        return self.capacity - self.n_used

    def take(self) -> int:
        """A page for one sequence, with anything in it. Raises EngineError if all are taken."""
        if self.unused:
            page = self.unused.pop()
            self.references[page] = 1
        elif len(self.references) < self.capacity:
            page = len(self.references)
            self.references.append(1)
        else:
            raise EngineError(f"all {self.capacity} cache pages of this node are in use", Code.MEMORY)
        return page

    def share(self, page: int) -> None:
        self.references[page] += 1

    def is_shared(self, page: int) -> bool:
        return self.references[page] > 1

    def release(self, pages: Sequence[int]) -> None:
        """One sequence less has these."""
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                self.unused.append(page)

    @abstractmethod
    def copy(self, page: int) -> int:
        """A page of one's own with the same bytes."""


class Pool(Pages):
    """Pages in the memory of the machine, reserved once and taken from the system as they are written.

    A system that limits reservations may grant less; then the capacity is smaller.

    Attributes:
        memory: uint8, (capacity, page_bytes).

    Raises:
        EngineError: not even one page was granted.
    """

    def __init__(self, page_bytes: int, capacity: int) -> None:
        self._map, granted = _reserved(page_bytes, max(1, capacity))
        super().__init__(page_bytes, min(capacity, granted))
        self.memory = np.frombuffer(self._map, dtype=np.uint8).reshape(-1, page_bytes)
        spread(self.memory)
        self._n_given_back = 0  # of the free pages, the first ones hold no memory

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def take(self) -> int:
        page = super().take()
        self._n_given_back = min(self._n_given_back, len(self.unused))
        return page

    def copy(self, page: int) -> int:
        other = self.take()
        self.memory[other] = self.memory[page]
        return other

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        kept = KEPT_FREE_BYTES // self.page_bytes
        while len(self.unused) - self._n_given_back > kept and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, self.unused[self._n_given_back] * self.page_bytes, self.page_bytes)
            self._n_given_back += 1


def _reserved(page_bytes: int, n_pages: int) -> tuple[mmap.mmap, int]:
    """Memory for so many pages, and their number. If the system refuses, half of what it grants: others need some, too."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
    wanted = n_pages
    while n_pages:
        try:
            found = mmap.mmap(-1, n_pages * page_bytes, flags=flags)
        except (OSError, OverflowError):
            n_pages //= 2
            continue
        if n_pages in (1, wanted):
            return found, n_pages
        found.close()
        return mmap.mmap(-1, n_pages // 2 * page_bytes, flags=flags), n_pages // 2
    raise EngineError(
        f"the system grants no memory for caches, not even {page_bytes} bytes: see ulimit -v and vm.overcommit_memory",
        Code.MEMORY,
    )


def capacity_of(cache_class: PageClass, max_length: int, limit_bytes: int | None = None) -> int:
    """Most pages that a class may have: as many as fit into the limit, if there is one, else into the machine's memory.

    They are reserved but not taken; free memory decides which sequences are admitted.
    """
    if limit_bytes is None:
        limit_bytes = max(psutil.virtual_memory().total, cache_class.n_bytes(max_length))
    return max(1, -(-limit_bytes // cache_class.page_bytes))


class PageTable:
    """Pages of one sequence in one class: position p is in page `ids[p // 32 - first]`, at p % 32."""

    def __init__(self) -> None:
        self.first = 0
        self.n = 0
        self._ids = np.zeros(8, dtype=np.int32)
        self.address = int(self._ids.ctypes.data)  # of the ids; another one when the table has grown

    @property
    def ids(self) -> np.ndarray:
        """int32, (n)"""
        return self._ids[: self.n]

    def append(self, page: int) -> None:
        if self.n == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self.address = int(self._ids.ctypes.data)
        self._ids[self.n] = page
        self.n += 1

    def replace(self, at: int, page: int) -> None:
        self._ids[at] = page

    def cut(self, n: int) -> list[int]:
        """Keep the first n pages; returns the others."""
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

    def copied(self) -> PageTable:
        other = PageTable()
        other.first, other.n, other._ids = self.first, self.n, self._ids.copy()
        other.address = int(other._ids.ctypes.data)
        return other


class _Sequence:
    def __init__(self, n_classes: int) -> None:
        self.end = 0  # position after the last row
        self.tables = [PageTable() for _ in range(n_classes)]


class CachePages:
    """The caches of all sequences of one stage.

    Args:
        pools: one for each class.
    """

    def __init__(self, classes: Sequence[PageClass], pools: Sequence[Pages]) -> None:
        assert len(classes) == len(pools)
        self.classes = list(classes)
        self.pools = list(pools)
        self._sequences: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def n_bytes(self) -> int:
        """In pages that sequences have."""
        return sum(pool.n_used * pool.page_bytes for pool in self.pools)

    @property
    def most_bytes(self) -> int | None:
        """As long as all sequences together take no more, every class has pages; None without blocks."""
        return min((pool.capacity * pool.page_bytes for pool in self.pools), default=None)

    def tables(self, seq_id: int) -> list[PageTable]:
        return self._sequences[seq_id].tables

    def extend(self, seq_id: int, start: int, n_rows: int) -> list[PageTable]:
        """Have pages for the positions [start, start + n_rows), which the caller then writes; what was there from `start` on
        is cut off. Returns the sequence's tables.

        Raises:
            EngineError: `start` is beyond the end, or a window has moved on: nothing has changed. Or all pages are in use: the
                sequence ends at `start`.
        """
        sequence = self._sequences.get(seq_id) or _Sequence(len(self.classes))
        if start != sequence.end:
            self._check_start(sequence, start)
            self._cut(sequence, start)
        try:
            for cache_class, pool, table in zip(self.classes, self.pools, sequence.tables, strict=True):
                _grow(cache_class, pool, table, start, n_rows)
        except EngineError:
            self._cut(sequence, start)
            raise
        sequence.end = start + n_rows
        self._sequences[seq_id] = sequence
        return sequence.tables

    def _check_start(self, sequence: _Sequence, start: int) -> None:
        if start > sequence.end:
            raise EngineError(f"a slice starts at position {start}, but its cache ends at {sequence.end}")
        for cache_class, table in zip(self.classes, sequence.tables, strict=True):
            lowest = 0 if cache_class.window is None else max(0, start - cache_class.window + 1)
            if lowest < table.first * PAGE:
                raise EngineError(
                    f"a slice goes back to position {start}, but the window kept only what follows {table.first * PAGE}"
                )

    def _cut(self, sequence: _Sequence, start: int) -> None:
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.cut(max(0, -(-start // PAGE) - table.first)))
        sequence.end = start

    def end(self, seq_id: int) -> int:
        """Positions that a sequence has; 0 if it is not known."""
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else sequence.end

    def rearrange(self, freed: Iterable[int], copies: Iterable[tuple[int, int]]) -> None:
        """Free sequences, and let others, (sequence, new sequence), continue from the same prefix; all at once.

        What is copied is what was there before, also of a sequence that is freed, or that continues from another one itself.

        Raises:
            EngineError: a prefix does not exist; nothing has changed.
        """
        made: dict[int, _Sequence] = {}
        for seq_id, new_id in copies if self.pools else ():  # a stage without blocks has nothing of any sequence
            if (source := self._sequences.get(seq_id)) is None:
                raise EngineError(f"sequence {seq_id} has no cache to continue from")
            other = made[new_id] = _Sequence(0)
            other.end, other.tables = source.end, [table.copied() for table in source.tables]
        for other in made.values():  # before anything is freed, so that no page in use is given away
            for pool, table in zip(self.pools, other.tables, strict=True):
                for page in table.ids:
                    pool.share(int(page))
        for seq_id in (*freed, *made):
            self.free(seq_id)
        self._sequences.update(made)

    def free(self, seq_id: int) -> None:
        """Forget a sequence. It is not an error if this stage has never seen it (because it was cancelled early)."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                pool.release(table.ids.tolist())

    def clear(self) -> None:
        for seq_id in list(self._sequences):
            self.free(seq_id)


def _grow(cache_class: PageClass, pool: Pages, table: PageTable, start: int, n_rows: int) -> None:
    """Pages of one's own for the positions [start, start + n_rows) of a sequence that ends at `start`."""
    if start % PAGE and pool.is_shared(page := int(table.ids[-1])):
        table.replace(table.n - 1, pool.copy(page))
        pool.release([page])
    if cache_class.window is not None:
        unseen = (start - cache_class.window - SLACK) // PAGE - table.first
        if unseen > 0:
            pool.release(table.drop(min(unseen, table.n)))
    while (table.first + table.n) * PAGE < start + n_rows:
        table.append(pool.take())
