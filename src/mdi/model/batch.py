"""The rows of one frame, as the blocks of a stage see them: which rows belong to which sequence, at which positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mdi.model.cache import BlockCache, CacheStore
from mdi.model.room import room_for
from mdi.model.shelf import LARGEST_ROOM, DecodeGroup


@dataclass(frozen=True)
class Rows:
    """Rows [first_row, first_row + n_rows) of a batch: positions from `start` on of one sequence."""

    first_row: int
    n_rows: int
    start: int
    caches: list[BlockCache]

    @property
    def span(self) -> slice:
        return slice(self.first_row, self.first_row + self.n_rows)


class Batch:
    """A ragged batch.

    Args:
        slices: (seq_id, start, n_rows) in row order.
        store: the stage's caches.
        device: where the positions are needed.
    """

    def __init__(self, slices: Sequence[tuple[int, int, int]], store: CacheStore, device: torch.device) -> None:
        self.rows: list[Rows] = []
        positions: list[int] = []
        for seq_id, start, n_rows in slices:
            self.rows.append(Rows(len(positions), n_rows, start, store.of(seq_id)))
            positions.extend(range(start, start + n_rows))
        self.positions = torch.tensor(positions, device=device)  # (N,)
        self._device = device
        self._store = store
        self._converted: dict[str, torch.Tensor] = {}
        self._parts: dict[int | None, tuple[list[DecodeGroup], list[Rows]]] = {}
        self._masks: dict[tuple[int, int, int, int | None], torch.Tensor] = {}

    @property
    def n_rows(self) -> int:
        return self.positions.numel()

    def parts(self, window: int | None) -> tuple[list[DecodeGroup], list[Rows]]:
        """What blocks with this window compute at once, and what they compute one sequence after the other.

        Which of the two a row belongs to depends on its own position only, so that company changes nothing.
        """
        if window not in self._parts:
            together: dict[int, list[Rows]] = {}
            alone: list[Rows] = []
            for rows in self.rows:
                room = min(room_for(rows.start + 1), self._store.max_length)
                if rows.n_rows == 1 and room <= LARGEST_ROOM and (window is None or room <= window):
                    together.setdefault(room, []).append(rows)
                else:
                    alone.append(rows)
            self._parts[window] = [self._group(members, room) for room, members in together.items()], alone
        return self._parts[window]

    def _group(self, members: list[Rows], room: int) -> DecodeGroup:
        numbers, starts, caches = zip(*((r.first_row, r.start, r.caches) for r in members), strict=True)
        whole = len(members) == len(self.positions)
        return DecodeGroup(list(numbers), list(starts), list(caches), self._store, room, whole, self._device)

    def converted(self, slot: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`x` in another type, in memory that all blocks use one after the other.

        Memory of their own, megabytes of a long cache, would come from the system anew for each block, page by page.

        Args:
            slot: what is valid until this is called for the same slot again.
        """
        if x.dtype == dtype:
            return x
        kept = self._converted.get(slot)
        if kept is None or kept.numel() < x.numel() or kept.dtype != dtype:
            kept = self._converted[slot] = torch.empty(x.numel(), dtype=dtype, device=x.device)
        return kept[: x.numel()].view(x.shape).copy_(x)

    def mask(self, rows: Rows, first: int, window: int | None, n_repeat: int) -> torch.Tensor | None:
        """Which keys each row may see; None if all may see all.

        Args:
            first: position of the first key; the keys end at the last row's position.
            window: how many positions back a row sees, itself included; None is all of them.
            n_repeat: how often the rows stand below each other (the query heads of a group).

        Returns:
            (n_repeat * n_rows, n_keys) boolean, the same object for every block that asks the same.
        """
        if rows.n_rows == 1:  # the cache gives no key that a single row may not see
            return None
        key = (rows.first_row, first, n_repeat, window)
        if key not in self._masks:
            queries = torch.arange(rows.start, rows.start + rows.n_rows, device=self._device)[:, None]
            keys = torch.arange(first, rows.start + rows.n_rows, device=self._device)[None, :]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[key] = mask.repeat(n_repeat, 1)
        return self._masks[key]
