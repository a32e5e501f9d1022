"""Short caches side by side: what lets sequences that decode together attend in one operation.

A cache of a few dozen positions costs more in calls than in arithmetic, and a frame brings many of them. So the caches of
sequences that decode in the same frame and have the same room lie in one buffer per block, a shelf, and are read at once. All
positions of the room are read, those beyond a sequence's end under a mask: a sequence's result depends on its own room and
never on who stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mdi.model.cache import BlockCache, CacheStore

LARGEST_ROOM = 256  # positions; with longer caches, reading beyond the end costs more than the calls


class Shelf:
    """Keys and values of `n` sequences in one block: kv (2, n, G, room, size)."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.keys, self.values = kv  # (n, G, room, size) each
        self._flat = kv.view(-1, kv.size(-1))

    def is_of(self, caches: Sequence[BlockCache], room: int) -> bool:
        n, _, own_room, _ = self.keys.shape
        in_place = all(cache.shelf is self and cache.place == i for i, cache in enumerate(caches))
        return in_place and n == len(caches) and own_room == room

    def write(self, places: torch.Tensor, kv: torch.Tensor) -> None:
        """Store one position of each sequence.

        Args:
            places: (n * 2 * G), see `DecodeGroup.places`.
            kv: (n, 2 * G, size), the keys of all groups and then their values.
        """
        rows = kv.reshape(-1, kv.size(-1))
        self._flat.index_copy_(0, places, rows if rows.dtype == self._flat.dtype else rows.to(self._flat.dtype))


def shelve(caches: Sequence[BlockCache], room: int) -> Shelf:
    """The shelf on which these caches stand, in this order and alone; they are moved to a new one if they do not yet.

    Moving costs about what one step of attention over them reads, and happens when a sequence joins, ends or outgrows its
    room. A place that a sequence has left is given back with the next move.

    Args:
        caches: of one block, with nothing dropped, and with an end within the room.
    """
    shelf = caches[0].shelf
    if shelf is not None and shelf.is_of(caches, room):
        return shelf
    first = caches[0].keys
    # Zeros, because a mask cannot undo what is not a number.
    shelf = Shelf(first.new_zeros(2, len(caches), first.size(0), room, first.size(2)))
    for place, cache in enumerate(caches):
        cache.move_to(shelf, place)
    return shelf


class DecodeGroup:
    """Sequences of a frame that bring one row each and whose caches have the same room.

    Args:
        rows: where each row stands in the batch.
        starts: the position of each.
        caches: those of each, in block order.
        store: what they are of.
        room: positions that their caches have room for.
        whole: whether these are all rows of the batch, in its order.
    """

    def __init__(
        self, rows: list[int], starts: list[int], caches: list[list[BlockCache]], store: CacheStore, room: int,
        whole: bool, device: torch.device,
    ) -> None:  # fmt: skip
        self.room = room
        self._starts, self._caches, self._store = starts, caches, store
        self._device = device
        self.index = None if whole else torch.tensor(rows, device=device)  # (n)
        self._places: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def shelf(self, layer: int) -> Shelf:
        """Where the caches of block `layer` of the stage stand, ready for one more position."""
        caches = [of_sequence[layer] for of_sequence in self._caches]
        for cache, start in zip(caches, self._starts, strict=True):
            cache.go_on_at(start)
        before = caches[0].shelf
        shelf = shelve(caches, self.room)
        if shelf is not before:
            self._store.let_go_bytes += shelf.kv.nbytes
        return shelf

    def places(self, n_groups: int) -> torch.Tensor:
        """Rows of a shelf's flat (2 * n * G * room) buffer that the new keys and values take: (n * 2 * G)."""
        if n_groups not in self._places:
            n = len(self)
            sequence = torch.arange(n, device=self._device)[:, None, None]
            kind = torch.arange(2, device=self._device)[None, :, None]
            group = torch.arange(n_groups, device=self._device)[None, None, :]
            start = torch.tensor(self._starts, device=self._device)[:, None, None]
            self._places[n_groups] = (((kind * n + sequence) * n_groups + group) * self.room + start).flatten()
        return self._places[n_groups]

    def mask(self, dtype: torch.dtype, n_groups: int, n_repeat: int) -> torch.Tensor:
        """What is added to the scores: nothing up to a sequence's own position, minus infinity beyond.

        Returns:
            (n, G, n_repeat, room), the same object for every block.
        """
        key = dtype, n_groups, n_repeat
        if key not in self._masks:
            starts = torch.tensor(self._starts, device=self._device)[:, None]
            beyond = torch.arange(self.room, device=self._device) > starts
            zeros = torch.zeros(len(self), self.room, dtype=dtype, device=self._device)
            mask = zeros.masked_fill_(beyond, float("-inf"))[:, None, None]
            self._masks[key] = mask.expand(-1, n_groups, n_repeat, -1)
        return self._masks[key]
