"""Forms the rings of a run, the first one and every later one alike: gets all nodes ready, then closes the links.

`Former.form` is all of it. `Former.load_ahead` gets the stages of a later ring into the memory of its nodes while the present
one generates, and changes nothing there: `form` then finds all weights in place. How much the caches may take is reckoned by
`form` alone, when the present ring's memory is free.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mdi.cancel import Cancel, Periodic
from mdi.checkpoint.adapters import Adapter
from mdi.control.client import ControlClient, FanOut
from mdi.control.messages import InitRequest, PartSpec
from mdi.control.reach import reach_node
from mdi.engine.kept_prefixes import kept_files
from mdi.engine.memory import CacheMemory
from mdi.engine.prefix_tasks import RingPrefixes
from mdi.engine.replay import COMPUTE, FILL, PASS
from mdi.engine.rows import receive_buffers, ring_limits
from mdi.engine.worker import Backend
from mdi.errors import Code, MdiError, NodeLostError, RingError, UsageError
from mdi.files import default_cache_dir
from mdi.host.computing import Computing
from mdi.host.threads import share_cores
from mdi.net.handshake import close_starter_ring
from mdi.net.hello import Fault
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, Seat, TcpRing
from mdi.net.wire import REFUSED_S
from mdi.run.identity import RingArithmetic
from mdi.run.part_sending import Holders
from mdi.run.policy import Form, Stage, computing
from mdi.run.ring_prefixes import StarterPrefixes
from mdi.run.setup import SecondarySetup, with_true_port
from mdi.run.supply import StarterSupply
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.extent import Extent
from mdi.spec.options import Requested, StarterOptions
from mdi.spec.window import window_of
from mdi.stages.group_part import GroupPart
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec, check_gradients
from mdi.stages.starter_weights import StarterWeights
from mdi.stages.store import CacheReport, Claim, HeldStage, StageStore, share_out
from mdi.tensor.group import SharingOut
from mdi.terminal import reporting

HOT_REFUSED_S = 0.1  # as net.ring.Seat.refused_s, where a hot spare makes a ring without the next node cheap
DROP_S = 0.5  # for nodes to hear that a ring will not be formed; else they notice by themselves, a little later
REACH_S = 2.0  # a node that gets blocks of another one has just answered
# Errors for which other nodes may replace a node in the first ring; the user must mend all others.

logger = logging.getLogger("mdi")

Link = LoopbackRing | TcpRing
Measured = tuple[float, float, int, int]
Counts = Mapping[int, int]  # of each text, positions whose rows were sent and kept, from the first on


@dataclass(frozen=True)
class Basis:
    """The common ground of all rings of a run.

    Attributes:
        run: its id; ring n of the run has the id `run + n`.
        family: of the model; weights: with the cut of the ring that is formed.
        options: the user's choices; `computing` is what follows from them.
        extent: of the run; its frames are those that the user wants.
        process: a number that the starter's process drew.
        listener: the starter's ring port; None in a ring of one node.
        caches: of all runs of this process.
        taps: blocks whose outputs come back with the rows that need logits.
        sharing: gives the nodes of every ring their shares, where some of them compute blocks together.
        gradients: whether nodes are asked for gradients.
        is_held: whether nodes hold the blocks already: then others can take the place of one that refuses.
        draft_bytes: that a small model takes in this process, with its caches.
    """

    run: int
    family: ModelFamily
    options: StarterOptions
    computing: Computing
    weights: StarterWeights
    extent: Extent
    process: str
    listener: RingListener | None
    caches: StageStore
    sharing: SharingOut | None = None
    taps: tuple[int, ...] = ()
    is_held: bool = False
    gradients: bool = False
    draft_bytes: int = 0

    @property
    def run_id(self) -> str:
        """As the nodes know it."""
        return f"{self.run:016x}"


# Caches that are restored from rows


@dataclass(frozen=True)
class ReplayPlan:
    """Attributes:
    is_by_starter: whether the starter's own rows are replayed.
    kept: positions of each text, from the first on, whose rows are there.
    """

    is_by_starter: bool
    kept: Mapping[int, int]


@dataclass(frozen=True)
class ReplayRoles:
    """The parts of a ring's nodes in restoring caches from rows.

    Computing the rows of a text again on one node is never slower than on all of them, one after the other: so it is done where
    the rows are there.

    Attributes:
        by_name: of each secondary that has a part in it, what it does with replays (engine.worker).
        is_by_starter: whether the starter's own rows are replayed.
        has_lost: whether a node has lost its caches, so that there is something to restore.
    """

    by_name: Mapping[str, str]
    is_by_starter: bool
    has_lost: bool

    def plan(self, own: Counts, sent: Mapping[str, Counts]) -> ReplayPlan | None:
        """By the rows that all nodes have that send some; None if no text can be restored so.

        Args:
            own: the rows that the starter has.
            sent: what each secondary reports.
        """
        senders = [sent.get(name, {}) for name, role in self.by_name.items() if role == FILL]
        if self.is_by_starter:
            senders.append(own)
        kept = _least(senders) if self.has_lost else dict.fromkeys(own, 1 << 60)
        return ReplayPlan(self.is_by_starter, kept) if kept else None


def replay_roles(names: Sequence[str], fresh: frozenset[str], hot: frozenset[str] = frozenset()) -> ReplayRoles | None:
    """For a ring with the cut of the one before; None if the starter has lost its caches, or is alone, or rows are on no node.

    Args:
        names: of its nodes; `fresh` are those without caches.
        hot: hot spares, which keep what their nodes send, not what these get.
    """
    if names[0] in fresh or len(names) < 2:
        return None
    if any(before in hot and before not in fresh for before, name in itertools.pairwise(names) if name in fresh):
        return None
    before = [names[k - 1] for k, name in enumerate(names) if name in fresh]
    roles = {name: PASS if name in fresh else FILL for name in before if name != names[0]}
    return ReplayRoles(roles, names[0] in before, bool(fresh.intersection(names)))


def _least(counts: Sequence[Counts]) -> dict[int, int]:
    """The common part of all of them."""
    common = set.intersection(*(set(one) for one in counts)) if counts else set()
    return {seq_id: n for seq_id in common if (n := min(one[seq_id] for one in counts))}


# Rings


def refused_s(stages: Sequence[Stage], index: int) -> float:
    """See net.ring.Seat: of the node at place `index`, about the next one."""
    is_cheap = stages[index].is_hot or stages[(index + 1) % len(stages)].is_hot
    return HOT_REFUSED_S if is_cheap else REFUSED_S


@dataclass
class Ring:
    """A ring of a run: prepared, and closed once it has a `link`.

    Attributes:
        number: from 1 on; rings that could not be formed count, too.
        cluster, clients: its nodes, and how its secondaries are reached.
        stages: its nodes with their blocks.
        stage: the starter's.
        part: of the starter, in a group; it does nothing if there is none.
        memory: what the caches of all nodes hold.
        processes: of its secondaries, the numbers that their processes drew.
        ring_ports: by name of each secondary, the ring port that it says it has.
        placement: hash of model, cut and ring; "" in a ring of one node.
        has_window: whether a node reads weights from its disk for each frame.
        is_exact: whether it gives texts the tokens that the ring before would have given them.
        may_guess: whether a row has the same bits in any company of others, or need not.
        is_deep: whether a text's guesses may have frames of their own: its nodes have cores of their own, and their weights in
            memory.
        replay: how caches are restored from rows; None: from the token ids.
        has_fresh: whether there are nodes without caches.
        arithmetics: by name of each node; `arithmetic` is that of all together.
        n_frames: in flight at most, without guesses.
        prefixes: that its nodes keep on their disks; None: none.
        link: from and to this node; None before it is closed, and after its end.
        computed: the same as the engine sees it.
    """

    number: int
    cluster: ClusterConfig
    clients: Sequence[ControlClient]
    stages: tuple[Stage, ...]
    stage: Backend
    memory: CacheMemory
    processes: Mapping[str, str]
    ring_ports: Mapping[str, Any]
    placement: str
    sent_rows: Mapping[str, Counts]
    has_window: bool
    arithmetics: Mapping[str, Arithmetic]
    arithmetic: RingArithmetic
    is_exact: bool = True
    may_guess: bool = True
    is_deep: bool = True
    replay: ReplayPlan | None = None
    has_fresh: bool = False
    part: GroupPart | None = None
    link: Link | None = None
    computed: Link | None = None
    n_frames: int = 1
    prefixes: RingPrefixes | None = None


@dataclass(frozen=True)
class VerifyRing:
    """A ring of this node and one other, which computes blocks of the present ring again; see `Former.form_verify_ring`.

    Attributes:
        run_id: as the other node knows it: a run of its own.
        caches: what that node can hold.
    """

    client: ControlClient
    run_id: str
    link: TcpRing
    arithmetic: Arithmetic
    caches: CacheReport


class Former:
    """Forms rings, one after the other. Its methods belong to one thread at a time, but for `measured`, `admit`, `forget` and
    `form_verify_ring`.

    Args:
        nodes: all secondaries that may take part.
        starter: this node, and the keys of the cluster.

    Attributes:
        ring: that was closed last; None before the first one.
        reached: of the secondaries that were reached for the last ring, or the one that could not be formed, the numbers that
            their processes drew.
        is_known: whether secondaries know the run, so that they must also hear of its end.
        clients: of the secondaries of the ring that was formed or tried last.
        held: the starter's stage; None before the first one.
    """

    def __init__(self, basis: Basis, starter: ClusterConfig, nodes: Sequence[NodeConfig]) -> None:
        self.basis = basis
        self.cluster = starter
        self.ring: Ring | None = None
        self.held: HeldStage | None = None
        self.reached: Mapping[str, str] = {}
        self.is_known = False
        self.clients: list[ControlClient] = []
        self._nodes = {node.name: node for node in nodes}
        self._n_rings = 0
        self._has_caches = False  # whether the starter's own are those of the texts
        self._have: dict[str, set[str]] = {}  # the sha256 of parts that each node has had, by its name
        self._unreached: Counter[str] = Counter()  # processes that live, and that no ring could be closed with
        self._closing: list[tuple[threading.Thread, Link]] = []
        files = kept_files(basis.options.cache_dir or default_cache_dir(), basis.options.keep_prefixes, starter.keys)
        self._prefixes = None if files is None else StarterPrefixes(files, basis.options)
        self._past: Measured = (0.0, 0.0, 0, 0)  # of rings that are closed, whose buffers are gone with them
        self._lock = threading.Lock()  # of these two

    @property
    def is_shared(self) -> bool:
        """Whether nodes compute blocks together."""
        return self.basis.weights.is_shared

    def admit(self, node: NodeConfig) -> ControlClient:
        """From any thread: a node that may take part from now on."""
        self._nodes[node.name] = node
        return ControlClient(node, self.cluster.keys)

    def forget(self, name: str) -> None:
        """From any thread: a node that no ring has, and that is gone."""
        self._nodes.pop(name, None)

    def form(self, plan: Form, cancel: Cancel, rows: Counts | None = None) -> Ring:
        """Form a ring; the present one, if there is one, ends.

        Args:
            rows: of the starter, that were sent and kept; None if texts must not be restored from rows.

        Raises:
            NodeLostError: of a node that could not take part; MdiError: it cannot be done at all.
        """
        # Not awaited: a node that is silent would hold it up.
        self.close_links(is_awaited=False, keeps_caches=bool(rows) and not plan.is_moved)
        return self.close(self.prepare(plan, cancel, rows), cancel)

    def load_ahead(
        self, plan: Form, cancel: Cancel, put: Callable[[Loaded], None], timeout_s: float | None = None,
        adapters: Sequence[Adapter] | None = None,
    ) -> LoadAhead | None:  # fmt: skip
        """Begin to load the stages of another ring while the present one goes on; None if it cannot be done meanwhile.

        Args:
            put: gets the outcome, from another thread.
            timeout_s: it fails after that time; None: it may take as long as it makes progress.
            adapters: that all stages of the other ring have; None: those of the present one.
        """
        basis, ring = self.basis, self.ring
        if ring is None or self.held is None:
            return None
        weights = copy.copy(basis.weights)  # the present ring is described with the other cut
        if adapters is not None:
            weights.put_adapters(adapters)
        cluster = replace(self.cluster, secondaries=tuple(self._nodes[name] for name in plan.names[1:]), spares=())
        if basis.sharing is None:
            weights.take_blocks(plan.spans)
        else:
            processes = self._ask_processes(
                [ControlClient(n, cluster.keys) for n in cluster.secondaries], REACH_S, cancel
            )
            cluster, blocks, groups = copy.copy(basis.sharing)(cluster, processes)
            weights.take_blocks(blocks, groups)
        clients = [ControlClient(node, cluster.keys) for node in cluster.secondaries]
        outside = [ControlClient(self._nodes[name], cluster.keys) for name in sorted(plan.outside)]
        self._n_rings += 1
        kept = frozenset((stage, basis.weights.share_of(index)) for index, stage in enumerate(ring.stages))
        kept = kept if adapters is None else frozenset()
        task = RingTask(
            replace(basis, weights=weights), cluster, clients, self._n_rings, REACH_S, frozenset(ring.processes),
            self._holders(outside), hot=plan.hot, kept=kept,
        )  # fmt: skip
        return LoadAhead(replace(plan, stages=task.stages), Preparation(task, self.held), cancel.child(timeout_s), put)

    def form_verify_ring(self, name: str, blocks: tuple[int, int], cancel: Cancel) -> VerifyRing:
        """From any thread, while no ring is formed: have another node compute blocks again. Raises MdiError."""
        basis, node = self.basis, self._nodes[name]
        weights, starter = copy.copy(basis.weights), self.cluster.starter
        weights.take_blocks([(0, 0), blocks])
        options = replace(basis.options, replay_memory=0, verify=0.0)
        alone = replace(
            basis, run=secrets.randbits(62), weights=weights, options=options, taps=(), gradients=False,
            extent=replace(basis.extent, n_frames=None),
        )  # fmt: skip
        cluster, client = replace(self.cluster, secondaries=(node,), spares=()), ControlClient(node, self.cluster.keys)
        work = Preparation(RingTask(alone, cluster, [client], 1, REACH_S))
        (setup,) = work.prepare_others(cancel)
        caches, arithmetic = setup.caches(False), setup.arithmetic
        seat = Seat(
            alone.run + 1, 0, (starter.name, node.name), work.placement, node.addr, node.port_in, options.wire_dtype,
            basis.process, cluster.keys, options.silence_s,
        )  # fmt: skip
        assert basis.listener is not None
        try:
            limits = ring_limits(basis.family.widest_row(basis.weights.model.spec))
            link = close_starter_ring(basis.listener, seat, len(cluster.nodes), limits, cancel=cancel)
        except MdiError:
            FanOut({name: partial(client.stop, alone.run_id, timeout_s=REACH_S)}).join(DROP_S)
            raise
        return VerifyRing(client, alone.run_id, link, arithmetic, caches)

    def prepare(self, plan: Form, cancel: Cancel, rows: Counts | None = None) -> Ring:
        """Get all nodes ready. Raises as `form`."""
        basis = self.basis
        cluster = replace(self.cluster, secondaries=tuple(self._nodes[name] for name in plan.names[1:]), spares=())
        if not self.is_shared and plan.spans != basis.weights.blocks:
            basis.weights.take_blocks(plan.spans)
        outside = [ControlClient(self._nodes[name], cluster.keys) for name in sorted(plan.outside)]
        fresh = plan.fresh
        while rows and not plan.is_moved and self._has_caches and not self.is_shared:
            if (roles := replay_roles(plan.names, fresh, plan.hot)) is None:
                break
            ring = self._prepare(cluster, cancel, roles.by_name, outside, plan.hot)
            lacking = frozenset(plan.names[1:]) - ring.sent_rows.keys() - fresh
            if not lacking:
                ring.replay = roles.plan(rows, ring.sent_rows)
                if ring.replay is None:
                    break
                ring.has_fresh = bool(fresh)
                return ring
            fresh |= lacking  # they were too long without a ring, or failed, and have freed their caches
        self._has_caches = False  # if this ring is not closed, the next one cannot use them
        ring = self._prepare(cluster, cancel, None, outside, plan.hot)
        ring.has_fresh = bool(fresh)
        return ring

    def close(self, ring: Ring, cancel: Cancel) -> Ring:
        """Close the links of a ring that is prepared. Raises NodeLostError, RingError."""
        basis, cluster = self.basis, ring.cluster
        names = tuple(node.name for node in cluster.nodes)
        following = cluster.nodes[1 % cluster.n_nodes]
        number = basis.run + ring.number
        seat = Seat(
            number, 0, names, ring.placement, following.addr, following.port_in, basis.options.wire_dtype,
            basis.process, cluster.keys, basis.options.silence_s, refused_s(ring.stages, 0),
        )  # fmt: skip
        group = basis.weights.group_of(0)
        ring.part = GroupPart(
            group, cluster.n_nodes, basis.listener, number, ring.placement, basis.process, basis.options.silence_s
        )
        try:
            inner = self._linked(ring, seat, cancel)
        except NodeLostError as e:
            if self.ring is not None:
                raise
            process = self.reached.get(e.node, "")
            self._unreached[process] += 1
            if self._unreached[process] > 1:  # the node is not lost, but its ring port cannot be reached
                raise RingError(str(e)) from None
            raise
        before, self.ring = self.ring, ring
        ring.link = inner  # from here on it is known, and will be closed
        ring.part.connect(ring.stage, inner)
        ring.computed = ring.part.of_starter(inner)
        ring.is_exact = before is None or before.arithmetic == ring.arithmetic
        ring.may_guess = basis.options.draft_inexact or ring.arithmetic.is_fixed
        if self._prefixes is not None:
            ring.prefixes = self._prefixes.of_ring(
                basis.weights, ring.stage, names, [*ring.arithmetics.values()], basis.extent.max_length
            )
        ring.is_deep = not ring.has_window and not share_cores(cluster.nodes)
        self._has_caches = True
        return ring

    def _linked(self, ring: Ring, seat: Seat, cancel: Cancel) -> Link:
        basis, cluster = self.basis, ring.cluster
        n_nodes = len(computing(ring.stages))
        n_frames = ring.n_frames = basis.extent.n_frames or n_nodes
        if n_frames != n_nodes:
            logger.info(
                "%d frames in flight over %d nodes (set by --frames N; more frames hide transfers)", n_frames, n_nodes
            )
        if basis.listener is None or not cluster.secondaries:  # none there, or all left out
            return LoopbackRing(n_frames, seat.epoch)
        n_places = basis.options.n_places(n_frames, n_nodes)
        limits, allocate = (
            ring_limits(basis.family.widest_row(basis.weights.model.spec), len(basis.taps)),
            receive_buffers(basis.computing.device),
        )
        try:
            link = close_starter_ring(basis.listener, seat, n_places, limits, allocate=allocate, cancel=cancel)
        except NodeLostError as e:
            first = cluster.secondaries[0]
            lost = next((node for node in cluster.secondaries if node.name == e.node), first)
            raise with_true_port(e, lost, ring.ring_ports.get(e.node)) from None
        logger.info("the ring is closed: %s", " -> ".join([*seat.names, seat.names[0]]))
        return link

    def _prepare(
        self,
        cluster: ClusterConfig,
        cancel: Cancel,
        replays: Mapping[str, str] | None,
        outside: Sequence[ControlClient],
        hot: frozenset[str],
    ) -> Ring:
        """A ring whose nodes are ready, with the cut that the weights have.

        Args:
            replays: where nodes are to keep the caches of the ring before: by name, what they do with replays.
            outside: nodes that are not in the ring, and are there: they may have parts.
            hot: names of the hot spares.
        """
        basis, is_first = self.basis, not self._n_rings
        wait_s = basis.options.wait_s if is_first and not basis.is_held else REACH_S
        known = frozenset(() if self.ring is None else self.ring.processes)
        self.cluster, self.clients = cluster, [ControlClient(node, cluster.keys) for node in cluster.secondaries]
        self._n_rings += 1
        if basis.sharing is not None:  # every set of nodes has different shares
            self.cluster, blocks, groups = basis.sharing(cluster, self._ask_processes(self.clients, wait_s, cancel))
            basis.weights.take_blocks(blocks, groups)
            self.clients = [ControlClient(node, cluster.keys) for node in self.cluster.secondaries]
        task = RingTask(
            basis, self.cluster, self.clients, self._n_rings, wait_s, known, self._holders(outside), replays, hot
        )
        work = Preparation(task, self.held)
        try:
            ring = work.run(cancel)
        except BaseException as e:
            raise self._named(e, work.failed, is_first) if isinstance(e, MdiError) else e from None
        finally:
            self.held = work.held
            self.is_known = self.is_known or work.has_begun
            if self.ring is None:
                self.reached = work.processes or self.reached
        self.reached = work.processes
        for name, parts in work.parts.items():
            self._have.setdefault(name, set()).update(part.sha256 for part in parts)
        return ring

    def _holders(self, outside: Sequence[ControlClient]) -> Holders:
        """Nodes of the ring, and outside it, that may have parts."""
        known: dict[str, list[ControlClient]] = {}
        for client in (*self.clients, *outside):
            for sha256 in self._have.get(client.node.name, ()):
                known.setdefault(sha256, []).append(client)
        return Holders(known, outside)

    def _ask_processes(self, clients: Sequence[ControlClient], wait_s: float, cancel: Cancel) -> dict[str, str]:
        """By name of each secondary, the number that its process drew. Raises MdiError, as `reach_node`."""
        asking = cancel.child()
        try:
            asked = FanOut({
                client.node.name: partial(reach_node, client, wait_s, asking) for client in clients
            })  # fmt: skip
            found = asked.wait(cancel)
        finally:
            asking.cancel()
            asking.close()
        return {client.node.name: str(status.get("process", "")) for client, status in zip(clients, found, strict=True)}

    def _named(self, error: MdiError, failed: str | None, is_first: bool) -> MdiError:
        """The error with the node that it is about, so that another ring can be formed without it."""
        is_final = is_first and not self.basis.is_held and not error.code.ended
        if isinstance(error, NodeLostError) or is_final:
            return error
        if failed is None and isinstance(error, UsageError):  # this node's own memory
            return NodeLostError(self.cluster.starter.name, str(error), Code.MEMORY)
        return error if failed is None else NodeLostError(failed, str(error), error.code)

    @property
    def has_fixed_rows(self) -> bool:
        """Whether a row of the present ring has the same bits in any company; so it is without a ring."""
        return self.ring is None or self.ring.arithmetic.is_fixed

    # Ends of rings

    def close_links(self, is_awaited: bool = True, keeps_caches: bool = False) -> None:
        """End the present ring, if there is one; its nodes keep their stages, and their caches if the next ring has them."""
        ring = self.ring
        if ring is not None and ring.link is not None:
            link, ring.link, ring.computed = ring.link, None, None
            if keeps_caches:
                name = self.cluster.starter.name
                link.fail(Fault("", "the run goes on over another ring", name, Code.RUN))
            else:
                link.stop("the run has ended")
            closer = threading.Thread(target=link.close, name="ring-close", daemon=True)
            closer.start()
            with self._lock:
                self._closing.append((closer, link))
            if ring.part is not None:
                ring.part.close()
        if is_awaited:
            for closer, _ in self._closing:
                closer.join()
        self.measured()

    def close_stage(self) -> None:
        """Give the memory of the starter's stage back; harmless if there is none."""
        if self.held is not None:
            self.basis.caches.remove(self.held)
        if self._prefixes is not None:
            self._prefixes.close()

    def measured(self) -> Measured:
        """wait_s, send_s, bytes_sent and frames of NodeMetrics, of all rings so far; from any thread."""
        with self._lock:
            for closer, link in self._closing:
                if not closer.is_alive():
                    self._past = _sum(self._past, _measured_of(link))
            self._closing = [(closer, link) for closer, link in self._closing if closer.is_alive()]
            present = None if self.ring is None else self.ring.link
            found = self._past
            for link in (*(link for _, link in self._closing), *(() if present is None else (present,))):
                found = _sum(found, _measured_of(link))
            return found


def _measured_of(link: Link) -> Measured:
    return link.inbox.wait_s, link.send_s, link.bytes_sent, link.n_frames


def _sum(a: Measured, b: Measured) -> Measured:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


# Nodes


@dataclass(frozen=True)
class RingTask:
    """What is asked for where the nodes of a ring get ready.

    Attributes:
        basis: with the cut of this ring.
        cluster: the nodes that take part; `clients` are its secondaries.
        number: of the ring.
        wait_s: how long a node is waited for that does not answer.
        known: secondaries of the ring before.
        holders: nodes that may have parts already.
        replays, hot: as for `Former._prepare`.
        kept: stages that the present ring also has, with the nodes' shares of them, if it goes on meanwhile; None if there is
            none, or it ends first.
    """

    basis: Basis
    cluster: ClusterConfig
    clients: Sequence[ControlClient]
    number: int
    wait_s: float
    known: frozenset[str] = frozenset()
    holders: Holders = field(default_factory=Holders)
    replays: Mapping[str, str] | None = None
    hot: frozenset[str] = frozenset()
    kept: frozenset[tuple[Stage, Any]] | None = None

    @property
    def epoch(self) -> str:
        """As the nodes know the ring."""
        return f"{self.basis.run + self.number:016x}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.cluster.nodes)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The nodes with their blocks; groups have an order of their own."""
        pairs = zip(self.names, self.basis.weights.blocks, strict=True)
        return tuple(Stage(name, start, stop, name in self.hot) for name, (start, stop) in pairs)

    @property
    def supply(self) -> StarterSupply:
        basis = self.basis
        return StarterSupply(self.cluster.starter.name, basis.weights, basis.family, basis.options)

    @property
    def replay_bytes(self) -> int:
        """Room on each node for the rows that it has sent."""
        return 0 if self.basis.weights.is_shared else self.basis.options.replay_bytes

    @property
    def spec(self) -> StageSpec:
        """The starter's stage. UsageError: no gradients."""
        basis, by_hand = self.basis, self.basis.options.kv_memory
        kv_memory = self.cluster.starter.kv_memory if by_hand is None else by_hand
        spec = self.supply.spec(basis.computing, basis.extent, kv_memory, 0, basis.draft_bytes)
        if basis.gradients:
            check_gradients(spec)
        return spec

    def request(self, index: int, parts: tuple[PartSpec, ...], placement: str) -> InitRequest:
        """The task of node `index` of the ring."""
        basis, nodes = self.basis, self.cluster.nodes
        weights, options = basis.weights, basis.options
        node, following, stages = nodes[index], nodes[(index + 1) % len(nodes)], self.stages
        n_nodes, group = len(computing(stages)), weights.group_of(index)
        port_in = following.port_in
        if index == len(nodes) - 1:
            assert basis.listener is not None
            port_in = basis.listener.port
        form = basis.computing.quantize
        own = {"device": node.device, "threads": node.threads, "quantize": form, "quantize_head": None}
        return InitRequest(
            run=basis.run_id, epoch=self.epoch, index=index, names=self.names, placement=placement,
            next_addr=following.addr, next_port=port_in, model=weights.model, blocks=weights.blocks[index], parts=parts,
            extent=replace(basis.extent, n_frames=options.n_places(basis.extent.n_frames or n_nodes, n_nodes)),
            is_hot=stages[index].is_hot, refused_s=refused_s(stages, index), hand_over=not options.fixed,
            keep_caches=self.replays is not None, replay=(self.replays or {}).get(node.name, COMPUTE),
            replay_bytes=self.replay_bytes, keeps_received=bool(options.verify), is_ahead=self.kept is not None,
            taps=basis.taps, gradients=basis.gradients, window=window_of(options.weight_memory),
            group=None if group is None else group.told, **{**vars(Requested.of(options)), **own},
        )  # fmt: skip


class Preparation:
    """Gets the nodes of one ring ready: configures every node, sends weights, builds stages.

    Args:
        held: the starter's stage; None before the first one. Parts of it are used again if they are the same.

    Attributes:
        next: the starter's stage of a ring that is loaded ahead, if it is another one.
        parts: the parts that each secondary needs, by its name.
        placement, processes: see Ring; known, as far as it came, also where the ring cannot be.
        setups: of the secondaries. The first that fails ends the others, and what waits for them.
        has_begun: whether secondaries know the run, so that they must also hear of its end.
    """

    def __init__(self, task: RingTask, held: HeldStage | None = None) -> None:
        self.task, self.held = task, held
        self.next: HeldStage | None = None
        self.parts: dict[str, tuple[PartSpec, ...]] = {}
        self.placement = ""
        self.setups: list[SecondarySetup] = []
        self.processes: dict[str, str] = {}
        self.has_begun = False

    def run(self, cancel: Cancel) -> Ring:
        """Do it. Raises MdiError: a node is not there or cannot."""
        spec, setups = self._checked_spec(), self.setups
        with cancel.child() as getting:
            try:
                self._configure_secondaries(getting)
                had = None if self.held is None else self.held.stage
                self.held = held = self._acquire(spec, getting, self.held)
                for setup in setups:
                    setup.wait()
                assert held.stage is not None
                if self.task.replays is None:
                    held.stage.caches.clear()
                of_nodes = [held.spec.arithmetic, *(one.arithmetic for one in setups)]
                memory = self._reckon_memory(held, held.stage is not had)  # last, when all weights are where they stay
            finally:
                self.processes = {setup.name: setup.process for setup in setups if setup.process}
                getting.cancel()
        for setup in setups:
            setup.join(1.0)
        return self._ring(held.stage, of_nodes, memory)

    def _ring(self, stage: Backend, of_nodes: Sequence[Arithmetic], memory: CacheMemory) -> Ring:
        """What stands."""
        task, basis, setups = self.task, self.task.basis, self.setups
        assert self.held is not None
        return Ring(
            number=task.number, cluster=task.cluster, clients=task.clients, stages=task.stages, stage=stage, memory=memory,
            processes=self.processes, ring_ports={one.name: one.ring_port for one in setups}, placement=self.placement,
            sent_rows={one.name: one.sent_rows for one in setups if one.sent_rows is not None},
            has_window=self.held.spec.window is not None or any(one.has_window for one in setups),
            arithmetics=dict(zip(task.names, of_nodes, strict=True)),
            arithmetic=RingArithmetic.of(
                task.names, basis.weights.blocks, of_nodes, basis.options.wire_dtype, basis.run + task.number
            ),
        )  # fmt: skip

    def load_ahead(self, cancel: Cancel) -> None:
        """Have all stages in memory while the present ring goes on; nodes keep them until `cancel` ends. Raises MdiError."""
        spec = self._checked_spec()
        self._configure_secondaries(cancel)
        if self.held is None or self.held.spec.key != spec.key:
            self.next = self._acquire(spec, cancel)
            self.task.basis.caches.release(self.next, self.next.owner)
        for setup in self.setups:
            setup.wait()

    def prepare_others(self, cancel: Cancel) -> list[SecondarySetup]:
        """Have the secondaries get ready, without a stage on this node. Raises MdiError."""
        with cancel.child() as getting:
            try:
                self._configure_secondaries(getting)
                for setup in self.setups:
                    setup.wait()
            finally:
                getting.cancel()
        for setup in self.setups:
            setup.join(1.0)
        return self.setups

    def drop_next(self) -> None:
        """Give the memory of a stage back that was loaded ahead and no ring uses; harmless if there is none."""
        if self.next is not None and self.next.use == "UNUSED":
            self.task.basis.caches.remove(self.next)

    def _checked_spec(self) -> StageSpec:
        """The starter's stage.

        Raises:
            NoMemoryError: weights that will not fit are not loaded in the first place. UsageError: no gradients.
        """
        spec = self.task.spec
        self.task.basis.caches.check_memory(spec, self.held)
        return spec

    def _acquire(self, spec: StageSpec, cancel: Cancel, instead_of: HeldStage | None = None) -> HeldStage:
        """Have the starter's own stage; loading may take long, and reports itself."""
        basis, n_begun = self.task.basis, itertools.count()
        state = f"{spec.name} loads its weights"

        def on_part() -> None:
            nonlocal state
            state = f"{spec.name} loads its weights: {next(n_begun)} of {len(spec.parts)} parts"
            logger.debug("%s", state)

        claim = Claim(basis.weights.id, basis.weights.id, True, share=basis.options.cache_share)
        with reporting(lambda: state):
            return basis.caches.acquire(spec, claim, self.task.supply, cancel, instead_of, on_part)

    @property
    def failed(self) -> str | None:
        """Name of the node that could not get ready; None if it was none of them."""
        return next((setup.name for setup in self.setups if setup.error is not None), None)

    def _configure_secondaries(self, cancel: Cancel) -> None:
        """Begin to set every secondary up, until `cancel` ends."""
        task, weights = self.task, self.task.basis.weights
        if not task.clients:
            return
        parts = self._hash_parts(cancel)
        hashes = [[p.sha256 for p in node] for node in parts]
        groups = [None if group is None else vars(group.told) for group in weights.groups]
        identity = [weights.model.config_hash, weights.blocks, task.names, hashes, groups]
        self.placement = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        self.parts = dict(zip(task.names[1:], map(tuple, parts), strict=True))
        self.has_begun = True
        for index, client in enumerate(task.clients, 1):
            name, share = client.node.name, weights.share_of(index)
            if task.kept is None or (Stage(name, *weights.blocks[index]), share) not in task.kept:
                request = task.request(index, self.parts[name], self.placement)
                source, is_known = weights.of_node(index), name in task.known
                self.setups.append(SecondarySetup(client, request, source, task.wait_s, cancel, is_known, task.holders))

    def _hash_parts(self, cancel: Cancel) -> list[list[PartSpec]]:
        """The parts of each secondary. Hashes of a checkpoint are computed once and remembered, so this may take a while."""
        weights = self.task.basis.weights
        parts: list[list[PartSpec]] = []
        report = Periodic()
        for index in range(1, len(weights.blocks)):
            parts.append([])
            source = weights.of_node(index)
            for name in self.task.basis.family.parts_of(weights, index):
                cancel.check()
                parts[-1].append(source.spec(name))
                if report.is_due():
                    logger.info("hashing the model (stored for the next time): %s of %d blocks", name, weights.n_layer)
        return parts

    def _reckon_memory(self, held: HeldStage, has_loaded: bool) -> CacheMemory:
        """Room in the caches of all nodes. Where weights were loaded, nodes of that machine have less than they said."""
        basis, nodes, setups = self.task.basis, self.task.cluster.nodes, self.setups
        width = basis.weights.model.spec.row_at(basis.weights.blocks[0][1]).width
        kept = basis.extent.row_bytes(width, self.task.replay_bytes) if setups else 0
        held.replay_bytes, held.sent = kept, None  # its engine has the rows
        own = basis.caches.grant(held)
        is_asked = has_loaded or not all(setup.is_ready_at_once for setup in setups)
        reports = [own, *(setup.caches(is_asked) for setup in setups)]
        memory = CacheMemory(share_out([(n.name, n.addr, report) for n, report in zip(nodes, reports, strict=True)]))
        length = basis.extent.max_length
        logger.debug("the caches of all nodes hold %s sequences of %d tokens", memory.n_sequences(length), length)
        return memory


# The next ring, while the present one generates


@dataclass(frozen=True)
class Loaded:
    """The outcome of a `LoadAhead`: see its `error`."""

    ahead: LoadAhead


class LoadAhead:
    """Loads the stages of a later ring, in a thread of its own; see `Former.load_ahead`.

    Args:
        cancel: its own.
        put: gets the outcome.

    Attributes:
        plan: the ring that they are for.
        error: why it cannot be; None as long as it goes on, and if all stages are there.
        failed: name of the node that was in the way, if one was.
    """

    def __init__(self, plan: Form, work: Preparation, cancel: Cancel, put: Callable[[Loaded], None]) -> None:
        self.plan = plan
        self.error: MdiError | None = None
        self._work = work
        self._cancel = cancel
        self._put = put
        self._thread = threading.Thread(target=self._run, name="load-ahead", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> str | None:
        return self.error.node if isinstance(self.error, NodeLostError) else self._work.failed

    def _run(self) -> None:
        try:
            self._work.load_ahead(self._cancel)
        except MdiError as e:
            self.error = e.with_traceback(None)
        except BaseException as e:  # for example out of memory: the present ring goes on
            logger.debug("loading ahead failed", exc_info=True)
            self.error = RingError(f"{type(e).__name__}: {e}")
        self._put(Loaded(self))

    def close(self) -> None:
        """Once another ring has been formed: the nodes' own rings keep the stages now."""
        self._cancel.cancel()
        self._thread.join()
        self._cancel.close()

    def give_up(self) -> None:
        """The present ring goes on, or has broken: give the memory back, here and on all nodes."""
        self.close()
        self._work.drop_next()
        names = {setup.name for setup in self._work.setups}
        asked = [client for client in self._work.task.clients if client.node.name in names]
        stops = {
            client.node.name: partial(
                client.stop, self._work.task.basis.run_id, timeout_s=REACH_S, ring=self._work.task.epoch
            )
            for client in asked
        }
        FanOut(stops).join(DROP_S)
