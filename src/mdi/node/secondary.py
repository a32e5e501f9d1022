"""A secondary node: waits to be configured, takes its weights, runs its stage in the ring, and waits again.

Its life is IDLE -> LOADING -> READY -> RUNNING -> READY ...; any failure leads to IDLE with the error in its status, never to
a dead or half-configured process. The main thread does the work; HTTP threads only hand it a job and answer questions.
"""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from litgpt.config import Config

import mdi
from mdi.checkpoint.source import ChunkFile, WeightSource
from mdi.checkpoint.store import BlockStore
from mdi.config import NodeConfig
from mdi.control.messages import CONTROL_VERSION, InitRequest, PartSpec, ProbeRequest, ProfileRequest
from mdi.control.reach import try_node
from mdi.control.server import ControlServer
from mdi.engine.secondary import SecondaryLoop
from mdi.engine.tensors import DTYPES, pinned_buffer
from mdi.errors import CheckpointError, ControlError, MdiError, RingError, UsageError
from mdi.metrics import peak_rss_bytes
from mdi.model.formats import check_format, quantizer
from mdi.model.stage import Stage
from mdi.net.hello import Fault
from mdi.net.listener import RingListener, open_socket
from mdi.net.ring import Seat, TcpRing, join_ring
from mdi.net.wire import HANDSHAKE_LIMITS, Limits
from mdi.node.device import check_room, choose_device, choose_dtype, choose_kv_dtype, held_bytes
from mdi.node.errand import Errand
from mdi.node.job import Abandoned, Job
from mdi.node.memory import CacheReport, report_caches
from mdi.node.profiler import Profiler, Subject
from mdi.partition.placement import size

PROFILE_S = 170.0
PROBE_S = 25.0

logger = logging.getLogger("mdi")


class SecondaryNode:
    """See the module. `open` binds the ports, `run` works until `close` or a `PUT /stop` that ends the process.

    Args:
        config: this node's entry of the nodes file.
        weights: a chunk or checkpoint on this machine, or None; what it lacks comes from the starter.
        cache_dir: where parts that were received are kept; with `cache_bytes`, no more than so many bytes of them.
        device, dtype, quantize: what the user asked for; None leaves it to the nodes file, then to the starter.
        kv_memory: bytes that caches may take; None leaves it to the nodes file, else it is what is free.
    """

    def __init__(
        self,
        config: NodeConfig,
        weights: WeightSource | None,
        cache_dir: Path,
        device: str | None = None,
        dtype: str | None = None,
        compile_stage: bool = False,
        quantize: str | None = None,
        kv_memory: int | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.config = config
        self._weights = weights
        self._verified: set[str] = set()  # parts of a chunk that were hashed
        self._store = BlockStore(cache_dir, cache_bytes)
        self._device = choose_device(device or config.device)
        self._dtype = dtype or config.dtype
        self._quantize = quantize
        self._kv_memory = config.kv_memory if kv_memory is None else kv_memory
        self._report_caches: Callable[[], CacheReport] | None = None
        check_format(quantize, self._device)
        choose_dtype(self._dtype, "float32", self._device)  # a wrong wish is told before anything is bound
        self._compile = compile_stage
        self._profiler = Profiler(config.name, self._device, cache_dir)
        self._probing = threading.Lock()
        self._lock = threading.Lock()
        self._jobs: queue.Queue[Job | Errand | None] = queue.Queue()
        self._job: Job | None = None
        self._errand: Errand | None = None
        self._last_run = ""
        self._state = "IDLE"
        self._error: str | None = None
        self._stage: Stage | None = None
        self._stage_key: tuple[Any, ...] | None = None
        self._blocks: tuple[int, int] | None = None
        self._model: str | None = None
        self._metrics: dict[str, Any] | None = None
        self._ring: TcpRing | None = None
        self._listener: RingListener | None = None
        self._control: ControlServer | None = None
        self._leave = False
        self._closed = False

    def open(self) -> None:
        """Bind both ports; UsageError if that is not possible. In any case, `close` is to be called afterwards."""
        name = self.config.name
        self._probe_cache()
        sock = open_socket(self.config.listen_addr, self.config.port_in, f"{name}'s inference port_in")
        self._listener = RingListener(sock, name)
        self._control = ControlServer(self, self.config.listen_addr, self.config.port, name)
        logger.info(
            "%s waits for its starter on %s:%d (ring port %d, device %s)",
            *(name, self.config.listen_addr, self.control_port, self.ring_port, self._device),
        )

    def _probe_cache(self) -> None:
        """A place for weights that cannot be written to is told now, not in the middle of the first run."""
        try:
            self._store.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._store.directory):
                pass
        except OSError as e:
            raise UsageError(
                f"cannot keep weights in {self._store.directory} ({e.strerror or e}): choose a place with --cache-dir"
            ) from None

    @property
    def control_port(self) -> int:
        assert self._control is not None
        return self._control.port

    @property
    def ring_port(self) -> int:
        assert self._listener is not None
        return self._listener.port

    def run(self) -> None:
        """Work on one run after the other."""
        while not self._leave:
            job = self._jobs.get()
            if job is None:
                return
            if isinstance(job, Errand):
                job.run()
                with self._lock:
                    self._errand = None
            else:
                self._work(job)

    def close(self) -> None:
        """End a run that is under way, let `run` return, and give the ports back; harmless if repeated."""
        self._leave = True
        with self._lock:
            if self._closed:
                return
            self._closed = True
            job, ring, errand = self._job, self._ring, self._errand
        if job is not None:
            self._end(job, ring)
        if errand is not None:
            errand.drop(ControlError(f"{self.config.name} is ending", 503))
        self._jobs.put(None)
        if self._control is not None:
            self._control.close()
        if self._listener is not None:
            self._listener.close()

    # What the control server calls, from its threads

    def status(self, run: str | None) -> dict[str, Any]:
        with self._lock:
            job = self._job
            if job is not None and run == job.run:
                job.touch()
            state, error, metrics = self._state, self._error, self._metrics
            is_known = bool(run) and run == self._last_run
            report_caches = self._report_caches if is_known else None
        return {
            "name": self.config.name,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "state": state,
            "error": error,
            "model": self._model,
            "blocks": self._blocks,
            "device": str(self._device),
            "memory": {
                "rss_bytes": psutil.Process().memory_info().rss,
                "peak_rss_bytes": peak_rss_bytes(),
                "available_bytes": self._profiler.available_bytes(),
            },
            "disk_free_bytes": self._store.free_bytes(),
            "ring_port": self._listener.port if self._listener is not None else None,
            "clock_s": time.time(),
            "measuring": self._profiler.progress,
            "progress": {"bytes": job.received_bytes, "total_bytes": job.total_bytes} if job else None,
            # Only who knows the run's id is told more about it: the id is what /stop asks for.
            "missing": self._missing_of(job) if job and is_known else None,
            "metrics": metrics if is_known else None,
            "caches": report_caches().to_json() if report_caches is not None else None,
        }

    def _missing_of(self, job: Job) -> list[dict[str, Any]] | None:
        """What the starter has to send, and how much of it is here from an earlier try; None until it is known."""
        missing = job.missing
        if missing is None:
            return None
        return [{"sha256": p.sha256, "have_bytes": self._store.partial_bytes(p.sha256)} for p in list(missing.values())]

    def init(self, request: InitRequest) -> dict[str, Any]:
        self._refuse_misfit_chunk(request)
        with self._lock:
            if self._job is not None and (self._ring is not None or not self._job.is_abandoned):
                raise ControlError(f"{self.config.name} is busy with another run ({self._state})", 409)
            if self._errand is not None:
                raise ControlError(f"{self.config.name} is busy measuring itself", 409)
            self._error, self._metrics = None, None
            job = Job(request)
            self._job, self._state, self._last_run = job, "LOADING", request.epoch
        self._jobs.put(job)
        return {}

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        with self._lock:
            job = self._job
            if job is None or job.run != run:
                raise ControlError(f"{self.config.name} takes part in no such run", 409)
        part = job.missing.get(sha256) if job.missing is not None else None
        if part is None:
            raise ControlError("this part was not asked for", 409)
        if n_bytes != part.n_bytes - offset:
            raise ControlError(f"{n_bytes} bytes from {offset} on do not make up part {part.name}", 400)

        def count(n: int) -> None:
            job.touch()
            job.received_bytes += n
            if job.stopped:
                raise ControlError("the run was ended", 409)

        try:
            self._store.receive(part, offset, read, count)
        except MdiError as e:
            if not self._store.partial_bytes(sha256):  # nothing is left to go on with: a full disk, or wrong bytes
                with job.changed:
                    job.failure = e
                    job.changed.notify_all()
            raise
        with job.changed:
            assert job.missing is not None
            job.missing.pop(sha256, None)
            job.changed.notify_all()

    def stop(self, run: str, leave: bool) -> None:
        with self._lock:
            if run != self._last_run:
                raise ControlError(f"{self.config.name} takes part in no such run", 409)
            job, ring = self._job, self._ring
        if job is not None:
            self._end(job, ring)
        if leave:
            self._leave = True
            self._jobs.put(None)

    def profile(self, request: ProfileRequest) -> dict[str, Any]:
        """Measured on the main thread, as a run's stage computes there; runs have to wait for its few seconds."""
        errand = Errand(lambda: self._profile(request))
        with self._lock:
            if self._job is not None:
                raise ControlError(f"{self.config.name} is busy with another run ({self._state})", 409)
            if self._errand is not None or self._leave:
                raise ControlError(f"{self.config.name} is busy measuring itself", 409)
            self._errand = errand
        self._jobs.put(errand)
        return errand.result(PROFILE_S)

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        self.check_echo()
        if not self._probing.acquire(timeout=PROBE_S):
            raise ControlError(f"{self.config.name} is busy reaching another node", 409)
        try:
            return try_node(request).to_json()
        finally:
            self._probing.release()

    def check_echo(self) -> None:
        if self._ring is not None:
            raise ControlError(f"{self.config.name} is busy with another run ({self._state})", 409)

    # The work, on the main thread

    def _profile(self, request: ProfileRequest) -> dict[str, Any]:
        quantize, dtype = self._number_format(request)
        subject = Subject(request.config, request.config_hash, dtype, quantize)
        is_kept = not request.fresh and self._profiler.is_kept(subject)
        try:
            profile = self._profiler.profile(subject, self._store, request.fresh)
        except CheckpointError:
            if self._stage is None:
                raise
            self._stage = self._stage_key = None  # the weights of the last run are in the way
            profile = self._profiler.profile(subject, self._store, request.fresh)
        return {"profile": profile.to_json(), "format": subject.format, "kept": is_kept}

    def _work(self, job: Job) -> None:
        error = None
        try:
            self._serve(job)
        except Abandoned as e:
            logger.info("%s: %s", self.config.name, e)
            error = str(e)
        except RingError as e:
            error = f"the run ended: {e}"
            logger.warning("%s: %s", self.config.name, error)
        except Exception as e:  # whatever it is, this node must be ready for the next run
            error = str(e) if isinstance(e, MdiError) else f"{type(e).__name__}: {e}"
            logger.error("%s: %s", self.config.name, error, exc_info=logger.isEnabledFor(logging.DEBUG))
        with self._lock:
            if self._job is not job:
                return  # given up on meanwhile, in favour of another starter's
            self._job, self._ring = None, None
            self._state, self._error = ("IDLE", error) if error else ("READY", None)
        logger.info("%s waits for the next run", self.config.name)

    def _serve(self, job: Job) -> None:
        self._wait_for_parts(job)
        device, dtype, stage = self._load(job)
        request = job.request
        kv_dtype = choose_kv_dtype(request.kv_dtype, dtype, device)
        check_room(stage, request.max_length, device, kv_dtype)
        stage.prepare(request.max_length, device, kv_dtype)
        is_mapped = dtype == DTYPES.get(request.stored_dtype)
        seat = Seat(
            int(request.epoch, 16),
            request.index,
            request.names,
            request.placement,
            request.next_addr,
            request.next_port,
            request.wire_dtype,
        )
        assert self._listener is not None
        expectation = self._listener.expect(seat.epoch, seat.prev_hello)
        try:
            with self._lock:
                self._state = "READY"
                self._report_caches = lambda: report_caches(stage, kv_dtype, device, self._kv_memory, is_mapped)
            logger.info("%s is ready: blocks %d to %d of %s", seat.name, stage.start, stage.stop - 1, request.model)
            sock = None
            while sock is None:
                job.check()
                sock = expectation.wait(0.5)
        finally:
            self._report_caches = None
            self._listener.forget(expectation)
        # The text of a STOP or ERROR has a byte per column, and a narrow model must not refuse it.
        limits = Limits(max_cols=max(stage.config.n_embd, HANDSHAKE_LIMITS.max_cols))
        pinned = pinned_buffer if device.type == "cuda" else None
        ring = join_ring(sock, seat, request.n_frames or seat.n_nodes, limits, allocate=pinned)
        with self._lock:
            self._ring, self._state = ring, "RUNNING"
        try:
            if job.stopped:
                ring.stop("ended before it began")
            self._run_stage(stage, ring, seat, device, dtype)
        finally:
            ring.close()
            stage.caches.clear()

    def _run_stage(self, stage: Stage, ring: TcpRing, seat: Seat, device: torch.device, dtype: torch.dtype) -> None:
        loop = SecondaryLoop(stage, ring, seat.epoch, seat.index == seat.n_nodes - 1, device, dtype, seat.wire)
        try:
            loop.run()
        except RingError:
            raise
        except Exception as e:
            ring.fail(Fault(seat.name, f"it failed: {type(e).__name__}: {e}", seat.name))
            raise
        except BaseException:  # Ctrl-C and SIGTERM
            ring.fail(Fault(seat.name, "it was told to end", seat.name))
            raise
        finally:
            with self._lock:
                self._metrics = {
                    "peak_rss_bytes": peak_rss_bytes(),
                    "compute_s": loop.compute_s,
                    "wait_s": ring.inbox.wait_s,
                    "send_s": ring.send_s,
                    "bytes_sent": ring.bytes_sent,
                    "frames": ring.n_frames,
                }
            logger.info(
                "%s: %d frames, %.2f s computing, %.2f s waiting",
                seat.name,
                ring.n_frames,
                loop.compute_s,
                ring.inbox.wait_s,
            )

    def _wait_for_parts(self, job: Job) -> None:
        """Find out what is missing (hashing a checkpoint may take a while), and wait until it has come."""
        missing = self._missing(job)
        self._check_memory(job.request)
        self._check_disk(job.request, missing)
        with job.changed:
            job.total_bytes = sum(part.n_bytes for part in missing)
            job.received_bytes = sum(self._store.partial_bytes(part.sha256) for part in missing)
            job.missing = {part.sha256: part for part in missing}
        if missing:
            to_come = job.total_bytes - job.received_bytes
            logger.info("%s gets %.1f MB of weights from its starter", self.config.name, to_come / 1e6)
        next_report = time.monotonic() + 2
        while True:
            with job.changed:
                job.changed.wait_for(lambda: not job.missing or job.stopped or job.failure is not None, 0.5)
            job.check()
            if not job.missing:
                return
            if time.monotonic() > next_report:
                next_report += 2
                logger.info("%s: %.1f of %.1f MB", self.config.name, job.received_bytes / 1e6, job.total_bytes / 1e6)

    def _load(self, job: Job) -> tuple[torch.device, torch.dtype, Stage]:
        """The stage of a run; the one in memory, if it is the same."""
        request = job.request
        device = self._device
        quantize, dtype = self._number_format(request)
        compiled = self._compile or request.compile
        shas = {part.name: part.sha256 for part in request.parts}
        key = (request.config_hash, request.blocks, tuple(shas.values()), dtype, device, compiled, quantize)
        if self._stage is not None and self._stage_key == key:
            return device, dtype, self._stage
        self._stage = self._stage_key = None  # give the memory back before the next one takes it
        stage = Stage(Config(**request.config), *request.blocks)

        def tensors(name: str) -> dict[str, torch.Tensor]:
            job.check()
            source = self._weights
            if source is not None:
                source.release()  # parts are needed one after the other
            if source is not None and name in source.part_names() and source.info(name).sha256 == shas[name]:
                if isinstance(source, ChunkFile) and name not in self._verified:  # its manifest is only a claim
                    source.verify_part(name)
                    self._verified.add(name)
                return source.tensors(name)
            return self._store.tensors(shas[name])

        stage.load(list(shas), tensors, device, dtype, quantizer(quantize, None))
        if compiled:
            stage.compile()
        self._stage, self._stage_key = stage, key
        self._blocks, self._model = request.blocks, request.model
        return device, dtype, stage

    def _number_format(self, request: InitRequest | ProfileRequest) -> tuple[str | None, torch.dtype]:
        """Weight format and dtype that this node computes in."""
        quantize = self._format(request.quantize)
        wished = self._dtype or request.dtype
        return quantize, choose_dtype(wished, request.stored_dtype, self._device, quantize is not None)

    def _format(self, wished: str | None) -> str | None:
        """The weight format of a run: this node's own choice, else the starter's if the device has kernels for it."""
        if self._quantize is not None or wished is None:
            return self._quantize
        try:
            check_format(wished, self._device)
        except UsageError as e:
            logger.warning("%s: %s", self.config.name, e)
            return None
        return wished

    def _missing(self, job: Job) -> list[PartSpec]:
        source, request = self._weights, job.request
        own: set[str] = set()
        if source is not None and source.config_hash == request.config_hash:
            for part in request.parts:
                job.check()
                if part.name in source.part_names():
                    own.add(source.info(part.name).sha256)
        return [p for p in request.parts if p.sha256 not in own and not self._store.has(p.sha256)]

    def _refuse_misfit_chunk(self, request: InitRequest) -> None:
        """A chunk that was named on the command line is a promise; a checkpoint is only a convenience."""
        chunk = self._weights
        if not isinstance(chunk, ChunkFile):
            return
        name = self.config.name
        start, stop = chunk.manifest.blocks
        advice = "start it with the right chunk, or without --chunk to have the weights sent"
        if chunk.config_hash != request.config_hash:
            raise ControlError(
                f"{name} was started with a chunk of {chunk.model}, but this run is of {request.model}: {advice}", 409
            )
        if not (start <= request.blocks[0] and request.blocks[1] <= stop):
            raise ControlError(
                f"{name} was started with a chunk of blocks [{start}, {stop}), but is to hold blocks "
                f"[{request.blocks[0]}, {request.blocks[1]}): {advice}",
                409,
            )

    def _check_disk(self, request: InitRequest, missing: list[PartSpec]) -> None:
        needed = sum(part.n_bytes - self._store.partial_bytes(part.sha256) for part in missing)
        if needed:
            removed = self._store.make_room(needed, {part.sha256 for part in request.parts})
            if removed:
                logger.info("%s removed %.1f MB of weights of earlier runs", self.config.name, removed / 1e6)
        free = self._store.free_bytes()
        if needed > free:
            raise ControlError(
                f"{self.config.name} has {free / 1e6:.0f} MB free on the disk of its cache, but {needed / 1e6:.0f} MB of "
                "weights would come: free some space, or choose another place with --cache-dir",
                507,
            )

    def _check_memory(self, request: InitRequest) -> None:
        """Weights that will not fit are not sent in the first place."""
        quantize, dtype = self._number_format(request)
        needed = held_bytes([part.n_bytes for part in request.parts], request.stored_dtype, dtype, quantize)
        kv_dtype = choose_kv_dtype(request.kv_dtype, dtype, self._device)
        needed += Stage(Config(**request.config), *request.blocks).run_bytes(request.max_length, kv_dtype)
        free = self._profiler.available_bytes()
        if needed > free:
            start, stop = request.blocks
            kind = quantize or str(dtype).removeprefix("torch.")
            raise ControlError(
                f"{self.config.name} has {size(free)} of memory free, but blocks [{start}, {stop}) and the caches of "
                f"one sequence take {size(needed)} in {kind}: give it fewer blocks (--layers, --placement), or use a "
                "smaller format (--quantize, --dtype)",
                507,
            )

    @staticmethod
    def _end(job: Job, ring: TcpRing | None) -> None:
        with job.changed:
            job.stopped = True
            job.changed.notify_all()
        if ring is not None:
            ring.stop("the starter ended the run")
