"""Text on a terminal: how many columns it takes, and how it is made to fit."""

from __future__ import annotations

import unicodedata

from mdi.terminal import one_line


def width(text: str) -> int:
    """Columns on a terminal: wide East Asian characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def clip(text: str, columns: int) -> str:
    """One line of at most so many columns, without control characters: they would reach the terminal."""
    text = " ".join(one_line(text).split())
    if width(text) <= columns:
        return text
    while width(text) > columns - 3:
        text = text[: min(len(text) - 1, columns)]
    return text + "..."
