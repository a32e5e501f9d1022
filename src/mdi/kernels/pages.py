"""Key/value caches as pages of 32 positions, from one pool for all sequences of a stage.

Blocks of the same kind have the same pages (`model.caches`). A sequence is a table of pages for each class of blocks, so that
cutting, copying and freeing it moves no keys or values. Pages have reference counts; a shared page is copied before rows are
written into it. (The idea is that of PagedAttention, Kwon et al. 2023, section 4.)

A page has one slot for each block of its class and each group of heads: keys, then values, each 32 positions; int8 has
32 scales of keys and of values behind them. The code that computes decides the layout of keys and values within a slot.
"""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import psutil

from mdi.errors import Code, EngineError
from mdi.kernels.memory_nodes import spread
from mdi.kernels.stage_caches import Piece, StageCaches
from mdi.kernels.states import StateStore
from mdi.model.caches import PAGE, SLACK, PageClass, Place, StateClass

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


class Layout(Protocol):
    """Where the numbers of a class's blocks lie in its pages."""

    def read(self, number: int, pages: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """The arrays of a `stage_caches.Piece`: of each row, one position in a page. Rows follow each other."""

    def write(self, number: int, pages: np.ndarray, positions: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        """The reverse. Raises EngineError for arrays of other shapes or types."""


class PageStore:
    """Pages of the blocks of one class; a sequence has a table of them.

    Args:
        layout: None where nothing is exported.
    """

    def __init__(self, cache_class: PageClass, pool: Pages, layout: Layout | None = None) -> None:
        self.cache_class, self.pool, self.layout = cache_class, pool, layout

    @property
    def n_bytes(self) -> int:
        return self.pool.n_used * self.pool.page_bytes

    @property
    def most_bytes(self) -> int:
        return self.pool.capacity * self.pool.page_bytes

    def begin(self, first: int = 0) -> PageTable:
        table = PageTable()
        table.first, beyond = divmod(first, PAGE)
        if beyond:
            raise EngineError(f"a cache that begins at position {first}, in the middle of a page")
        return table

    def check(self, entry: PageTable, start: int) -> None:
        window = self.cache_class.window
        lowest = 0 if window is None else max(0, start - window + 1)
        if lowest < entry.first * PAGE:
            raise EngineError(
                f"a slice goes back to position {start}, but the window kept only what follows {entry.first * PAGE}"
            )

    def cut(self, entry: PageTable, end: int) -> None:
        self.pool.release(entry.cut(max(0, -(-end // PAGE) - entry.first)))

    def grow(self, entry: PageTable, start: int, n_rows: int) -> None:
        pool, window = self.pool, self.cache_class.window
        if start % PAGE and pool.is_shared(page := int(entry.ids[-1])):
            entry.replace(entry.n - 1, pool.copy(page))
            pool.release([page])
        if window is not None:
            unseen = (start - window - SLACK) // PAGE - entry.first
            if unseen > 0:
                pool.release(entry.drop(min(unseen, entry.n)))
        while (entry.first + entry.n) * PAGE < start + n_rows:
            entry.append(pool.take())

    def copied(self, entry: PageTable) -> PageTable:
        for page in entry.ids:
            self.pool.share(int(page))
        return entry.copied()

    def free(self, entry: PageTable) -> None:
        self.pool.release(entry.ids.tolist())

    def read(self, entry: PageTable, number: int, start: int, stop: int) -> Piece:
        assert self.layout is not None
        first = max(start, entry.first * PAGE)
        return Piece(first, self.layout.read(number, *self._rows(entry, first, stop)))

    def write(self, entry: PageTable, number: int, piece: Piece, stop: int) -> None:
        assert self.layout is not None
        self.layout.write(number, *self._rows(entry, piece.first, stop), piece.arrays)

    @staticmethod
    def _rows(entry: PageTable, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The page of each position, and its place there."""
        pages, positions = np.divmod(np.arange(first, stop), PAGE)
        return entry.ids[pages - entry.first], positions


class CachePages(StageCaches[PageStore | StateStore]):
    """The caches of a stage: pages, and states.

    Args:
        pools, layouts: one for each class of pages; without layouts nothing is exported.
        states: those of the other classes, which follow.
        places, numbers, cache_type: as of StageCaches.
    """

    def __init__(
        self, classes: Sequence[PageClass], pools: Sequence[Pages], layouts: Sequence[Layout] = (),
        places: Sequence[Place] = (), numbers: Sequence[int] = (), cache_type: str = "float32",
        states: Sequence[StateStore] = (),
    ) -> None:  # fmt: skip
        rows: Sequence[Layout | None] = layouts or [None] * len(classes)
        pages = [PageStore(c, pool, one) for c, pool, one in zip(classes, pools, rows, strict=True)]
        super().__init__([*pages, *states], places, numbers, cache_type)

    @property
    def classes(self) -> list[PageClass | StateClass]:
        return [store.cache_class for store in self.stores]

    @property
    def pools(self) -> list[Pages]:
        return [store.pool for store in self.stores if isinstance(store, PageStore)]
