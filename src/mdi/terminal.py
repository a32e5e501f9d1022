"""Output for people. Text of models, peers and files may have escape sequences, which could move the cursor, change the
title or the clipboard, or hide other text; they are removed here.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

# Control characters, those from 128 on too: some terminals take 0x9b for the beginning of a sequence.
_INVISIBLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def plain(text: str) -> str:
    """A text of several lines, without control characters."""
    return text.translate(_INVISIBLE)


def one_line(value: Any) -> str:
    """Anything as one line. Unprintable characters become spaces, also those that change the direction of text."""
    return "".join(c if c.isprintable() else " " for c in str(value))


def show(text: str, end: str = "\n", out: TextIO | None = None) -> None:
    """Print foreign text at once. A program that reads our output gets it unchanged."""
    out = out or sys.stdout
    out.write((plain(text) if out.isatty() else text) + end)
    out.flush()


def show_error(message: Any) -> None:
    """Print one line about why a command, or a step of it, failed."""
    print(f"error: {one_line(message)}", file=sys.stderr)


class LineFormatter(logging.Formatter):
    """A record as one line, in the terminal and in files that a person looks at in one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return plain(super().formatException(ei))
