"""Width of text on a terminal in columns, and how text is shortened to fit."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence

from mdi.terminal import one_line


def width(text: str) -> int:
    """Columns on a terminal: wide East Asian characters take two, combining marks none."""
    return sum(_width_of(c) for c in text)


def clip(text: str, columns: int) -> str:
    """One line of at most so many columns, without control characters, which must not reach the terminal."""
    text = " ".join(one_line(text).split())
    if width(text) <= columns:
        return text
    while width(text) > columns - 3:
        text = text[: min(len(text) - 1, columns)]
    return text + "..."


def table(rows: Sequence[Sequence[str]], left: Collection[int] | None = None) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cell. Those in `left` are left-aligned, others right-aligned.

    Args:
        left: numbers of columns; None is all of them.
    """
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, n) in enumerate(zip(row, widths, strict=True)):
            pad = " " * (n - width(cell))
            cells.append(cell + pad if left is None or i in left else pad + cell)
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped(line: str, columns: int) -> list[str]:
    """A line cut at spaces into pieces of at most so many columns; always at least one piece."""
    pieces = []
    while (end := _n_fitting(line, columns)) < len(line):
        cut = line.rfind(" ", 1, end + 1)
        cut = cut if cut > 0 else end
        pieces.append(line[:cut])
        line = line[cut:].removeprefix(" ")
    return [*pieces, line]


def _width_of(character: str) -> int:
    return 0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _n_fitting(line: str, columns: int) -> int:
    """How many characters fit; at least one."""
    taken = 0
    for n, character in enumerate(line):
        taken += _width_of(character)
        if taken > columns:
            return max(n, 1)
    return len(line)
