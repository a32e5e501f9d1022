"""A secondary node: waits to be configured, takes its weights, runs its stage in the ring, and waits again.

Its life is IDLE -> LOADING -> READY -> RUNNING -> READY ...; any failure leads to IDLE with the error in its status, never to
a dead or half-configured process. The main thread does the work; HTTP threads only hand it a job and answer questions.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import mdi
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weights import WeightSource
from mdi.config import NodeConfig, WeightMemory
from mdi.control.messages import CONTROL_VERSION, InitRequest, ProbeRequest, ProfileRequest
from mdi.control.reach import try_node
from mdi.control.server import ControlServer
from mdi.errors import CheckpointError, ControlError, MdiError, MemoryShortError, RingError
from mdi.kernels import library
from mdi.machine.device import devices
from mdi.machine.threads import computing_threads, n_threads
from mdi.measure.profiler import Profiler, share_of
from mdi.measure.profiling import Subject
from mdi.metrics import peak_rss_bytes
from mdi.net.listener import RingListener, open_socket
from mdi.node.job import Abandoned, Job
from mdi.node.main_thread_task import MainThreadTask
from mdi.node.model_family import ModelFamily
from mdi.node.service import Service
from mdi.node.stage_holder import StageHolder
from mdi.security.keys import KeyFile

PROFILE_S, PROBE_S = 170.0, 25.0
N_PROBES = 16

logger = logging.getLogger("mdi")


class SecondaryNode:
    """See the module. `open` binds the ports, `run` works until `close` or a `PUT /stop` that ends the process.

    Args:
        config: this node's entry of the nodes file.
        weights: a chunk or checkpoint on this machine, or None; what it lacks comes from the starter.
        cache_dir: where parts that were received are kept; with `cache_bytes`, no more than so many bytes of them.
        device, dtype, quantize: what the user asked for; None leaves it to the nodes file, then to the starter.
        kv_memory: bytes that caches may take, in the same way; else it is what is free.
        family: of the models that it can run; None is litgpt's.
        threads: that this process was told to compute with; None leaves it to the starter.
        keys: of the cluster; without, whoever reaches the ports can use the node.
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
        family: ModelFamily | None = None,
        cache_bytes: int | None = None,
        threads: int | None = None,
        weight_memory: WeightMemory | None = None,
        keys: KeyFile | None = None,
    ) -> None:
        self.config, self._keys = config, keys
        self._store = BlockStore(cache_dir, cache_bytes)
        self._stages = StageHolder(
            config.name,
            weights,
            self._store,
            device or config.device,
            dtype or config.dtype,
            quantize,
            config.threads if threads is None else threads,
            compile_stage,
            family or ModelFamily(),
            weight_memory or WeightMemory(),
        )
        self._kv_memory = config.kv_memory if kv_memory is None else kv_memory
        self._begin_s = time.monotonic()
        self.process = secrets.token_hex(8)  # with the name, who this is: addresses change
        self._profiler = Profiler(config.name, cache_dir)
        self._probes = threading.BoundedSemaphore(N_PROBES)  # the one that is made, and those that wait for it
        self._lock, self._probing = threading.Lock(), threading.Lock()
        self._jobs: queue.Queue[Job | MainThreadTask | None] = queue.Queue()
        self._job: Job | None = None
        self._last: Job | None = None  # the one that there is, or was
        self._task: MainThreadTask | None = None
        self._planned_run: str | None = None  # that it was measured for last, and may get no part in
        self._state = "IDLE"  # while there is none
        self._error: str | None = None
        self._error_code: str | None = None
        self._listener: RingListener | None = None
        self._control: ControlServer | None = None
        self._leave = self._closed = False

    def open(self) -> None:
        """Bind both ports; UsageError if that is not possible. In any case, `close` is to be called afterwards."""
        name = self.config.name
        self._stages.check_folder()
        sock = open_socket(self.config.listen_addr, self.config.port_in, f"{name}'s inference port_in")
        self._listener = RingListener(sock, name, self._keys)
        self._control = ControlServer(self, self.config.listen_addr, self.config.port, name, self._keys)
        logger.info(
            "%s waits for its starter on %s:%d (ring port %d, device %s)",
            *(name, self.config.listen_addr, self.control_port, self.ring_port, self._stages.device),
        )

    @property
    def control_port(self) -> int:
        assert self._control is not None
        return self._control.port

    @property
    def ring_port(self) -> int:
        assert self._listener is not None
        return self._listener.port

    def run(self) -> None:
        """Work on one run after the other; afterwards nothing of them is in memory."""
        try:
            while not self._leave and (job := self._jobs.get()) is not None:
                if isinstance(job, MainThreadTask):
                    job.run()
                    with self._lock:
                        self._task = None
                else:
                    self._work(job)
        finally:
            self._stages.drop_stage()

    def close(self) -> None:
        """End a run that is under way, let `run` return, and give the ports back; harmless if repeated."""
        self._leave = True
        with self._lock:
            if self._closed:
                return
            self._closed = True
            job, task = self._job, self._task
        if job is not None:
            job.end()
        if task is not None:
            task.drop(ControlError(f"{self.config.name} is ending", 503, code="leaving"))
        self._jobs.put(None)
        if self._control is not None:
            self._control.close()
        if self._listener is not None:
            self._listener.close()

    # What the control server calls, from its threads

    def status(self, run: str | None) -> dict[str, Any]:
        with self._lock:
            job, last = self._job, self._last
            if job is not None and run == job.run:
                job.touch()
            state, error, error_code = self._state_now, self._error, self._error_code
            known = last if last is not None and run == last.run else None
            report_caches = known.report_caches if known is not None else None
            measure = known.measure if known is not None else None
        return {
            "name": self.config.name,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "process": self.process,
            "arithmetic": library.arithmetic(),
            "state": state,
            "error": error,
            "error_code": error_code,
            "model": self._stages.model,
            "blocks": self._stages.blocks,
            "device": str(self._stages.device),
            "devices": devices(),
            "own": self._stages.own,
            "memory": {
                "rss_bytes": psutil.Process().memory_info().rss,
                "peak_rss_bytes": peak_rss_bytes(),
                "available_bytes": self._profiler.available_bytes(self._stages.device),
            },
            "disk_free_bytes": self._store.free_bytes(),
            "ring_port": self._listener.port if self._listener is not None else None,
            "clock_s": time.time(),
            "up_s": round(time.monotonic() - self._begin_s, 1),
            "timer_s": time.perf_counter(),
            "measuring": self._profiler.progress,
            "progress": {"bytes": job.received_bytes, "total_bytes": job.total_bytes} if job else None,
            "looking": job.looking if job else None,
            "loading": job.loading if job else None,
            # Only who knows the run's id is told more about it: the id is what /stop asks for.
            "missing": self._missing_of(job) if job and known else None,
            "metrics": known.metrics if known else None,
            "measured": measure() if measure is not None else None,
            "caches": report_caches().to_json() if report_caches is not None else None,
        }

    @property
    def _state_now(self) -> str:
        return self._job.state if self._job is not None else self._state

    def _missing_of(self, job: Job) -> list[dict[str, Any]] | None:
        """What the starter has to send, and how much of it is here from an earlier try; None until it is known."""
        missing = job.missing
        if missing is None:
            return None
        return [{"sha256": p.sha256, "have_bytes": self._store.partial_bytes(p.sha256)} for p in list(missing.values())]

    def init(self, request: InitRequest) -> dict[str, Any]:
        self._stages.family.check(request)
        self._stages.refuse_misfit_chunk(request)
        computing = self._stages.computing(request)
        with self._lock:
            if self._job is not None and (self._job.is_running or not self._job.is_abandoned):
                raise ControlError(self._busy, 409, code="busy")
            if self._task is not None:
                raise ControlError(f"{self.config.name} is busy measuring itself", 409, code="busy")
            self._error = self._error_code = None
            self._job = self._last = job = Job(request, computing)
        self._jobs.put(job)
        return {}

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        with self._lock:
            job = self._job
            if job is None or job.run != run:
                raise ControlError(f"{self.config.name} takes part in no such run", 409, code="run")
        part = job.missing.get(sha256) if job.missing is not None else None
        if part is None:
            raise ControlError("this part was not asked for", 409)
        if n_bytes != part.n_bytes - offset:
            raise ControlError(f"{n_bytes} bytes from {offset} on do not make up part {part.name}", 400)

        def count(n: int) -> None:
            job.touch()
            job.received_bytes += n
            if job.stopped:
                raise ControlError("the run was ended", 409, code="run")

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
            job, last = self._job, self._last
            is_known = last is not None and run == last.run
            if not is_known and (run != self._planned_run or job is not None):
                raise ControlError(f"{self.config.name} takes part in no such run", 409, code="run")
        if job is not None:
            job.end()
        if leave:
            self._leave = True
            self._jobs.put(None)

    def profile(self, request: ProfileRequest) -> dict[str, Any]:
        """Measured on the main thread, as a run's stage computes there; runs have to wait for its few seconds."""
        task = MainThreadTask(lambda check: self._profile(request, check))
        with self._lock:
            if self._job is not None:
                raise ControlError(self._busy, 409, code="busy")
            if self._task is not None or self._leave:
                raise ControlError(f"{self.config.name} is busy measuring itself", 409, code="busy")
            self._task = task
            self._planned_run = request.run
        self._jobs.put(task)
        return task.result(PROFILE_S)

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        self.check_echo()
        busy = ControlError(f"{self.config.name} is busy reaching another node", 409, code="busy")
        if not self._probes.acquire(blocking=False):
            raise busy
        try:
            if not self._probing.acquire(timeout=PROBE_S):
                raise busy
            try:
                return try_node(request, keys=self._keys).to_json()
            finally:
                self._probing.release()
        finally:
            self._probes.release()

    def check_echo(self) -> None:
        job = self._job
        if job is not None and job.is_running:
            raise ControlError(self._busy, 409, code="busy")

    @property
    def _busy(self) -> str:
        return f"{self.config.name} is busy with another run ({self._state_now})"

    # The work, on the main thread

    def _profile(self, request: ProfileRequest, check: Callable[[], None]) -> dict[str, Any]:
        computing = self._stages.computing(request)
        subject = Subject(request.config, request.config_hash, computing)
        if request.slots is not None:
            return {"machine_share": share_of(subject, request.slots)}
        is_kept = not request.fresh and self._profiler.is_kept(subject)
        try:
            profile = self._profiler.profile(subject, self._store, request.fresh, check)
        except (CheckpointError, MemoryShortError):
            if not self._stages.drop_stage():  # the weights of the last run were in the way
                raise
            profile = self._profiler.profile(subject, self._store, request.fresh, check)
        with computing_threads(computing.threads):
            threads = n_threads()
        return {"profile": profile.to_json(), "format": subject.computing.format, "threads": threads, "kept": is_kept}

    def _work(self, job: Job) -> None:
        assert self._listener is not None
        name, free_bytes = self.config.name, self._profiler.available_bytes
        error = code = None
        try:
            Service(name, self.process, job, self._stages, self._listener, free_bytes, self._kv_memory).run()
        except Abandoned as e:
            logger.info("%s: %s", name, e)
            error, code = str(e), e.code
        except RingError as e:
            error, code = f"the run ended: {e}", e.code
            logger.warning("%s: %s", name, error)
        except Exception as e:  # whatever it is, this node must be ready for the next run
            error, code = (str(e), e.code) if isinstance(e, MdiError) else (f"{type(e).__name__}: {e}", MdiError.code)
            if isinstance(e, MemoryError):
                error, code = "it ran out of memory", "memory"
            logger.error("%s: %s", name, error, exc_info=logger.isEnabledFor(logging.DEBUG))
        with self._lock:
            if self._job is not job:
                return  # given up on meanwhile, in favour of another starter's
            self._job = None
            job.detach()
            self._state, self._error, self._error_code = ("IDLE", error, code) if error else ("READY", None, None)
        logger.info("%s waits for the next run", name)
