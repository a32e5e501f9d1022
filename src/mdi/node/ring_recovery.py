"""Handles lost nodes of a run, from its first ring on: connects the parts of `mdi.recovery` for one starter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mdi.config import NodeConfig
from mdi.control.client import ControlClient
from mdi.engine.starter import StarterEngine
from mdi.errors import NodeLostError
from mdi.machine.neighbours import host_of
from mdi.measure.model_shape import model_shape
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.node.ring_former import RingFormer
from mdi.node.run_rings import RunRings
from mdi.partition.model import Workload
from mdi.partition.profile import ClusterProfile, NodeProfile
from mdi.recovery.joins import Joins, Newcomers
from mdi.recovery.keeper import RingKeeper
from mdi.recovery.moves import Moves
from mdi.recovery.moving import MovingCut
from mdi.recovery.replacement import Cut, Stage
from mdi.recovery.roll_call import free_nodes
from mdi.recovery.slow_nodes import SlowNodes, ask_all


class RingRecovery:
    """See the module.

    Args:
        rings: of the run, before the first.
        nodes: all secondaries that may take part.
        profile: measurements of nodes and links; None if there are none.
        check: called again and again until the first ring is closed; what it raises ends the waiting.
        newcomers: nodes that are found during the run.

    Attributes:
        keeper: what replaces lost nodes.
    """

    def __init__(
        self, rings: RunRings, nodes: Sequence[NodeConfig], profile: ClusterProfile | None, check: Callable[[], None],
        newcomers: Newcomers,
    ) -> None:  # fmt: skip
        basis = rings.basis
        weights, options = basis.weights, basis.options
        workload = Workload(basis.n_sequences, basis.max_length, replay_bytes=options.replay_bytes)
        self._rings = rings
        self._newcomers = newcomers
        self._is_measured = profile is not None
        self._former = former = RingFormer(rings, weights, nodes, check)
        self._clients = [ControlClient(node, rings.cluster.keys) for node in nodes]
        self._spares = [node.name for node in nodes if node.is_spare]
        shape = model_shape(weights.config, rings.format, rings.kv_dtype)
        part_bytes = fmean(weights.part_bytes(f"block.{i}") for i in range(weights.n_layer))
        self._cut = MovingCut(shape, profile, workload, part_bytes, lambda: former.n_rounds_left)
        self._moves: Moves | None = None
        self._first: LoopbackRing | TcpRing | None = None  # the first ring, if that was closed in `prepare`
        self.keeper = RingKeeper(former, self._clients, self._spares, _cut_of(rings, self._cut), options.silence_s)

    def prepare(self, check: Callable[[], None]) -> None:
        """Prepare the first ring; if a node is lost meanwhile, replace it and close the ring at once.

        Raises:
            MdiError: a node never answered, nor does a spare; or a node cannot do its part, or was lost and cannot be replaced.
        """
        try:
            self._rings.prepare(check)
        except NodeLostError as e:
            is_known = self._is_measured or e.node in self._rings.processes
            if not is_known and not free_nodes([one for one in self._clients if one.node.is_spare]):
                raise  # it has never answered: it was not started, or has another address
            self._first = self.keeper.after_loss(e)

    def form(self) -> LoopbackRing | TcpRing:
        """The first ring, closed. Raises RingError."""
        if self._first is not None:
            return self._first
        try:
            return self._former.form_first()
        except NodeLostError as e:
            return self.keeper.after_loss(e)

    def begin(self, engine: StarterEngine) -> None:
        """From here on the ring is the engine's, and blocks may move without a loss."""
        self._former.engine = self.keeper.texts = engine
        if not self._rings.is_shared:  # otherwise all nodes have shares of all blocks
            clients = {client.node.name: client for client in self._clients}
            measure = self._measure if self._is_measured else None
            joins = Joins(self.keeper, self._cut, clients, frozenset(self._spares), self._newcomers, measure)
            own = self._rings.cluster.starter.name
            ask = ask_all(clients, self._rings.run, lambda: (own, (engine.compute_s, self._rings.measured()[3])))
            slow = SlowNodes(self._cut, ask)
            self._moves = Moves(self.keeper, slow, joins, lambda: self._rings.leaving, self._leave)

    def _leave(self) -> None:
        """Have the engine leave the present ring; one that breaks at this moment is replaced anyway."""
        ring, engine = self._rings.ring, self._former.engine
        if ring is not None and engine is not None:
            engine.leave(ring.epoch)

    def close(self) -> None:
        if self._moves is not None:
            self._moves.close()
            self._moves = None

    def _measure(self, client: ControlClient) -> NodeProfile:
        """What a node that has come says of itself. Raises MdiError."""
        answer = client.profile(self._rings.profile_request)
        node = client.node
        profile = NodeProfile.from_json({**answer["profile"], "name": node.name}, f"the profile of {node.name}")
        return replace(profile, machine=host_of(node.addr))


def _cut_of(rings: RunRings, cut: MovingCut) -> Cut:
    """How a run's model is cut over the nodes that are left."""

    def cut_over(holders: Sequence[Stage], most: Mapping[str, int]) -> tuple[int, ...] | None:
        if rings.is_shared:  # they get new shares
            return (rings.n_layer, *(0 for _ in holders[1:]))
        return cut(holders, most)

    return cut_over
