"""Memory for the rows that a node has sent (engine/replay.py), as nodes and plans count it."""

from __future__ import annotations

REPLAY_BYTES = 64 << 20  # default
ROW_VALUE_BYTES = 4  # of a row's values, at most


def most_bytes(limit_bytes: int, n_sequences: int, length: int, row_bytes: int) -> int:
    """The most that rows can take: those of all positions of all sequences."""
    return min(limit_bytes, n_sequences * length * row_bytes)
