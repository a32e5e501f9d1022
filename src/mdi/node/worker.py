"""A secondary's part in one ring: weights come, the stage is built, the ring closes, its frames are computed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mdi.block_ranges import block_span
from mdi.cancel import Cancel, Periodic
from mdi.checkpoint.parts import Part
from mdi.control.messages import HAND_OVER_S, InitRequest
from mdi.engine.kept_prefixes import kept_files
from mdi.engine.recorder import LIVE_SPANS, Recorder, recorder_of
from mdi.engine.rows import receive_buffers, ring_limits
from mdi.engine.worker import Backend, SecondaryLoop, TappedStage
from mdi.errors import Code, MdiError, NodeLostError, RingError
from mdi.host.threads import computing_threads
from mdi.metrics import peak_rss_bytes
from mdi.net.handshake import join_ring
from mdi.net.hello import Fault
from mdi.net.link import STUCK_S
from mdi.net.listener import RingListener
from mdi.net.ring import Seat, TcpRing
from mdi.node.node_weights import NodeWeights
from mdi.node.round_robin import AbandonedError, RoundRobin, Turn
from mdi.stages.group_part import GroupPart, share_metrics
from mdi.stages.kernel_stage import KernelStage
from mdi.stages.store import KEPT_S, CacheReport, HeldStage, StageStore
from mdi.stages.trained_tensors import LastSets, Trained
from mdi.units import size

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Waits:
    """How long a node waits, in seconds.

    Attributes:
        lease_s: before the ring is closed, for a sign of life from its starter.
        kernels_s: for its kernels when it begins; if they have to be compiled, it says so then.
        hand_over_s: for other nodes to take its blocks when it leaves.
        stuck_s: see RoundRobin.
    """

    lease_s: float = 10.0
    kernels_s: float = 2.0
    hand_over_s: float = HAND_OVER_S
    stuck_s: float = STUCK_S


class RingLease(Cancel):
    """Ends what happens before the ring is closed: when the ring was ended, or its starter is silent for too long.

    Attributes:
        failure: what went wrong while weights came.
    """

    def __init__(self, lease_s: float) -> None:
        super().__init__()
        self._lease_s = lease_s
        self.failure: MdiError | None = None
        self._last_sign = time.monotonic()

    def touch(self) -> None:
        """The starter lives."""
        self._last_sign = time.monotonic()

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self._last_sign > self._lease_s

    @property
    def error(self) -> BaseException | None:
        if self.failure is not None:
            return self.failure
        if (error := super().error) is not None:
            return error
        return (
            AbandonedError(f"the starter has been silent for {self._lease_s:.0f} s: given up")
            if self.is_silent
            else None
        )


class RingWorker:
    """Has a thread of its own from the request to the ring's end; the computing is RoundRobin's.

    Args:
        name, process: of the node, see Seat.
        held: its stage, or the place for it.
        weights: of this node, here before and to come.
        store: of stages.
        turns: computes the ring's frames.
        listener: the ring port.
        lease_s: see Waits.
        on_end: called from the thread when the ring has ended.
        prefix_dir: where prefixes are kept.

    Attributes:
        changed: notified, and n_changes counted, when the state has changed, and what of the parts is known.
        state: LOADING, READY (everything is here, the ring is open) or RUNNING; and when it has ended, READY again if that was
            in good order, else IDLE.
        error, error_code: what ended it, if that was not in good order.
        lost: which node broke the ring and how, as far as this one knows.
        has_ended: set when this node has no part in it any more.
        is_stopped: whether it was ended from here; is_replaced: because of another ring of its run.
        has_begun: whether its ring was closed.
        missing: parts that the starter has to send, by sha256; None until that is known.
        n_looked_for: parts that were looked for on this machine, of those in the request.
        is_loading, n_loaded: whether the stage is being loaded, and parts that are in it, of those in the request.
        report_caches: while READY, says how much cache this node can hold.
        measure: the measurements so far, while RUNNING.
        metrics: the measurements, once the ring has ended.
        tensors: that came last for questions about blocks, until the ring has ended.
    """

    def __init__(
        self, name: str, process: str, request: InitRequest, held: HeldStage, weights: NodeWeights, store: StageStore,
        turns: RoundRobin, listener: RingListener, lease_s: float, on_end: Callable[[], None] = lambda: None,
        prefix_dir: Path = Path(),
    ) -> None:  # fmt: skip
        self._name, self._process = name, process
        self.request, self.held = request, held
        self._weights, self._store, self._turns, self._listener = weights, store, turns, listener
        self._on_end, self._prefix_dir = on_end, prefix_dir
        self.cancel = RingLease(lease_s)
        self.changed = threading.Condition()
        self.n_changes = 0
        self.has_ended = threading.Event()
        self.state = "LOADING"
        self.error: str | None = None
        self.error_code: Code | None = None
        self.lost: Fault | None = None
        self.missing: dict[str, Part] | None = None
        self.total_bytes = self.received_bytes = 0
        self.n_looked_for = self.n_loaded = 0
        self.is_loading = self.is_stopped = self.is_replaced = self.has_begun = False
        self.report_caches: Callable[[], CacheReport] | None = None
        self.measure: Callable[[], dict[str, Any]] | None = None
        self.metrics: dict[str, Any] | None = None
        self.tensors = LastSets[Trained]()
        self.ring: TcpRing | None = None
        self._fault: Fault | None = None  # that ended it from here
        self._thread = threading.Thread(target=self._run, name=f"run-{self.run[:8]}", daemon=True)

    # From any thread

    @property
    def run(self) -> str:
        return self.request.run

    @property
    def is_running(self) -> bool:
        """Whether the ring is closed: from then on the ring itself shows whether the starter is alive."""
        return self.ring is not None

    def begins_within(self, timeout_s: float) -> bool:
        """Wait until its ring is closed, or will not be; whether it is."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_running or self.is_abandoned or self.has_ended.is_set(), timeout_s)
            return self.is_running

    @property
    def is_abandoned(self) -> bool:
        return self.is_stopped or self.cancel.is_silent

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def wait_until_known(self, timeout_s: float) -> None:
        """Until it is READY, or has ended, or parts are known to be missing."""
        with self.changed:
            self.changed.wait_for(lambda: self.state != "LOADING" or bool(self.missing), timeout_s)

    def _note_change(self) -> None:
        """Wake all who wait for it; with `changed` held."""
        self.n_changes += 1
        self.changed.notify_all()

    def note_part(self, sha256: str) -> None:
        """A part has come."""
        with self.changed:
            if self.missing is not None:
                self.missing.pop(sha256, None)
            self._note_change()

    def fail(self, error: MdiError) -> None:
        """A part cannot come."""
        with self.changed:
            self.cancel.failure = error
            self._note_change()

    def end(self) -> None:
        """End it in good order, however far it is."""
        if (ring := self._stop(AbandonedError("the starter ended the run before it began"))) is not None:
            ring.stop("the starter ended the run")

    def abort(self, fault: Fault) -> None:
        """End it, however far it is, and say to the other nodes why."""
        error = AbandonedError(f"the run ended before it began: {fault.message}", fault.code)
        if (ring := self._stop(error, fault)) is not None:
            ring.fail(fault)

    def quit(self, reason: str) -> None:
        """End it, because the node leaves. A starter knows it by its name in the ring, which may be longer than its own."""
        name = self.request.names[self.request.index]
        self.abort(Fault(name, reason, name, Code.LEFT))

    def replace(self) -> None:
        """End it for another ring of the same run, which may use its caches."""
        self.is_replaced = True
        self.abort(Fault("", f"{self._name} takes part in another ring of this run", self._name, Code.RUN))

    def _stop(self, error: AbandonedError, fault: Fault | None = None) -> TcpRing | None:
        self.cancel.cancel(error)
        with self.changed:
            self.is_stopped = True
            self._fault = self._fault or fault
            self._note_change()
            return self.ring

    def announce_leave(self) -> None:
        """Say to the starter that this node waits for its blocks to be moved to others."""
        if (ring := self.ring) is not None:
            ring.announce_leave()

    # On its thread

    def _run(self) -> None:
        error: Exception | None = None
        is_broken = False  # whether the stage failed
        try:
            with computing_threads(self.held.spec.computing.threads):
                self._take_part()
        except Exception as e:  # whatever it is, this node must be ready for the next run
            error = e
            is_broken = self.has_begun and not isinstance(e, RingError | AbandonedError)
            self._log(e)
        is_kept = not is_broken and self._may_come_back(error)
        self._store.release(self.held, self.request.epoch, is_kept, is_failed=is_broken)
        self.finish(error)
        if not self.is_replaced:
            logger.info("%s waits for the next run", self._name)
        self._on_end()
        if is_kept and not self.is_replaced:  # what was replaced is for the ring that comes instead
            with self.changed:
                self.changed.wait_for(lambda: self.is_stopped, KEPT_S)
            self._store.release(self.held, self.request.epoch)

    def finish(self, error: Exception | None) -> None:
        """The ring's buffers are not needed any more."""
        self.tensors.close()
        if isinstance(error, RingError):
            node = error.node if isinstance(error, NodeLostError) else ""
            self.lost = Fault(node, str(error), self.request.names[self.request.index], error.code)
        with self.changed:
            self.error, self.error_code = _in_words(error)
            self.state = "READY" if error is None else "IDLE"
            self.ring = None
            self.has_ended.set()
            self._note_change()

    def _log(self, error: Exception) -> None:
        if self.is_replaced:
            logger.info("%s goes over to another ring of this run", self._name)
        elif isinstance(error, AbandonedError):
            logger.info("%s: %s", self._name, error)
        elif isinstance(error, RingError):
            logger.warning("%s: the run ended: %s", self._name, error)
        else:
            logger.error("%s: %s", self._name, error, exc_info=logger.isEnabledFor(logging.DEBUG))

    def _may_come_back(self, error: Exception | None) -> bool:
        """Whether the run may use these caches again: neither the starter nor this node failed."""
        if not (self.has_begun or self.held.has_caches):
            return False
        if self.is_replaced:
            return True
        if self.is_stopped:
            return False
        is_own = isinstance(error, NodeLostError) and error.node in (self.request.names[0], self._name)
        return isinstance(error, RingError) and not is_own

    def _take_part(self) -> None:
        request = self.request
        self._have_stage()
        group = GroupPart(
            self.held.spec.group, len(request.names), self._listener, int(request.epoch, 16), request.placement, self._process,
            request.silence_s,
        )  # fmt: skip
        try:
            ring, seat = self._close_ring()
            try:
                self.begin(ring)
                stage = self.held.stage
                assert stage is not None
                group.connect(stage, ring, self._turns.note_sign)
                self._compute(stage, ring, seat, group)
            finally:
                ring.close()
        finally:
            group.close()

    def _have_stage(self) -> None:
        """Wait for the weights, and have the stage built."""
        if self.held.stage is None:
            with self._weights.store.in_use({part.sha256 for part in self.request.parts}):
                self._wait_for_parts()
                self._store.complete(self.held, self._weights, self.cancel, self._next_part)
        else:
            with self.changed:
                self.missing = {}
                self._note_change()
            self._store.complete(self.held, self._weights, self.cancel)

    def _wait_for_parts(self) -> None:
        """Find the missing parts, and wait until they have come."""
        weights, spec = self._weights, self.held.spec
        missing = weights.missing(spec, self._store.loaded_parts(self.held), self.cancel, self._part_looked_for)
        weights.check_disk(spec, missing)
        with self.changed:
            self.total_bytes = sum(part.n_bytes for part in missing)
            self.received_bytes = sum(weights.store.partial_bytes(part.sha256) for part in missing)
            self.missing = {part.sha256: part for part in missing}
            self._note_change()
        if missing:
            to_come = self.total_bytes - self.received_bytes
            logger.info("%s gets %s of weights from its starter", self._name, size(to_come))
        report = Periodic()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self.missing or self.cancel.is_cancelled, 0.5)
            self.cancel.check()
            if not self.missing:
                return
            if report.is_due():
                logger.info("%s: %s of %s", self._name, size(self.received_bytes), size(self.total_bytes))

    def _part_looked_for(self) -> None:
        self.n_looked_for += 1

    def _next_part(self) -> None:
        """Called before each part that is loaded: those before it are in."""
        if self.is_loading:
            self.n_loaded += 1
        self.is_loading = True

    def _close_ring(self) -> tuple[TcpRing, Seat]:
        """Be READY until the previous node calls, then take this node's place in the ring."""
        request, spec, stage = self.request, self.held.spec, self.held.stage
        assert stage is not None
        seat = Seat(
            int(request.epoch, 16), request.index, request.names, request.placement, request.next_addr,
            request.next_port, request.wire_dtype, self._process, self._listener.keys, request.silence_s, request.refused_s,
        )  # fmt: skip
        expectation = self._listener.expect(seat.epoch, seat.prev_hello)
        try:
            with self.changed:
                self.report_caches, self.state = (lambda: self._store.grant(self.held)), "READY"
                self._note_change()
            logger.info("%s is ready: %s of %s", seat.name, block_span(stage.start, stage.stop), request.model.name)
            sock = None
            with self.cancel.waking(expectation.wake):
                while sock is None:
                    self.cancel.check()
                    sock = expectation.wait(0.5)
        finally:
            self.report_caches = None
            self._listener.forget(expectation)
        is_own = isinstance(stage, KernelStage)
        widest = stage.row_in.width if is_own else self._weights.family.widest_row(request.model.spec)
        buffers = receive_buffers(spec.computing.device)
        ring = join_ring(
            sock, seat, request.extent.n_frames or seat.n_nodes, ring_limits(widest, len(self.request.taps)), allocate=buffers,
            codec_in=expectation.codec, arrivals=self._turns.changed, listener=self._listener,
            caller=expectation.caller, cancel=self.cancel,
        )  # fmt: skip
        return ring, seat

    def begin(self, ring: TcpRing) -> None:
        """The ring is closed. If it was ended meanwhile, it is ended at once for all nodes, with the same reason."""
        with self.changed:
            self.ring, self.state = ring, "RUNNING"
            self.has_begun = True
            was_stopped, fault = self.is_stopped, self._fault
            self._note_change()
        if fault is not None:
            ring.fail(fault)
        elif was_stopped:
            ring.stop("ended before it began")

    def _compute(self, stage: Backend, ring: TcpRing, seat: Seat, group: GroupPart) -> None:
        is_last = seat.index == seat.n_nodes - 1 or group.is_whole  # which needs only the rows for logits
        recorder = recorder_of(self.request.n_spans)
        recorded = ring if recorder is None else recorder.over(ring, self.request.is_hot)
        seen = group.of_member(recorded)
        tapped = TappedStage(stage, stage.rows, self.request.taps, stage.start, stage.stop)
        files = kept_files(self._prefix_dir, self.request.keep_prefixes, self._listener.keys)
        loop = SecondaryLoop(
            stage, stage.rows, seen, is_last, seat.wire, self.held.sent, self.request.replay, tapped, self.held.received,
            self.request.is_hot, None if files is None else lambda task: files.answer(task, stage.caches),
        )  # fmt: skip
        turn = Turn(loop, ring, self.held.spec.computing.threads, partial(getattr, stage, "n_finished"))
        if self.held.spec.window is not None:
            turn.read_bytes = lambda: stage.weight_use.read_bytes
        for link in (ring.next_link, ring.previous_link):
            link.work = lambda: self._turns.work
        self.measure = lambda: _measured(stage, turn, recorder, LIVE_SPANS)
        self._turns.add(turn)
        try:
            turn.wait()
        except RingError:
            raise
        except Exception as e:
            code = e.code if isinstance(e, MdiError) else Code.FAILED
            words = str(e) if isinstance(e, AbandonedError) else f"it failed: {type(e).__name__}: {e}"
            ring.fail(Fault(seat.name, words, seat.name, code))
            raise
        finally:
            if files is not None:
                files.close()
            self.measure = None
            self.metrics = _measured(stage, turn, recorder)
            logger.info(
                "%s: %d frames, %.2f s computing, %.2f s waiting",
                *(seat.name, ring.n_frames, loop.compute_s, turn.wait_s),
            )


def _measured(stage: Backend, turn: Turn, recorder: Recorder | None, n_spans: int | None = None) -> dict[str, Any]:
    """Measurements of a node in a run, and the last `n_spans` that it recorded; None is all."""
    spans = {} if recorder is None else recorder.to_json(n_spans)
    ring, use = turn.ring, stage.weight_use
    share = share_metrics(stage)
    return {
        **spans,
        **({} if share is None else share.to_json()),
        "peak_rss_bytes": peak_rss_bytes(),
        "compute_s": turn.loop.compute_s,
        "wait_s": turn.wait_s,
        "send_s": ring.send_s,
        "bytes_sent": ring.bytes_sent,
        "frames": ring.n_frames,
        "next_way_s": ring.next_link.way_s,
        "weights_resident_bytes": use.resident_bytes,
        "weights_read_bytes": use.read_bytes,
        "disk_wait_s": use.wait_s,
        "expert_hits": use.expert_hits,
        "expert_misses": use.expert_misses,
    }


def _in_words(error: Exception | None) -> tuple[str | None, Code | None]:
    """An error in words and as a code."""
    if error is None:
        return None, None
    if isinstance(error, MemoryError):
        return "it ran out of memory", Code.MEMORY
    if isinstance(error, RingError):
        return f"the run ended: {error}", error.code
    if isinstance(error, MdiError):
        return str(error), error.code
    return f"{type(error).__name__}: {error}", Code.FAILED
