"""Which way of reading is faster here: past the system's memory of files, or through it. Measured, with a unit that is to be
read anyway."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np

from mdi.window.files import PAGE_BYTES, WeightBytes
from mdi.window.units import Unit

PROBE_BYTES = 4 << 20  # read one way, then as many the other way
TURNS = 4

logger = logging.getLogger("mdi")


def choose_way(files: Iterable[WeightBytes], unit: Unit, memory: np.ndarray) -> float:
    """Have all files read the way that was faster on one of them.

    Args:
        unit: whose bytes are read for it, into `memory`.

    Returns:
        bytes per second of that way; 0 if the unit is too small to tell.
    """
    files = list(files)
    run = max(unit.runs, key=lambda one: one.stop - one.start)
    piece = min(PROBE_BYTES, (run.stop - run.start) // (2 * TURNS) // PAGE_BYTES * PAGE_BYTES)
    if not piece:
        return 0.0
    spent = {True: 0.0, False: 0.0}
    view = memory.data[:piece]
    for turn in range(2 * TURNS):
        is_direct = turn % 2 == 0 and run.file.can_be_direct
        start = run.start + turn * piece
        run.file.drop(start, piece)
        run.file.is_direct = is_direct
        begin = time.perf_counter()
        run.file.stream(start, view)
        spent[is_direct] += time.perf_counter() - begin
    is_direct = run.file.can_be_direct and spent[True] <= spent[False]
    for file in files:
        file.is_direct = is_direct and file.can_be_direct
    rate = piece * TURNS / max(spent[is_direct], 1e-9)
    if not run.file.can_be_direct:
        rate = 2 * piece * TURNS / max(spent[False], 1e-9)
    logger.debug(
        "weights are read %s, %.0f MB/s", "past the page cache" if is_direct else "through the page cache", rate / 1e6
    )
    return rate
