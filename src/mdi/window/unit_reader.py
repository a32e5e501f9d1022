"""A thread that reads units into reused memory, ahead of the thread that computes with them.

Units are read in one order, pass after pass. Position p of all passes is unit p % n, and lies in slot p % W: since n is brought
to a multiple of W (by positions without a unit), each unit has its slot for good. A position may be read as soon as the one
W before it has been let go of.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from mdi.errors import CheckpointError, EngineError
from mdi.window.weight_units import Unit

PIECE_BYTES = 8 << 20  # bytes read at a time, so that reading can be stopped
TOLD_S = 10.0  # a wait for the disk that is worth a word
GIVEN_UP_S = 60.0  # ... after which a disk that gives nothing counts as failed

logger = logging.getLogger("mdi")


class Reader:
    """See the module.

    Args:
        units: of one pass; None is a position without one.
        slots: memory, uint8 arrays; their number divides that of `units`.

    Attributes:
        read_bytes: that came from the disk.
        wait_s: how long `unit` waited for them.
    """

    def __init__(self, units: Sequence[Unit | None], slots: Sequence[np.ndarray]) -> None:
        assert slots and len(units) % len(slots) == 0
        self._units, self._slots = units, slots
        self._changed = threading.Condition()
        self._next = 0  # the position that is read next, or now
        self._let_go = 0  # positions below are done with
        self._is_closed = False
        self._error: BaseException | None = None
        self._last_sign = time.monotonic()
        self.read_bytes = 0
        self.wait_s = 0.0
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def unit(self, index: int) -> Iterator[None]:
        """Within it, unit `index` of a pass is in its slot. Units between the last one and this are skipped.

        Raises:
            CheckpointError: it cannot be read.
        """
        position = self._let_go + (index - self._let_go) % len(self._units)
        self._wait_for(position)
        try:
            yield
        finally:
            self._move_to(position + 1)

    def close(self) -> None:
        """End the thread; harmless if repeated."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(TOLD_S)

    @property
    def is_full(self) -> bool:
        """Whether all that may be read has been read."""
        with self._changed:
            return self._next == self._let_go + len(self._slots)

    def _wait_for(self, position: int) -> None:
        begin = time.monotonic()
        if position != self._let_go:
            self._move_to(position)
        next_word = begin + TOLD_S
        with self._changed:
            if self._error is not None:  # met ahead of time, or raised before
                self._error = None  # many errors of disks pass, so it is read again
                self._changed.notify_all()
            while self._next <= position:
                if self._error is not None:
                    raise self._error
                if self._is_closed:
                    raise EngineError("the weights of this stage were freed")
                self._changed.wait(1.0)
                now = time.monotonic()
                if now - max(self._last_sign, begin) > GIVEN_UP_S:
                    raise CheckpointError(
                        f"the disk has given nothing of {self._file_of(position)} for {GIVEN_UP_S:.0f} s: check the disk"
                    )
                if now > next_word:
                    next_word = now + TOLD_S
                    logger.warning("waiting for the disk: %s (%.0f s)", self._file_of(position), now - begin)
        self.wait_s += time.monotonic() - begin

    def _file_of(self, position: int) -> str:
        unit = self._units[position % len(self._units)]
        return str(unit.runs[0].file.path) if unit is not None and unit.runs else ""

    def _move_to(self, position: int) -> None:
        """All below it is done with."""
        with self._changed:
            while self._units[position % len(self._units)] is None:
                position += 1
            self._let_go = position
            self._next = max(self._next, position)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (self._error or self._next >= self._let_go + len(self._slots)):
                    self._changed.wait()
                if self._is_closed:
                    return
                position = self._next
            error: BaseException | None = None
            try:
                self._read(position)
            except BaseException as e:  # raised in the waiting thread
                error = e
            with self._changed:
                if error is not None:
                    self._error = error
                elif self._next == position:  # otherwise other units are needed by now
                    self._next += 1
                self._changed.notify_all()

    def _read(self, position: int) -> None:
        unit = self._units[position % len(self._units)]
        if unit is None:
            return
        if position % len(self._units) == 0:
            for file in {run.file for one in self._units if one is not None for run in one.runs}:
                file.check()
        for n_bytes in read_unit(unit, self._slots[position % len(self._slots)]):
            self.read_bytes += n_bytes
            self._last_sign = time.monotonic()
            if self._is_closed or self._let_go > position:
                return


def read_unit(unit: Unit, memory: np.ndarray) -> Iterator[int]:
    """Read a unit into memory, piece by piece; the bytes of each that has come. Raises CheckpointError."""
    view = memory.data
    for run in unit.runs:
        for start in range(run.start, run.stop, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, run.stop)
            at = run.at + start - run.start
            yield run.file.stream(start, view[at : at + stop - start])
