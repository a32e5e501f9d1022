"""Maps files of weights into memory: the system loads pages when they are touched, and processes share them."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from mdi.errors import CheckpointError, MemoryShortError
from mdi.units import size


def map_bytes(path: Path, start: int, stop: int, *, is_writable: bool = False) -> np.ndarray:
    """Bytes [start, stop) of a file, (stop - start) of uint8; the mapping goes with the last array that looks into it.

    Args:
        is_writable: writes stay in memory and never reach the file; for code that cannot use read-only memory.

    Raises:
        CheckpointError: the file cannot be opened, or is shorter.
        MemoryShortError: there is not enough memory.
    """
    if start == stop:
        return np.empty(0, dtype=np.uint8)
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found < stop:
                raise CheckpointError(f"{path} was cut short: {found} bytes, {stop} expected at least")
            access = mmap.ACCESS_COPY if is_writable else mmap.ACCESS_READ
            mapped = mmap.mmap(file.fileno(), stop - first, access=access, offset=first)
    except OSError as e:
        if e.errno == errno.ENOMEM:
            raise MemoryShortError(
                f"there is too little memory to map {size(stop - first)} of {path}: free some, or raise the limit "
                "of this process (ulimit -v)"
            ) from None
        raise CheckpointError(f"cannot map {path} into memory: {e.strerror or e}") from None
    return np.frombuffer(mapped, dtype=np.uint8, count=stop - start, offset=start - first)
