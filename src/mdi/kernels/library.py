"""Loads the library of kernels into this process."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from dataclasses import dataclass

from mdi.errors import KernelError, UsageError
from mdi.kernels import build, place

OFF = "off"
FORCED = "MDI_KERNELS"  # the environment variable that forces one instruction set
_ONE = threading.Lock()  # several threads that need the library compile it once

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL | None
    why_not: str = ""


def load() -> ctypes.CDLL | None:
    """The library, found or compiled at the first call; None where it cannot be had or is not wanted.

    Raises UsageError if MDI_KERNELS asks for what this machine does not have.
    """
    return _loaded().library


def look_again() -> None:
    """Make the next call find the library again, after the environment, the compiler or the sources have changed."""
    _load.cache_clear()


def why_not() -> str:
    """Why the library is missing, and what to do about it; "" if it is there."""
    return _loaded().why_not


def instruction_set() -> str:
    """The instruction set in use, named as in MDI_KERNELS."""
    library = load()
    if library is None:
        return OFF
    library.mdi_instruction_set.restype = ctypes.c_char_p
    name: bytes = library.mdi_instruction_set()
    return name.decode()


def arithmetic() -> str:
    """The kind of arithmetic; nodes of one kind give the same bits.

    "fused" with multiply-adds that round once (AMX, AVX-512, AVX2, NEON), "plain" C++, or "torch" without kernels.
    """
    return {OFF: "torch", "plain": "plain"}.get(instruction_set(), "fused")


def _loaded() -> _Loaded:
    with _ONE:
        return _load()


@functools.cache
def _load() -> _Loaded:
    forced = os.environ.get(FORCED, "").strip().lower()
    choices = [s.name for s in build.INSTRUCTION_SETS]
    if forced == OFF:
        return _Loaded(None, f"{FORCED}={OFF}")
    if forced and forced not in choices:
        raise UsageError(f"{FORCED}={forced}: it must be one of {', '.join(choices)}, {OFF}")
    try:
        library = _open()
    except KernelError as e:
        if forced:
            raise UsageError(f"{FORCED}={forced}: {e}") from e
        logger.warning("%s. Until then this node computes in plain torch, which is slower", e)
        return _Loaded(None, str(e))
    if forced and library.mdi_force(forced.encode()) != 0:
        raise UsageError(
            f"{FORCED}={forced}: this machine does not have these instructions; plain works on every machine"
        )
    return _Loaded(library)


def _open() -> ctypes.CDLL:
    path = place.find_library()
    try:
        return ctypes.CDLL(os.fspath(path))
    except OSError as e:
        raise KernelError(f"the kernels cannot be loaded ({e}): remove {path}, and they are compiled again") from e
