"""Experts of a stage in slots of memory that all of them share: read from the disk when rows have chosen them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence

from mdi.engine.worker import WeightUse
from mdi.errors import EngineError
from mdi.kernels.layout import Matrix
from mdi.stages.window_files import FIRST_EXPERT, JOIN_S, Unit, pages, read_unit, wait_for_disk

N_READERS = 4  # a disk with a queue gives more to several that ask

Key = tuple[str, int]  # part and piece of an expert's unit


class ExpertSlots:
    """Reads chosen experts, in threads of its own, and keeps those that were used last.

    The least recently used expert goes, but of a block that has more than its share of the slots, first of the block for which
    one is read: blocks are computed in turn, so by age alone none would be left in the next pass if a pass chooses more experts
    than there are slots.

    Args:
        units: each an expert, `Unit.piece` as in window_files.

    Attributes:
        slots: uint8, as large as the largest expert each.
    """

    def __init__(self, units: Sequence[Unit], n_slots: int) -> None:
        self._units: dict[Key, Unit] = {(unit.part, unit.piece): unit for unit in units}
        slot_bytes = max(unit.n_bytes for unit in units)
        self.slots = [pages(slot_bytes) for _ in range(n_slots)]
        self._free = list(range(n_slots))
        # The slot of each expert in memory, of each block, the least recently used first.
        self._held: dict[str, OrderedDict[Key, int]] = {unit.part: OrderedDict() for unit in units}
        self._share = (n_slots - min(N_READERS, n_slots // 2)) / len(self._held)  # some slots are for what is read now
        self._used: dict[Key, int] = {}  # when each was used last, counted
        self._addresses = {key: self.slots[0].ctypes.data for key in self._units}  # where the kernels look for each
        self._wanted: list[Key] = []  # of the present block, not computed yet
        self._reading: set[Key] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        self._last_sign = time.monotonic()
        self._clock = self._n_chosen = self._n_misses = self._read_bytes = 0
        self._wait_s = 0.0
        self._threads: list[threading.Thread] = []  # begin with the first `ready`

    def matrices(self, part: str) -> list[dict[str, Matrix]]:
        """The weights of each expert of a block, by name, where `ready` supposes them at first."""
        return [unit.placed(self.slots[0]) for unit in self._units.values() if unit.part == part]

    @property
    def use(self) -> WeightUse:
        """But for the memory."""
        hits = max(0, self._n_chosen - self._n_misses)
        return WeightUse(0, self._read_bytes, self._wait_s, hits, self._n_misses)

    def ready(self, block: int, chosen: Sequence[int]) -> Generator[tuple[int, list[tuple[int, int]]], None, None]:
        """See kernels.blocks.ExpertReader. Raises CheckpointError: one cannot be read."""
        if not self._threads:
            names = [f"experts-{i}" for i in range(min(N_READERS, len(self.slots)))]
            self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
            for thread in self._threads:
                thread.start()
        keys = [(f"block.{block}", FIRST_EXPERT + expert) for expert in chosen]
        with self._changed:
            self._wanted, self._error = list(keys), None  # many errors of disks pass, so it is read again
            self._n_chosen += len(keys)
            self._changed.notify_all()
        done = 0
        try:
            while done < len(keys):
                come = self._wait_for(keys[done:])
                moves = [(key[1] - FIRST_EXPERT, by) for key in keys[done : done + come] if (by := self._moved(key))]
                yield done + come, moves
                with self._changed:
                    for key in keys[done : done + come]:
                        self._clock += 1
                        self._used[key] = self._clock
                        self._held[key[0]].move_to_end(key)
                    done += come
                    self._wanted = keys[done:]
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._wanted = []

    def close(self) -> None:
        """End the threads; harmless if repeated."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)

    def _wait_for(self, keys: Sequence[Key]) -> int:
        """How many of the first ones are in memory: one at least."""
        with self._changed:
            self._wait_s += wait_for_disk(
                self._changed, lambda: self._has(keys[0]), lambda: self._last_sign, self._units[keys[0]]
            )
            return next((i for i, key in enumerate(keys) if not self._is_there(key)), len(keys))

    def _has(self, key: Key) -> bool:
        if self._is_there(key):
            return True
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise EngineError("the weights of this stage were freed")
        return False

    def _is_there(self, key: Key) -> bool:
        return key in self._held[key[0]] and key not in self._reading

    def _moved(self, key: Key) -> int:
        address = self.slots[self._held[key[0]][key]].ctypes.data
        by, self._addresses[key] = address - self._addresses[key], address
        return by

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (job := None if self._error else self._next_job()) is None:
                    self._changed.wait()
                if self._is_closed:
                    return
            assert job is not None
            key, slot = job
            error: BaseException | None = None
            try:
                self._read(key, slot)
            except BaseException as e:  # raised in the waiting thread
                error = e
            with self._changed:
                self._reading.discard(key)
                if error is not None:
                    if key in self._wanted:  # not of a frame that is over
                        self._error = error
                    self._free.append(self._held[key[0]].pop(key))
                self._changed.notify_all()

    def _read(self, key: Key, slot: int) -> None:
        unit = self._units[key]
        for file in {run.file for run in unit.runs}:
            file.check()
        for n_bytes in read_unit(unit, self.slots[slot]):
            with self._changed:
                self._read_bytes += n_bytes
                self._last_sign = time.monotonic()

    def _next_job(self) -> tuple[Key, int] | None:
        """The first wanted expert that nobody reads, and a slot for it, both taken; None if there is none."""
        for i, key in enumerate(self._wanted):
            if key in self._held[key[0]]:
                continue
            slot = self._slot_for(key, is_first=not i)
            if slot is None:
                return None
            self._held[key[0]][key] = slot
            self._clock += 1
            self._used[key] = self._clock
            self._reading.add(key)
            self._n_misses += 1
            return key, slot
        return None

    def _slot_for(self, key: Key, is_first: bool) -> int | None:
        """A free one, or one whose expert goes; None until experts in front of it are done with."""
        if self._free:
            return self._free.pop()
        busy = self._reading.union(self._wanted)
        own = [key[0]] if len(self._held[key[0]]) >= self._share else []
        over = [part for part, held in self._held.items() if len(held) > self._share]
        for parts in (own, over, [*self._held] if is_first else []):
            oldest = [one for part in parts if (one := next((k for k in self._held[part] if k not in busy), None))]
            if oldest:
                return self._taken_from(min(oldest, key=self._used.__getitem__))
        # All slots have what is wanted. Nothing is computed while the first one is missing.
        last = next((k for k in reversed(self._wanted) if self._is_there(k)), None) if is_first else None
        return None if last is None else self._taken_from(last)

    def _taken_from(self, key: Key) -> int:
        return self._held[key[0]].pop(key)
