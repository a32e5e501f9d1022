"""One row each of several sequences, in tensors at fixed addresses, so that a block's step can be recorded once.

To a block it looks like `batch.Batch`. Rows that no sequence has fill it up to a size that was recorded: they write to a page
of their own, the scratch page, and what comes of them is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mdi.kernels.page_sizes import PAGE
from mdi.model.batch import Alone, Rows
from mdi.model.cache import Memory, Selection, TorchCaches


class FixedGroup:
    """What the rows see in one class of caches; as batch.Together, with tables as wide as the widest.

    Args:
        tables: (n, width) pages of each sequence. firsts: (n,) position of the first key there. positions: (n,) of the rows.
        window: how many positions back a row sees, itself included; None is all of them.
    """

    index = None  # the rows are the whole batch

    def __init__(self, tables: torch.Tensor, firsts: torch.Tensor, positions: torch.Tensor, window: int | None) -> None:
        self._n, self._width = tables.shape
        self._firsts, self._positions, self._window = firsts, positions, window
        self.pages = Selection(tables.numel(), ((0, tables.view(-1), None, None),))
        written = torch.div(positions - firsts, PAGE, rounding_mode="floor")
        page = tables.gather(1, written[:, None])[:, 0]
        self.places = Selection(self._n, ((0, page, positions % PAGE, None),))
        self._masks: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def seen(self, gathered: torch.Tensor) -> torch.Tensor:
        """(positions of all, G, size) -> (n, G, positions of each, size)"""
        return gathered.view(self._n, -1, *gathered.shape[1:]).transpose(1, 2)

    def mask(self, dtype: torch.dtype, n_groups: int, n_repeat: int) -> torch.Tensor:
        """What is added to the scores, see batch.Together: (n, G, n_repeat, positions of each)"""
        key = dtype, n_groups, n_repeat
        if key not in self._masks:
            keys = self._firsts[:, None] + torch.arange(self._width * PAGE, device=self._firsts.device)
            is_hidden = keys > self._positions[:, None]
            if self._window is not None:
                is_hidden |= keys <= self._positions[:, None] - self._window
            zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
            mask = zeros.masked_fill_(is_hidden, float("-inf"))[:, None, None]
            self._masks[key] = mask.expand(-1, n_groups, n_repeat, -1)
        return self._masks[key]


class FixedRows:
    """The numbers of a step, all in one tensor on the device, so that one copy brings them there.

    Args:
        n: rows.
        widths: pages of a sequence, for each class of the caches.

    Attributes:
        positions: (n,). tables: of each class, (n, width). firsts: of each class, (n,).
    """

    def __init__(self, n: int, widths: Sequence[int], device: torch.device) -> None:
        self._n, self._widths = n, tuple(widths)
        lengths = [n, *(n * (1 + width) for width in widths)]
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(lengths), dtype=torch.int64, pin_memory=is_gpu)
        self._device = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        self.positions, *of_classes = self._device.split(lengths)
        self.firsts = [part[:n] for part in of_classes]
        self.tables = [part[n:].view(n, -1) for part in of_classes]

    def fill(self, rows: Sequence[Rows], scratch: Sequence[int]) -> None:
        """Take the positions and tables of sequences; those beyond have the scratch page of each class."""
        numbers = self._host.numpy()
        numbers[: self._n] = 0
        numbers[: len(rows)] = [one.start for one in rows]
        at = self._n
        for c, width in enumerate(self._widths):
            firsts, tables = numbers[at : at + self._n], numbers[at + self._n : at + self._n * (1 + width)]
            firsts[:], tables[:] = 0, scratch[c]
            for i, one in enumerate(rows):
                table = one.tables[c]
                firsts[i] = table.first * PAGE
                of_row = tables[i * width : (i + 1) * width]
                of_row[: table.n] = table.ids
                of_row[table.n :] = table.ids[-1]  # its own: a mask cannot undo what another one's page may hold
            at += self._n * (1 + width)
        self._device.copy_(self._host)  # waits, for the host's numbers change with the next frame

    def batch(self, caches: TorchCaches) -> FixedBatch:
        return FixedBatch(self, caches)


class FixedBatch:
    """As `batch.Batch`, for blocks that attend with model.attention.CachedAttention."""

    def __init__(self, rows: FixedRows, caches: TorchCaches) -> None:
        self.caches = caches
        self.positions = rows.positions
        self.memory = Memory(caches.device)
        self._groups = [
            FixedGroup(tables, firsts, rows.positions, one.window)
            for tables, firsts, one in zip(rows.tables, rows.firsts, caches.classes, strict=True)
        ]

    def places(self, cache_class: int) -> Selection:
        return self._groups[cache_class].places

    def parts(self, cache_class: int) -> tuple[list[FixedGroup], list[Alone]]:
        return [self._groups[cache_class]], []

    def seen(self, part: FixedGroup, layer: int, half: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (0) or values (1) of one block, (n, G, n_keys, size), as `dtype`."""
        found = part.seen(self.caches.blocks[layer].gather(half, part.pages, self.memory))
        return found if found.dtype == dtype else found.to(dtype)


def widths_of(rows: Sequence[Rows], n_classes: int) -> list[int]:
    """Pages that the longest of some sequences has, for each class."""
    return [max(int(np.max([one.tables[c].n for one in rows])), 1) for c in range(n_classes)]
