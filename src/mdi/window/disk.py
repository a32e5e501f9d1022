"""Measures which way of reading is faster, with or without the system's page cache, by a unit that must be read anyway."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np

from mdi.units import size
from mdi.window.files import PAGE_BYTES, WeightBytes
from mdi.window.unit_reader import PIECE_BYTES
from mdi.window.weight_units import Unit

PROBE_BYTES = 32 << 20  # read one way, side by side as they will be, then as many the other way
TURNS = 2

logger = logging.getLogger("mdi")


def choose_way(files: Iterable[WeightBytes], unit: Unit, memory: np.ndarray) -> float:
    """Have all files read the way that was faster on one of them, in the better of two turns each.

    Args:
        unit: whose bytes are read for it, into `memory`.

    Returns:
        bytes per second of that way; 0 if the unit is too small to tell.
    """
    files = list(files)
    if not unit.runs:
        return 0.0
    run = max(unit.runs, key=lambda one: one.stop - one.start)
    n_bytes = min(PROBE_BYTES, (run.stop - run.start) // (2 * TURNS) // PAGE_BYTES * PAGE_BYTES)
    if not n_bytes:
        return 0.0
    best = {True: float("inf"), False: float("inf")}
    for turn in range(2 * TURNS):
        is_direct = turn % 2 == 0 and run.file.can_be_direct
        spent = _timed(run.file, run.start + turn * n_bytes, n_bytes, is_direct, memory.data)
        best[is_direct] = min(best[is_direct], spent)
    is_direct = best[True] < best[False]
    for file in files:
        file.is_direct = is_direct and file.can_be_direct
    rate = n_bytes / max(best[is_direct], 1e-9)
    told = [
        f"{name} {size(n_bytes / best[way])}/s" for way, name in ((True, "direct"), (False, "plain")) if best[way] < 1e9
    ]
    logger.debug("weights are read %s: %s", "past the system's memory" if is_direct else "through it", ", ".join(told))
    return rate


def _timed(file: WeightBytes, start: int, n_bytes: int, is_direct: bool, memory: memoryview) -> float:
    """Seconds for some bytes that the system has not in its memory."""
    file.drop(start, n_bytes)
    file.is_direct = is_direct
    begin = time.perf_counter()
    for at in range(0, n_bytes, PIECE_BYTES):
        file.stream(start + at, memory[: min(PIECE_BYTES, n_bytes - at)])
    return time.perf_counter() - begin
