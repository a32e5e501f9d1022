"""Prints a line every two seconds during long work."""

from __future__ import annotations

import time

REPORT_S = 2.0


class Periodic:
    """`is_due` once every REPORT_S, first after that time."""

    def __init__(self) -> None:
        self.begin_s = self._last_s = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to say something; if so, the next time begins now."""
        now = time.monotonic()
        if now - self._last_s <= REPORT_S:
            return False
        self._last_s = now
        return True

    @property
    def passed_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.begin_s
