"""Shows texts as they are generated: side by side in colours on a terminal, elsewhere one after the other."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Protocol, TextIO

from mdi.columns import wrapped
from mdi.terminal import note_written, plain

WIDTH = 100
REDRAW_S = 0.05  # drawing is computing that the run would rather do
_COLORS = (36, 33, 35, 32, 94, 91)


class Stream(Protocol):
    """Takes the pieces of several texts."""

    def show(self, index: int, text: str) -> None:
        """A piece of sample `index`; "" when it has ended."""


def open_stream(n_samples: int, out: TextIO | None = None) -> Stream:
    """The display for this output and so many texts."""
    out = out or sys.stdout
    n_rows = shutil.get_terminal_size().lines
    if n_samples > 1 and can_redraw(out) and Panels.ROWS_EACH * n_samples < n_rows:
        return Panels(n_samples, out)
    return Flow(n_samples, out)


def can_redraw(out: TextIO) -> bool:
    """Whether lines that were written can be written over."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, index: int, out: TextIO) -> str:
    """In the colour of number `index`, where `out` shows colours and the user has not asked for none (NO_COLOR)."""
    if not can_redraw(out) or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_COLORS[index % len(_COLORS)]}m{text}\033[0m"


def heading(index: int) -> str:
    return f"--- sample {index}"


class Flow:
    """The first text that has not ended flows, those after it wait: so nothing is mixed up, in a file neither."""

    def __init__(self, n_samples: int, out: TextIO) -> None:
        self._out = out
        self._has_headings = n_samples > 1
        self._waiting: list[list[str]] = [[] for _ in range(n_samples)]
        self._has_ended = [False] * n_samples
        self._flowing = -1
        self._begin_next()

    def show(self, index: int, text: str) -> None:
        if not text:
            self._has_ended[index] = True
            if index == self._flowing:
                self._out.write("\n")
                note_written("\n", self._out)
                self._begin_next()
        elif index == self._flowing:
            self._write(text)
        else:
            self._waiting[index].append(text)
        self._out.flush()

    def _begin_next(self) -> None:
        """Go to the next text that has not ended; those that have are written whole."""
        while self._flowing + 1 < len(self._waiting):
            self._flowing += 1
            if self._has_headings:
                self._out.write(paint(heading(self._flowing), self._flowing, self._out) + "\n")
            self._write("".join(self._waiting[self._flowing]))
            if not self._has_ended[self._flowing]:
                return
            self._out.write("\n")

    def _write(self, text: str) -> None:
        if self._out.isatty():
            text = plain(text)
        self._out.write(paint(text, self._flowing, self._out) if text and self._has_headings else text)
        note_written(text, self._out)


class Panels:
    """All texts below each other, drawn again as they grow: their last lines, and when all have ended the whole of them."""

    ROWS_EACH = 3  # a heading and two lines: with less there is nothing to read

    def __init__(self, n_samples: int, out: TextIO) -> None:
        self._out = out
        self._columns = min(WIDTH, shutil.get_terminal_size().columns - 1)
        self._lines = [[""] for _ in range(n_samples)]
        self._n_growing = n_samples
        self._n_drawn = 0
        self._drawn_s = float("-inf")

    def show(self, index: int, text: str) -> None:
        if text:
            lines = self._lines[index]
            for line in (lines.pop() + plain(text).expandtabs(4)).split("\n"):
                lines += wrapped(line, self._columns)
        else:
            self._n_growing -= 1
        if self._n_growing == 0:
            self._draw(None)
        elif time.monotonic() - self._drawn_s >= REDRAW_S:
            self._draw(max(1, (shutil.get_terminal_size().lines - 1) // len(self._lines) - 1))

    def _draw(self, n_last: int | None) -> None:
        """Overwrite the screen with the last lines of each text; None: all lines."""
        rows: list[str] = []
        for index, lines in enumerate(self._lines):
            shown = lines if n_last is None else lines[-n_last:]
            rows += [paint(line, index, self._out) if line else "" for line in (heading(index), *shown)]
        up = f"\033[{self._n_drawn}A" if self._n_drawn else ""
        self._out.write(up + "".join(f"\r{row}\033[K\n" for row in rows) + "\033[J")
        self._out.flush()
        self._n_drawn, self._drawn_s = len(rows), time.monotonic()
