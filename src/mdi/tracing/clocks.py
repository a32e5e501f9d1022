"""Compares other nodes' timers with this node's by round trips."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

N_ROUND_TRIPS = 16
# Timers of real machines run apart by less than this; what looks like more is a round trip that took long one way.
DRIFT_LIMIT = 2e-4


@dataclass(frozen=True)
class Reading:
    """At `here_s` of this node's timer the other one showed `there_s`, give or take `error_s`: half the round trip."""

    here_s: float
    there_s: float
    error_s: float


def read_clock(ask: Callable[[], float], n_round_trips: int = N_ROUND_TRIPS) -> Reading:
    """Ask another node for its time several times; the quickest answer counts. What `ask` raises goes through."""
    readings = []
    for _ in range(n_round_trips):
        begin = time.perf_counter()
        there = ask()
        end = time.perf_counter()
        readings.append(Reading((begin + end) / 2, there, (end - begin) / 2))
    return min(readings, key=lambda reading: reading.error_s)


def settled(delays_s: Sequence[float], errors_s: Sequence[float]) -> list[float]:
    """Corrections of the nodes' clocks that make the links of a ring as equal as the clocks' errors allow.

    What all links take together is known well, for the first node sees frames leave and come back; how it is shared out is
    known as well as the clocks are. Of all clocks that may be right, those are taken that make no link odd without a reason.

    Args:
        delays_s: of the quickest frame from each node to the next, the last one's to the first; may be negative.
        errors_s: of each node's clock against the first one's, whose own is 0.
    """
    n = len(delays_s)
    moved = [0.0] * n
    for _ in range(20 * n):
        for i in range(1, n):
            before, after = (delays_s[j] + moved[(j + 1) % n] - moved[j] for j in (i - 1, i))
            moved[i] = min(errors_s[i], max(-errors_s[i], moved[i] + (after - before) / 2))
    return moved


class Clock:
    """Turns another node's times into this one's.

    Args:
        readings: one or more, in the order of time: between the first and the last, the timers may drift.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        first, last = readings[0], readings[-1]
        best = min(readings, key=lambda reading: reading.error_s)
        self.error_s = max(first.error_s, last.error_s)
        self._there, self._here, self._rate = best.there_s, best.here_s, 1.0
        gone = last.there_s - first.there_s
        if gone > 0:
            rate = (last.here_s - first.here_s) / gone
            if abs(rate - 1.0) <= DRIFT_LIMIT:
                self._there, self._here, self._rate = first.there_s, first.here_s, rate

    def here_ns(self, there_ns: int) -> int:
        """A moment of the other node's timer, on this node's."""
        return round(self._here * 1e9 + (there_ns - self._there * 1e9) * self._rate)
