"""Loads the pages of mapped files with the weights, and names the file if the disk fails later."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mdi.errors import CheckpointError

POPULATE_BYTES = 64 << 20  # bytes that are loaded between two calls of `on_bytes`

_MADV_POPULATE_READ = 22  # Linux 5.14 and later; elsewhere a byte of each page is read
_BAD = (errno.EFAULT, errno.EIO, getattr(errno, "EHWPOISON", errno.EIO))


def populate(arrays: Iterable[np.ndarray], where: str, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """Load mapped pages now, so that the first token does not wait for them, and find out whether they can be read.

    Args:
        where: the file, for the error.
        on_bytes: called with the size of each loaded piece; its exceptions pass through.

    Raises:
        CheckpointError: the file was cut short since it was mapped, or the disk cannot read it.
    """
    for array in arrays:
        data = array.reshape(-1).view(np.uint8)
        for first in range(0, data.size, POPULATE_BYTES):
            piece = data[first : first + POPULATE_BYTES]
            _populate(piece, where)
            on_bytes(piece.size)


def _populate(data: np.ndarray, where: str) -> None:
    """Load the pages of some bytes."""
    start = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    error = ask_for(start, data.ctypes.data + data.size - start)
    if error in _BAD:
        raise CheckpointError(
            f"{where} cannot be read: it was cut short, or the disk is damaged ({os.strerror(error)})"
        )
    if error:  # a system that does not know of this
        data[:: mmap.PAGESIZE].max(initial=0)


def ask_for(address: int, n_bytes: int) -> int:
    """Have the system bring pages; 0, or its error number."""
    madvise = madvise_function()
    if madvise is None:
        return errno.ENOSYS
    while madvise(address, n_bytes, _MADV_POPULATE_READ) != 0:
        error = ctypes.get_errno()
        if error not in (errno.EINTR, errno.EAGAIN):
            return error
    return 0


@functools.cache
def madvise_function() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):  # another system
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def name_in_faults(library: Any, arrays: Iterable[np.ndarray], where: str) -> None:
    """Have the kernels end this process with a line that names the file, if a page of its mapping cannot be read later on.

    Without it, the system ends the process with SIGBUS and no word.

    Args:
        library: of kernels; what it does not know is left out.
        arrays: views of mappings; others are ignored.
    """
    if not hasattr(library, "mdi_watch_mapping"):
        return
    library.mdi_watch_mapping.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    library.mdi_unwatch_mapping.argtypes = [ctypes.c_int]
    message = f"error: {where} cannot be read any more: it was cut short, or the disk is damaged\n".encode()
    for whole in {id(whole): whole for whole in map(_mapping_of, arrays) if whole is not None}.values():
        slot = library.mdi_watch_mapping(whole.ctypes.data, whole.nbytes, message)
        if slot >= 0:
            weakref.finalize(whole, library.mdi_unwatch_mapping, slot)


def _mapping_of(array: np.ndarray) -> np.ndarray | None:
    """The array over the whole mapping that this one is a view of."""
    base = array.base
    while isinstance(base, np.ndarray):
        array, base = base, base.base
    owner = base.obj if isinstance(base, memoryview) else base
    return array if isinstance(owner, mmap.mmap) else None
