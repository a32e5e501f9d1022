"""A secondary's part in one ring: weights come, the stage is built, the ring closes, its frames are computed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mdi.block_ranges import block_span
from mdi.engine.replay import SentRows
from mdi.engine.rows import ArrayRows
from mdi.engine.worker import FrameRows, SecondaryLoop
from mdi.errors import CheckpointError, MdiError, NodeLostError, RingError
from mdi.kernels.kernel_stage import KernelStage
from mdi.machine.threads import computing_threads
from mdi.metrics import peak_rss_bytes
from mdi.net.handshake import join_ring
from mdi.net.hello import Fault
from mdi.net.listener import RingListener
from mdi.net.ring import Seat, TcpRing
from mdi.node.cache_budget import check_capacity
from mdi.node.forming import receive_buffers, ring_limits
from mdi.node.group_member import GroupPart, share_metrics
from mdi.node.job import Abandoned, Job
from mdi.node.round_robin import RoundRobin, Turn
from mdi.node.stage_holder import StageHolder
from mdi.node.stage_slots import KEPT_S, StageSlots
from mdi.periodic import Periodic
from mdi.security.keys import KeyFile
from mdi.tracing.recorder import LIVE_SPANS, Recorder, recorder_of
from mdi.units import size
from mdi.window.window_stage import WindowStage

if TYPE_CHECKING:
    from mdi.node.stage_holder import NodeStage

logger = logging.getLogger("mdi")


class Service:
    """A node's part in one ring, on a thread of its own, from the request to the ring's end. The computing is RoundRobin's.

    Args:
        name, process: of the node, see Seat.
        job: the task, and its progress.
        holder: the weights, here before and to come.
        slots: where the stage goes.
        turns: computes the ring's frames.
        listener: the ring port.
        kv_memory: limit for all caches of the node in bytes; None: the free memory.
        on_over: called from the thread when the ring is over.
    """

    def __init__(
        self,
        name: str,
        process: str,
        job: Job,
        holder: StageHolder,
        slots: StageSlots,
        turns: RoundRobin,
        listener: RingListener,
        kv_memory: int | None,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_over = on_over
        self._name = name
        self._process = process
        self.job = self._job = job
        self._request = job.request
        self._holder = holder
        self._slots = slots
        self._turns = turns
        self._listener = listener
        self._kv_memory = kv_memory
        self._thread = threading.Thread(target=self._run, name=f"run-{job.run[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        job, epoch = self._job, self._request.epoch
        error: Exception | None = None
        try:
            with computing_threads(job.computing.threads):
                self._take_part()
        except Exception as e:  # whatever it is, this node must be ready for the next run
            error = e
            self._tell(e)
        is_kept = self._may_come_back(error)
        self._slots.release(job.slot, epoch, is_kept, is_failed=isinstance(error, CheckpointError))
        job.finish(error)
        logger.info("%s waits for the next run", self._name)
        self._on_over()
        if is_kept and not job.is_replaced:  # what was replaced is for the ring that comes instead
            with job.changed:
                job.changed.wait_for(lambda: job.stopped, KEPT_S)
            self._slots.release(job.slot, epoch)

    def _tell(self, error: Exception) -> None:
        if isinstance(error, Abandoned):
            logger.info("%s: %s", self._name, error)
        elif isinstance(error, RingError):
            logger.warning("%s: the run ended: %s", self._name, error)
        else:
            logger.error("%s: %s", self._name, error, exc_info=logger.isEnabledFor(logging.DEBUG))

    def _may_come_back(self, error: Exception | None) -> bool:
        """Whether the run may use these caches again: neither the starter nor this node failed."""
        job = self._job
        if not (job.has_begun or job.has_caches):
            return False
        if job.stopped:
            return job.is_replaced
        is_own = isinstance(error, NodeLostError) and error.node in (self._request.names[0], self._name)
        return isinstance(error, RingError) and not is_own

    def _take_part(self) -> None:
        job, request, slot = self._job, self._request, self._job.slot
        if slot.stage is None:
            with self._holder.store.in_use({part.sha256 for part in request.parts}):
                self._wait_for_parts()
                stage = self._holder.build(request, job.computing, slot.loaded, job.check, self._next_part)
        else:
            stage = slot.stage
            job.missing = {}
        if not job.has_caches:
            check_capacity(self._name, stage, request.max_length, job.computing.device)
            stage.prepare(request.max_length, self._kv_memory)
        if not job.has_caches or slot.sent is None:
            slot.sent = SentRows(request.replay_bytes)
        self._slots.fill(slot, stage, request.max_length)
        group = GroupPart(request, self._listener, self._process)
        try:
            ring, seat = self._close_ring(stage)
            try:
                job.begin(ring)
                group.connect(stage, ring, self._turns.note_sign)
                self._compute(stage, ring, seat, group)
            finally:
                ring.close()
        finally:
            group.close()

    def _wait_for_parts(self) -> None:
        """Find the missing parts, and wait until they have come."""
        job, holder = self._job, self._holder
        missing = holder.missing(self._request, job.slot.loaded, job.check, self._part_looked_for)
        holder.check_disk(self._request, missing)
        with job.changed:
            job.total_bytes = sum(part.n_bytes for part in missing)
            job.received_bytes = sum(holder.store.partial_bytes(part.sha256) for part in missing)
            job.missing = {part.sha256: part for part in missing}
        if missing:
            to_come = job.total_bytes - job.received_bytes
            logger.info("%s gets %s of weights from its starter", self._name, size(to_come))
        report = Periodic()
        while True:
            with job.changed:
                job.changed.wait_for(lambda: not job.missing or job.stopped or job.failure is not None, 0.5)
            job.check()
            if not job.missing:
                return
            if report.is_due():
                logger.info("%s: %s of %s", self._name, size(job.received_bytes), size(job.total_bytes))

    def _part_looked_for(self) -> None:
        self._job.n_looked_for += 1

    def _next_part(self) -> None:
        """Called before each part that is loaded: those before it are in."""
        job = self._job
        job.check()
        if job.is_loading:
            job.n_loaded += 1
        job.is_loading = True

    def _close_ring(self, stage: NodeStage) -> tuple[TcpRing, Seat]:
        """Be READY until the previous node calls, then take this node's place in the ring."""
        job, request, device = self._job, self._request, self._job.computing.device
        seat = _seat_of(job, self._process, self._listener.keys)
        expectation = self._listener.expect(seat.epoch, seat.prev_hello)
        try:
            job.get_ready(lambda: self._slots.grant(job.slot, request))
            logger.info("%s is ready: %s of %s", seat.name, block_span(stage.start, stage.stop), request.model)
            sock = None
            while sock is None:
                job.check()
                sock = expectation.wait(0.5)
        finally:
            job.report_caches = None
            self._listener.forget(expectation)
        widest = stage.n_embd if isinstance(stage, KernelStage) else self._holder.family.widest_row(stage.config)
        limits = ring_limits(widest)
        buffers, n_frames = receive_buffers(device), request.n_frames or seat.n_nodes
        ring = join_ring(
            sock, seat, n_frames, limits, allocate=buffers, codec_in=expectation.codec, arrivals=self._turns.changed,
            listener=self._listener, caller=expectation.caller,
        )  # fmt: skip
        return ring, seat

    def _compute(self, stage: NodeStage, ring: TcpRing, seat: Seat, group: GroupPart) -> None:
        is_last = seat.index == seat.n_nodes - 1 or group.is_whole  # which needs only the rows for logits
        rows: FrameRows = ArrayRows() if isinstance(stage, KernelStage) else stage.rows
        recorder = recorder_of(self._request.extensions)
        recorded = ring if recorder is None else recorder.over(ring)
        loop = SecondaryLoop(
            stage, rows, group.over(recorded), is_last, seat.wire, self._job.slot.sent, self._request.replay
        )
        read_bytes = (lambda: stage.weight_use.read_bytes) if isinstance(stage, WindowStage) else (lambda: 0)
        turn = Turn(loop, ring, self._job.computing.threads, lambda: stage.n_finished, read_bytes)
        for link in (ring.next_link, ring.previous_link):
            link.work = lambda: self._turns.work
        self._job.measure = lambda: _measured(stage, turn, recorder, LIVE_SPANS)
        self._turns.add(turn)
        try:
            turn.wait()
        except RingError:
            raise
        except Exception as e:
            code = e.code if isinstance(e, MdiError) else MdiError.code
            words = str(e) if isinstance(e, Abandoned) else f"it failed: {type(e).__name__}: {e}"
            ring.fail(Fault(seat.name, words, seat.name, code))
            raise
        finally:
            self._job.measure = None
            self._job.metrics = _measured(stage, turn, recorder)
            logger.info(
                "%s: %d frames, %.2f s computing, %.2f s waiting",
                *(seat.name, ring.n_frames, loop.compute_s, turn.wait_s),
            )


def _seat_of(job: Job, process: str, keys: KeyFile | None) -> Seat:
    request = job.request
    return Seat(
        int(request.epoch, 16),
        request.index,
        request.names,
        request.placement,
        request.next_addr,
        request.next_port,
        request.wire_dtype,
        process,
        keys,
        request.silence_s,
    )


def _measured(stage: NodeStage, turn: Turn, recorder: Recorder | None, n_spans: int | None = None) -> dict[str, Any]:
    """What a node measured of a run, and the last `n_spans` that it recorded; None is all."""
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
        "weights_resident_bytes": use.resident_bytes,
        "weights_read_bytes": use.read_bytes,
        "disk_wait_s": use.wait_s,
    }
