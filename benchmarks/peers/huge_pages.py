"""Weights on huge pages: a processor looks up one page for 2 MB instead of 512.

Decoding reads all weights once per step, and a good part of that time goes into finding pages, above all in virtual machines,
where a lookup walks two tables. Linux gives a process huge pages where it asks for them (`madvise`), which glibc and the
packed kernels' own allocations do not.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGE = (
    2 << 20
)  # bytes, on x86 and on ARM with pages of 4 KB; where it is more, the kernel says no and nothing is lost
_MADV_HUGEPAGE = 14  # from now on, and by the kernel's own thread in time
_MADV_COLLAPSE = 25  # at once, Linux 6.1 and later


def use_huge_pages() -> int:
    """Bring the memory that this process has filled onto huge pages, as far as the system lets it.

    Only pieces that are in memory in full: to ask for more (the rest of a thread's stack) would cost memory.

    Returns:
        bytes that were asked for; 0 where there is nothing of the kind (another system, an old kernel).
    """
    if sys.platform != "linux":
        return 0
    try:
        libc = ctypes.CDLL(None)
        mincore, madvise = libc.mincore, libc.madvise
        regions = list(anonymous_regions(Path("/proc/self/maps").read_text()))
    except (OSError, AttributeError):  # no /proc, another C library
        return 0
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    n_bytes = 0
    for start, stop in regions:
        pages = ctypes.create_string_buffer((stop - start) // mmap.PAGESIZE)
        if mincore(start, stop - start, pages) != 0:  # the region is gone again
            continue
        for first, last in filled_pieces(pages.raw, HUGE_PAGE // mmap.PAGESIZE):
            piece = start + first * HUGE_PAGE, (last - first) * HUGE_PAGE
            if madvise(*piece, _MADV_HUGEPAGE) == 0:
                madvise(*piece, _MADV_COLLAPSE)
                n_bytes += piece[1]
    return n_bytes


def anonymous_regions(maps: str) -> Iterator[tuple[int, int]]:
    """Anonymous, writable regions (start, stop) of a process, cut to whole huge pages.

    Args:
        maps: what the kernel says, in the format of proc_pid_maps(5).
    """
    for line in maps.splitlines():
        span, permissions, _, device, inode, *name = line.split(maxsplit=5)
        if permissions.startswith("rw") and (device, inode) == ("00:00", "0") and name in ([], ["[heap]"]):
            start, stop = (int(number, 16) for number in span.split("-"))
            start, stop = -(-start // HUGE_PAGE) * HUGE_PAGE, stop // HUGE_PAGE * HUGE_PAGE
            if start < stop:
                yield start, stop


def filled_pieces(pages: bytes, n: int) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of pieces of `n` pages that are all in memory; a page is if its lowest bit is set (mincore)."""
    first = None
    n_pieces = len(pages) // n
    for piece in range(n_pieces):
        filled = all(page & 1 for page in pages[piece * n : (piece + 1) * n])
        if filled and first is None:
            first = piece
        elif not filled and first is not None:
            yield first, piece
            first = None
    if first is not None:
        yield first, n_pieces
