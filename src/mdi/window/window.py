"""The weights of a stage with a window: memory for units that stay, slots for the others, and their reader."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable

import numpy as np

from mdi.cancel import Cancel
from mdi.kernels.layout import Matrix
from mdi.stages.kernel_stage import WeightUse
from mdi.window.disk import choose_way
from mdi.window.slot_plan import WindowPlan
from mdi.window.unit_reader import Reader, read_unit

logger = logging.getLogger("mdi")


class Window:
    """See the module. What stays is read now, and the first units that do not, in the background.

    Raises:
        CheckpointError: a unit cannot be read.
    """

    def __init__(self, plan: WindowPlan, cancel: Cancel | None = None) -> None:
        cancel = cancel or Cancel()
        self.plan = plan
        self._index = {(unit.part, unit.piece): i for i, unit in enumerate(plan.units)}
        streamed = plan.streamed
        self._place = {i: place for place, i in enumerate(streamed)}
        slots = [_pages(n) for n in plan.slot_bytes]
        memory = {i: slots[place % plan.n_slots] for i, place in self._place.items()}
        files = {run.file for unit in plan.units for run in unit.runs}
        probed = max(plan.units, key=lambda unit: unit.n_bytes)
        memory |= {i: _pages(plan.units[i].n_bytes) for i in plan.kept}
        self.disk_bytes_s = choose_way(files, probed, memory[plan.units.index(probed)])
        self._kept_read = 0
        for i in sorted(plan.kept):
            for n_bytes in read_unit(plan.units[i], memory[i]):
                self._kept_read += n_bytes
                cancel.check()
        self._memory = memory
        self._closed_with: list[Callable[[], None]] = []
        self._reader: Reader | None = None
        if streamed:
            padding = -len(streamed) % plan.n_slots
            self._reader = Reader([*(plan.units[i] for i in streamed), *[None] * padding], slots)
        self._end = weakref.finalize(self, _close, self._reader, self._closed_with)

    def matrices(self, part: str) -> list[dict[str, Matrix]]:
        """The weights of a part, by name: for each of its units, its place in memory."""
        return [unit.placed(self._memory[i]) for i, unit in enumerate(self.plan.units) if unit.part == part]

    def unit(self, part: str, piece: int) -> contextlib.AbstractContextManager[None]:
        """Within this context, the unit is in memory. Ask for units in the order of a pass."""
        place = self._place.get(self._index[part, piece])
        if place is None or self._reader is None:
            return contextlib.nullcontext()
        return self._reader.unit(place)

    @property
    def use(self) -> WeightUse:
        reader = self._reader
        read, wait_s = (reader.read_bytes, reader.wait_s) if reader is not None else (0, 0.0)
        return WeightUse(self.plan.resident_bytes, self._kept_read + read, wait_s)

    @property
    def is_full(self) -> bool:
        """Whether there is nothing to read until a unit is freed."""
        return self._reader is None or self._reader.is_full

    @property
    def reads_direct(self) -> bool:
        """Whether reads go past the system's memory of files."""
        return all(run.file.is_direct for unit in self.plan.units for run in unit.runs)

    def on_close(self, action: Callable[[], None]) -> None:
        """Have something done when the reading has ended."""
        self._closed_with.append(action)

    def close(self) -> None:
        """End the reading; harmless if repeated."""
        self._end()


def _close(reader: Reader | None, others: list[Callable[[], None]]) -> None:
    if reader is not None:
        reader.close()
    for action in others:
        action()


def _pages(n_bytes: int) -> np.ndarray:
    """Memory on its own pages, uint8 (n_bytes), which is freed with the last array that uses it."""
    if not n_bytes:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError, ValueError):  # fewer, larger pages, where the system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
