"""Rows at a cut: what travels between two nodes for each token of a text, as columns by name. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

HIDDEN = "hidden"


@dataclass(frozen=True)
class Column:
    """Numbers of a row that belong together.

    Attributes:
        is_cached: blocks that read it put it into their caches, so they need it of all rows. What is not cached is needed only
            of rows that a block computes.
    """

    name: str
    width: int
    is_cached: bool = False


@dataclass(frozen=True)
class RowLayout:
    """The columns of a row side by side, in order: hidden first, those for caches last.

    Attributes:
        is_skipped: the blocks behind compute only rows that give logits: of all others only the columns for caches travel.
    """

    columns: tuple[Column, ...]
    is_skipped: bool = False

    @cached_property
    def width(self) -> int:
        """Numbers of a row that carries all columns."""
        return sum(one.width for one in self.columns)

    @cached_property
    def cached(self) -> RowLayout:
        """The columns for caches alone."""
        return RowLayout(tuple(one for one in self.columns if one.is_cached))

    def place(self, name: str) -> slice:
        """Where a column is in a row. Raises ValueError: it has no such column."""
        at = [one.name for one in self.columns].index(name)
        offset = sum(one.width for one in self.columns[:at])
        return slice(offset, offset + self.columns[at].width)
