"""The rows of one frame for the blocks of a stage: their sequences and positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mdi.kernels.page_sizes import PAGE
from mdi.kernels.pages import PageTable
from mdi.kernels.slices import Slices
from mdi.model.cache import Memory, Selection, TorchCaches

# Pages up to which sequences that decode in the same frame attend together: then calls cost more than the arithmetic does, and
# the gathered memory is small.
LARGEST_TOGETHER = 8


@dataclass(frozen=True)
class Rows:
    """Rows [first_row, first_row + n_rows) of a batch: positions from `start` on of one sequence.

    Attributes:
        tables: of the sequence, for each class.
    """

    first_row: int
    n_rows: int
    start: int
    tables: list[PageTable]

    @property
    def span(self) -> slice:
        return slice(self.first_row, self.first_row + self.n_rows)

    @property
    def end(self) -> int:
        return self.start + self.n_rows


@dataclass(frozen=True)
class Alone:
    """One sequence's rows, and the positions that they see.

    Attributes:
        first: position of the first key that any of them sees; the keys end at the last row's position.
        pages: pages of these keys.
    """

    rows: Rows
    first: int
    pages: Selection

    def seen(self, gathered: torch.Tensor) -> torch.Tensor:
        """Of what its pages have, (positions, G, size), what can be seen: (1, G, n_keys, size)."""
        skipped = self.first % PAGE
        return gathered[skipped : skipped + self.rows.end - self.first].transpose(0, 1)[None]


class Together:
    """Sequences that bring one row each and have as many pages: a block attends to all of them at once.

    All positions of their pages are read, those beyond a sequence's end under a mask: a sequence's result depends on its own
    position and never on the other sequences.

    Attributes:
        index: the rows' places in the batch; None if they are the whole batch.
        pages: of all of them, those of the first sequence before those of the next.
    """

    def __init__(
        self, starts: Sequence[int], index: torch.Tensor | None, pages: Selection, device: torch.device
    ) -> None:
        self.index, self.pages = index, pages
        self._n = len(starts)
        self._starts = torch.tensor(starts, device=device)
        self._masks: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def seen(self, gathered: torch.Tensor) -> torch.Tensor:
        """(positions of all, G, size) -> (n, G, positions of each, size)"""
        return gathered.view(self._n, -1, *gathered.shape[1:]).transpose(1, 2)

    def mask(self, dtype: torch.dtype, n_groups: int, n_repeat: int) -> torch.Tensor:
        """Numbers to add to the scores: nothing up to a sequence's own position, minus infinity beyond.

        Returns:
            (n, G, n_repeat, positions of each), the same object for every block.
        """
        key = dtype, n_groups, n_repeat
        if key not in self._masks:
            device, length = self._starts.device, self.pages.n // self._n * PAGE
            beyond = torch.arange(length, device=device) > self._starts[:, None]
            zeros = torch.zeros(self._n, length, dtype=dtype, device=device)
            mask = zeros.masked_fill_(beyond, float("-inf"))[:, None, None]
            self._masks[key] = mask.expand(-1, n_groups, n_repeat, -1)
        return self._masks[key]


class Batch:
    """A ragged batch; the caches have pages for all of its rows.

    Args:
        caches: the stage's.

    Raises:
        EngineError: a slice that does not fit its sequence's cache, or memory that has run out.
    """

    def __init__(self, slices: Slices, caches: TorchCaches) -> None:
        self.caches = caches
        self.memory = Memory(caches.device)
        self.rows: list[Rows] = []
        n = 0
        for seq_id, start, n_rows, *_ in slices:
            self.rows.append(Rows(n, n_rows, start, caches.extend(seq_id, start, n_rows)))
            n += n_rows
        ranges = [np.arange(rows.start, rows.end) for rows in self.rows]
        self._numbers = np.concatenate([np.zeros(0, dtype=np.int64), *ranges])
        self._places: dict[int, Selection] = {}
        self._alone: dict[tuple[int, int], Alone] = {}
        self._parts: dict[int, tuple[list[Together], list[Alone]]] = {}
        self._masks: dict[tuple[int, int, int, int | None], torch.Tensor] = {}

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """(N,)"""
        return torch.from_numpy(self._numbers).to(self.caches.device)

    def places(self, cache_class: int) -> Selection:
        """Where the keys and values of all rows are written."""
        if cache_class not in self._places:
            ids = [np.zeros(0, dtype=np.int32)]
            for rows in self.rows:
                table = rows.tables[cache_class]
                ids.append(table.ids[np.arange(rows.start, rows.end) // PAGE - table.first])
            self._places[cache_class] = self.caches.select(cache_class, np.concatenate(ids), self._numbers % PAGE)
        return self._places[cache_class]

    def parts(self, cache_class: int) -> tuple[list[Together], list[Alone]]:
        """Sequences that blocks of this class compute together, and those that they compute one by one.

        The position of a row alone decides to which of the two it belongs, so other rows change nothing.
        """
        if cache_class not in self._parts:
            window = self.caches.classes[cache_class].window
            together: dict[int, list[Rows]] = {}
            alone: list[Alone] = []
            for rows in self.rows:
                n_pages = -(-rows.end // PAGE)
                if rows.n_rows == 1 and n_pages <= LARGEST_TOGETHER and (window is None or rows.end <= window):
                    together.setdefault(n_pages, []).append(rows)
                else:
                    alone.append(self.alone(rows, cache_class))
            self._parts[cache_class] = [self._together(each, cache_class) for each in together.values()], alone
        return self._parts[cache_class]

    def alone(self, rows: Rows, cache_class: int) -> Alone:
        """The keys that these rows see."""
        key = rows.first_row, cache_class
        if key not in self._alone:
            table, window = rows.tables[cache_class], self.caches.classes[cache_class].window
            first = 0 if window is None else max(0, rows.start - window + 1)
            ids = table.ids[first // PAGE - table.first : -(-rows.end // PAGE) - table.first]
            self._alone[key] = Alone(rows, first, self.caches.select(cache_class, ids))
        return self._alone[key]

    def _together(self, members: list[Rows], cache_class: int) -> Together:
        pages = np.concatenate([rows.tables[cache_class].ids for rows in members])
        device = self.caches.device
        is_all = len(members) == len(self._numbers)
        index = None if is_all else torch.tensor([rows.first_row for rows in members], device=device)
        return Together([rows.start for rows in members], index, self.caches.select(cache_class, pages), device)

    def seen(self, part: Alone | Together, layer: int, half: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (0) or values (1) of one block that these rows may see, (n, G, n_keys, size), as `dtype`."""
        found = part.seen(self.caches.blocks[layer].gather(half, part.pages, self.memory))
        if found.dtype == dtype:
            return found
        return self.memory.of(f"half {half} as {dtype}", found.shape, dtype).copy_(found)

    def mask(self, part: Alone, window: int | None, n_repeat: int) -> torch.Tensor | None:
        """The keys that each row may see; None if all may see all.

        Args:
            window: how many positions back a row sees, itself included; None is all of them.
            n_repeat: how often the rows are repeated (the query heads of a group).

        Returns:
            (n_repeat * n_rows, n_keys) boolean, the same object for every block that asks the same.
        """
        rows = part.rows
        if rows.n_rows == 1:  # a single row may see every key
            return None
        key = (rows.first_row, part.first, n_repeat, window)
        if key not in self._masks:
            queries = torch.arange(rows.start, rows.end, device=self.caches.device)[:, None]
            keys = torch.arange(part.first, rows.end, device=self.caches.device)[None, :]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[key] = mask.repeat(n_repeat, 1)
        return self._masks[key]
