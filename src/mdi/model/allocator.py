"""Memory that was freed, back to the system: glibc keeps it for later, up to the size of all weights after packing them."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def give_back_freed() -> None:
    """Let the allocator return what is free to the system; milliseconds."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
