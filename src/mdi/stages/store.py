"""All stages in the memory of a process, and their caches: the same store on a starter and on a secondary.

`acquire` has a stage built, takes one that is the same, or refuses with a reason. A stage outlives its ring. After a normal end
it stays until another run needs its memory. After a broken ring it is kept for KEPT_S with its caches, for the run's next ring.
A stage that failed while it computed is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from mdi.block_ranges import block_span
from mdi.cancel import Cancel
from mdi.checkpoint.weights import WeightSource
from mdi.engine.memory import NodeCaches
from mdi.engine.replay import SentRows
from mdi.engine.worker import Backend
from mdi.errors import Code, ControlError, MdiError, NoMemoryError
from mdi.host.resources import device_free_bytes
from mdi.kernels.blocks import Weights
from mdi.kernels.format_maps import shown
from mdi.model.caches import PageClass, StateClass
from mdi.spec.combinations import GRADIENTS, TORCH, refuse
from mdi.spec.decode import Bytes, Meta, Name, Whole, decode
from mdi.spec.options import WeightMemory
from mdi.stages.building import build_stage
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec
from mdi.units import size

if TYPE_CHECKING:
    from mdi.stages.plain_blocks import KeptInputs, PlainBlocks

# Of stages that compute gradients, as long as these live.
_KEPT_INPUTS: WeakKeyDictionary[Backend, KeptInputs] = WeakKeyDictionary()

# Free memory that is left to the system, to other programs, and to the rows of a stage.
MARGIN_SHARE = 0.15
MARGIN_BYTES = 64 << 20
N_CLASSES_LIMIT = 1000


@dataclass(frozen=True)
class CacheReport:
    """A report of a node about its caches once its stage is loaded.

    Attributes:
        limit_bytes: limit for the caches.
        is_by_hand: whether --kv-memory set it; else it is the memory that is free now, which nodes of one machine share.
        classes: what pages take, for each window of its blocks, and what states take.
        device: whose memory they use.
    """

    limit_bytes: int
    is_by_hand: bool
    classes: tuple[PageClass | StateClass, ...]
    device: str

    def to_json(self) -> dict[str, Any]:
        states = [[c.state_bytes, c.row_bytes, c.n_before] for c in self.classes if isinstance(c, StateClass)]
        return {
            "limit_bytes": self.limit_bytes,
            "is_by_hand": self.is_by_hand,
            "classes": [[c.window, c.page_bytes] for c in self.classes if isinstance(c, PageClass)],
            "device": self.device,
            **({"states": states} if states else {}),
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> CacheReport:
        """Raises ControlError if it cannot be read."""
        told = decode(_Reported, data, f"{where}, of its caches", ControlError)
        classes: tuple[PageClass | StateClass, ...]
        classes = *(PageClass(*one) for one in told.classes), *(StateClass(*one) for one in told.states)
        return cls(told.limit_bytes, told.is_by_hand, classes, told.device)


@dataclass(frozen=True)
class _Reported:
    """A report as it travels; a class is (window, page_bytes), or of states (state_bytes, row_bytes, n_before)."""

    limit_bytes: Bytes
    is_by_hand: bool
    classes: Annotated[tuple[tuple[Whole | None, Bytes], ...], Meta(max_length=N_CLASSES_LIMIT)]
    device: Name
    states: Annotated[tuple[tuple[Bytes, Bytes, Whole], ...], Meta(max_length=N_CLASSES_LIMIT)] = ()


def blocks_of_stage(stage: Backend, each: Callable[[], None] = lambda: None) -> PlainBlocks:
    """The blocks of a stage with gradients, in torch.

    Args:
        each: called after each block.

    Raises:
        UsageError: torch is not installed, or the stage has no whole packed weights in memory.
    """
    from mdi.host.device import load_torch
    from mdi.stages.kernel_stage import KernelStage

    load_torch("computing gradients")
    from mdi.stages.plain_blocks import KeptInputs, PlainBlocks

    if not isinstance(stage, KernelStage) or stage.group is not None or stage.weights.ready is not None:
        refuse({GRADIENTS: GRADIENTS, TORCH: "these blocks are not whole in the kernels' form"})
    assert isinstance(stage, KernelStage)
    kept = _KEPT_INPUTS.setdefault(stage, KeptInputs())
    return PlainBlocks(stage.spec, lambda index: stage.weights[f"block.{index}"], each, kept)


def check_capacity(name: str, stage: Backend, max_length: int, device: str, promised: int = 0) -> None:
    """Raises NoMemoryError if not even one sequence of full length fits into the memory that node `name` has left.

    Args:
        promised: as for `report_caches`.
    """
    needed, available = stage.run_bytes(max_length), device_free_bytes(device) - promised
    if needed > available:
        raise NoMemoryError(
            f"a sequence of {max_length} tokens needs {size(needed)} of caches and tables for "
            f"{block_span(stage.start, stage.stop)} on {name}, but {size(available)} are left there: ask for fewer "
            "tokens, or a smaller --sequence-length"
        )


def report_caches(stage: Backend, device: str, by_hand: int | None, promised: int = 0) -> CacheReport:
    """The most that the caches of a stage may take, that is loaded and prepared.

    Unless the limit was set by hand, the temporary memory of attention is subtracted from it. No limit is larger
    than what the system has reserved.

    Args:
        by_hand: the limit that the user set.
        promised: bytes of the free memory that other stages of this process will take or must keep.
    """
    limits = [limit for limit in (by_hand, stage.cache_limit) if limit is not None]
    limit = min(limits, default=None)
    if limit is None:
        limit = int((device_free_bytes(device) - stage.mapped_bytes - promised) * (1 - MARGIN_SHARE)) - MARGIN_BYTES
        limit = int(limit / (1 + stage.gathered_share))
    if (reserved := stage.caches.most_bytes) is not None:
        limit = min(limit, reserved)
    return CacheReport(max(0, limit), bool(limits), tuple(stage.caches.classes), device)


def share_out(reports: Sequence[tuple[str, str, CacheReport]]) -> tuple[NodeCaches, ...]:
    """The caches that each node can hold, when nodes on one machine or GPU share its memory.

    Args:
        reports: name, address and report of each node.
    """
    owners: dict[tuple[str, str], list[int]] = {}
    for _, addr, report in reports:
        if not report.is_by_hand and report.classes:
            owners.setdefault((addr, report.device), []).append(report.limit_bytes)
    nodes = []
    for name, addr, report in reports:
        sharing = owners.get((addr, report.device), []) if not report.is_by_hand else []
        if len(sharing) > 1:
            report = replace(report, limit_bytes=min(sharing) // len(sharing))
        nodes.append(NodeCaches(name, report.limit_bytes, report.classes))
    return tuple(nodes)


KEPT_S = 15.0  # how long a run whose ring broke keeps its stage and caches

_LOOK_S = 0.2  # between two looks at whether a build that is waited for is still wanted

logger = logging.getLogger("mdi")


class StageBusyError(MdiError):
    """There will be memory once a stage is freed that is kept for another run."""

    code = Code.BUSY


class Claim(NamedTuple):
    """A ring that wants a stage.

    Attributes:
        run, owner: ids of the run, and of its ring.
        keeps_caches: whether those of the run's last ring shall stay.
        replay_bytes: memory for rows that were sent.
        keeps_received: whether rows that came are kept as well, in as much memory.
        share: of the free memory, for its caches; less than 1 where runs share a node.
    """

    run: str
    owner: str
    keeps_caches: bool = False
    replay_bytes: int = 0
    share: float = 1.0
    keeps_received: bool = False


class Supply(Protocol):
    """Where the weights of a stage come from: mdi.node.node_weights.NodeWeights, or mdi.run.supply.StarterSupply."""

    family: ModelFamily
    memory: WeightMemory  # how weights in files are read
    cache_dir: Path  # for weights that must be packed for a window

    def reading(self, spec: StageSpec, cancel: Cancel) -> contextlib.AbstractContextManager[Any]:
        """Within it, the source of each part of the stage can be asked for: a function of its name.

        Raises:
            CheckpointError: weights on this machine are damaged.
        """


Building = Callable[
    [StageSpec, Callable[[str], WeightSource], Mapping[str, Weights], ModelFamily, WeightMemory, Path, Cancel, int],
    Backend,
]


@dataclass(eq=False)
class HeldStage:
    """One stage, or the memory for one that is being built.

    Attributes:
        run, owner: that use it, or that used it last: ids of a run and its ring.
        use: USED (by a ring, or one that is being formed), KEPT (for the next ring of its run) or UNUSED.
        weights: bytes of its weights, by what they are: stages share those that are the same.
        cache_bytes: the most that its caches may take.
        has_caches: whether the caches of the run's last ring are still there, and wanted.
        loaded: weights for it that were in memory already, by part; until it is built.
        sent: rows that its ring has sent to the next node, as long as its caches are there; replay_bytes: that they may take.
        received: rows that have come, if they are kept, in as much memory.
    """

    spec: StageSpec
    run: str
    owner: str
    weights: dict[Any, int]
    cache_bytes: int = 0
    stage: Backend | None = None
    has_caches: bool = False
    loaded: dict[str, Weights] = field(default_factory=dict)
    sent: SentRows | None = None
    received: SentRows | None = None
    replay_bytes: int = 0
    keeps_received: bool = False
    share: float = 1.0
    use: str = "USED"
    since: float = field(default_factory=time.monotonic)

    def set_use(self, use: str) -> None:
        self.use, self.since = use, time.monotonic()

    def claim(self, claim: Claim, spec: StageSpec) -> None:
        self.spec, self.run, self.owner = spec, claim.run, claim.owner
        self.replay_bytes, self.share, self.keeps_received = claim.replay_bytes, claim.share, claim.keeps_received
        self.set_use("USED")

    @property
    def device(self) -> str:
        return self.spec.computing.device

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def rows_to_come(self) -> int:
        """Bytes of rows that are still to be kept."""
        kept = sum(rows.n_bytes for rows in (self.sent, self.received) if rows is not None)
        return max(0, self.replay_bytes * (1 + self.keeps_received) - kept)

    def reserved_for_others(self, other: HeldStage | None) -> int:
        """Memory that is not free for another stage, whatever the system says: for caches that will grow, and files."""
        if self.stage is None:
            return self.weight_bytes + self.cache_bytes + self.rows_to_come
        shared = 0 if other is None else sum(n for what, n in self.weights.items() if what in other.weights)
        caches_to_come = max(0, self.cache_bytes - self.stage.caches.n_bytes)
        return max(0, self.stage.mapped_bytes - shared) + caches_to_come + self.rows_to_come


class StageStore:
    """All methods may be called from any thread.

    Args:
        available: memory of a device that is free, or would be if stages that are not in use were dropped; None asks the
            system, and subtracts what stages in use were promised.
        kv_memory: limit for all caches together; None: the free memory, but for `spare_bytes`, which are left to others.
        build: makes a stage from its spec.
    """

    def __init__(
        self, available: Callable[[str], int] | None = None, kv_memory: int | None = None, build: Building = build_stage,
        spare_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.available = available or self._unpromised
        self.kv_memory = kv_memory
        self._build, self._spare_bytes = build, spare_bytes
        self._lock = threading.RLock()
        self._held: list[HeldStage] = []  # the latest last
        self._built = threading.Condition()
        self._in_hand: set[tuple[Any, ...]] = set()  # keys of stages that are being built

    def acquire(
        self, spec: StageSpec, claim: Claim, supply: Supply, cancel: Cancel, instead_of: HeldStage | None = None,
        on_part: Callable[[], None] = lambda: None,
    ) -> HeldStage:  # fmt: skip
        """A stage that is ready for a run: `reserve`, then `complete`."""
        held = self.reserve(spec, claim, supply.family, instead_of)
        try:
            self.complete(held, supply, cancel, on_part)
        except BaseException:
            self.release(held, claim.owner, is_failed=held.stage is None)
            raise
        return held

    def reserve(
        self, spec: StageSpec, claim: Claim, family: ModelFamily, instead_of: HeldStage | None = None
    ) -> HeldStage:
        """The place of a stage for a ring: an unused one that is the same, else memory for a new one.

        Args:
            instead_of: a stage that the caller uses. If it is the same, it stays, with its caches if they are long enough;
                else it is dropped first, but for weights that the new one has as well.

        Raises:
            NoMemoryError: there is too little. StageBusyError: there will be enough once a kept stage is freed.
        """
        with self._lock:
            self._free_overdue(claim.run)
            is_present = _is_ready(instead_of, spec)
            if (found := instead_of if is_present else self._same(spec.key, claim.run)) is not None:
                had_caches = is_present or (found.use == "KEPT" and found.run == claim.run)
                found.has_caches = claim.keeps_caches and had_caches and self._reaches(found, spec.extent.max_length)
                found.claim(claim, spec)
                self._free_kept(claim.run)
                if instead_of is not None and instead_of is not found:
                    self.remove(instead_of)
                return found
            self._free_kept(claim.run)
            loaded = self._loaded(spec)
            if instead_of is not None:
                self.remove(instead_of)
            here = self._weights_here(spec)
            shared = [part.name for part in spec.parts if _weight_key(spec, part.sha256) in here]
            weights = spec.weight_bytes({**loaded, **dict.fromkeys(shared)})
            needed = weights + spec.run_bytes(family)
            self._admit(spec, needed + claim.replay_bytes)
            held = HeldStage(spec, claim.run, claim.owner, _weights_of(spec, weights, here), loaded=loaded)
            held.cache_bytes = needed - weights
            held.claim(claim, spec)
            self._held.append(held)
            return held

    def complete(
        self, held: HeldStage, supply: Supply, cancel: Cancel, on_part: Callable[[], None] = lambda: None
    ) -> None:
        """Build the stage unless it is there, and prepare it for its run. Interrupted by `cancel`.

        Two threads that want the same stage build it one after the other, and share the weights.

        Args:
            on_part: called before each part that is loaded.

        Raises:
            NoMemoryError: the caches of one text do not fit.
            UsageError, CheckpointError: see build_stage.
        """
        spec, stage = held.spec, held.stage
        if stage is not None:
            return self._prepare(held, stage)
        with self._alone(spec, cancel):  # until others can share the weights
            with supply.reading(spec, cancel) as source:
                held.loaded = {**self._loaded(spec), **held.loaded}  # another one may have been built meanwhile

                def next_source(part: str) -> WeightSource:
                    cancel.check()
                    on_part()
                    return source(part)

                stage = self._build(
                    spec,
                    next_source,
                    held.loaded,
                    supply.family,
                    supply.memory,
                    supply.cache_dir,
                    cancel,
                    self._promised(held),
                )
            logger.debug("%s", spec.computing.describe(spec.name, *spec.blocks))
            try:
                self._prepare(held, stage)
            except BaseException:
                stage.close()
                raise

    def _prepare(self, held: HeldStage, stage: Backend) -> None:
        """Make a stage ready for its run, unless it has the caches of the ring before."""
        spec = held.spec
        if not held.has_caches:
            check_capacity(spec.name, stage, spec.extent.max_length, held.device, self._promised(held))
            stage.prepare(spec.extent.max_length, self._kv_memory(spec))
        if not held.has_caches or held.sent is None:
            held.sent = SentRows(held.replay_bytes)
            held.received = SentRows(held.replay_bytes) if held.keeps_received else None
        self._fill(held, stage)

    @contextlib.contextmanager
    def _alone(self, spec: StageSpec, cancel: Cancel) -> Iterator[None]:
        """One build of a stage at a time."""
        key = spec.key
        with self._built:
            while key in self._in_hand:
                cancel.check()
                self._built.wait(_LOOK_S)
            self._in_hand.add(key)
        try:
            yield
        finally:
            with self._built:
                self._in_hand.discard(key)
                self._built.notify_all()

    def _fill(self, held: HeldStage, stage: Backend) -> None:
        """The stage is prepared; its caches will hold at least one sequence."""
        with self._lock:
            held.stage, held.loaded = stage, {}
            held.cache_bytes = stage.run_bytes(held.spec.extent.max_length)
            if isinstance(stage, KernelStage) and isinstance(stage.weights, Resident):
                parts = held.spec.parts
                held.weights = {_weight_key(held.spec, p.sha256): stage.weights.part_bytes(p.name) for p in parts}
            elif isinstance(stage, KernelStage):
                held.weights = {held.owner: stage.weights.n_bytes}

    def grant(self, held: HeldStage) -> CacheReport:
        """The limit for the caches of a ring that will be closed next.

        No more is kept for it than its sequences need, unless it says itself which share it may take. A limit by hand, the
        stage's or that of this store, is one for all caches of the process together.
        """
        assert held.stage is not None
        with self._lock:
            others = [one for one in self._on(held.device) if one is not held and one.use != "UNUSED"]
            by_hand = self._kv_memory(held.spec)
            if by_hand is not None:
                by_hand = max(0, by_hand - sum(one.cache_bytes for one in others))
            promised = sum(one.reserved_for_others(held) for one in others) + held.rows_to_come
            report = report_caches(held.stage, held.device, by_hand, promised)
            extent = held.spec.extent
            each = sum(c.n_bytes(extent.max_length) for c in report.classes)
            limit = int(report.limit_bytes * held.share)
            if self._spare_bytes and not report.is_by_hand:
                # One text may go on whatever others need: nobody has a share of the memory for it.
                has_room = limit - self._spare_bytes > each
                limit = limit - self._spare_bytes if has_room else min(limit, each)
                report = replace(report, is_by_hand=not has_room)
            report = replace(report, limit_bytes=limit)
            held.cache_bytes = report.limit_bytes
            if held.share == 1.0:
                held.cache_bytes = min(report.limit_bytes, each * extent.n_sequences)
            return report

    def release(self, held: HeldStage, owner: str, is_kept: bool = False, is_failed: bool = False) -> None:
        """The ring that used it has ended, or its kept stage is not needed; does nothing if another ring uses it now.

        Args:
            is_kept: its run may come back for it.
            is_failed: it could not be built, or raised while it computed: no ring may have it again.
        """
        with self._lock:
            if held.owner != owner or held not in self._held or held.use == "UNUSED":
                return
            if held.stage is None or is_failed:
                self.remove(held)
            elif is_kept:
                held.set_use("KEPT")
            else:
                self._free_caches(held)

    def remove(self, held: HeldStage) -> None:
        """Give its memory back; harmless if repeated. Whoever remembers it keeps its description."""
        with self._lock:
            if held in self._held:
                self._held.remove(held)
        stage, held.stage, held.loaded = held.stage, None, {}
        if stage is not None:
            stage.close()

    def drop_unused(self) -> bool:
        """Give the memory of all stages back that no ring uses; whether there was one."""
        with self._lock:
            unused = [held for held in self._held if held.use == "UNUSED"]
            for held in unused:
                self.remove(held)
            return bool(unused)

    def close(self) -> None:
        """Give the memory of all stages back; no ring uses one any more."""
        for held in self.listed:
            self.remove(held)

    def check_memory(self, spec: StageSpec, instead_of: HeldStage | None) -> None:
        """Raises NoMemoryError if the weights of a stage will not fit, before anything is prepared for it."""
        with self._lock:
            if self._same(spec.key, "") is not None:
                return
            needed = spec.weight_bytes(self._loaded(spec))
            if not _is_ready(instead_of, spec):
                self._check_free(spec, needed, self.available(spec.computing.device))

    def loaded_parts(self, held: HeldStage) -> set[str]:
        """Names of the parts of a stage whose weights are in memory already."""
        with self._lock:
            return {*held.loaded, *self._loaded(held.spec)}

    def in_use_bytes(self, device: str) -> int:
        """Bytes that the stages in use on a device have, and were promised. Does not wait for the lock: a status asks."""
        return _bytes_of([held for held in self._on(device) if held.use != "UNUSED"])

    @property
    def latest(self) -> HeldStage | None:
        """The one that was used last, or is. Does not wait for the lock, as `listed`."""
        ready = [held for held in self.listed if held.stage is not None]
        return max(ready, key=lambda held: (held.use == "USED", held.since), default=None)

    @property
    def listed(self) -> list[HeldStage]:
        return list(self._held)

    def _kv_memory(self, spec: StageSpec) -> int | None:
        return self.kv_memory if spec.kv_memory is None else spec.kv_memory

    def _on(self, device: str) -> list[HeldStage]:
        return [held for held in self.listed if held.device == device]

    def _promised(self, held: HeldStage | None, device: str | None = None) -> int:
        """Free memory of a device that other stages in use will take, or must keep."""
        on = self._on(device or (held.device if held is not None else ""))
        return sum(one.reserved_for_others(held) for one in on if one is not held and one.use != "UNUSED")

    def _unpromised(self, device: str) -> int:
        return device_free_bytes(device) - self._promised(None, device)

    def _free_overdue(self, run: str) -> None:
        """Stages that were kept for another run for long enough are not kept any more."""
        now = time.monotonic()
        for held in self._held:
            if held.use == "KEPT" and held.run != run and now - held.since > KEPT_S:
                self._free_caches(held)

    def _free_kept(self, run: str) -> None:
        """The run's own old stage is not the same."""
        for held in self._held:
            if held.use == "KEPT" and held.run == run:
                self._free_caches(held)

    def _same(self, key: tuple[Any, ...], run: str) -> HeldStage | None:
        """A stage that is the same and not in use: that of the run itself, if there is one."""
        free = [
            held for held in self._held
            if held.spec.key == key and held.stage is not None
            and (held.use == "UNUSED" or (held.use, held.run) == ("KEPT", run))
        ]  # fmt: skip
        return max(free, key=lambda held: held.run == run, default=None)

    def _reaches(self, held: HeldStage, max_length: int) -> bool:
        assert held.stage is not None
        return held.stage.max_length >= max_length

    def _loaded(self, spec: StageSpec) -> dict[str, Weights]:
        """Weights of parts that another stage has in memory, in the form that this one needs."""
        found: dict[str, Weights] = {}
        if not _is_shareable(spec):
            return found
        with self._lock:
            for held in self._on(spec.computing.device):
                stage = held.stage
                if not isinstance(stage, KernelStage) or not isinstance(stage.weights, Resident):
                    continue
                if held.spec.computing.packing == spec.computing.packing:
                    shas = {part.sha256: part.name for part in held.spec.parts}
                    found |= {p.name: stage.weights[shas[p.sha256]] for p in spec.parts if p.sha256 in shas}
        return found

    def _weights_here(self, spec: StageSpec) -> dict[Any, int]:
        """Bytes of the weights of a stage that others have, or will have once they are built."""
        if not _is_shareable(spec):
            return {}
        wanted = {_weight_key(spec, part.sha256) for part in spec.parts}
        return {key: n for held in self._held for key, n in held.weights.items() if key in wanted}

    def _free_caches(self, held: HeldStage) -> None:
        assert held.stage is not None
        held.stage.caches.clear()
        held.sent = held.received = None
        held.cache_bytes = 0
        held.set_use("UNUSED")

    def _check_free(self, spec: StageSpec, needed: int, free: int) -> None:
        if needed <= free:
            return
        here = self._on(spec.computing.device)
        kept = _bytes_of(here) - _bytes_of([held for held in here if held.use != "KEPT"])
        if needed <= free + kept:
            raise StageBusyError(f"{spec.name} keeps a stage for a run whose ring broke, for up to {KEPT_S:.0f} s")
        raise NoMemoryError(
            f"{spec.name} has {size(free)} of memory free, but {spec} and the caches of one sequence take {size(needed)} in "
            f"{shown(spec.computing.format)}: give it fewer blocks (--layers, --placement, more nodes) or a smaller share "
            "(--shares), or use a smaller format (--quantize, --dtype)"
        )

    def _admit(self, spec: StageSpec, needed: int) -> None:
        """Make memory for a stage by dropping those that were not used for longest."""
        free = self.available(spec.computing.device)
        self._check_free(spec, needed, free)
        here = self._on(spec.computing.device)
        unused = sorted((held for held in here if held.use == "UNUSED"), key=lambda held: held.since)
        used = [held for held in here if held.use != "UNUSED"]
        while unused and free - (_bytes_of([*used, *unused]) - _bytes_of(used)) < needed:
            dropped = unused.pop(0)
            self.remove(dropped)
            logger.info("%s drops %s of %s from memory", spec.name, dropped.spec, dropped.spec.model.name or "a model")


def _is_ready(held: HeldStage | None, spec: StageSpec) -> bool:
    """Whether this is the stage of the spec, and there."""
    return held is not None and held.stage is not None and held.spec.key == spec.key


def _is_shareable(spec: StageSpec) -> bool:
    """Whether other stages can use its weights as well."""
    return not spec.is_torch and spec.window is None


def _weight_key(spec: StageSpec, sha256: str) -> Any:
    """Shareable weights with the same key are the same memory."""
    return sha256, spec.computing.packing


def _weights_of(spec: StageSpec, n_bytes: int, here: Mapping[Any, int]) -> dict[Any, int]:
    """Memory of the weights of a stage that is not built yet: `n_bytes` of its own, and those that are `here` already."""
    if not _is_shareable(spec):
        return {object(): n_bytes}
    new = {_weight_key(spec, part.sha256): part.n_bytes for part in spec.parts}
    new = {key: n for key, n in new.items() if key not in here} or {object(): 1}
    total = sum(new.values())
    return {**here, **{key: n_bytes * n // total for key, n in new.items()}}


def _bytes_of(stages: Sequence[HeldStage]) -> int:
    """The memory of these stages together; weights that several of them have count once."""
    weights: dict[Any, int] = {}
    for held in stages:
        weights.update(held.weights)
    return sum(weights.values()) + sum(held.cache_bytes + held.replay_bytes for held in stages)
