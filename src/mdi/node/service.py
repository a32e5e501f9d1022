"""A secondary's part in one run, on the main thread: its weights come, its stage is built, the ring closes, it computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mdi.block_ranges import block_span
from mdi.engine.arrays import ArrayRows
from mdi.engine.secondary_loop import Rows, SecondaryLoop
from mdi.errors import MdiError, RingError
from mdi.machine.computing import Computing
from mdi.machine.threads import computing_threads
from mdi.metrics import peak_rss_bytes
from mdi.model.array_stage import ArrayStage
from mdi.net.handshake import join_ring
from mdi.net.hello import Fault
from mdi.net.listener import RingListener
from mdi.net.ring import Seat, TcpRing
from mdi.node.cache_budget import check_capacity, report_caches
from mdi.node.forming import receive_buffers, ring_limits
from mdi.node.job import Job
from mdi.node.stage_holder import StageHolder
from mdi.periodic import Periodic
from mdi.security.keys import KeyFile
from mdi.tracing.recorder import LIVE_SPANS, Recorder, recorder_of
from mdi.units import size

if TYPE_CHECKING:
    from mdi.node.stage_holder import NodeStage

logger = logging.getLogger("mdi")


class Service:
    """One job, from its request to the end of the ring.

    Args:
        name, process: of the node, see Seat.
        job: what is to be done; it also keeps how far that is.
        holding: the weights, here before and to come.
        listener: the ring port.
        free_bytes: memory of a device for weights and caches.
        kv_memory: bytes that caches may take; None is what is free.
    """

    def __init__(
        self,
        name: str,
        process: str,
        job: Job,
        holding: StageHolder,
        listener: RingListener,
        free_bytes: Callable[[str], int],
        kv_memory: int | None,
    ) -> None:
        self._name = name
        self._process = process
        self._job = job
        self._request = job.request
        self._stages = holding
        self._listener = listener
        self._free_bytes = free_bytes
        self._kv_memory = kv_memory

    def run(self) -> None:
        """Returns when the run was ended in good order; raises what ended it else."""
        with computing_threads(self._job.computing.threads):
            self._run()

    def _run(self) -> None:
        computing = self._job.computing
        self._wait_for_parts(computing)
        max_length = self._request.max_length
        stage = self._stages.stage(self._request, computing, self._job.check, self._next_part)
        check_capacity(self._name, stage, max_length, computing.device)
        stage.prepare(max_length, self._kv_memory)
        ring, seat = self._close_ring(stage, computing)
        try:
            self._job.begin(ring)
            self._compute(stage, ring, seat)
        finally:
            ring.close()
            stage.caches.clear()

    def _wait_for_parts(self, computing: Computing) -> None:
        """Find out what is missing, and wait until it has come."""
        job, holding = self._job, self._stages
        missing = holding.missing(self._request, job.check, self._part_looked_for)
        holding.check_memory(self._request, computing, self._free_bytes(computing.device))
        holding.check_disk(self._request, missing)
        with job.changed:
            job.total_bytes = sum(part.n_bytes for part in missing)
            job.received_bytes = sum(holding.store.partial_bytes(part.sha256) for part in missing)
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

    def _close_ring(self, stage: NodeStage, computing: Computing) -> tuple[TcpRing, Seat]:
        """Be READY until the previous node calls, then take this node's place in the ring."""
        job, request, device = self._job, self._request, computing.device
        seat = _seat_of(job, self._process, self._listener.keys)
        expectation = self._listener.expect(seat.epoch, seat.prev_hello)
        try:
            job.report_caches = lambda: report_caches(stage, device, self._kv_memory)
            job.state = "READY"
            logger.info("%s is ready: %s of %s", seat.name, block_span(stage.start, stage.stop), request.model)
            sock = None
            while sock is None:
                job.check()
                sock = expectation.wait(0.5)
        finally:
            job.report_caches = None
            self._listener.forget(expectation)
        widest = stage.n_embd if isinstance(stage, ArrayStage) else self._stages.family.widest_row(stage.config)
        limits = ring_limits(widest)
        buffers, n_frames = receive_buffers(device), request.n_frames or seat.n_nodes
        ring = join_ring(
            sock, seat, n_frames, limits, allocate=buffers, codec_in=expectation.codec, listener=self._listener,
            caller=expectation.caller,
        )  # fmt: skip
        return ring, seat

    def _compute(self, stage: NodeStage, ring: TcpRing, seat: Seat) -> None:
        is_last = seat.index == seat.n_nodes - 1
        rows: Rows = ArrayRows() if isinstance(stage, ArrayStage) else stage.rows
        recorder = recorder_of(self._request.extensions)
        recorded = ring if recorder is None else recorder.over(ring)
        loop = SecondaryLoop(stage, rows, recorded, is_last, seat.wire)
        self._job.measure = lambda: _measured(stage, loop, ring, recorder, LIVE_SPANS)
        try:
            loop.run()
        except RingError:
            raise
        except Exception as e:
            code = e.code if isinstance(e, MdiError) else MdiError.code
            ring.fail(Fault(seat.name, f"it failed: {type(e).__name__}: {e}", seat.name, code))
            raise
        except BaseException:  # Ctrl-C and SIGTERM
            ring.fail(Fault(seat.name, "it was told to end", seat.name, "left"))
            raise
        finally:
            self._job.measure = None
            self._job.metrics = _measured(stage, loop, ring, recorder)
            logger.info(
                "%s: %d frames, %.2f s computing, %.2f s waiting",
                *(seat.name, ring.n_frames, loop.compute_s, ring.inbox.wait_s),
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


def _measured(
    stage: NodeStage, loop: SecondaryLoop, ring: TcpRing, recorder: Recorder | None, n_spans: int | None = None
) -> dict[str, Any]:
    """What a node measured of a run, and the last `n_spans` that it recorded; None is all."""
    spans = {} if recorder is None else recorder.to_json(n_spans)
    use = stage.weight_use
    return {
        **spans,
        "peak_rss_bytes": peak_rss_bytes(),
        "compute_s": loop.compute_s,
        "wait_s": ring.inbox.wait_s,
        "send_s": ring.send_s,
        "bytes_sent": ring.bytes_sent,
        "frames": ring.n_frames,
        "weights_resident_bytes": use.resident_bytes,
        "weights_read_bytes": use.read_bytes,
        "disk_wait_s": use.wait_s,
    }
