"""The rings of one run as its starter forms them: a first one, and another each time that nodes are lost or moved."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mdi.config import ClusterConfig
from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.control.messages import ProfileRequest
from mdi.control.reach_node import reach_node
from mdi.errors import MdiError, NodeLostError, UsageError
from mdi.kernels import library
from mdi.kernels.kernel_stage import WeightUse
from mdi.machine.computing import Computing
from mdi.measure.planning import profile_request
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, Seat, TcpRing
from mdi.node.cache_budget import SharedCaches
from mdi.node.forming import form_ring
from mdi.node.identity import numbers_of
from mdi.node.model_family import ModelFamily
from mdi.node.own_stage import OwnStage
from mdi.node.part_sending import Holders
from mdi.node.placing import model_of
from mdi.node.preparation import Preparation
from mdi.node.starter_weights import StarterWeights
from mdi.node.teardown import dismiss
from mdi.spec.options import StarterOptions

REACH_S = 2.0  # a node that takes another's place has just answered
# Errors for which other nodes may replace a node in the first ring; the user must mend all others.
ENDED = ("left", "leaving", "disk")

logger = logging.getLogger("mdi")

Measured = tuple[float, float, int, int]
MakeOwn = Callable[[ClusterConfig, Mapping[str, str]], tuple[ClusterConfig, OwnStage]]


@dataclass(frozen=True)
class RunBasis:
    """What all rings of a run have in common; see Preparation.

    Attributes:
        process: a number that the starter's process drew.
        listener: the starter's ring port; None in a ring of one node.
        caches: of all runs of this process.
        make_own: where the starter's own stage is not just its blocks: gives that, and the nodes in another order, for nodes
            and, by the names of the secondaries, the numbers that their processes drew.
    """

    family: ModelFamily
    config: Any
    options: StarterOptions
    computing: Computing
    weights: StarterWeights
    max_length: int
    n_sequences: int
    process: str
    listener: RingListener | None
    caches: SharedCaches
    make_own: MakeOwn | None = None


class RunRings:
    """See the module.

    Args:
        run: id of the run, and of its first ring; each further ring draws an epoch of its own.

    Attributes:
        cluster, clients: of the nodes of the ring that was prepared last.
        ring: that is closed; None before and after.
        preparation: of the ring that was formed last.
        processes: of the secondaries that were reached for that ring or the next one, the numbers that their processes drew.
    """

    def __init__(self, basis: RunBasis, cluster: ClusterConfig, run: int) -> None:
        self.basis = basis
        self._run = self._epoch = run
        self.cluster = cluster
        self.clients: list[ControlClient] = []
        self.ring: LoopbackRing | TcpRing | None = None
        self.preparation: Preparation | None = None
        self.processes: Mapping[str, str] = {}
        self._have: dict[str, set[str]] = {}  # the sha256 of parts that each node has had, by its name
        self._arithmetic: dict[str, str] = {}
        self._is_configured = False
        self._is_first = True
        self._n_rings = 0  # that were prepared
        self._closing: list[tuple[threading.Thread, LoopbackRing | TcpRing]] = []
        self._past: Measured = (0.0, 0.0, 0, 0)  # of rings that are closed, whose buffers are gone with them
        self._lock = threading.Lock()  # of these two

    @property
    def run(self) -> str:
        """Id of the run, as its nodes know it."""
        return f"{self._run:016x}"

    @property
    def format(self) -> str:
        """What blocks are held in."""
        return self.basis.computing.format

    @property
    def kv_dtype(self) -> str:
        """What caches hold."""
        return self.basis.computing.kv_dtype

    @property
    def profile_request(self) -> ProfileRequest:
        """How a node is to measure itself with this run's model."""
        weights, computing = self.basis.weights, self.basis.computing
        return profile_request(model_of(weights), computing, self.basis.options, run=self.run)

    @property
    def n_layer(self) -> int:
        return self.basis.weights.n_layer

    @property
    def max_length(self) -> int:
        """Tokens that the longest text of the run can reach."""
        return self.basis.max_length

    @property
    def is_open(self) -> bool:
        """Whether nodes know the run but not its end."""
        return self.ring is not None or self._is_configured

    @property
    def leaving(self) -> Sequence[str]:
        """Nodes of the ring that are about to end, and compute until their blocks are elsewhere."""
        ring = self.ring  # read once: the engine's thread may close it meanwhile
        return ring.leaving if isinstance(ring, TcpRing) else ()

    def prepare(
        self, check: Callable[[], None], replays: Mapping[str, str] | None = None, beside: Sequence[ControlClient] = ()
    ) -> Preparation:
        """Get all nodes of `cluster` ready, with the cut that the weights have; `replays` as for Preparation.

        Args:
            beside: nodes that are not in the ring, and are there: they may have parts.

        Raises:
            MdiError: a node is not there or cannot.
        """
        basis = self.basis
        options = basis.options if self._is_first else replace(basis.options, wait_s=REACH_S)
        ids = (self.run, f"{self._epoch:016x}")
        port = None if basis.listener is None else basis.listener.port
        self.clients = [ControlClient(node, self.cluster.keys) for node in self.cluster.secondaries]
        own = self.own
        if basis.make_own is not None:  # every set of nodes has different shares
            self.cluster, own = basis.make_own(self.cluster, self._ask_processes(options.wait_s, check))
            self.clients = [ControlClient(node, self.cluster.keys) for node in self.cluster.secondaries]
            if self.own not in (None, own):
                self.own.drop()
        elif own is None:
            own = OwnStage(self.cluster.starter.name, basis.family, basis.config, basis.options, basis.caches)
        self._n_rings += 1
        preparation = Preparation(
            basis.family, basis.config, self.cluster, self.clients, options, basis.computing, basis.weights, ids, port,
            basis.max_length, basis.n_sequences, self.preparation, own, replays, self._holders(beside),
            self._n_rings,
        )  # fmt: skip
        try:
            preparation.run(check)
        except BaseException as e:
            if own is not self.own:
                own.drop()
            raise self._named(e, preparation.failed) if isinstance(e, MdiError) else e from None
        finally:
            self._is_configured = self._is_configured or preparation.has_begun
            if self.preparation is None:
                self.processes = preparation.processes
        self.preparation, self.processes = preparation, preparation.processes
        self._arithmetic.update(preparation.arithmetic)
        for name, parts in preparation.parts.items():
            self._have.setdefault(name, set()).update(part.sha256 for part in parts)
        return preparation

    def _holders(self, beside: Sequence[ControlClient]) -> Holders:
        """Nodes of the ring, and beside it, that may have parts."""
        known: dict[str, list[ControlClient]] = {}
        for client in (*self.clients, *beside):
            for sha256 in self._have.get(client.node.name, ()):
                known.setdefault(sha256, []).append(client)
        return Holders(known, beside)

    def _ask_processes(self, wait_s: float, check: Callable[[], None]) -> dict[str, str]:
        """By name of each secondary, the number that its process drew. Raises MdiError, as `reach_node`."""
        is_off = threading.Event()
        try:
            asked = FanOut({
                client.node.name: partial(reach_node, client, wait_s, is_off) for client in self.clients
            })  # fmt: skip
            found = asked.wait(check)
        finally:
            is_off.set()
        return {
            client.node.name: str(status.get("process", "")) for client, status in zip(self.clients, found, strict=True)
        }

    def _named(self, error: MdiError, failed: str | None) -> MdiError:
        """The error with the node that it is about, so that another ring can be formed without it."""
        if isinstance(error, NodeLostError) or (self._is_first and error.code not in ENDED):
            return error
        if failed is None and isinstance(error, UsageError):  # this node's own memory
            return NodeLostError(self.cluster.starter.name, str(error), "memory")
        return error if failed is None else NodeLostError(failed, str(error), error.code)

    def form(self) -> LoopbackRing | TcpRing:
        """Close the ring that was prepared. Raises NodeLostError, RingError."""
        basis, cluster, preparation = self.basis, self.cluster, self.preparation
        assert preparation is not None
        names = tuple(node.name for node in cluster.nodes)
        following = cluster.nodes[1 % cluster.n_nodes]
        seat = Seat(
            self._epoch, 0, names, preparation.placement, following.addr, following.port_in, basis.options.wire_dtype,
            basis.process, cluster.keys, basis.options.silence_s,
        )  # fmt: skip
        preparation.own.expect(basis.listener, self._epoch, preparation.placement, basis.process)
        self.ring = form_ring(
            basis.listener, cluster, seat, basis.options.n_frames or cluster.n_nodes,
            basis.family.widest_row(basis.config), basis.computing.device, preparation.ring_ports,
        )  # fmt: skip
        return preparation.own.over(self.ring)

    def prepare_another(
        self, cluster: ClusterConfig, check: Callable[[], None], replays: Mapping[str, str] | None,
        beside: Sequence[ControlClient],
    ) -> Preparation:  # fmt: skip
        """After one that broke, get these nodes ready for another ring, with the cut that the weights have.

        Raises:
            NodeLostError: names the node that was in the way; MdiError: it cannot be done.
        """
        self._is_first = False
        self._close(is_awaited=False)  # a node that is silent would hold it up
        self._epoch = secrets.randbits(64)
        self.cluster = cluster
        return self.prepare(check, replays, beside)

    def end(self, leave: bool, patient: bool) -> list[dict[str, Any]]:
        """End the run on all nodes; what each secondary measured, {} where that is not known.

        Args:
            leave: end their processes as well.
            patient: wait until they have noticed the end.
        """
        self._close()
        if not self._is_configured:
            return []
        self._is_configured = False
        return dismiss(self.clients, self.run, leave, patient)

    def measured(self) -> Measured:
        """wait_s, send_s, bytes_sent and frames of NodeMetrics, of all rings so far; from any thread."""
        with self._lock:
            for closer, ring in self._closing:
                if not closer.is_alive():
                    self._past = _sum(self._past, _measured_of(ring))
            self._closing = [(closer, ring) for closer, ring in self._closing if closer.is_alive()]
            found, present = self._past, self.ring
            for ring in (*(ring for _, ring in self._closing), *(() if present is None else (present,))):
                found = _sum(found, _measured_of(ring))
            return found

    @property
    def weight_use(self) -> WeightUse:
        """What the starter's own stage has read."""
        return WeightUse(0, 0, 0.0) if self.preparation is None else self.preparation.own.weight_use

    @property
    def is_shared(self) -> bool:
        """Whether all nodes compute every block together."""
        return self.own is not None and self.own.is_shared

    @property
    def numbers(self) -> str:
        """See `numbers_of`: of the ring that was prepared last."""
        own, basis, names = self.own, self.basis, [node.name for node in self.cluster.nodes]
        assert own is not None
        computing = basis.computing
        ours = library.arithmetic() if computing.packing is not None else "torch"
        arithmetic = {**self._arithmetic, names[0]: ours if computing.device == "cpu" else computing.device}
        shares = [own.share_of(index) for index in range(len(names))]
        config = basis.family.kernel_config(basis.weights.config)
        return numbers_of(
            basis.weights.blocks, names, shares, arithmetic, computing, basis.options, self._epoch, config
        )

    @property
    def own(self) -> OwnStage | None:
        """The starter's own stage; None before it exists."""
        return None if self.preparation is None else self.preparation.own

    def close(self) -> None:
        """Free the starter's own stage."""
        if self.own is not None:
            self.own.close()

    def _close(self, is_awaited: bool = True) -> None:
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.stop("the run is over")
            closer = threading.Thread(target=ring.close, name="ring-close", daemon=True)
            closer.start()
            with self._lock:
                self._closing.append((closer, ring))
            if self.own is not None:
                self.own.leave()
        if is_awaited:
            for closer, _ in self._closing:
                closer.join()
        self.measured()


def _measured_of(ring: LoopbackRing | TcpRing) -> Measured:
    return ring.inbox.wait_s, ring.send_s, ring.bytes_sent, ring.n_frames


def _sum(a: Measured, b: Measured) -> Measured:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]
