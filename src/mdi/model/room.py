"""How large the caches of a sequence can get: numbers alone, so that the starter can reckon with them without torch.

A buffer grows in steps, and what is reserved for a sequence must cover the step and not only the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_ROWS = 64  # prompt rows per frame: small enough that stages overlap during prefill
FIRST_POSITIONS = 64  # room that a new cache has
GROWTH_POSITIONS = 256  # a copy every 256 tokens is nothing beside reading the whole cache for each of them
WINDOW_SLACK = 64  # positions that a windowed cache keeps beyond its window, so that a slice may be taken back
WINDOW_SPARE = 32  # room beyond those: a full buffer is shifted once in so many tokens


def room_for(n_positions: int) -> int:
    """Room that a buffer of at least `n_positions` is made with."""
    for room in (FIRST_POSITIONS, 2 * FIRST_POSITIONS):
        if n_positions <= room:
            return room
    return -(-n_positions // GROWTH_POSITIONS) * GROWTH_POSITIONS


def largest_room(length: int, window: int | None, chunk_rows: int, max_length: int) -> int:
    """Room that the buffer of one block comes to have, at most, while a sequence grows to `length` positions.

    Args:
        window: of the block; None keeps everything.
        chunk_rows: rows that come at once, at most.
        max_length: of the run: no buffer has more room.
    """
    if window is not None and length > window + WINDOW_SLACK:
        length = window + WINDOW_SLACK + WINDOW_SPARE + chunk_rows
    return min(room_for(length), max_length)


@dataclass(frozen=True)
class CacheKind:
    """Blocks of one stage whose caches grow alike: their window, and what they keep of one position, added up."""

    window: int | None
    position_bytes: int

    def n_bytes(self, length: int, chunk_rows: int, max_length: int) -> int:
        return self.position_bytes * largest_room(length, self.window, chunk_rows, max_length)
