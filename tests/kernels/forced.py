"""The instruction sets of this machine, one after the other."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from mdi.kernels import library


def instruction_sets() -> list[str]:
    """Names, best first; none without kernels."""
    loaded = library.load()
    if loaded is None:
        return []
    loaded.mdi_instruction_sets.restype = ctypes.c_char_p
    names: bytes = loaded.mdi_instruction_sets()
    return names.decode().split()


@contextlib.contextmanager
def forced(name: str | None) -> Iterator[None]:
    """What is made or packed meanwhile uses this instruction set; None changes nothing."""
    loaded = library.load()
    assert loaded is not None
    if name:
        assert loaded.mdi_force(name.encode()) == 0
    try:
        yield
    finally:
        if name:
            loaded.mdi_force(os.environ.get(library.FORCED, "").strip().lower().encode())
