"""Puts a run's texts on another ring: what the starter does when `mdi.recovery` has decided who is to hold what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mdi.config import ClusterConfig, NodeConfig
from mdi.control.client import ControlClient
from mdi.engine.starter_engine import StarterEngine
from mdi.errors import EngineError
from mdi.measure.model_shape import model_shape
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.node.preparation import Preparation
from mdi.node.replay_plan import ReplayPlan, plan_replay
from mdi.node.run_rings import RunRings
from mdi.node.starter_weights import StarterWeights
from mdi.partition.model import Workload
from mdi.partition.profile import ClusterProfile
from mdi.recovery.keeper import RingKeeper
from mdi.recovery.moves import Moves
from mdi.recovery.moving import MovingCut
from mdi.recovery.records import REPLAY, TOKENS
from mdi.recovery.replacement import Next, Stage


class RingFormer:
    """A `mdi.recovery.keeper.Former`; its methods belong to the engine's thread.

    Args:
        rings: of the run, the first of which is closed.
        nodes: all secondaries that may take part.
    """

    def __init__(
        self, rings: RunRings, weights: StarterWeights, engine: StarterEngine, nodes: Sequence[NodeConfig]
    ) -> None:
        self._rings = rings
        self._weights = weights
        self._engine = engine
        self._cluster = rings.cluster
        self._nodes = {node.name: node for node in nodes}
        self._clients = {node.name: ControlClient(node, rings.cluster.keys) for node in nodes}
        self._stages = self._stages_of(self._cluster)
        self.restored_by = TOKENS

    @property
    def stages(self) -> Sequence[Stage]:
        return self._stages

    @property
    def processes(self) -> Mapping[str, str]:
        preparation = self._rings.preparation
        return {} if preparation is None else preparation.processes

    def form(self, following: Next) -> LoopbackRing | TcpRing:
        secondaries = tuple(self._nodes[name] for name in following.names[1:])
        cluster = ClusterConfig(self._cluster.starter, secondaries, self._cluster.keys)
        if not self._rings.is_shared:  # else all nodes get a share of all blocks, and compute their caches again
            self._weights.cut_anew(following.counts)
        plan, fresh, preparation = self._prepare(cluster, following)
        ring = self._rings.form()
        engine = self._engine
        engine.stage, engine.memory = preparation.stage, preparation.memory
        engine.kept = None if plan is None else plan.kept
        engine.fills_replays, engine.has_fresh = plan is not None and plan.is_by_starter, bool(fresh)
        self.restored_by = TOKENS if plan is None else REPLAY
        self._stages = self._stages_of(cluster)
        return ring

    def _prepare(
        self, cluster: ClusterConfig, following: Next
    ) -> tuple[ReplayPlan | None, frozenset[str], Preparation]:
        """Get the nodes ready; how caches are restored, and which nodes have none."""
        fresh = following.fresh
        while (plan := self._plan_replay(replace(following, fresh=fresh))) is not None:
            preparation = self._rings.prepare_another(cluster, self.check, plan.roles)
            lacking = frozenset(following.names[1:]) - preparation.keeping - fresh
            if not lacking:
                return plan, fresh, preparation
            fresh |= lacking  # they were too long without a ring, or failed, and have let their caches go
        return None, fresh, self._rings.prepare_another(cluster, self.check, None)

    def _plan_replay(self, following: Next) -> ReplayPlan | None:
        if following.is_moved or self._rings.is_shared or self._engine.is_isolating:
            return None
        return plan_replay(following, self._engine.sent.counts, self._clients, self._rings.run)

    def check(self) -> None:
        if self._engine.is_closing:
            raise EngineError("the run was ended while its ring was formed anew")

    def _stages_of(self, cluster: ClusterConfig) -> list[Stage]:
        pairs = zip(cluster.nodes, self._weights.blocks, strict=True)
        return [Stage(node.name, start, stop) for node, (start, stop) in pairs]


def make_keeper(
    rings: RunRings, weights: StarterWeights, engine: StarterEngine, nodes: Sequence[NodeConfig],
    profile: ClusterProfile | None, silence_s: float, workload: Workload,
) -> tuple[RingKeeper, Moves | None]:  # fmt: skip
    """What replaces the lost nodes of a run, and what moves blocks without a loss; the latter is to be closed in the end, and
    is not there where all nodes have shares of all blocks."""
    shape = model_shape(weights.config, rings.format, rings.kv_dtype)
    part_bytes = fmean(weights.part_bytes(f"block.{i}") for i in range(weights.n_layer))
    cut = MovingCut(shape, profile, workload, part_bytes, lambda: engine.n_rounds_left)
    if rings.is_shared:
        return _keeper_of_shares(rings, weights, engine, nodes, silence_s), None
    clients = [ControlClient(node, rings.cluster.keys) for node in nodes]
    spares = [node.name for node in nodes if node.is_spare]
    keeper = RingKeeper(RingFormer(rings, weights, engine, nodes), engine, clients, spares, cut, silence_s)
    return keeper, Moves(keeper, cut, clients, spares, lambda: rings.leaving, engine.leave)


def _keeper_of_shares(
    rings: RunRings, weights: StarterWeights, engine: StarterEngine, nodes: Sequence[NodeConfig], silence_s: float
) -> RingKeeper:
    """Where all nodes compute every block together, those that are left get new shares."""

    def cut(holders: Sequence[Stage], most: Mapping[str, int]) -> tuple[int, ...]:
        return (weights.n_layer, *(0 for _ in holders[1:]))

    clients = [ControlClient(node, rings.cluster.keys) for node in nodes]
    spares = [node.name for node in nodes if node.is_spare]
    return RingKeeper(RingFormer(rings, weights, engine, nodes), engine, clients, spares, cut, silence_s)
