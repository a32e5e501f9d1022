"""Key/value caches: one per sequence and block, with room for the tokens that are there, not for all that could come.

A cache is a growing buffer of positions [base, end). A block with a sliding window drops what it can never read again, so
its cache stays near the window, whatever the length of the sequence. Rotating KV caches (MDI-LLM thesis, section 3.5)
are the dictionary `CacheStore`: a node holds one set per sequence in flight, and a frame says whose rows it brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mdi.errors import EngineError
from mdi.model.allocator import give_back_freed
from mdi.model.room import (
    CHUNK_ROWS,
    FIRST_POSITIONS,
    WINDOW_SLACK,
    WINDOW_SPARE,
    CacheKind,
    largest_room,
    room_for,
)

if TYPE_CHECKING:
    from mdi.model.shelf import Shelf

GIVE_BACK_BYTES = 8 << 20


@dataclass(frozen=True)
class CacheShape:
    """What one block keeps of one position: `n_groups` keys of `k_size` values and values of `v_size`."""

    n_groups: int
    k_size: int
    v_size: int
    window: int | None = None

    def kind(self, itemsize: int) -> CacheKind:
        """What decides how much memory it takes, with values of `itemsize` bytes."""
        return CacheKind(self.window, self.n_groups * (self.k_size + self.v_size) * itemsize)

    def n_bytes(self, length: int, itemsize: int) -> int:
        """What a sequence of `length` tokens takes at most, brought in slices of up to CHUNK_ROWS rows."""
        return self.kind(itemsize).n_bytes(length, CHUNK_ROWS, length)

    def copy_bytes(self, max_length: int, itemsize: int) -> int:
        """What a growing cache takes beside its new buffer for a moment: the old keys, or the old values."""
        room = largest_room(max_length, self.window, CHUNK_ROWS, max_length)
        return self.n_groups * max(self.k_size, self.v_size) * itemsize * room


class BlockCache:
    """Keys (G, length, k_size) and values (G, length, v_size) of one sequence in one block.

    With `v_size` 0 the values are not stored: they are part of the keys (latent attention).

    Attributes:
        shelf, place: the shared buffer that the cache stands in, if it does (`mdi.model.shelf`), and where.
    """

    def __init__(self, shape: CacheShape, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = shape
        self._max_length = max_length
        self.base = 0  # position of the first entry that is kept
        self.end = 0  # position after the last entry
        room = min(FIRST_POSITIONS, max_length)
        self._k = torch.empty(shape.n_groups, room, shape.k_size, device=device, dtype=dtype)
        self._v = torch.empty(shape.n_groups, room, shape.v_size, device=device, dtype=dtype)
        self.shelf: Shelf | None = None
        self.place = 0

    @property
    def keys(self) -> torch.Tensor:
        """The whole buffer of the keys, (G, room, k_size)."""
        return self._k

    @property
    def n_bytes(self) -> int:
        return (self._k.numel() + self._v.numel()) * self._k.element_size()

    def append(self, start: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Write the keys and values of positions [start, start + n); what was kept from `start` on is cut off.

        Args:
            start: at most `end`; with a window, at most WINDOW_SLACK before it.
            k, v: (G, n, k_size) and (G, n, v_size).

        Returns:
            keys, values and the position of their first entry; they reach back as far as row `start` may look.

        Raises:
            EngineError: `start` is beyond the end, or lies so far back that the window has moved on.
        """
        n = k.size(1)
        self._cut(start)
        self._make_room(start - self.base + n)
        at = start - self.base  # base may have moved
        self._k[:, at : at + n] = k
        self._v[:, at : at + n] = v
        self.end = start + n
        window = self._shape.window
        first = self.base if window is None else max(self.base, start - window + 1)
        kept = slice(first - self.base, at + n)
        return self._k[:, kept], self._v[:, kept], first

    def go_on_at(self, start: int) -> None:
        """Take position `start` for written; the caller writes it. What was kept from there on is cut off."""
        if start != self.end:
            self._cut(start)
        self.end = start + 1

    def move_to(self, shelf: Shelf, place: int) -> None:
        """Stand on a shelf from now on: its room is at least up to the end of this cache, which has dropped nothing."""
        kept = min(self.end, self._k.size(1))
        for old, new in zip((self._k, self._v), shelf.kv[:, place], strict=True):
            new[:, :kept] = old[:, :kept]
        self._k, self._v = shelf.kv[:, place]
        self.shelf, self.place = shelf, place

    def _cut(self, start: int) -> None:
        if start > self.end:
            raise EngineError(f"a slice starts at position {start}, but its cache ends at {self.end}")
        if self.base and start < self.end and start - self._shape.window + 1 < self.base:  # type: ignore[operator]
            raise EngineError(
                f"a slice goes back to position {start}, but the window kept only what follows {self.base}"
            )
        self.end = start

    def _make_room(self, n_needed: int) -> None:
        """Let the buffer hold `n_needed` positions from `base` on: forget behind the window, else grow."""
        if n_needed <= self._k.size(1):
            return
        window = self._shape.window
        drop = 0 if window is None else max(0, self.end - window - WINDOW_SLACK - self.base)
        n_wanted = n_needed - drop + (WINDOW_SPARE if drop else 0)
        room = max(self._k.size(1), min(room_for(n_wanted), self._max_length))
        self._k = self._moved(self._k, drop, room)
        self._v = self._moved(self._v, drop, room)
        self.base += drop
        self.shelf = None

    def _moved(self, old: torch.Tensor, drop: int, room: int) -> torch.Tensor:
        kept = old[:, drop : self.end - self.base]
        new = old if room == old.size(1) else old.new_empty(old.size(0), room, old.size(2))
        new[:, : kept.size(1)] = kept.clone() if new is old else kept
        return new

    def copied(self) -> BlockCache:
        """An independent copy, for a sequence that goes on from the same prefix."""
        other = BlockCache.__new__(BlockCache)
        other.__dict__.update(self.__dict__)
        other._k, other._v, other.shelf = self._k.clone(), self._v.clone(), None
        return other


class CacheStore:
    """All caches of one stage: a list of BlockCache, in block order, per sequence.

    Attributes:
        let_go_bytes: about what caches have left behind, as they moved to other memory, since `give_back`.
    """

    def __init__(self, shapes: list[CacheShape], max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self.max_length = max_length
        self._device = device
        self._dtype = dtype
        self._caches: dict[int, list[BlockCache]] = {}
        self.let_go_bytes = 0

    def of(self, seq_id: int) -> list[BlockCache]:
        """The caches of a sequence, made on first use."""
        caches = self._caches.get(seq_id)
        if caches is None:
            caches = [BlockCache(s, self.max_length, self._device, self._dtype) for s in self._shapes]
            self._caches[seq_id] = caches
        return caches

    def copy(self, seq_id: int, new_id: int) -> None:
        self._caches[new_id] = [cache.copied() for cache in self.of(seq_id)]

    def free(self, seq_id: int) -> None:
        """Forget a sequence; one that this stage has not seen (it was cancelled early) is no error."""
        self._caches.pop(seq_id, None)

    def give_back(self) -> None:
        """Return to the system what caches have left behind, now and then: to move as much took longer than this."""
        if self.let_go_bytes >= GIVE_BACK_BYTES and self._device.type == "cpu":
            self.let_go_bytes = 0
            give_back_freed()

    def clear(self) -> None:
        self._caches.clear()

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def n_bytes(self) -> int:
        return sum(cache.n_bytes for caches in self._caches.values() for cache in caches)
