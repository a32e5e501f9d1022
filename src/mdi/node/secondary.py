"""A secondary node: it waits for a starter, gets weights, runs stages in one ring or several, and waits again.

Each run's life is LOADING -> READY -> RUNNING -> READY; any failure leads to IDLE with the error in its status, never to
a dead or half-configured process. The main thread computes for all rings (`round_robin`); each ring is set up by a thread of
its own (`worker`); HTTP threads only answer questions and begin and end runs.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import mdi
from mdi.cancel import Cancel
from mdi.checkpoint.parts import Part
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weights import WeightSource
from mdi.control.message_server import MessageServer
from mdi.control.messages import (
    COMPILING,
    CONTROL_VERSION,
    ROWS_BYTES,
    BlocksRequest,
    ForwardRequest,
    InitRequest,
    PartSpec,
    ProbeRequest,
    ProfileRequest,
    RowsRequest,
    TensorsRequest,
    ToldRows,
)
from mdi.control.server import ControlServer
from mdi.control.swarm import ModelRequest, SwarmRequest, SwarmTable
from mdi.engine.worker import Backend
from mdi.errors import Code, ControlError, MdiError, NoMemoryError
from mdi.host.device import devices, load_kernels
from mdi.host.resources import device_free_bytes
from mdi.host.threads import computing_threads
from mdi.kernels import library
from mdi.kernels.slices import Slice, SliceTable
from mdi.metrics import peak_rss_bytes
from mdi.net.keys import KeyFile
from mdi.net.listener import RingListener, open_socket
from mdi.net.wire import Frame, FrameType
from mdi.node.forwards import Forwards
from mdi.node.node_weights import NodeWeights
from mdi.node.round_robin import RoundRobin
from mdi.node.runs import Runs
from mdi.node.secondary_status import InTime, RingWatch, run_status, slot_status
from mdi.node.self_measurement import SelfMeasurement
from mdi.node.spare_memory import SpareMemory
from mdi.node.swarm_model import SwarmModel
from mdi.node.worker import RingWorker, Waits
from mdi.placement.profiler import Profiler
from mdi.spec.cluster import NodeConfig
from mdi.spec.options import ANYTHING, Requested, WeightMemory
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec
from mdi.stages.store import Claim, HeldStage, StageBusyError, StageStore, blocks_of_stage
from mdi.stages.trained_tensors import NONE, is_learned, joined_bytes, of_blocks, read_shapes

JOIN_S = 10.0
READY_S = 1.0  # a node that has its stage in memory is, in a few milliseconds

logger = logging.getLogger("mdi")


class SecondaryNode:
    """`open` binds the ports, `run` works until `close` or a `PUT /stop` that ends the process.

    Args:
        config: this node's entry of the nodes file.
        weights: a chunk or checkpoint on this machine, or None; the starter sends missing parts.
        cache_dir: folder for received parts; `cache_bytes` is its limit.
        prefix_dir: folder for prefixes, if they are kept elsewhere.
        asked: the user's choice of what to compute with; next comes the nodes file, then the starter.
        kv_memory: limit for caches in bytes, in the same order; else the free memory.
        family: of the models that it can run; None is litgpt's.
        keys: of the cluster; without them, anybody who reaches the ports can use the node.
        waits: how long it waits.
        spare_bytes: memory that is left to others (SpareMemory); free_bytes: what is free of a device.
    """

    def __init__(
        self,
        config: NodeConfig,
        weights: WeightSource | None,
        cache_dir: Path,
        asked: Requested = ANYTHING,
        kv_memory: int | None = None,
        family: ModelFamily | None = None,
        cache_bytes: int | None = None,
        weight_memory: WeightMemory | None = None,
        keys: KeyFile | None = None,
        waits: Waits | None = None,
        prefix_dir: Path | None = None,
        spare_bytes: int = 0,
        free_bytes: Callable[[str], int] = device_free_bytes,
    ) -> None:
        self.config, self._keys, self.waits = config, keys, waits or Waits()
        self.store, self._prefix_dir = BlockStore(cache_dir, cache_bytes), prefix_dir or cache_dir
        own = asked.over(Requested.of(config))
        self.weights = NodeWeights(
            config.name, weights, self.store, own, family or ModelFamily(), weight_memory or WeightMemory()
        )
        self._begin_s = time.monotonic()
        self.process = secrets.token_hex(8)  # identifies the node, with its name: addresses change
        self.profiler = Profiler(
            config.name, cache_dir, in_use_bytes=lambda device: self.stages.in_use_bytes(device), spare_bytes=spare_bytes
        )  # fmt: skip
        self.stages = StageStore(
            lambda device: self.profiler.available_bytes(device),
            config.kv_memory if kv_memory is None else kv_memory,
            spare_bytes=spare_bytes,
        )
        self._spare = SpareMemory(
            config.name, self.weights.device, spare_bytes, free_bytes, lambda: self.stages.drop_unused()
        )
        self.turns, self.runs = RoundRobin(self.waits.stuck_s), Runs(config.name)
        self._admission = threading.Lock()
        self._measurement = SelfMeasurement(
            config.name, self.profiler, self.weights, self.stages, self.store, self.turns, self.runs, self._admission,
            keys,
        )  # fmt: skip
        self.workers: list[RingWorker] = []
        self.table = SwarmTable()
        self.swarm_model: SwarmModel | None = None  # of whose blocks it holds some for all runs
        self.expected: Mapping[str, PartSpec] = {}  # parts that come for them, by sha256
        self._kernels = threading.Thread(target=load_kernels, name="kernels", daemon=True)
        self._in_time = InTime()
        self._forwards = Forwards(config.name, self.weights.pieces, keys)
        self._deadline: threading.Timer | None = None
        self.listener: RingListener | None = None
        self.control: ControlServer | None = None
        self._messages: MessageServer | None = None
        self.is_leaving = self._closed = False

    def open(self) -> None:
        """Bind both ports; UsageError if that is not possible. Call `close` afterwards in any case."""
        name = self.config.name
        self.weights.check_folder()
        self._spare.start()
        self._kernels.start()
        self._kernels.join(self.waits.kernels_s)
        sock = open_socket(self.config.listen_addr, self.config.port_in, f"{name}'s inference port_in")
        self.listener = RingListener(sock, name, self._keys)
        self._messages = MessageServer(self, self.listener)
        self.control = ControlServer(self, self.config.listen_addr, self.config.port, name, self._keys)
        logger.info(
            "%s waits for its starter on %s:%d (ring port %d, device %s)",
            *(name, self.config.listen_addr, self.control_port, self.ring_port, self.weights.device),
        )

    @property
    def control_port(self) -> int:
        assert self.control is not None
        return self.control.port

    @property
    def ring_port(self) -> int:
        assert self.listener is not None
        return self.listener.port

    def wait_for_kernels(self, cancel: Cancel) -> None:
        """Until they are compiled. Raises the error of `cancel`."""
        while self._kernels.is_alive():
            cancel.wait(0.1)

    def run(self) -> None:
        """Compute for one ring or several, until `close`, or until the node is to leave and the last ring has ended."""
        try:
            self.turns.run()
        except BaseException:  # Ctrl-C and SIGTERM
            self._abort_all("it was asked to end")
            raise

    def close(self) -> None:
        """End the runs that are under way, let `run` return, and give the ports back; harmless if repeated."""
        with self._admission:
            self.is_leaving = True
            if self._closed:
                return
            self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        for worker in self.workers:
            worker.end()
        self.turns.close()
        self._spare.close()
        if self.control is not None:
            self.control.close()
        if self._messages is not None:
            self._messages.close()
        for worker in self.workers:
            worker.join(JOIN_S)
        if not any(worker.is_alive for worker in self.workers):
            self.stages.close()
        if self.listener is not None:
            self.listener.close()

    # Leaving

    @property
    def may_hand_over(self) -> bool:
        """Whether `leave` would have something to do."""
        return not self.is_leaving and any(one.is_running and one.request.hand_over for one in self.runs.active)

    def leave(self) -> None:
        """Move the blocks to other nodes, and let `run` return then, or after some time."""
        with self._admission:
            if not self.may_hand_over:
                return
            self.is_leaving = True
        logger.info(
            "%s is leaving; it waits at most %.0f s until other nodes have its blocks",
            self.config.name,
            self.waits.hand_over_s,
        )
        for worker in self.runs.active:
            if worker.is_running and worker.request.hand_over:
                worker.announce_leave()
            else:
                worker.quit("it was asked to end")
        self._deadline = threading.Timer(
            self.waits.hand_over_s, self._abort_all, ("its blocks were not taken over in time",)
        )
        self._deadline.daemon = True
        self._deadline.start()
        self._leave_if_idle()

    def _abort_all(self, reason: str) -> None:
        for worker in self.runs.active:
            worker.quit(reason)

    def _leave_if_idle(self) -> None:
        """Called after the end of each ring, and when the node is to leave."""
        if self.is_leaving and not self.runs.active:
            self.turns.close()

    # Called by the servers of both ports, in their threads

    def status(self, run: str | None) -> dict[str, Any]:
        """The status of a run or of the node. Nothing slow is in it: a node that does not answer counts as dead."""
        device, latest = self.weights.device, self.stages.latest
        found = self._run_status(run)
        is_compiling = self._kernels.is_alive()  # asked last, so that nothing is left out if the state is not COMPILING
        return {
            **found,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "arithmetic": None if is_compiling else library.arithmetic(),
            "kernels": "compiling" if is_compiling else library.instruction_set(),
            "leaving": self.is_leaving,
            "model": latest.spec.model.name if latest is not None else None,
            "blocks": latest.spec.blocks if latest is not None else None,
            "device": str(device),
            "devices": None if is_compiling else devices(),
            "own": {"device": self.weights.own.device, "threads": self.weights.own.threads},
            "memory": {
                "rss_bytes": psutil.Process().memory_info().rss,
                "peak_rss_bytes": peak_rss_bytes(),
                "available_bytes": self.profiler.offered_bytes(device),
                **self._spare.status(),
            },
            "disk_free_bytes": self._in_time.ask("disk", self.store.free_bytes),
            "clock_s": time.time(),
            "up_s": round(time.monotonic() - self._begin_s, 1),
            "timer_s": time.perf_counter(),
            "measuring": self.profiler.progress,
            "slots": [slot_status(held, self.runs.find(held.run), run, self.process) for held in self.stages.listed],
        }

    def _run_status(self, run: str | None) -> dict[str, Any]:
        """The fields that a starter needs, as `/init` answers them; nothing slow is among them."""
        own = self.runs.find(run)
        if own is not None and not own.has_ended.is_set():
            own.cancel.touch()
        return self.status_of(own or self.runs.latest, own is not None)

    def status_of(self, worker: RingWorker | None, is_known: bool) -> dict[str, Any]:
        """The fields of `GET /status`, and of what is pushed to the starter; `is_known`: `worker` is of the run that asks."""
        return {
            "name": self.config.name,
            "process": self.process,
            "ring_port": self.listener.port if self.listener is not None else None,
            **run_status(worker, is_known, self.store, self._in_time),
            **({"state": COMPILING} if self._kernels.is_alive() and self.runs.latest is None else {}),
        }

    def init(self, request: InitRequest) -> dict[str, Any]:
        self.weights.family.check(request)
        self.weights.refuse_misfit_chunk(request)
        spec = self.weights.spec(request)
        with self._admission:
            if self.is_leaving:
                raise ControlError(f"{self.config.name} is ending", 503, code=Code.LEAVING)
            if self.turns.is_stuck:
                raise ControlError(
                    f"{self.config.name} lives, but its computing does not go on: check its disk, and start it again", 503,
                    code=Code.STUCK,
                )  # fmt: skip
            self._measurement.check_idle()
            if not self.runs.admit(request):
                return self._run_status(request.run)
            held = self._reserve(request, spec)
            is_in_memory = held.stage is not None
            worker = self._serve(request, held)
        if is_in_memory:  # it is READY in a moment, and its starter need not ask again: texts may be waiting
            worker.wait_until_known(READY_S)
        return self._run_status(request.run)

    def _reserve(self, request: InitRequest, spec: StageSpec) -> HeldStage:
        """The place of a stage. Raises ControlError."""
        # Of rows that come, and of those that are sent.
        widest = max(request.model.spec.row_at(cut).width for cut in request.blocks)
        rows = request.extent.row_bytes(widest, request.replay_bytes)
        claim = Claim(
            request.run, request.epoch, request.keep_caches, rows, request.cache_share,
            request.keeps_received,
        )  # fmt: skip
        try:
            return self.stages.reserve(spec, claim, self.weights.family)
        except NoMemoryError as e:
            raise ControlError(str(e), 507, code=e.code) from None
        except StageBusyError as e:
            raise ControlError(str(e), 409, code=e.code) from None
        except MdiError:
            raise
        except Exception as e:  # a config that makes no sense for the models of this node
            raise ControlError(
                f"{self.config.name} cannot run this model: {type(e).__name__}: {e}", 409, code=Code.USAGE
            ) from None

    def _serve(self, request: InitRequest, held: HeldStage) -> RingWorker:
        assert self.listener is not None
        worker = RingWorker(
            self.config.name, self.process, request, held, self.weights, self.stages, self.turns, self.listener,
            self.waits.lease_s, self._leave_if_idle, self._prefix_dir,
        )  # fmt: skip
        self.runs.add(worker)
        self.workers = [*(one for one in self.workers if one.is_alive), worker]
        try:
            worker.start()
        except RuntimeError as e:  # no thread can be had at the moment
            error = ControlError(f"{self.config.name} cannot begin a ring now: {e}", 503, code=Code.BUSY)
            self.stages.release(held, request.epoch)
            worker.finish(error)
            raise error from None
        return worker

    def watch(self, run: str, epoch: str | None) -> RingWatch:
        worker = self.runs.find(run, epoch)
        if worker is None:
            raise self._unknown_run()
        return RingWatch(worker, lambda: self.status_of(worker, True))

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        rings = self.runs.active_of(run)
        if not rings and run == self.process and (own := self.expected.get(sha256)) is not None:
            self._check_rest(own, offset, n_bytes)
            return self.store.receive(own, offset, read)
        if not rings:
            raise self._unknown_run()
        worker = next((one for one in rings if one.missing and sha256 in one.missing), rings[-1])
        part = worker.missing.get(sha256) if worker.missing is not None else None
        if part is None:
            is_here = any(part.sha256 == sha256 for part in worker.request.parts)
            raise ControlError("this part is not missing (any more)", 409, code=Code.BUSY if is_here else Code.CONTROL)
        self._check_rest(part, offset, n_bytes)

        def count(n: int) -> None:
            worker.cancel.touch()
            worker.received_bytes += n
            if worker.is_stopped:
                raise ControlError("the run was ended", 409, code=Code.RUN)

        try:
            self.store.receive(part, offset, read, count)
        except MdiError as e:
            if e.code.again:
                if self.store.has(sha256):
                    self._note_part(sha256)
            elif not self.store.partial_bytes(sha256):  # nothing to resume: a full disk, or wrong bytes
                worker.fail(e)
            raise
        self._note_part(sha256)

    @staticmethod
    def _check_rest(part: Part, offset: int, n_bytes: int) -> None:
        if n_bytes != part.n_bytes - offset:
            raise ControlError(f"{n_bytes} bytes from {offset} on do not make up part {part.name}", 400)

    def rows(self, request: RowsRequest) -> dict[str, Any]:
        worker = self.runs.find(request.run, request.epoch)
        if worker is None or worker.ring is None:
            raise self._unknown_run()
        held = worker.held
        kept = held.sent if request.which == "sent" else held.received
        if kept is None:
            raise ControlError(f"{self.config.name} keeps no rows that it has {request.which}", 409, code=Code.RUN)
        part = Slice(request.seq_id, request.start, request.stop - request.start, 0)
        found = kept.fill(Frame(FrameType.BATCH, 0, slices=SliceTable([part])))
        data = bytes(found.payload)
        if request.is_whole and len(data) > ROWS_BYTES:
            raise ControlError(f"{len(data)} bytes of rows; an answer has at most {ROWS_BYTES}", 413)
        told = base64.b64encode(data).decode() if request.is_whole else None
        sha256, arithmetic = hashlib.sha256(data).hexdigest(), held.spec.arithmetic
        return ToldRows(found.dtype, found.n_cols, sha256, arithmetic, told).to_json()

    def _note_part(self, sha256: str) -> None:
        """A part has come, for one ring: another one may wait for it, too."""
        for worker in self.runs.active:
            worker.note_part(sha256)

    def forward(self, request: ForwardRequest) -> None:
        is_known = self.runs.find(request.run) is not None or request.run == self._measurement.planned_run
        if not is_known and request.run not in self.table.versions:  # of a standing node, the number of its process
            raise self._unknown_run()
        self._forwards.send(request)

    def compute_blocks(
        self, request: BlocksRequest, n_bytes: int, read: Callable[[int], bytes], sign: Callable[[], None]
    ) -> memoryview:
        worker, stage = self._computing(request.run, request.blocks)
        start, stop = request.blocks
        shape = request.n_texts, request.n_tokens, worker.request.model.spec.width
        n_rows = 4 * math.prod(shape) * (1 + request.is_backward)
        if request.n_tokens > worker.request.extent.max_length or n_bytes != n_rows:
            raise ControlError(f"{n_bytes} bytes are not {request.n_texts} texts of {request.n_tokens} tokens", 400)
        blocks, trained = blocks_of_stage(stage, sign), NONE
        if request.tensors is not None:
            found = worker.tensors.use(request.tensors)
            if found is None:
                raise ControlError(f"{self.config.name} does not have these tensors (any more)", 409, code=Code.TENSORS)
            trained = of_blocks(found, start, stop)
        x, *gradients = _floats(read, n_rows).reshape(-1, *shape)
        with computing_threads(worker.held.spec.computing.threads):
            if not gradients:
                return joined_bytes([blocks.forward(x, start, stop, trained)])
            dx, learned = blocks.backward(x, gradients[0], start, stop, trained)
        return joined_bytes([dx, *(learned[name] for name in trained if is_learned(name))])

    def take_tensors(self, request: TensorsRequest, n_bytes: int, read: Callable[[int], bytes]) -> None:
        worker, _ = self._computing(request.run, request.blocks)
        if n_bytes < request.header_bytes:
            raise ControlError(f"{n_bytes} bytes have no header of {request.header_bytes}", 400)
        header = _bytes_of(read, request.header_bytes)
        shapes = read_shapes(header, worker.request.model.config, *request.blocks)
        if n_bytes != request.header_bytes + 4 * sum(map(math.prod, shapes.values())):
            raise ControlError(f"{n_bytes} bytes are not these tensors", 400)
        sha256, trained = hashlib.sha256(header), dict[str, np.ndarray]()
        for name, shape in shapes.items():
            numbers = _floats(read, 4 * math.prod(shape))
            sha256.update(numbers.data)
            trained[name] = numbers.reshape(shape)
        if sha256.hexdigest() != request.sha256:
            raise ControlError("the tensors do not have the hash that was announced", 400)
        worker.tensors.put(request.sha256, trained)

    def _computing(self, run: str, blocks: tuple[int, int]) -> tuple[RingWorker, Backend]:
        """The ring and the stage that has these blocks. Raises ControlError."""
        worker = self.runs.find(run)
        stage = None if worker is None or worker.has_ended.is_set() else worker.held.stage
        if worker is None or stage is None:
            raise self._unknown_run()
        if not stage.start <= blocks[0] < blocks[1] <= stage.stop:
            raise ControlError(f"{self.config.name} has other blocks in this run", 409, code=Code.RUN)
        return worker, stage

    def stop(self, run: str, leave: bool, ring: str | None = None) -> None:
        if ring is not None:
            return self.runs.stop_ring(run, ring)
        if not self.runs.stop(run) and (run != self._measurement.planned_run or self.runs.active):
            raise self._unknown_run()
        if leave:
            self.is_leaving = True
            self._leave_if_idle()

    def _unknown_run(self) -> ControlError:
        return ControlError(f"{self.config.name} does not take part in this run", 409, code=Code.RUN)

    def profile(self, request: ProfileRequest, note: Callable[[Any], None] = lambda what: None) -> dict[str, Any]:
        return self._measurement.profile(request, note)

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        return self._measurement.probe(request)

    def swarm(self, request: SwarmRequest) -> dict[str, Any]:
        return self.table.answer(request)

    def model(self, request: ModelRequest) -> dict[str, Any]:
        model = self.swarm_model
        if model is None or model.weights != request.weights:
            raise ControlError(f"{self.config.name} holds no blocks of this model", 404, code=Code.WEIGHTS)
        return model.told(request.parts).to_json()

    def check_echo(self) -> None:
        self._measurement.check_echo()


def _bytes_of(read: Callable[[int], bytes], n_bytes: int) -> bytearray:
    data = bytearray()
    while len(data) < n_bytes:
        if not (piece := read(n_bytes - len(data))):
            raise ControlError("the bytes were cut off", 400)
        data += piece
    return data


def _floats(read: Callable[[int], bytes], n_bytes: int) -> np.ndarray:
    """float32 numbers of `n_bytes` that come."""
    return np.frombuffer(_bytes_of(read, n_bytes), dtype="<f4")
