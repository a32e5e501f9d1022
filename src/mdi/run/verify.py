"""Has random rows of the nodes computed again by other nodes that have the blocks, or here, and compares them bit by bit.

Whenever a text has WINDOW more rows, it is drawn for each node whether all rows of the text so far are computed again,
from the rows that the node before says it has sent. The more rows were left out before, the less probable that is: so the
share of rows that is computed again is the rate. The kernels give a row the same bits in any company and on any processor
(run.identity), so one other bit is enough to know that a node computes nonsense. If it was another node that computed it
again, a third opinion decides which of the two is wrong: this node's or, where it cannot hold the blocks, one more node's;
without one, both are named. What a node says that it got is compared with what the node before says that it sent: where they
differ, one of the two is wrong, and both are named. Nodes whose numbers may differ, because they compute in torch or in other
formats, are not verified, and named once.

A text whose rows were chosen is not told to have ended before they are verified. Beams are refused.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mdi.cancel import Cancel
from mdi.control.meeting import Unheard
from mdi.control.messages import ROWS_BYTES, RowsRequest, ToldRows
from mdi.engine.starter import StarterEngine
from mdi.errors import ControlError, EngineError, MdiError, NoMemoryError, RingError, WireError
from mdi.host.threads import computing_threads
from mdi.kernels.page_sizes import CHUNK_ROWS
from mdi.kernels.slices import Slice
from mdi.net.wire import DTYPE_CODES, DTYPES, Frame, FrameType
from mdi.run.form import Basis, Former, Ring
from mdi.run.policy import Stage
from mdi.run.recomputing import OthersBlocks, OwnBlocks, Recomputed
from mdi.stages.starter_weights import StarterSupply
from mdi.stages.store import Claim

WINDOW = 32
JOIN_S = 10.0
JUDGE_S = 60.0  # a text that cannot go on waits so long for a verdict
LOOK_S = 0.5  # between two looks at whether nodes that compute again are to leave
LEAVE_S = 5.0  # for them to be free for another ring

_Told = tuple[str, bytes]  # computed rows: the name of their type, and the bytes

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Untrue:
    """Nodes, of which one has told or computed wrong rows.

    Attributes:
        ring: number of the ring whose rows they are; None: all of its rows are right, the node only computed some again.
    """

    nodes: tuple[str, ...]
    ring: int | None
    reason: str


@dataclass(frozen=True)
class _Job:
    """Rows of a text up to `stop` that node `index` of the ring has computed; `index` None: the text has ended."""

    ring: Ring | None
    seq_id: int
    index: int | None
    stop: int = 0


_LEAVE = _Job(None, -1, None)  # other nodes are left alone


@dataclass
class _Text:
    """The state of checking a text over the present ring.

    Attributes:
        n_before: rows whose tokens were known before; n_back: rows whose tokens are known; n_offered: of them, those for which
            was drawn. chosen: rows of each node, from the first on, that are to be computed again.
        hashes: of each row that came back from the last node, by position.
        pending: of each node that has a job, how many.
        checked: rows of each node, from the first on, that were computed again.
        is_held: whether its end is held back.
    """

    n_before: int
    n_back: int = 0
    n_offered: int = 0
    chosen: dict[str, int] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    is_held: bool = False


class RowVerifier:
    """See the module, and engine.starter.Verifier. `close` ends its thread.

    Args:
        rate: the probability.
        put: gets what was found; the ring is to be left then, if it is one of its nodes.
        holders: names of other nodes that may compute the blocks of a node of the ring, the best first.

    Attributes:
        n_rows: rows of all nodes so far; n_checked: those that were computed again; n_void: that could not be.
        n_fetched: bytes of rows that nodes have sent for it.
        n_by_others: rows that other nodes have computed again.
        busy_s: time that computing them again took.
        found: what was found, and when (time.perf_counter()).
    """

    def __init__(
        self, rate: float, former: Former, put: Callable[[Untrue], None],
        holders: Callable[[Stage, Sequence[Stage]], Sequence[str]] = lambda stage, ring: (),
    ) -> None:  # fmt: skip
        self._rate = rate
        self._former = former
        self._put = put
        self._holders = holders
        self._random = random.SystemRandom()  # no node can know which rows are chosen
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a job is done
        self._texts: dict[int, _Text] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ring: Ring | None = None
        self._accused: tuple[str, ...] = ()
        self._told: set[str] = set()  # nodes that cannot be verified, of which the log has a line
        self._again: dict[int, Recomputed] = {}  # blocks of the nodes of the ring `_of_ring`
        self._of_ring: Ring | None = None
        self._numerics: dict[int, str] = {}  # of its nodes
        self._unfit: set[tuple[str, int]] = set()  # nodes that compute the blocks of a node of it otherwise
        self._liars: set[str] = set()  # of those that have computed something again
        self._unheard = Unheard()
        self._others_end: Cancel | None = None  # while other nodes may compute for this
        self._cancel = Cancel()
        self.engine: StarterEngine | None = None
        self.n_rows = self.n_checked = self.n_void = self.n_fetched = self.n_by_others = 0
        self.busy_s = 0.0
        self.found: list[tuple[Untrue, float]] = []
        self._is_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
        self._thread.start()

    # Of the engine's thread

    def begin(self) -> None:
        """A ring begins; nothing is known of its rows."""
        with self._lock:
            self._ring, self._accused = self._former.ring, ()
            self._texts.clear()
            self._others_end = self._others_end or self._cancel.child()

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
                "%d of %d rows of other nodes were computed again (%.1f %%, %.1f s, %d by other nodes), %d could not be",
                self.n_checked, self.n_rows, 100 * self.n_checked / self.n_rows, self.busy_s, self.n_by_others, self.n_void,
            )  # fmt: skip
            self.n_rows = 0

    def leave_others(self) -> None:
        """From any thread: until the next ring begins no other node computes for this; they may be needed in the ring."""
        with self._lock:
            end, self._others_end = self._others_end, None
        if end is not None:
            end.cancel()
            end.close()
            self._is_left.clear()
            self._jobs.put(_LEAVE)
            if any(one.name for one in [*self._again.values()]):
                self._is_left.wait(LEAVE_S)

    def _run(self) -> None:
        with computing_threads(self._former.basis.computing.threads):
            while not self._cancel.is_cancelled:
                try:
                    job = self._jobs.get(timeout=LOOK_S)
                except queue.Empty:
                    self._drop([index for index, one in self._again.items() if one.is_leaving])
                    continue
                if job is None:
                    break
                begin = time.perf_counter()
                self._take(job)
                self.busy_s += time.perf_counter() - begin
        self._drop([*self._again])
        self._cancel.close()

    def _take(self, job: _Job) -> None:
        if job is _LEAVE:
            self._drop([index for index, one in self._again.items() if one.name])
            self._is_left.set()
        elif job.index is None:
            for one in self._again.values():
                one.free(job.seq_id)
        elif job.ring is not None and job.ring is self._ring:
            if job.ring is not self._of_ring:
                self._drop([*self._again])
                self._of_ring = job.ring
                self._numerics.clear()
                self._unfit.clear()
            self._do(job, job.ring, job.index)

    def _do(self, job: _Job, ring: Ring, index: int) -> None:
        name = ring.stages[index].name
        with self._lock:
            text = self._texts.get(job.seq_id)
        if text is None or self._accused:
            return
        start = 0
        try:
            while self._ring is ring:
                again = self._blocks_again(ring, index, job.seq_id)
                if (start := again.cached.get(job.seq_id, 0)) >= job.stop:
                    break
                stop = min(job.stop, start + CHUNK_ROWS)
                try:
                    found = self._wrong(job.seq_id, ring, index, start, stop, text, again)
                except RingError as e:  # of the other node
                    self._lose(index, e)
                    continue
                if found is not None:
                    return self._accuse(ring, *found)
                self.n_checked += stop - start
                self.n_by_others += (stop - start) * bool(again.name)
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

    def _wrong(
        self, seq_id: int, ring: Ring, index: int, start: int, stop: int, text: _Text, again: Recomputed
    ) -> tuple[tuple[str, ...], str] | None:
        """Compute rows of a text again: the nodes of which one is wrong, and why; None if all agree."""
        name, before = ring.stages[index].name, ring.stages[index - 1].name
        got = self._ask(ring, index, seq_id, start, stop, "received")
        rows = self._rows_of(ring, index - 1, seq_id, start, stop)
        if (got.dtype, got.n_cols, got.sha256) != (rows.dtype, rows.n_cols, hashlib.sha256(rows.payload).hexdigest()):
            names = (name,) if index == 1 else (before, name)
            return names, f"{before} says that it sent other rows than {name} says that it got"
        codec = ring.stage.rows
        try:
            x = codec.read(rows, rows.n_cols)
        except WireError as e:
            return ((name,) if index == 1 else (before, name)), f"no rows: {e}"
        if not codec.are_finite(x):  # what follows from such rows may differ with the processor
            raise EngineError(f"the rows that {name} got are not finite")
        told = again.compute(seq_id, start, rows)
        if index == len(ring.stages) - 1:
            is_same = partial(self._came_back, ring, text, start)
        else:
            sent = self._ask(ring, index, seq_id, start, stop, "sent")
            following = self._ask(ring, index + 1, seq_id, start, stop, "received")
            is_same = partial(_is_hash, sent)
            if is_same(told) and sent.sha256 != following.sha256:
                names = (name, ring.stages[index + 1].name)
                return names, f"{names[0]} says that it sent other rows than {names[1]} says that it got"
        if is_same(told):
            return None
        if not again.name:
            return (name,), f"{name} computes other rows than this node"
        return self._decided(seq_id, ring, index, start, stop, again, told, is_same)

    def _decided(
        self, seq_id: int, ring: Ring, index: int, start: int, stop: int, first: Recomputed, told: _Told,
        is_same: Callable[[_Told], bool],
    ) -> tuple[tuple[str, ...], str] | None:  # fmt: skip
        """A node of the ring and one that computed its blocks again differ: as `_wrong`, by a third opinion."""
        name = ring.stages[index].name
        reason = f"{name} and {first.name} compute different rows"
        both = (name, first.name), reason
        if (third := self._third(ring, index, first.name)) is None:
            return both
        try:
            for at, end in itertools.pairwise((*range(0, start, CHUNK_ROWS), start, stop)):
                found = third.compute(seq_id, at, self._rows_of(ring, index - 1, seq_id, at, end))
        except RingError:
            third.close()
            return both
        here = third.name or "this node"
        if is_same(found):
            self._drop([at for at, one in self._again.items() if one.name == first.name])
            self._again[index] = third
            untrue = Untrue((first.name,), None, f"{first.name} computes other rows than {name} and {here}")
            self.found.append((untrue, time.perf_counter()))
            self._liars.add(first.name)
            self._put(untrue)
            return None
        third.close()
        return (
            (name,) if found == told else (name, first.name)
        ), f"{name} computes other rows than {first.name} and {here}"

    @staticmethod
    def _came_back(ring: Ring, text: _Text, start: int, told: _Told) -> bool:
        """Whether these rows are those that the last node has sent back, as far as it has."""
        codec, n_cols = ring.stage.rows, ring.stage.n_embd
        form = DTYPES[DTYPE_CODES[told[0]]]
        n_rows = len(told[1]) // form.n_bytes(1, n_cols)
        back = codec.read(Frame(FrameType.BATCH, 0, 0, told[0], n_rows, n_cols, payload=told[1]), n_cols)
        known = [p for p in range(start, start + n_rows) if p in text.hashes]
        return all(hashlib.sha256(back[p - start].tobytes()).digest() == text.hashes[p] for p in known)

    def _ask(
        self, ring: Ring, index: int, seq_id: int, start: int, stop: int, which: str, is_whole: bool = False
    ) -> ToldRows:
        basis = self._former.basis
        epoch = f"{basis.run + ring.number:016x}"
        return ring.clients[index - 1].rows(RowsRequest(basis.run_id, epoch, seq_id, start, stop, which, is_whole))

    def _rows_of(self, ring: Ring, index: int, seq_id: int, start: int, stop: int) -> Frame:
        """The rows that node `index` has sent."""
        if index == 0:
            assert self.engine is not None
            dtype, n_cols, data = self.engine.sent.fill([Slice(seq_id, start, stop - start)])
            return Frame(FrameType.BATCH, 0, 0, dtype, stop - start, n_cols, payload=data)
        n_cols = self._former.basis.weights.config.n_embd
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
        return Frame(FrameType.BATCH, 0, 0, dtype, stop - start, n_cols, payload=scales + values)

    # Who computes them again

    def _blocks_again(self, ring: Ring, index: int, seq_id: int) -> Recomputed:
        """The blocks of a node, on another node that has them, or else here. Raises _CannotError, ControlError."""
        if (known := self._again.get(index)) is not None and not known.is_leaving:
            return known
        self._drop([index])
        if self._others_end is None:
            raise EngineError("the ring is over")  # and its nodes' memory is for the next one
        if index not in self._numerics:
            self._numerics[index] = self._ask(ring, index, seq_id, 0, 1, "received").numerics
        if not self._numerics[index]:
            raise _CannotError("it computes in torch")
        self._again[index] = found = self._others(ring, index) or self._own(ring, index)
        return found

    def _others(self, ring: Ring, index: int, without: str = "") -> Recomputed | None:
        """Another node's; None if none can."""
        stage = ring.stages[index]
        for name in self._holders(stage, ring.stages):
            if name == without or name in self._liars or (name, index) in self._unfit or self._unheard.is_avoided(name):
                continue
            if (found := self._beside(name, stage)) is None:
                self._unheard.add(name)
            elif found.numerics != self._numerics[index]:
                found.close()
                self._unfit.add((name, index))
            else:
                self._unheard.remove(name)
                return found
        return None

    def _beside(self, name: str, stage: Stage) -> Recomputed | None:
        end = self._others_end
        while end is not None and not end.is_cancelled:
            try:
                return OthersBlocks(self._former.beside(name, (stage.start, stage.stop), end), end)
            except MdiError as e:
                logger.debug("%s does not compute the blocks of %s again: %s", name, stage.name, e)
                same = [index for index, one in self._again.items() if one.name == name]
                if e.code != NoMemoryError.code or not same:
                    return None
                self._drop(same)  # it has memory for fewer nodes' blocks
        return None

    def _own(self, ring: Ring, index: int) -> Recomputed:
        """This node's. Raises _CannotError."""
        basis: Basis = self._former.basis
        supply = StarterSupply(ring.stages[0].name, basis.weights, basis.family, basis.options)
        spec = supply.spec(basis.computing, basis.max_length, basis.n_sequences, node=index)
        claim = Claim(f"verify {basis.run_id}", f"verify {basis.run_id} {ring.number} {index}")
        while True:
            try:
                held = basis.caches.acquire(spec, claim, supply, self._cancel)
                break
            except NoMemoryError as e:
                own = [at for at, one in self._again.items() if not one.name]
                if not own:
                    raise _CannotError(str(e)) from None
                self._drop(own)
            except MdiError as e:
                raise _CannotError(str(e)) from None
        found = OwnBlocks(held, basis.caches, basis.options.wire_dtype)
        if found.numerics != self._numerics[index]:
            found.close()
            raise _CannotError(f"it computes with {self._numerics[index]}, this node with {found.numerics}")
        return found

    def _third(self, ring: Ring, index: int, first: str) -> Recomputed | None:
        try:
            return self._own(ring, index)
        except _CannotError:
            return self._others(ring, index, without=first)

    def _lose(self, index: int, error: RingError) -> None:
        """Another node does not compute the blocks of node `index` any more."""
        logger.debug("%s computes nothing again any more: %s", self._again[index].name, error)
        self._unheard.add(self._again[index].name)
        self._drop([index])

    def _drop(self, indices: Sequence[int]) -> None:
        for index in indices:
            if (found := self._again.pop(index, None)) is not None:
                found.close()


def _is_hash(sent: ToldRows, told: _Told) -> bool:
    """Whether these are the rows that a node says it has sent."""
    return (sent.dtype, sent.sha256) == (told[0], hashlib.sha256(told[1]).hexdigest())


class _CannotError(Exception):
    """A node cannot be verified at all."""
