"""The rows that a frame asks for, as frames, stages and kernels all name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """Rows of one sequence in a frame, which holds at most one slice of a sequence.

    Attributes:
        seq_id: the sequence.
        start: position of the first row in the sequence; a start before the end of the cache truncates the cache.
        n_rows: how many consecutive positions.
        n_logits: how many of the last rows come back to the starter for logits: each may give a token. Stages need not know.
    """

    seq_id: int
    start: int
    n_rows: int
    n_logits: int = 0


Slices = Sequence[Slice]  # in row order
