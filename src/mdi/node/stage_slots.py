"""The stages in a secondary's memory, one slot each, within one memory budget.

A stage outlives its ring. After a normal end it stays until another run needs its memory. After a broken ring it is kept for
KEPT_S with its caches, for the run's next ring.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mdi.block_ranges import block_span
from mdi.control.messages import InitRequest
from mdi.engine.replay import SentRows
from mdi.errors import ControlError
from mdi.kernels.kernel_stage import KernelStage, Weights
from mdi.machine.computing import Computing
from mdi.node.cache_budget import CacheReport, report_caches, share_in
from mdi.node.stage_holder import StageHolder
from mdi.replay_memory import ROW_VALUE_BYTES, most_bytes
from mdi.units import size
from mdi.window.window_stage import WindowStage

if TYPE_CHECKING:
    from mdi.node.stage_holder import NodeStage

KEPT_S = 15.0  # how long a run whose ring broke keeps its stage and caches

logger = logging.getLogger("mdi")


@dataclass(eq=False)
class Slot:
    """One stage, or the memory for one that is being built.

    Attributes:
        run, owner: that uses it, or that used it last, and the epoch of its ring.
        use: USED (by a ring, or one that is being formed), KEPT (for the next ring of its run) or UNUSED.
        weights: bytes of its weights, by what they are: slots share those that are the same. While it is built, of all that
            it takes.
        cache_bytes: the most that its caches may take.
        loaded: weights for it that were in memory already, by part.
        sent: rows that its ring has sent to the next node, as long as its caches are there; replay_bytes: that they may take.
    """

    key: tuple[Any, ...]
    run: str
    owner: str
    model: str
    blocks: tuple[int, int]
    computing: Computing
    weights: dict[Any, int]
    shas: dict[str, str]
    cache_bytes: int = 0
    stage: NodeStage | None = None
    loaded: dict[str, Weights] = field(default_factory=dict)
    sent: SentRows | None = None
    replay_bytes: int = 0
    use: str = "USED"
    since: float = field(default_factory=time.monotonic)

    def turn(self, use: str) -> None:
        self.use, self.since = use, time.monotonic()

    @property
    def device(self) -> str:
        return self.computing.device

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def rows_to_come(self) -> int:
        """Bytes of rows that are still to be kept."""
        return max(0, self.replay_bytes - (0 if self.sent is None else self.sent.n_bytes))

    def promised_beside(self, other: Slot) -> int:
        """What is not free for another slot, whatever the system says: what caches will take, and files that must stay."""
        if self.stage is None:
            return self.weight_bytes + self.rows_to_come
        shared = sum(n for what, n in self.weights.items() if what in other.weights)
        caches_to_come = max(0, self.cache_bytes - self.stage.caches.n_bytes)
        return max(0, self.stage.mapped_bytes - shared) + caches_to_come + self.rows_to_come


class StageSlots:
    """See the module. All methods may be called from any thread.

    Args:
        name: of the node.
        holder: gives the memory that a stage needs.
        available: memory of a device that is free, or would be if slots that are not in use were dropped.
        kv_memory: limit for all caches together; None: the free memory.
    """

    def __init__(self, name: str, holder: StageHolder, available: Callable[[str], int], kv_memory: int | None) -> None:
        self._name = name
        self._holder = holder
        self.available = available
        self.kv_memory = kv_memory
        self._lock = threading.RLock()
        self._slots: list[Slot] = []  # the latest last

    def reserve(self, request: InitRequest, computing: Computing) -> tuple[Slot, bool]:
        """A slot for a ring: an unused one with the same stage, else memory for a new one.

        Returns:
            The slot, and whether it has the caches of the run's last ring, which are to stay.

        Raises:
            ControlError: `memory`, or `busy` if there will be enough once a kept stage is freed.
        """
        with self._lock:
            self._let_go(request.run)
            key = self._holder.key(request, computing)
            if (found := self._same(key, request.run)) is not None:
                has_caches = request.keep_caches and found.use == "KEPT" and found.run == request.run
                found.run, found.owner, found.model = request.run, request.epoch, request.model
                found.replay_bytes = _replay_bytes(request)
                found.turn("USED")
                return found, has_caches and self._reaches(found, request.max_length)
            loaded = self._loaded(request, computing)
            needed = self._holder.needed_bytes(request, computing, loaded)
            self._admit(request, computing, needed + _replay_bytes(request))
            shas = {part.name: part.sha256 for part in request.parts}
            slot = Slot(
                key, request.run, request.epoch, request.model, request.blocks, computing, {request.epoch: needed}, shas,
                loaded=loaded,
            )  # fmt: skip
            slot.replay_bytes = _replay_bytes(request)
            self._slots.append(slot)
            return slot, False

    def fill(self, slot: Slot, stage: NodeStage, max_length: int) -> None:
        """The stage of a slot is prepared; its caches will hold at least one sequence."""
        with self._lock:
            slot.stage = stage
            slot.loaded = {}
            slot.cache_bytes = stage.run_bytes(max_length)
            if isinstance(stage, WindowStage):
                slot.weights = {slot.owner: stage.weight_bytes}
            elif isinstance(stage, KernelStage):
                packing = slot.computing.packing
                slot.weights = {(sha, packing): stage.part_bytes(part) for part, sha in slot.shas.items()}

    def grant(self, slot: Slot, request: InitRequest) -> CacheReport:
        """The limit for the caches of a ring that will be closed next.

        No more is kept for it than its `n_sequences` need, unless it says itself which share it may take.
        """
        assert slot.stage is not None
        with self._lock:
            others = [one for one in self._on(slot.device) if one is not slot and one.use != "UNUSED"]
            by_hand = self.kv_memory
            if by_hand is not None:
                by_hand = max(0, by_hand - sum(one.cache_bytes for one in others))
            promised = sum(one.promised_beside(slot) for one in others) + slot.rows_to_come
            report = report_caches(slot.stage, slot.device, by_hand, promised)
            share = share_in(request.extensions)
            report = replace(report, limit_bytes=int(report.limit_bytes * share))
            slot.cache_bytes = report.limit_bytes
            if share == 1.0:
                each = sum(c.n_bytes(request.max_length) for c in report.classes)
                slot.cache_bytes = min(report.limit_bytes, each * request.n_sequences)
            return report

    def release(self, slot: Slot, owner: str, is_kept: bool = False, is_failed: bool = False) -> None:
        """The ring that used it is over, or its kept stage is not needed; does nothing if another ring uses it now.

        Args:
            is_kept: its run may come back for it.
            is_failed: its weights could not be read: no ring may have it again.
        """
        with self._lock:
            if slot.owner != owner or slot not in self._slots or slot.use == "UNUSED":
                return
            if slot.stage is None or is_failed:
                self._remove(slot)
            elif is_kept:
                slot.turn("KEPT")
            else:
                self._free_caches(slot)

    def drop_unused(self) -> bool:
        """Give the memory of all stages back that no ring uses; whether there was one."""
        with self._lock:
            unused = [slot for slot in self._slots if slot.use == "UNUSED"]
            for slot in unused:
                self._remove(slot)
            return bool(unused)

    def close(self) -> None:
        """Give the memory of all stages back; no ring uses one any more."""
        with self._lock:
            for slot in self.listed:
                self._remove(slot)

    def in_use_bytes(self, device: str) -> int:
        """What the stages in use on a device have, and were promised. Does not wait for the lock: a status asks."""
        return _bytes_of([slot for slot in self._on(device) if slot.use != "UNUSED"])

    @property
    def latest(self) -> Slot | None:
        """The one that was used last, or is. Does not wait for the lock, as `listed`."""
        ready = [slot for slot in self.listed if slot.stage is not None]
        return max(ready, key=lambda slot: (slot.use == "USED", slot.since), default=None)

    @property
    def listed(self) -> list[Slot]:
        return list(self._slots)

    def _on(self, device: str) -> list[Slot]:
        return [slot for slot in self.listed if slot.device == device]

    def _let_go(self, run: str) -> None:
        """Stages that were kept for long enough, or that only this run could use again, are not kept any more."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.use == "KEPT" and slot.run != run and now - slot.since > KEPT_S:
                self._free_caches(slot)

    def _same(self, key: tuple[Any, ...], run: str) -> Slot | None:
        """A stage that is the same and not in use: that of the run itself, if there is one."""
        free = [
            slot for slot in self._slots
            if slot.key == key and slot.stage is not None and (slot.use == "UNUSED" or (slot.use, slot.run) == ("KEPT", run))
        ]  # fmt: skip
        return max(free, key=lambda slot: slot.run == run, default=None)

    def _reaches(self, slot: Slot, max_length: int) -> bool:
        assert slot.stage is not None
        return slot.stage.max_length >= max_length

    def _loaded(self, request: InitRequest, computing: Computing) -> dict[str, Weights]:
        """Weights of parts that another stage has in memory, in the form that this one needs. Frees the run's own old stage."""
        found: dict[str, Weights] = {}
        for slot in self._slots:
            if slot.use == "KEPT" and slot.run == request.run:
                self._free_caches(slot)
            is_alike = slot.device == computing.device and slot.computing.packing == computing.packing
            if computing.packing is None or not is_alike:
                continue
            if not isinstance(slot.stage, KernelStage) or isinstance(slot.stage, WindowStage):
                continue
            for part in request.parts:
                if slot.shas.get(part.name) == part.sha256:
                    found[part.name] = slot.stage.weights_of(part.name)
        return found

    def _remove(self, slot: Slot) -> None:
        """Its memory is free with that: runs that are over remember their slots."""
        self._slots.remove(slot)
        if slot.stage is not None:
            slot.stage.close()
        slot.stage, slot.loaded = None, {}

    def _free_caches(self, slot: Slot) -> None:
        assert slot.stage is not None
        slot.stage.caches.clear()
        slot.sent = None
        slot.cache_bytes = 0
        slot.turn("UNUSED")

    def _admit(self, request: InitRequest, computing: Computing, needed: int) -> None:
        """Make memory for a stage by dropping those that were not used for longest. Raises ControlError."""
        here = self._on(computing.device)
        free = self.available(computing.device)
        if needed > free:
            kept = _bytes_of(here) - _bytes_of([slot for slot in here if slot.use != "KEPT"])
            if needed <= free + kept:
                raise ControlError(
                    f"{self._name} keeps a stage for a run whose ring broke, for up to {KEPT_S:.0f} s", 409, code="busy"
                )
            start, stop = request.blocks
            raise ControlError(
                f"{self._name} has {size(free)} of memory free, but {block_span(start, stop)} and the caches of "
                f"one sequence take {size(needed)} in {computing.format}: give it fewer blocks (--layers, --placement), or "
                "use a smaller format (--quantize, --dtype)",
                507,
                code="memory",
            )
        unused = sorted((slot for slot in here if slot.use == "UNUSED"), key=lambda slot: slot.since)
        used = [slot for slot in here if slot.use != "UNUSED"]
        while unused and free - (_bytes_of([*used, *unused]) - _bytes_of(used)) < needed:
            dropped = unused.pop(0)
            self._remove(dropped)
            logger.info(
                "%s drops %s of %s from memory", self._name, block_span(*dropped.blocks), dropped.model or "a model"
            )


def _replay_bytes(request: InitRequest) -> int:
    """What the run may keep here of rows that were sent."""
    row_bytes = request.config.get("n_embd", 0) * ROW_VALUE_BYTES
    return most_bytes(request.replay_bytes, request.n_sequences, request.max_length, row_bytes)


def _bytes_of(slots: Sequence[Slot]) -> int:
    """The memory of these slots together; weights that several of them have count once."""
    weights: dict[Any, int] = {}
    for slot in slots:
        weights.update(slot.weights)
    return sum(weights.values()) + sum(slot.cache_bytes + slot.replay_bytes for slot in slots)
