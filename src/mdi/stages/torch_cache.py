"""Key/value caches of the torch path: the pages of `mdi.kernels.pages` in torch's memory. A block gathers by page number what a
sequence has.

For each block a page has the keys of its 32 positions, (32, G, k_size), then the values, (32, G, v_size), so that consecutive
pages have a sequence's keys in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mdi.errors import Code, EngineError
from mdi.kernels.cache_rows import TYPES, check_arrays
from mdi.kernels.pages import CachePages, Pages, PageStore, Pool, capacity_of
from mdi.kernels.states import StateStore
from mdi.model.caches import PAGE, PageClass, Paged, State, cache_numbers, stage_places
from mdi.model.spec import ModelSpec

TORCH_TYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CACHE_TYPE_OF = {dtype: name for name, dtype in TORCH_TYPES.items()}
SLAB_BYTES = 32 << 20  # of a GPU's memory, taken at once


class TorchPages(Protocol):
    """Pages as tensors: rows of slabs, which are (pages, numbers of a page)."""

    slabs: list[torch.Tensor]

    def where(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slab of each page, and its row there."""


class HostPages(Pool):
    """In the memory of the machine, all in one slab.

    A new page is zeros: rows that are not written yet are read under a mask, and a mask cannot undo what is not a number.
    """

    def __init__(self, page_bytes: int, capacity: int, dtype: torch.dtype) -> None:
        super().__init__(page_bytes, capacity)
        self.slabs = [torch.from_numpy(self.memory).view(dtype)]

    def where(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(pages), pages

    def take(self) -> int:
        page = super().take()
        self.slabs[0][page].zero_()
        return page


class DevicePages(Pages):
    """In a GPU's memory, slab after slab; all slabs are freed when no page is in use. A new page is zeros."""

    def __init__(
        self, page_bytes: int, capacity: int, dtype: torch.dtype, device: torch.device, slab_bytes: int = SLAB_BYTES
    ) -> None:
        super().__init__(page_bytes, capacity)
        self._dtype, self._device = dtype, device
        self.slab_pages = max(1, slab_bytes // page_bytes)
        self.slabs: list[torch.Tensor] = []

    def where(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slabs, rows = np.divmod(pages, self.slab_pages)
        return slabs, rows

    def take(self) -> int:
        page = super().take()
        if int(self.where(np.array(page))[0]) == len(self.slabs):
            try:
                shape = self.slab_pages, self.page_bytes // self._dtype.itemsize
                self.slabs.append(torch.empty(shape, dtype=self._dtype, device=self._device))
            except RuntimeError:  # of several types, by device
                super().release([page])
                taken = self.slab_pages * self.page_bytes >> 20
                raise EngineError(
                    f"no memory is left on {self._device} for another {taken} MB of caches", Code.MEMORY
                ) from None
        self._row(page).zero_()
        return page

    def copy(self, page: int) -> int:
        other = self.take()
        self._row(other).copy_(self._row(page))
        return other

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        if not self.n_used:
            self.slabs.clear()
            self.unused.clear()
            self.references.clear()

    def _row(self, page: int) -> torch.Tensor:
        slab, row = self.where(np.array(page))
        return self.slabs[int(slab)][int(row)]


@dataclass(frozen=True)
class Selection:
    """Pages, or positions in pages, in an order: of each slab that has some, which, and where they stand in that order.

    Attributes:
        n: how many.
        parts: number of a slab; rows of it; positions in them, if positions were asked for; places in the order, None if all
            are in one slab.
    """

    n: int
    parts: tuple[tuple[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None], ...]


class BlockCache:
    """Keys and values of one block, of all sequences.

    Args:
        pool: of its class.
        cache_class: the number of that.
        begin: where it begins in a page, in numbers.
    """

    def __init__(self, pool: TorchPages, cache_class: int, begin: int, kind: Paged) -> None:
        self.pool, self.cache_class = pool, cache_class
        n_groups = kind.n_groups
        keys = (begin, n_groups, kind.k_size)
        self._halves = [keys]
        if kind.v_size:
            self._halves.append((begin + PAGE * n_groups * kind.k_size, n_groups, kind.v_size))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the keys, and of the values where there are any, of one position: (G, size)"""
        return [(n_groups, size) for _, n_groups, size in self._halves]

    def write(self, places: Selection, *kv: torch.Tensor) -> None:
        """Store keys and values (N, G, size) of positions; values only where there are any."""
        for (begin, n_groups, size), rows in zip(self._halves, kv, strict=True):
            for slab_number, pages, positions, at in places.parts:
                slab = self.pool.slabs[slab_number]
                strides = (slab.stride(0), n_groups * size, size, 1)
                view = slab.as_strided((slab.size(0), PAGE, n_groups, size), strides, begin)
                assert positions is not None
                view[pages, positions] = (rows if at is None else rows[at]).to(slab.dtype)

    def read(self, places: Selection) -> list[torch.Tensor]:
        """The reverse, in the type of the caches."""
        found = []
        for begin, n_groups, size in self._halves:
            rows = torch.empty(
                places.n, n_groups, size, dtype=self.pool.slabs[0].dtype, device=self.pool.slabs[0].device
            )
            for slab_number, pages, positions, at in places.parts:
                slab = self.pool.slabs[slab_number]
                strides = (slab.stride(0), n_groups * size, size, 1)
                view = slab.as_strided((slab.size(0), PAGE, n_groups, size), strides, begin)
                rows[slice(None) if at is None else at] = view[pages, positions]
            found.append(rows)
        return found

    def gather(self, half: int, pages: Selection, memory: Memory) -> torch.Tensor:
        """Keys (0) or values (1) of these pages, one after the other: (n * 32, G, size), valid until the next of this half."""
        begin, n_groups, size = self._halves[half]
        numbers = PAGE * n_groups * size
        found = memory.of(f"half {half}", (pages.n, numbers), self.pool.slabs[0].dtype)
        for slab_number, index, _, at in pages.parts:
            slab = self.pool.slabs[slab_number]
            view = slab.as_strided((slab.size(0), numbers), (slab.stride(0), 1), begin)
            if at is None:
                torch.index_select(view, 0, index, out=found)
            else:
                found[at] = view.index_select(0, index)
        return found.view(pages.n * PAGE, n_groups, size)


class BlockRows:
    """The blocks of one class as `mdi.kernels.pages.Layout`: rows of theirs as arrays."""

    def __init__(self, caches: TorchCaches, cache_class: int) -> None:
        self._caches, self._class = caches, cache_class
        own = {number: caches.blocks[i] for i, (c, number) in enumerate(caches.places) if c == cache_class}
        self._blocks = {number: block for number, block in own.items() if isinstance(block, BlockCache)}
        self._dtype = np.dtype(TYPES[caches.cache_type])

    def read(self, number: int, pages: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        found = self._blocks[number].read(self._caches.select(self._class, pages, positions))
        return tuple((one.view(torch.uint16) if one.dtype == torch.bfloat16 else one).cpu().numpy() for one in found)

    def write(self, number: int, pages: np.ndarray, positions: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        block = self._blocks[number]
        check_arrays(arrays, [(len(pages), *shape) for shape in block.shapes], [self._dtype] * len(block.shapes))
        tensors = [torch.from_numpy(np.ascontiguousarray(one)) for one in arrays]
        own = [one.view(torch.bfloat16) if one.dtype == torch.uint16 else one for one in tensors]
        block.write(self._caches.select(self._class, pages, positions), *(one.to(self._caches.device) for one in own))


class Memory:
    """Tensors that all blocks use one after the other.

    New memory for each block, megabytes for a long cache, would come from the system page by page.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, slot: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with anything in it, valid until this is called for the same slot again."""
        n = int(np.prod(shape))
        kept = self._kept.get(slot)
        if kept is None or kept.numel() < n or kept.dtype != dtype:
            kept = self._kept[slot] = torch.empty(n, dtype=dtype, device=self._device)
        return kept[:n].view(*shape)


class TorchCaches(CachePages):
    """The caches of a stage of torch.

    Args:
        spec: of the model; the blocks are [start, stop).
        max_length: positions that a sequence may reach.
        dtype: number type of the caches.
        limit_bytes: what all caches together will take at most; None is not known.

    Attributes:
        blocks: in order.
    """

    def __init__(
        self, spec: ModelSpec, start: int, stop: int, max_length: int, device: torch.device, dtype: torch.dtype,
        limit_bytes: int | None = None,
    ) -> None:  # fmt: skip
        counts, places = stage_places(spec, start, stop)
        kinds = [kind for kind in counts if isinstance(kind, Paged)]
        classes = [kind.of_blocks(counts[kind], CACHE_TYPE_OF[dtype]) for kind in kinds]
        states = [
            StateStore(kind, n, limit_bytes, lambda shape: torch.zeros(shape, device=device))
            for kind, n in counts.items()
            if isinstance(kind, State)
        ]
        pools: list[HostPages | DevicePages] = []
        for c in classes:
            if device.type == "cpu":
                pools.append(HostPages(c.page_bytes, capacity_of(c, max_length, limit_bytes), dtype))
            else:
                limit = limit_bytes if limit_bytes is not None else _memory_bytes(device)
                pools.append(DevicePages(c.page_bytes, capacity_of(c, max_length, limit), dtype, device))
        super().__init__(classes, pools, (), places, cache_numbers(spec, start, stop), CACHE_TYPE_OF[dtype], states)
        self.device, self.places = device, places
        sizes = [kind.block_bytes(CACHE_TYPE_OF[dtype]) // dtype.itemsize for kind in kinds]  # in numbers
        self.blocks: list[BlockCache | None] = [  # None: it has states
            BlockCache(pools[c], c, number * sizes[c], kinds[c]) if c < len(kinds) else None for c, number in places
        ]
        for i, store in enumerate(self.stores):
            if isinstance(store, PageStore):
                store.layout = BlockRows(self, i)

    def paged(self, layer: int) -> BlockCache:
        """The keys and values of a block."""
        found = self.blocks[layer]
        assert found is not None
        return found

    def window(self, cache_class: int) -> int | None:
        """Positions that rows see in a class of pages."""
        found = self.classes[cache_class]
        assert isinstance(found, PageClass)
        return found.window

    def select(self, cache_class: int, pages: np.ndarray, positions: np.ndarray | None = None) -> Selection:
        """Pages by their numbers; with `positions`, one position in each."""
        pool = self.pools[cache_class]
        assert isinstance(pool, HostPages | DevicePages)
        slabs, rows = pool.where(pages)
        parts = []
        distinct = np.unique(slabs)
        for slab in distinct.tolist():
            at = None if len(distinct) == 1 else np.flatnonzero(slabs == slab)
            own = slice(None) if at is None else at
            index = self._tensor(rows[own])
            where = None if positions is None else self._tensor(positions[own])
            parts.append((slab, index, where, None if at is None else self._tensor(at)))
        return Selection(len(pages), tuple(parts))

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device)


def _memory_bytes(device: torch.device) -> int | None:
    """Of a device that has its own; None if it is the machine's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
