"""How large the caches of a sequence can get: numbers alone, so that the starter can reckon with them without torch.

A buffer grows in steps, and what is reserved for a sequence must cover the step and not only the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_ROWS = 64  # prompt rows per frame: small enough that stages overlap during prefill
FIRST_POSITIONS = 64  # room that a new cache has
# (positions, step): up to so many, a buffer grows by so much. A copy costs about what attention reads for one token, so small
# buffers may grow in small steps, and what is reserved stays near what is used; beyond these, GROWTH_POSITIONS.
SMALL_STEPS = ((128, 32), (256, 64))
GROWTH_POSITIONS = 256
WINDOW_SLACK = 64  # positions that a windowed cache keeps beyond its window, so that a slice may be taken back
WINDOW_SPARE = 32  # room beyond those: a full buffer is shifted once in so many tokens


def room_for(n_positions: int) -> int:
    """Room that a buffer of at least `n_positions` is made with."""
    step = next((step for limit, step in SMALL_STEPS if n_positions <= limit), GROWTH_POSITIONS)
    return max(FIRST_POSITIONS, -(-n_positions // step) * step)


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
