"""Prints a line every two seconds, or more rarely, during long work."""

from __future__ import annotations

import time
from collections.abc import Callable

REPORT_S = 2.0


class Periodic:
    """`is_due` once every `each_s`, first after that time."""

    def __init__(self, each_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._each_s, self._clock = each_s, clock
        self.begin_s = self._last_s = clock()

    def is_due(self) -> bool:
        """Whether it is time to say something; if so, the next time begins now."""
        now = self._clock()
        if now - self._last_s <= (REPORT_S if self._each_s is None else self._each_s):
            return False
        self._last_s = now
        return True

    @property
    def passed_s(self) -> float:
        """Since the beginning."""
        return self._clock() - self.begin_s
