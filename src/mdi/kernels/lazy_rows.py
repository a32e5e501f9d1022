"""Matrices of which a few rows are in memory at a time: they are read or computed when they are asked for.

The head of a model in plain numbers can be larger than all that a node holds; what packs a weight needs 64 rows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np


class Rows(Protocol):
    """An array, or a `LazyRows`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, at: slice, /) -> Any: ...


class LazyRows:
    """A matrix that is read a slice at a time.

    Args:
        shape: rows first.
        read: gives rows of a slice that has bounds within the shape, and no step.
    """

    def __init__(self, shape: tuple[int, ...], read: Callable[[slice], np.ndarray]) -> None:
        self.shape, self._read = shape, read

    def __getitem__(self, at: slice, /) -> np.ndarray:
        first, last, _ = at.indices(self.shape[0])
        return self._read(slice(first, max(first, last)))


def changed(rows: Rows, change: Callable[[np.ndarray], np.ndarray]) -> LazyRows:
    """Rows of the same shape, each computed from its own."""
    return LazyRows(rows.shape, lambda at: change(rows[at]))


def spans(counts: Sequence[int], at: slice) -> Iterator[tuple[int, slice]]:
    """The pieces that have some rows, of pieces with so many rows that lie one below the other, and which rows of theirs.

    No rows are no rows of the first piece.
    """
    start, is_found = 0, False
    for i, count in enumerate(counts):
        first, last = max(at.start - start, 0), min(at.stop - start, count)
        if first < last:
            is_found = True
            yield i, slice(first, last)
        start += count
    if not is_found:
        yield 0, slice(0, 0)


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """One array below the other; a single one as it is."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def part_of_rows(rows: Rows, first: int, n: int) -> Rows:
    """Rows [first, first + n)."""
    if (first, n) == (0, rows.shape[0]):
        return rows
    return LazyRows((n, *rows.shape[1:]), lambda at: rows[first + at.start : first + at.stop])


def stacked(pieces: Sequence[Rows]) -> LazyRows:
    """Matrices of equal width, one below the other."""
    counts = [piece.shape[0] for piece in pieces]

    def read(at: slice) -> np.ndarray:
        return joined([pieces[i][own] for i, own in spans(counts, at)])

    return LazyRows((sum(counts), *pieces[0].shape[1:]), read)
