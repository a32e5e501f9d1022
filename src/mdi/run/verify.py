"""Has random rows of the nodes computed again by other nodes that have the blocks, or here, and compares them bit by bit.

Whenever a text has WINDOW more rows, it is drawn for each node whether all rows of the text so far are computed again,
from the rows that the node before says it has sent. The more rows were left out before, the less probable that is: so the
share of rows that is computed again is the rate. The kernels give a row the same bits in any company and on any processor
(run.identity), so one other bit is enough to know that a node computes nonsense. If it was another node that computed it
again, a third opinion decides which of the two is wrong: this node's or, where it cannot hold the blocks, one more node's;
without one, both are named. What a node says that it got is compared with what the node before says that it sent: where they
differ, one of the two is wrong, and both are named. Nodes whose numbers may differ, because they compute in torch or in other
formats, are not verified, and named once.

A text whose rows were chosen is not told to have ended before they are verified. When a ring is over, rows that were chosen
and not compared count as wrong: the text goes on behind those that were. Beams are refused.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import logging
import math
import queue
import random
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mdi.cancel import Cancel
from mdi.control.meeting import Unanswered
from mdi.control.messages import ROWS_BYTES, RowsRequest, ToldRows
from mdi.engine.replay import SentRows
from mdi.engine.rows import whole_rows
from mdi.engine.starter import StarterEngine
from mdi.errors import ControlError, EngineError, MdiError, NoMemoryError, RingError, WireError
from mdi.host.threads import computing_threads
from mdi.kernels.slices import Slice, SliceTable
from mdi.model.caches import CHUNK_ROWS
from mdi.model.rows import RowLayout
from mdi.net.ring import TcpRing
from mdi.net.wire import DTYPE_CODES, DTYPES, Frame, FrameType
from mdi.run.form import Basis, Former, Ring
from mdi.run.policy import Stage
from mdi.run.recomputing import OthersBlocks, OwnBlocks, Recomputed
from mdi.run.supply import StarterSupply
from mdi.stages.store import Claim

WINDOW = 32
JOIN_S = 10.0
JUDGE_S = 60.0  # a text that cannot go on waits so long for a verdict
LOOK_S = 0.5  # between two looks at whether nodes that compute again are to leave
LEAVE_S = 5.0  # for them to be free for another ring
# How often a node is asked for rows of a text that cannot go on without them, and how long it is not asked then, as a part of
# the silence after which a node is lost: meanwhile a ring that breaks has broken.
TRIES = 10
PAUSE = 0.25

_Computed = tuple[str, bytes]  # computed rows: the name of their type, and the bytes

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
    """Rows of a text up to `stop` that node `index` of the ring has computed; `index` None: the text has ended.

    Attributes:
        n_tries: how often a node has not told its rows for it.
    """

    ring: Ring | None
    seq_id: int
    index: int | None
    stop: int = 0
    n_tries: int = 0


_LEAVE = _Job(None, -1, None)  # other nodes are left alone
_LOOK = _Job(None, -2, None)  # look whether they are to leave


@dataclass
class _Rows:
    """Of the rows of a text that a node has computed, from the first on.

    Attributes:
        chosen: so many are to be computed again; checked: so many were, without a gap, and are right.
        n_jobs: that are not done.
    """

    chosen: int = 0
    checked: int = 0
    n_jobs: int = 0


@dataclass
class _Text:
    """The state of checking a text over the present ring.

    Attributes:
        n_before: rows whose tokens were known before; n_back: rows whose tokens are known; n_offered: of them, those for which
            was drawn.
        hashes: of each row that came back from the last node, by position.
        nodes: by name of each node.
        is_withheld: whether its end is withheld; is_judged: whether the engine waits for a verdict.
    """

    n_before: int
    n_back: int = 0
    n_offered: int = 0
    hashes: dict[int, bytes] = field(default_factory=dict)
    nodes: defaultdict[str, _Rows] = field(default_factory=lambda: defaultdict(_Rows))
    is_withheld: bool = False
    is_judged: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether jobs are not done."""
        return any(rows.n_jobs for rows in self.nodes.values())


@dataclass(frozen=True)
class Verified:
    """What was verified of a run.

    Attributes:
        rows: of all nodes so far; checked: those that were computed again; by_others: on other nodes.
        void: rows that were chosen, and could not be compared.
        not_verified: nodes whose numbers may differ.
        untrue: nodes that were left out.
    """

    rows: int
    checked: int
    by_others: int
    void: int
    not_verified: tuple[str, ...]
    untrue: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: list(one) if isinstance(one, tuple) else one for name, one in vars(self).items()}


class RowVerifier:
    """The `Verifier` of the engine (engine.starter). `close` ends its thread.

    Args:
        rate: the probability.
        put: gets what was found; the ring is to be left then, if it is one of its nodes.
        holders: names of other nodes that may compute the blocks of a node of the ring, the best first.
        cancel: of the run.

    Attributes:
        n_rows: rows of all nodes so far; n_checked: those that were computed again; n_void: that were to be, and could not.
        n_fetched: bytes of rows that nodes have sent for it.
        n_by_others: rows that other nodes have computed again.
        busy_s: time that computing them again took.
        found: what was found, and when (time.perf_counter()).
    """

    def __init__(
        self, rate: float, former: Former, put: Callable[[Untrue], None],
        holders: Callable[[Stage, Sequence[Stage]], Sequence[str]] = lambda stage, ring: (), cancel: Cancel | None = None,
    ) -> None:  # fmt: skip
        self._rate = rate
        self._former = former
        self._put = put
        self._holders = holders
        self._random = random.SystemRandom()  # no node can know which rows are chosen
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a job is done
        self._texts: dict[int, _Text] = {}
        # Of texts that go on over another ring: of each node of an earlier one, rows that are right; others may be wrong.
        self._doubtful: dict[int, dict[str, int]] = {}
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._later: deque[tuple[float, _Job]] = deque()  # that are tried again, and when
        self._ring: Ring | None = None
        self._accused: tuple[str, ...] = ()  # nodes of the present ring
        self._untrue: set[str] = set()  # and of all
        self._told: set[str] = set()  # nodes that cannot be verified, of which the log has a line
        self._again: dict[int, Recomputed] = {}  # blocks of the nodes of the ring `_of_ring`
        self._of_ring: Ring | None = None
        self._unfit: set[tuple[str, int]] = set()  # nodes that compute the blocks of a node of it otherwise
        self._liars: set[str] = set()  # of those that have computed something again
        self._unanswered = Unanswered()
        self._others_end: Cancel | None = None  # while other nodes may compute for this
        self._cancel = Cancel(parent=cancel)
        self.engine: StarterEngine | None = None
        self.n_rows = self.n_checked = self.n_void = self.n_fetched = self.n_by_others = 0
        self.busy_s = 0.0
        self.found: list[tuple[Untrue, float]] = []
        self._is_left = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
        self._thread.start()

    @property
    def verified(self) -> Verified:
        with self._lock:
            untrue = dict.fromkeys(name for one, _ in self.found for name in one.nodes)
            return Verified(
                self.n_rows, self.n_checked, self.n_by_others, self.n_void, tuple(sorted(self._told)), tuple(untrue)
            )

    # Of the engine's thread

    def begin(self) -> Mapping[int, int]:
        with self._lock:
            found = {seq_id: self._n_right(seq_id) for seq_id in {*self._texts, *self._doubtful}}
            self._texts.clear()
            kept = {seq_id: n for seq_id, n in found.items() if n is not None}
            for seq_id in kept:
                del self._doubtful[seq_id]
            self._ring, self._accused = self._former.ring, ()
            self._others_end = self._others_end or self._cancel.child()
        return kept

    def _n_right(self, seq_id: int) -> int | None:
        """The ring is over: rows of a text, from the first on, that still count; None: all. It is noted in `_doubtful`."""
        doubtful = self._doubtful.setdefault(seq_id, {})
        wrong = set(self._untrue)
        if (text := self._texts.get(seq_id)) is not None and (ring := self._ring) is not None:
            self._choose(ring, seq_id, text)
            missing = self._missing(text)
            self.n_void += sum(missing.values())
            wrong.update(missing)
            for name in (stage.name for stage in _verifiable(ring)):
                if (n := max(text.n_before, text.nodes[name].checked)) < text.n_back:
                    doubtful[name] = min(n, doubtful.get(name, n))
        if not wrong.intersection(doubtful):
            return None
        # As far as all nodes are right that can be verified: when the text goes on, nothing is known any more of these rows.
        return min(n for name, n in doubtful.items() if name in wrong or name not in self._told)

    def _missing(self, text: _Text) -> dict[str, int]:
        """Of each node that is verified, rows of a text that were chosen and have not been compared."""
        found = {name: rows.chosen - rows.checked for name, rows in text.nodes.items() if name not in self._told}
        return {name: n for name, n in found.items() if n > 0}

    def returned(self, seq_id: int, start: int, rows: Any) -> None:
        ring = self._ring
        assert ring is not None
        with self._lock:
            text = self._texts.setdefault(seq_id, _Text(start))
            for at, row in enumerate(rows):
                text.hashes[start + at] = hashlib.sha256(row.tobytes()).digest()
            n_before, text.n_back = text.n_back, max(text.n_back, start + len(rows))
            self.n_rows += (text.n_back - n_before) * len(_verifiable(ring))
            if text.n_back - text.n_offered >= WINDOW:
                self._choose(ring, seq_id, text)

    def holds(self, seq_id: int) -> bool:
        with self._lock:
            if (text := self._texts.get(seq_id)) is None or (ring := self._ring) is None:
                return False
            self._choose_rest(ring, seq_id, text)
            text.is_withheld = bool(text.is_waiting or self._accused)
            if not text.is_withheld:
                self._end(seq_id, text)
        return text.is_withheld

    def forget(self, seq_id: int) -> None:
        """A text is over."""
        with self._lock:
            self._doubtful.pop(seq_id, None)
            if self._texts.pop(seq_id, None) is not None and self._ring is not None:
                self._jobs.put(_Job(self._ring, seq_id, None))

    def _end(self, seq_id: int, text: _Text) -> None:
        """A text is over, and goes to its reader."""
        self.n_void += sum(self._missing(text).values())
        self.forget(seq_id)

    @property
    def is_untrue(self) -> bool:
        return bool(self._accused)

    def judge(self, seq_id: int, position: int, row: Any) -> bool:
        ring = self._ring
        assert ring is not None
        with self._lock:
            text = self._texts.setdefault(seq_id, _Text(position))
            text.hashes[position] = hashlib.sha256(row.tobytes()).digest()
            text.is_judged = True
            for index, stage in enumerate(ring.stages):
                if stage in _verifiable(ring) and stage.name not in self._told:
                    self._put_job(ring, seq_id, text, index, position + 1)
        self._wait(ring, lambda: not text.is_waiting or self.is_untrue, JUDGE_S)
        return self.is_untrue

    def _put_job(self, ring: Ring, seq_id: int, text: _Text, index: int, stop: int) -> None:
        rows = text.nodes[ring.stages[index].name]
        rows.chosen, rows.n_jobs = max(rows.chosen, stop), rows.n_jobs + 1
        self._jobs.put(_Job(ring, seq_id, index, stop))

    def _choose(self, ring: Ring, seq_id: int, text: _Text) -> None:
        """Draw for the rows of a text for which nobody drew yet."""
        n_new, text.n_offered = text.n_back - text.n_offered, text.n_back
        if not n_new:
            return
        for index, stage in enumerate(ring.stages):
            if stage in _verifiable(ring) and stage.name not in self._told:
                n_left_out = text.n_back - text.nodes[stage.name].chosen
                if self._random.random() * n_left_out < self._rate * n_new:
                    self._put_job(ring, seq_id, text, index, text.n_back)

    def _choose_rest(self, ring: Ring, seq_id: int, text: _Text) -> None:
        """As `_choose`; and rows that were chosen before, and that a node has not told, are compared after all."""
        self._choose(ring, seq_id, text)
        names = [stage.name for stage in ring.stages]
        for name in self._missing(text):
            if not (rows := text.nodes[name]).n_jobs:
                self._put_job(ring, seq_id, text, names.index(name), rows.chosen)

    # Of the thread that forms rings

    def finish(self) -> None:
        """The ring was left of one's own will: wait until all rows that were chosen are compared, those of today included.

        Not longer than the ring is whole; what is not compared then is retracted.
        """
        with self._lock:
            if (ring := self._ring) is None:
                return
            for seq_id, text in self._texts.items():
                self._choose_rest(ring, seq_id, text)
        self._wait(ring, lambda: not any(text.is_waiting for text in self._texts.values()) or self.is_untrue)

    def _wait(self, ring: Ring, is_so: Callable[[], bool], timeout_s: float = math.inf) -> None:
        """Until something is so, the ring has broken, or the run is over."""
        deadline = time.monotonic() + timeout_s
        with self._changed, self._cancel.waking(self._wake):
            while not (is_so() or self._cancel.is_cancelled or _is_over(ring)) and time.monotonic() < deadline:
                self._changed.wait(LOOK_S)  # no link says that it broke while nobody receives from it

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # Of its own thread

    def close(self) -> None:
        """Harmless if repeated."""
        self._cancel.cancel()
        self._jobs.put(_LOOK)
        self._thread.join(JOIN_S)
        if self._is_closed or not self.n_rows:
            return
        self._is_closed = True
        names = f"; not verified: {', '.join(sorted(self._told))}" if self._told else ""
        logger.info(
            "%d of %d rows of other nodes were computed again (%.1f %%, %.1f s, %d by other nodes), %d could not be%s",
            self.n_checked, self.n_rows, 100 * self.n_checked / self.n_rows, self.busy_s, self.n_by_others, self.n_void, names,
        )  # fmt: skip

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
                job = self._next_job()
                begin = time.perf_counter()
                try:
                    self._take(job)
                except Exception:  # the rows of other texts are compared all the same
                    logger.warning("warning: rows could not be verified", exc_info=True)
                if job is not _LOOK:
                    self.busy_s += time.perf_counter() - begin
        self._drop([*self._again])
        self._cancel.close()

    def _next_job(self) -> _Job:
        now = time.monotonic()
        if self._later and self._later[0][0] <= now:
            return self._later.popleft()[1]
        left_s = min([LOOK_S, *(at - now for at, _ in [*self._later][:1])])
        try:
            return self._jobs.get(timeout=left_s)
        except queue.Empty:
            return _LOOK

    def _take(self, job: _Job) -> None:
        if job is _LOOK:
            self._drop([index for index, one in self._again.items() if one.is_leaving])
        elif job is _LEAVE:
            self._drop([index for index, one in self._again.items() if one.name])
            self._is_left.set()
        elif job.index is None:
            for one in self._again.values():
                one.free(job.seq_id)
        elif job.ring is not None and job.ring is self._ring:
            if job.ring is not self._of_ring:
                self._drop([*self._again])
                self._of_ring = job.ring
                self._unfit.clear()
            self._do(job, job.ring, job.index)

    def _do(self, job: _Job, ring: Ring, index: int) -> None:
        name = ring.stages[index].name
        with self._lock:
            text = self._texts.get(job.seq_id) if self._ring is ring and not self._accused else None
        if text is None:
            return
        is_done = True
        try:
            self._compare(job, ring, index, text)
        except _UntrueError as e:
            is_done = False
            self._accuse(ring, e.names, str(e))
        except _NotToldError as e:
            logger.debug("%s cannot be verified now: %s", name, e)
            is_done = not self._tries_again(job, ring, text, e)
        except _CannotError as e:
            self._warn_unverified(name, str(e))
        except (ControlError, EngineError) as e:  # rows that are forgotten here as well, or another node without memory
            logger.debug("%s cannot be verified now: %s", name, e)
        finally:
            if is_done:
                self._done(job, name, text)

    def _compare(self, job: _Job, ring: Ring, index: int, text: _Text) -> None:
        """Compute the rows of a job again, behind those that are right already.

        Raises:
            _UntrueError: a node is wrong. _NotToldError, _CannotError, ControlError, EngineError: they cannot be compared.
        """
        rows = text.nodes[ring.stages[index].name]
        while self._ring is ring:
            again = self._blocks_again(ring, index)
            if again.cached.get(job.seq_id, 0) > rows.checked:
                again.free(job.seq_id)  # what was computed could not be compared: from the first row on
            if (start := again.cached.get(job.seq_id, 0)) >= job.stop:
                break
            stop = min(job.stop, start + CHUNK_ROWS)
            try:
                self._check(job.seq_id, ring, index, start, stop, text, again)
            except RingError as e:  # of the other node
                self._lose(index, e)
                continue
            n_new = max(0, stop - rows.checked)
            self.n_checked += n_new
            self.n_by_others += n_new * bool(again.name)
            rows.checked += n_new

    def _tries_again(self, job: _Job, ring: Ring, text: _Text, error: _NotToldError) -> bool:
        """Whether a job is done later, as the text cannot go on without it. In the end the node that tells nothing is named."""
        if not (text.is_withheld or text.is_judged):
            return False  # with the next rows of the text
        assert self.engine is not None
        if self.engine.sent.counts.get(job.seq_id, 0) < job.stop:
            return False  # forgotten here as well, in as much memory
        if job.n_tries < TRIES:
            pause_s = PAUSE * self._former.basis.options.silence_s
            self._later.append((time.monotonic() + pause_s, replace(job, n_tries=job.n_tries + 1)))
        elif not _is_over(ring):
            self._accuse(ring, (error.node,), f"{error.node} does not tell the rows that it has computed ({error})")
        return True

    def _done(self, job: _Job, name: str, text: _Text) -> None:
        with self._lock:
            text.nodes[name].n_jobs -= 1
            is_over = text.is_withheld and not text.is_waiting and job.ring is self._ring and not self._accused
            if is_over:
                self._end(job.seq_id, text)
            self._changed.notify_all()
        if is_over:
            assert self.engine is not None
            self.engine.release(job.seq_id)

    def _accuse(self, ring: Ring, names: tuple[str, ...], reason: str) -> None:
        untrue = Untrue(names, ring.number, reason)
        with self._lock:
            if ring is not self._ring:
                return
            self.found.append((untrue, time.perf_counter()))
            self._put(untrue)  # before the engine's thread ends its ring for it
            self._accused = names
            self._untrue.update(names)
            self._changed.notify_all()

    def _warn_unverified(self, name: str, why: str) -> None:
        if name not in self._told:
            with self._lock:
                self._told.add(name)
            logger.warning("warning: %s is not verified: %s", name, why)

    def _check(
        self, seq_id: int, ring: Ring, index: int, start: int, stop: int, text: _Text, again: Recomputed
    ) -> None:
        """Compute rows of a text again. Raises as `_compare`, and RingError: the node that computes them again is lost."""
        name, before = ring.stages[index].name, ring.stages[index - 1].name
        both = (name,) if index == 1 else (before, name)  # the starter is believed
        got = self._ask(ring, index, seq_id, start, stop, "received")
        rows = self.kept_rows_of(ring, index - 1, seq_id, start, stop)
        if (got.dtype, got.n_cols, got.sha256) != (rows.dtype, rows.n_cols, hashlib.sha256(rows.payload).hexdigest()):
            raise _UntrueError(both, f"{before} says that it sent other rows than {name} says that it got")
        codec = ring.stage.rows
        try:
            x = whole_rows(codec, rows, self.row_at_cut(ring, index))
        except WireError as e:
            raise _UntrueError(both, f"no rows: {e}") from None
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
                raise _UntrueError(names, f"{names[0]} says that it sent other rows than {names[1]} says that it got")
        if is_same(told):
            return
        if not again.name:
            raise _UntrueError((name,), f"{name} computes other rows than this node")
        self._decide(seq_id, ring, index, start, stop, again, told, is_same)

    def _decide(
        self, seq_id: int, ring: Ring, index: int, start: int, stop: int, first: Recomputed, told: _Computed,
        is_same: Callable[[_Computed], bool],
    ) -> None:  # fmt: skip
        """A node of the ring and one that computed its blocks again differ: a third opinion says which of both is wrong.

        Raises:
            _UntrueError: the node of the ring is, or nobody knows. _NotToldError, ...: the rows for it cannot be had now.
        """
        name = ring.stages[index].name
        if (third := self._third(ring, index, first.name)) is None:
            raise _UntrueError((name, first.name), f"{name} and {first.name} compute different rows")
        here = third.name or "this node"
        try:
            for at, end in itertools.pairwise((*range(0, start, CHUNK_ROWS), start, stop)):
                found = third.compute(seq_id, at, self.kept_rows_of(ring, index - 1, seq_id, at, end))
            if not is_same(found):
                names = (name,) if found == told else (name, first.name)
                raise _UntrueError(names, f"{name} computes other rows than {first.name} and {here}")
        except RingError:
            third.close()
            raise _UntrueError((name, first.name), f"{name} and {first.name} compute different rows") from None
        except BaseException:
            third.close()
            raise
        self._drop([at for at, one in self._again.items() if one.name == first.name])
        self._again[index] = third
        untrue = Untrue((first.name,), None, f"{first.name} computes other rows than {name} and {here}")
        with self._lock:
            self.found.append((untrue, time.perf_counter()))
        self._liars.add(first.name)
        self._put(untrue)

    @staticmethod
    def _came_back(ring: Ring, text: _Text, start: int, told: _Computed) -> bool:
        """Whether these rows are those that the last node has sent back, as far as it has."""
        codec, n_cols = ring.stage.rows, ring.stage.at_starter.returned_width
        form = DTYPES[DTYPE_CODES[told[0]]]
        n_rows = len(told[1]) // form.n_bytes(1, n_cols)
        back = codec.read(Frame(FrameType.BATCH, 0, 0, told[0], n_rows, n_cols, payload=told[1]), n_cols)
        known = [p for p in range(start, start + n_rows) if p in text.hashes]
        return all(hashlib.sha256(back[p - start].tobytes()).digest() == text.hashes[p] for p in known)

    def _ask(
        self, ring: Ring, index: int, seq_id: int, start: int, stop: int, which: str, is_whole: bool = False
    ) -> ToldRows:
        basis, name = self._former.basis, ring.stages[index].name
        epoch = f"{basis.run + ring.number:016x}"
        try:
            told = ring.clients[index - 1].rows(RowsRequest(basis.run_id, epoch, seq_id, start, stop, which, is_whole))
        except ControlError as e:
            raise _NotToldError(name, str(e)) from None
        if told.arithmetic != (known := ring.arithmetics[name]):
            raise _UntrueError((name,), f"{name} says that it computes with {told.arithmetic}, and said {known} before")
        return told

    def kept_rows_of(self, ring: Ring, index: int, seq_id: int, start: int, stop: int) -> Frame:
        """The rows that node `index` has sent."""
        frame = Frame(FrameType.BATCH, 0, slices=SliceTable([Slice(seq_id, start, stop - start)]))
        if index == 0:
            assert self.engine is not None
            return self.engine.sent.fill(frame)
        layout = self.row_at_cut(ring, index + 1)
        n_cached = layout.cached.width
        n_cols = layout.width - n_cached
        most = max(1, ROWS_BYTES // (8 * layout.width))
        pieces = [
            self._ask(ring, index, seq_id, at, min(stop, at + most), "sent", is_whole=True)
            for at in range(start, stop, most)
        ]
        dtype = pieces[0].dtype
        name = ring.stages[index].name
        if dtype not in DTYPE_CODES or any((one.dtype, one.n_cols) != (dtype, n_cols) for one in pieces):
            raise _UntrueError((name,), f"{name} sends rows of several types")
        form = DTYPES[DTYPE_CODES[dtype]]
        joined = SentRows(sys.maxsize)
        for at, one in zip(range(start, stop, most), pieces, strict=True):
            n = min(stop, at + most) - at
            try:
                data = base64.b64decode(one.rows or "", validate=True)
            except ValueError:
                raise _UntrueError((name,), f"{name} sends no rows: what it says is not base64") from None
            if len(data) != form.n_bytes(n, n_cols) + form.n_bytes(n, n_cached):
                raise _UntrueError((name,), f"{name} sends {len(data)} bytes for {n} rows")
            part = SliceTable([Slice(seq_id, at - start, n)])
            joined.add(Frame(FrameType.BATCH, 0, 0, dtype, n, n_cols, part, payload=data, n_cached=n_cached))
            self.n_fetched += len(data)
        found = joined.fill(replace(frame, slices=SliceTable([Slice(seq_id, 0, stop - start)])))
        return replace(found, slices=frame.slices)

    def row_at_cut(self, ring: Ring, index: int) -> RowLayout:
        """Of the rows that node `index` gets."""
        return self._former.basis.weights.model.spec.row_at(ring.stages[index].start)

    # Who computes them again

    def _blocks_again(self, ring: Ring, index: int) -> Recomputed:
        """The blocks of a node, on another node that has them, or else here. Raises _CannotError, ControlError."""
        if (known := self._again.get(index)) is not None and not known.is_leaving:
            return known
        self._drop([index])
        if _is_over(ring):
            raise EngineError("the ring is over")  # and memory is for the next one
        if not (own := ring.arithmetics[ring.stages[index].name]).is_certain:
            raise _CannotError(f"it computes with {own}")
        has_others = self._others_end is not None
        try:
            self._again[index] = found = has_others and self._others(ring, index) or self._own(ring, index)
        except _CannotError as e:
            raise e if has_others else EngineError(str(e)) from None
        return found

    def _others(self, ring: Ring, index: int, without: str = "") -> Recomputed | None:
        """Another node's; None if none can."""
        stage = ring.stages[index]
        for name in self._holders(stage, ring.stages):
            is_out = name == without or name in self._liars or (name, index) in self._unfit
            if is_out or self._unanswered.is_avoided(name):
                continue
            if (found := self._ring_with(name, stage)) is None:
                self._unanswered.add(name)
            elif found.arithmetic != ring.arithmetics[stage.name]:
                found.close()
                self._unfit.add((name, index))
            else:
                self._unanswered.remove(name)
                return found
        return None

    def _ring_with(self, name: str, stage: Stage) -> Recomputed | None:
        end = self._others_end
        while end is not None and not end.is_cancelled:
            try:
                row_out = self._former.basis.weights.model.spec.row_at(stage.stop)
                return OthersBlocks(self._former.form_verify_ring(name, (stage.start, stage.stop), end), row_out, end)
            except MdiError as e:
                logger.debug("%s does not compute the blocks of %s again: %s", name, stage.name, e)
                same = [index for index, one in self._again.items() if one.name == name]
                if not e.code.less_fits or not same:
                    return None
                self._drop(same)  # it has memory for fewer nodes' blocks
        return None

    def _own(self, ring: Ring, index: int) -> Recomputed:
        """This node's. Raises _CannotError."""
        basis: Basis = self._former.basis
        supply = StarterSupply(ring.stages[0].name, basis.weights, basis.family, basis.options)
        spec = supply.spec(basis.computing, basis.extent, node=index)
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
        if found.arithmetic != (theirs := ring.arithmetics[ring.stages[index].name]):
            found.close()
            raise _CannotError(f"it computes with {theirs}, this node with {found.arithmetic}")
        return found

    def _third(self, ring: Ring, index: int, first: str) -> Recomputed | None:
        try:
            return self._own(ring, index)
        except _CannotError:
            return self._others(ring, index, without=first)

    def _lose(self, index: int, error: RingError) -> None:
        """Another node does not compute the blocks of node `index` any more."""
        logger.debug("%s computes nothing again any more: %s", self._again[index].name, error)
        self._unanswered.add(self._again[index].name)
        self._drop([index])

    def _drop(self, indices: Sequence[int]) -> None:
        for index in indices:
            if (found := self._again.pop(index, None)) is not None:
                found.close()


def _verifiable(ring: Ring) -> tuple[Stage, ...]:
    """Stages of other nodes that compute blocks."""
    return tuple(stage for stage in ring.stages[1:] if stage.start < stage.stop)


def _is_over(ring: Ring) -> bool:
    link = ring.link  # read once: another thread may close it meanwhile
    return not isinstance(link, TcpRing) or link.wait_end(0)


def _is_hash(sent: ToldRows, told: _Computed) -> bool:
    """Whether these are the rows that a node says it has sent."""
    return (sent.dtype, sent.sha256) == (told[0], hashlib.sha256(told[1]).hexdigest())


class _CannotError(Exception):
    """A node cannot be verified at all."""


class _NotToldError(Exception):
    """A node has not told rows now, for whatever reason."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(message)
        self.node = node


class _UntrueError(Exception):
    """One of these nodes is wrong."""

    def __init__(self, names: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.names = names
