"""Whether this process has its cores to itself: only then may its idle threads spin."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from mdi.control_groups import n_cores

SPINS = 2000  # looks of an idle thread before it sleeps: tens of microseconds
SPAN_S = 1.0  # between two measurements
OTHERS_SHARE = 0.1  # share of each used core that other programs may take


class FreeCores:
    """Measures about once a second, when it is asked, what other processes take of this one's cores.

    Args:
        n_threads: that compute.
        clock, own_s: seconds, and processor seconds of this process.
        busy_s: processor seconds of all processes on this one's cores; None where the system does not tell.
    """

    def __init__(
        self,
        n_threads: int,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] = time.process_time,
        busy_s: Callable[[], float | None] | None = None,
    ) -> None:
        self._n_threads = n_threads
        self._clock, self._own_s, self._busy_s = clock, own_s, busy_s or busy_core_s
        self._can_spin = 1 < n_threads <= n_cores()
        self._begin, self._before = clock(), self._others_s()
        self._spins = 0

    def spins(self) -> int:
        """How often an idle thread of the kernels may poll for work before it sleeps; 0 beside other work or under a quota."""
        now = self._clock()
        if not self._can_spin or now - self._begin < SPAN_S:
            return self._spins
        others, span, before = self._others_s(), now - self._begin, self._before
        self._begin, self._before = now, others
        is_free = before is not None and others is not None and others - before <= OTHERS_SHARE * self._n_threads * span
        self._spins = SPINS if is_free else 0
        return self._spins

    def _others_s(self) -> float | None:
        busy = self._busy_s() if self._can_spin else None
        return None if busy is None else busy - self._own_s()


def busy_core_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds that the cores which this process may use were busy since the system's start; None if it does not say."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy, n_found = 0, 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in cores:
            user, nice, system, _idle, _iowait, *interrupted = map(int, fields[:8])
            busy += user + nice + system + sum(interrupted)
            n_found += 1
    return busy / os.sysconf("SC_CLK_TCK") if n_found == len(cores) else None  # a sandbox may show fewer
