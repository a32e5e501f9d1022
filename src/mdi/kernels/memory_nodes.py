"""Machines with several memory nodes (sockets, or halves of one): which node has the memory that threads read.

The system takes a page from the memory node of the core that touches it first. If all cores of a process belong to one memory
node, this is enough. If they belong to several, any thread may compute with any part of a weight, so pages are spread
evenly over the memory nodes. Pages of a mapped file are where the first process that read them ran, and can only be copied.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

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
