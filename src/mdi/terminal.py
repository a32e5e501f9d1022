"""Lines for a terminal and for a log, in words or as JSON, without control characters."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

# Control characters, those from 128 on too: some terminals take 0x9b for the beginning of a sequence.
_INVISIBLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def plain(text: str) -> str:
    """A text of several lines, without control characters."""
    return text.translate(_INVISIBLE)


def one_line(value: Any) -> str:
    """Anything as one line. Unprintable characters become spaces, also those that change the direction of text."""
    return "".join(c if c.isprintable() else " " for c in str(value))


_is_mid_line = False  # whether the terminal's last line is one of a text that grows


def note_written(text: str, out: TextIO) -> None:
    """A piece of a text has been written, so that a line of the log begins on a line of its own."""
    global _is_mid_line
    if text and out.isatty():
        _is_mid_line = not text.endswith("\n")


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Lines of the log on a terminal that a text may be growing on, and under them a line that changes in its place."""

    _has_state = False

    def emit(self, record: logging.LogRecord) -> None:
        global _is_mid_line
        if _is_mid_line and self.stream.isatty():
            self.stream.write("\n")
            _is_mid_line = False
        self.show_state("")
        super().emit(record)

    def show_state(self, text: str) -> bool:
        """Write a line over the one that was there; "" takes it away. Whether that is possible: on a terminal, in words."""
        if not self.stream.isatty() or isinstance(self.formatter, JsonFormatter):
            return False
        with self.lock or contextlib.nullcontext():
            if _is_mid_line:
                return True  # a text is there
            if text or self._has_state:
                self.stream.write(f"\r{one_line(text)[: shutil.get_terminal_size().columns - 1]}\x1b[K")
                self.stream.flush()
            self._has_state = bool(text)
        return True


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


FIRST_S, EACH_S = 2.0, 10.0  # until a wait is reported, and then again
DRAWN_S = 0.5  # and again where the line changes in its place
_WAITS: list[object] = []  # of this process; the one that began last knows best what happens


@contextlib.contextmanager
def reporting(state: Callable[[], str], first_s: float = FIRST_S, each_s: float = EACH_S) -> Iterator[None]:
    """Within: what takes long says so after two seconds; `state` says what it is, and how far.

    On a terminal in one line that changes in its place, else in a line of the log every ten seconds. Of several, one within
    the other, the innermost speaks.
    """
    ended, begin, logger = threading.Event(), time.monotonic(), logging.getLogger("mdi")
    _WAITS.append(ended)
    screens = [handler for handler in logger.handlers if isinstance(handler, TerminalHandler)]

    def report() -> None:
        wait_s = first_s
        while not ended.wait(wait_s):
            wait_s = each_s
            if _WAITS[-1] is not ended:
                continue
            line = f"{state()} ({time.monotonic() - begin:.0f} s so far)"
            if any([screen.show_state(line) for screen in screens]):
                wait_s = min(each_s, DRAWN_S)
            else:
                logger.info(line)
        for screen in screens:
            screen.show_state("")

    thread = threading.Thread(target=report, name="reporting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _WAITS.remove(ended)


VARIABLE = "MDI_LOG"
PLAIN, TIMED, JSON = "plain", "time", "json"
FORMS = (PLAIN, TIMED, JSON)
# Commands that run until they are ended, so their log is read later.
SERVICES = ("secondary", "serve")


def form_of(command: str, is_json: bool, environment: Mapping[str, str]) -> str:
    """The form of --log-json, else of the environment, else the command's default."""
    if is_json:
        return JSON
    named = environment.get(VARIABLE, "")
    if named in FORMS:
        return named
    return TIMED if command in SERVICES else PLAIN


def formatter(form: str, is_verbose: bool = False) -> logging.Formatter:
    """For records on stderr."""
    if form == JSON:
        return JsonFormatter()
    if form == TIMED:
        return LineFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    return LineFormatter("%(asctime)s %(message)s" if is_verbose else "%(message)s", "%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC, RFC 3339), level, message, thread and logger; `error` holds a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": one_line(record.getMessage()),
            "thread": record.threadName,
            "logger": record.name,
        }
        if record.exc_info:
            found["error"] = plain(self.formatException(record.exc_info))
        return json.dumps(found)
