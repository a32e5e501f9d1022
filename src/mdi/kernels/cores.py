"""The cores of this process: whether it has them to itself, for only then may its idle threads spin, and which memory node has
the memory that they read.

The system takes a page from the memory node of the core that touches it first. If all cores of a process belong to one memory
node, this is enough. If they belong to several (sockets, or halves of one), any thread may compute with any part of a weight,
so pages are spread evenly over the memory nodes. Pages of a mapped file are where the first process that read them ran, and
can only be copied.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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


LEAST_BYTES = 1 << 20  # smaller memory stays in the processor's caches

_NODES = Path("/sys/devices/system/node")
# The C library has no function for it.
MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine()) if sys.platform == "linux" else None
_INTERLEAVE = 3
_MOST_NODES = 1024  # that the system knows


def spread(memory: np.ndarray) -> bool:
    """Have the system deal out the pages of memory that was not touched yet; whether that is needed here, and was done."""
    nodes = memory_nodes()
    if len(nodes) < 2 or memory.nbytes < LEAST_BYTES:
        return False
    start = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    return interleave(start, (memory.ctypes.data + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE, nodes)


def memory_nodes() -> tuple[int, ...]:
    """Numbers of the memory nodes that this process' cores belong to; () where the system does not say."""
    if MBIND is None or not hasattr(os, "sched_getaffinity"):
        return ()
    return nodes_of(frozenset(os.sched_getaffinity(0)), _NODES)


@functools.cache
def nodes_of(cores: frozenset[int], folder: Path) -> tuple[int, ...]:
    """The memory nodes of some cores, as the system reports them in `folder`."""
    found = []
    for path in folder.glob("node[0-9]*/cpulist"):
        try:
            own = _numbers(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return ()
        if own & cores:
            found.append(int(path.parent.name[len("node") :]))
    return tuple(sorted(found))


def interleave(address: int, n_bytes: int, nodes: tuple[int, ...]) -> bool:
    """Whole pages, dealt out over memory nodes; whether the system does."""
    mask = sum(1 << node for node in nodes).to_bytes(_MOST_NODES // 8, sys.byteorder)
    arguments = ctypes.c_void_p(address), ctypes.c_ulong(n_bytes), ctypes.c_int(_INTERLEAVE), ctypes.c_char_p(mask)
    done: int = system_call()(ctypes.c_long(MBIND or 0), *arguments, ctypes.c_ulong(_MOST_NODES + 1), ctypes.c_uint(0))
    return done == 0


@functools.cache
def system_call() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _numbers(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}"""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
