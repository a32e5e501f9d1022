"""Has random rows of the nodes computed again by the starter, and compares them bit by bit.

Whenever a text has WINDOW more rows, it is drawn for each node whether all rows of the text so far are computed again here,
from the rows that the node before says it has sent. The more rows were left out before, the less probable that is: so the
share of rows that is computed again is the rate. The kernels give a row the same bits in any company and on any processor
(run.identity), so one other bit is enough to know that a node computes nonsense. What a node says that it got is compared with
what the node before says that it sent: where they differ, one of the two is wrong, and both are named. Nodes whose numbers may
differ, because they compute in torch or in other formats, are not verified, and named once.

A text whose rows were chosen is not told to have ended before they are verified. The search for beams is not verified.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mdi.cancel import Cancel
from mdi.control.messages import ROWS_BYTES, RowsRequest, ToldRows
from mdi.engine.starter import StarterEngine
from mdi.errors import ControlError, EngineError, MdiError, NoMemoryError, WireError
from mdi.host.threads import computing_threads
from mdi.kernels.page_sizes import CHUNK_ROWS
from mdi.kernels.slices import Slice, SliceTable
from mdi.net.wire import DTYPE_CODES, DTYPES, Frame, FrameType
from mdi.run.form import Basis, Former, Ring
from mdi.stages.starter_weights import StarterSupply
from mdi.stages.store import Claim, HeldStage

WINDOW = 32
JOIN_S = 10.0
JUDGE_S = 60.0  # a text that cannot go on waits so long for a verdict

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Untrue:
    """Nodes of ring number `ring`, of which one has told or computed wrong rows."""

    nodes: tuple[str, ...]
    ring: int
    reason: str


@dataclass(frozen=True)
class _Job:
    """Rows of a text up to `stop` that node `index` of the ring has computed; `index` None: the text has ended."""

    ring: Ring
    seq_id: int
    index: int | None
    stop: int = 0


@dataclass
class _Text:
    """The state of checking a text over the present ring.

    Attributes:
        n_before: rows whose tokens were known before; n_back: rows whose tokens are known; n_offered: of them, those for which
            was drawn. chosen: rows of each node, from the first on, that are to be computed again.
        hashes: of each row that came back from the last node, by position.
        pending: of each node that has a job, how many.
        checked: rows of each node, from the first on, that were computed again; cached: those whose caches are here.
        is_held: whether its end is held back.
    """

    n_before: int
    n_back: int = 0
    n_offered: int = 0
    chosen: dict[str, int] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    is_held: bool = False


class RowVerifier:
    """See the module, and engine.starter.Verifier. `close` ends its thread.

    Args:
        rate: the probability.
        put: gets what was found; the ring is to be left then.

    Attributes:
        n_rows: rows of all nodes so far; n_checked: those that were computed again; n_void: that could not be.
        n_fetched: bytes of rows that nodes have sent for it.
        busy_s: time that computing them again took.
        found: what was found, and when (time.perf_counter()).
    """

    def __init__(self, rate: float, former: Former, put: Callable[[Untrue], None]) -> None:
        self._rate = rate
        self._former = former
        self._put = put
        self._random = random.SystemRandom()  # no node can know which rows are chosen
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a job is done
        self._texts: dict[int, _Text] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ring: Ring | None = None
        self._accused: tuple[str, ...] = ()
        self._told: set[str] = set()  # nodes that cannot be verified, of which the log has a line
        self._stages: dict[int, HeldStage] = {}
        self._of_ring: Ring | None = None  # the ring of `_stages`
        self._cancel = Cancel()
        self.engine: StarterEngine | None = None
        self.n_rows = self.n_checked = self.n_void = self.n_fetched = 0
        self.busy_s = 0.0
        self.found: list[tuple[Untrue, float]] = []
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
        self._thread.start()

    # Of the engine's thread

    def begin(self) -> None:
        """A ring begins; nothing is known of its rows."""
        with self._lock:
            self._ring, self._accused = self._former.ring, ()
            self._texts.clear()

    def returned(self, seq_id: int, start: int, rows: Any) -> None:
        ring = self._ring
        assert ring is not None
        with self._lock:
            text = self._texts.setdefault(seq_id, _Text(start))
            for at, row in enumerate(rows):
                text.hashes[start + at] = hashlib.sha256(row.tobytes()).digest()
            n_before, text.n_back = text.n_back, max(text.n_back, start + len(rows))
            self.n_rows += (text.n_back - n_before) * sum(stage.start < stage.stop for stage in ring.stages[1:])
            if text.n_back - text.n_offered >= WINDOW:
                self._choose(ring, seq_id, text)

    def holds(self, seq_id: int) -> bool:
        with self._lock:
            if (text := self._texts.get(seq_id)) is None or (ring := self._ring) is None:
                return False
            self._choose(ring, seq_id, text)
            text.is_held = bool(text.pending or self._accused)
        if not text.is_held:
            self.forget(seq_id)
        return text.is_held

    def forget(self, seq_id: int) -> None:
        """A text is over."""
        with self._lock:
            if self._texts.pop(seq_id, None) is not None and self._ring is not None:
                self._jobs.put(_Job(self._ring, seq_id, None))

    def n_right(self, seq_id: int) -> int | None:
        with self._lock:
            if (text := self._texts.get(seq_id)) is None:
                return None
            names = self._accused or (tuple(text.pending) if text.is_held else ())
            n = max(text.n_before, min((text.checked.get(name, 0) for name in names), default=text.n_back))
            return n if n < text.n_back else None

    @property
    def is_untrue(self) -> bool:
        return bool(self._accused)

    def judge(self, seq_id: int, position: int, row: Any) -> bool:
        ring = self._ring
        assert ring is not None
        with self._lock:
            text = self._texts.setdefault(seq_id, _Text(position))
            text.hashes[position] = hashlib.sha256(row.tobytes()).digest()
            for index, stage in enumerate(ring.stages):
                if index and stage.start < stage.stop and stage.name not in self._told:
                    self._put_job(ring, seq_id, text, index, position + 1)
        with self._changed:
            self._changed.wait_for(lambda: not text.pending or self.is_untrue, JUDGE_S)
        return self.is_untrue

    def _put_job(self, ring: Ring, seq_id: int, text: _Text, index: int, stop: int) -> None:
        name = ring.stages[index].name
        text.pending[name] = text.pending.get(name, 0) + 1
        self._jobs.put(_Job(ring, seq_id, index, stop))

    def _choose(self, ring: Ring, seq_id: int, text: _Text) -> None:
        n_new, text.n_offered = text.n_back - text.n_offered, text.n_back
        if self._accused or not n_new:
            return
        for index, stage in enumerate(ring.stages):
            n_left_out = text.n_back - text.chosen.get(stage.name, 0)
            is_there = index > 0 and stage.start < stage.stop and stage.name not in self._told
            if is_there and self._random.random() * n_left_out < self._rate * n_new:
                text.chosen[stage.name] = text.n_back
                self._put_job(ring, seq_id, text, index, text.n_back)

    # Of its own thread

    def close(self) -> None:
        """Harmless if repeated."""
        self._cancel.cancel()
        self._jobs.put(None)
        self._thread.join(JOIN_S)
        if self.n_rows:
            logger.info(
                "%d of %d rows of other nodes were computed again (%.1f %%, %.1f s), %d could not be",
                *(self.n_checked, self.n_rows, 100 * self.n_checked / self.n_rows, self.busy_s, self.n_void),
            )
            self.n_rows = 0

    def _run(self) -> None:
        with computing_threads(self._former.basis.computing.threads):
            while (job := self._jobs.get()) is not None and not self._cancel.is_cancelled:
                begin = time.perf_counter()
                if job.ring is not self._of_ring:
                    self._drop_stages()
                    self._of_ring = job.ring
                if job.index is None:
                    for held in self._stages.values():
                        assert held.stage is not None
                        held.stage.caches.free(job.seq_id)
                elif job.ring is self._ring:
                    self._do(job, job.index)
                self.busy_s += time.perf_counter() - begin
        self._drop_stages()
        self._cancel.close()

    def _do(self, job: _Job, index: int) -> None:
        name = job.ring.stages[index].name
        with self._lock:
            text = self._texts.get(job.seq_id)
        if text is None or self._accused:
            return
        try:
            start = text.cached.get(name, 0)
            while start < job.stop and self._ring is job.ring:
                stop = min(job.stop, start + CHUNK_ROWS)
                if (found := self._wrong(job, index, start, stop, text)) is not None:
                    return self._accuse(job.ring, *found)
                self.n_checked += stop - start
                start = text.cached[name] = stop
                text.checked[name] = max(stop, text.checked.get(name, 0))
        except _CannotError as e:
            self._tell(name, str(e))
        except (ControlError, EngineError) as e:  # rows that were forgotten, or a node that is lost
            logger.debug("%s cannot be verified now: %s", name, e)
            self.n_void += job.stop - start
        except Exception as e:
            logger.debug("verifying failed", exc_info=True)
            self._tell(name, f"{type(e).__name__}: {e}")
        self._done(job, name, text)

    def _done(self, job: _Job, name: str, text: _Text) -> None:
        with self._lock:
            text.pending[name] -= 1
            if not text.pending[name]:
                del text.pending[name]
            is_over = text.is_held and not text.pending and job.ring is self._ring and not self._accused
            self._changed.notify_all()
        if is_over:
            assert self.engine is not None
            self.forget(job.seq_id)
            self.engine.release(job.seq_id)

    def _accuse(self, ring: Ring, names: tuple[str, ...], reason: str) -> None:
        untrue = Untrue(names, ring.number, reason)
        with self._lock:
            if ring is not self._ring:
                return
            self.found.append((untrue, time.perf_counter()))
            self._put(untrue)  # before the engine's thread ends its ring for it
            self._accused = names
            self._changed.notify_all()

    def _tell(self, name: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning("warning: %s is not verified: %s", name, why)

    def _wrong(self, job: _Job, index: int, start: int, stop: int, text: _Text) -> tuple[tuple[str, ...], str] | None:
        """Compute rows of a text again: the nodes of which one is wrong, and why; None if all agree."""
        ring, seq_id = job.ring, job.seq_id
        name, before = ring.stages[index].name, ring.stages[index - 1].name
        held = self._stage(ring, index)
        stage = held.stage
        assert stage is not None
        got = self._ask(ring, index, seq_id, start, stop, "received")
        if got.numerics != held.numerics:
            raise _CannotError(f"it computes with {got.numerics or 'torch'}, this node with {held.numerics}")
        dtype, n_cols, data = self._rows_of(ring, index - 1, seq_id, start, stop)
        if (got.dtype, got.n_cols, got.sha256) != (dtype, n_cols, hashlib.sha256(data).hexdigest()):
            names = (name,) if index == 1 else (before, name)
            return names, f"{before} says that it sent other rows than {name} says that it got"
        rows = Frame(FrameType.BATCH, 0, 0, dtype, stop - start, n_cols, payload=data)
        try:
            x = stage.rows.read(rows, stage.n_embd)
        except WireError as e:
            return ((name,) if index == 1 else (before, name)), f"no rows: {e}"
        if not stage.rows.are_finite(x):  # what follows from such rows may differ with the processor
            raise EngineError(f"the rows that {name} got are not finite")
        y = stage(x, SliceTable([Slice(seq_id, start, stop - start)]))
        dtype, payload = stage.rows.payload(y, self._former.basis.options.wire_dtype)
        if index < len(ring.stages) - 1:
            sent = self._ask(ring, index, seq_id, start, stop, "sent")
            is_same = (sent.dtype, sent.sha256) == (dtype, hashlib.sha256(payload).hexdigest())
            following = self._ask(ring, index + 1, seq_id, start, stop, "received")
            if is_same and sent.sha256 != following.sha256:
                names = (name, ring.stages[index + 1].name)
                return names, f"{names[0]} says that it sent other rows than {names[1]} says that it got"
        else:
            back = stage.rows.read(
                Frame(FrameType.BATCH, 0, 0, dtype, stop - start, stage.n_embd, payload=payload), stage.n_embd
            )
            known = [p for p in range(start, stop) if p in text.hashes]
            is_same = all(hashlib.sha256(back[p - start].tobytes()).digest() == text.hashes[p] for p in known)
        return None if is_same else ((name,), f"{name} computes other rows than this node")

    def _ask(
        self, ring: Ring, index: int, seq_id: int, start: int, stop: int, which: str, is_whole: bool = False
    ) -> ToldRows:
        basis = self._former.basis
        epoch = f"{basis.run + ring.number:016x}"
        return ring.clients[index - 1].rows(RowsRequest(basis.run_id, epoch, seq_id, start, stop, which, is_whole))

    def _rows_of(self, ring: Ring, index: int, seq_id: int, start: int, stop: int) -> tuple[str, int, bytes]:
        """The rows that node `index` has sent: their type, columns and bytes."""
        if index == 0:
            assert self.engine is not None
            return self.engine.sent.fill([Slice(seq_id, start, stop - start)])
        n_cols = int(self._former.basis.weights.config["n_embd"])
        most = max(1, ROWS_BYTES // (8 * n_cols))
        pieces = [
            self._ask(ring, index, seq_id, at, min(stop, at + most), "sent", is_whole=True)
            for at in range(start, stop, most)
        ]
        dtype = pieces[0].dtype
        if dtype not in DTYPE_CODES or any((one.dtype, one.n_cols) != (dtype, n_cols) for one in pieces):
            raise ControlError("rows of several types")
        form = DTYPES[DTYPE_CODES[dtype]]
        width = form.n_scales(n_cols) * form.scale_bytes
        scales, values = b"", b""
        for at, one in zip(range(start, stop, most), pieces, strict=True):
            n = min(stop, at + most) - at
            data = base64.b64decode(one.rows or "", validate=True)
            if len(data) != form.n_bytes(n, n_cols):
                raise ControlError(f"{len(data)} bytes for {n} rows")
            scales += data[: n * width]
            values += data[n * width :]
            self.n_fetched += len(data)
        return dtype, n_cols, scales + values

    # Stages

    def _stage(self, ring: Ring, index: int) -> HeldStage:
        """The blocks of a node, in this node's memory. Raises _CannotError."""
        if index not in self._stages:
            try:
                self._stages[index] = self._acquire(ring, index)
            except NoMemoryError as e:
                if not self._stages:
                    raise _CannotError(str(e)) from None
                self._drop_stages()  # their caches are gone, but not what was found right
                with self._lock:
                    for text in self._texts.values():
                        text.cached.clear()
                return self._stage(ring, index)
            except MdiError as e:
                raise _CannotError(str(e)) from None
        return self._stages[index]

    def _acquire(self, ring: Ring, index: int) -> HeldStage:
        basis: Basis = self._former.basis
        supply = StarterSupply(ring.stages[0].name, basis.weights, basis.family, basis.options)
        spec = supply.spec(basis.computing, basis.max_length, basis.n_sequences, node=index)
        claim = Claim(f"verify {basis.run_id}", f"verify {basis.run_id} {ring.number} {index}")
        return basis.caches.acquire(spec, claim, supply, self._cancel)

    def _drop_stages(self) -> None:
        for held in self._stages.values():
            self._former.basis.caches.release(held, held.owner)
        self._stages.clear()


class _CannotError(Exception):
    """A node cannot be verified at all."""
