"""Waiting for what other threads and processes do, without a guess of how long they take."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0  # far beyond what anything takes, so that a busy machine fails nothing
PAUSE_S = 0.02


def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Ask again and again; AssertionError if it does not hold in time."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        threading.Event().wait(PAUSE_S)


def until_gone(ref: weakref.ref[Any]) -> None:
    """Until nothing refers to an object any more, after the garbage was collected."""

    def is_gone() -> bool:
        gc.collect()
        return ref() is None

    until(is_gone)
