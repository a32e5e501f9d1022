"""Text as it is generated, on a terminal: one sample flows, several take turns line by line."""

from __future__ import annotations

import sys
from typing import TextIO

from mdi.terminal import plain

WIDTH = 88
_COLORS = (36, 33, 35, 32, 34, 31)


class Stream:
    """Shows the pieces of `n_samples` texts.

    Args:
        out: where to; a terminal gets colours.
    """

    def __init__(self, n_samples: int, out: TextIO | None = None) -> None:
        self._n_samples = n_samples
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._lines = [""] * n_samples

    def show(self, index: int, text: str) -> None:
        """A piece of sample `index`; "" when it has ended."""
        if text and self._is_terminal:
            text = plain(text)
            if not text:
                return
        if self._n_samples == 1:
            self._out.write(text or "\n")
            self._out.flush()
            return
        if not text:
            if self._lines[index]:
                self._line(index, self._lines[index])
            self._lines[index] = ""
            return
        *whole, rest = (self._lines[index] + text).split("\n")
        for line in whole:
            for piece in _wrapped(line):
                self._line(index, piece)
        *full, self._lines[index] = _wrapped(rest)
        for piece in full:
            self._line(index, piece)

    def _line(self, index: int, line: str) -> None:
        label = f"[{index}]"
        if self._is_terminal:
            label = f"\033[{_COLORS[index % len(_COLORS)]}m{label}\033[0m"
        self._out.write(f"{label} {line}\n")
        self._out.flush()


def _wrapped(line: str) -> list[str]:
    """A line cut at spaces into pieces of at most WIDTH characters; always at least one piece."""
    pieces = []
    while len(line) > WIDTH:
        cut = line.rfind(" ", 1, WIDTH + 1)
        cut = cut if cut > 0 else WIDTH
        pieces.append(line[:cut])
        line = line[cut:].removeprefix(" ")
    return [*pieces, line]
