"""Moves a run's texts to another ring, as the starter does once `mdi.recovery` has chosen the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mdi.config import ClusterConfig, NodeConfig
from mdi.control.client import ControlClient
from mdi.engine.starter import StarterEngine
from mdi.errors import EngineError, NodeLostError, RingError
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.node.preparation import Preparation
from mdi.node.replay_plan import ReplayPlan, replay_roles
from mdi.node.run_rings import RunRings
from mdi.node.starter_weights import StarterWeights
from mdi.recovery.records import REPLAY, TOKENS
from mdi.recovery.replacement import Next, Stage


class RingFormer:
    """A `mdi.recovery.keeper.Former`; its methods belong to the thread that forms the first ring, then to the engine's.

    Args:
        rings: of the run.
        nodes: all secondaries that may take part.
        check: what it raises ends the forming of the first ring.

    Attributes:
        engine: continues over the rings; None before the first one is closed.
    """

    def __init__(
        self, rings: RunRings, weights: StarterWeights, nodes: Sequence[NodeConfig], check: Callable[[], None]
    ) -> None:
        self._rings = rings
        self._weights = weights
        self.engine: StarterEngine | None = None
        self._check = check
        self._unreached: Counter[str] = Counter()  # processes that live, and that no ring could be closed with
        self._cluster = rings.cluster
        self._nodes = {node.name: node for node in nodes}
        self._clients = {node.name: ControlClient(node, rings.cluster.keys) for node in nodes}
        self._stages = self._stages_of(self._cluster)
        self._has_caches = True  # whether the starter's own are those of the texts
        self.restored_by = TOKENS
        self._numbers: str | None = None  # of the last ring that was closed
        self.is_exact = True

    @property
    def stages(self) -> Sequence[Stage]:
        return self._stages

    @property
    def processes(self) -> Mapping[str, str]:
        return self._rings.processes

    @property
    def n_rounds_left(self) -> int:
        """Tokens that the longest text may still get."""
        return self._rings.max_length if self.engine is None else self.engine.n_rounds_left

    def form(self, following: Next) -> LoopbackRing | TcpRing:
        secondaries = tuple(self._nodes[name] for name in following.names[1:])
        cluster = ClusterConfig(self._cluster.starter, secondaries, self._cluster.keys)
        if not self._rings.is_shared:  # otherwise all nodes get a share of all blocks, and compute their caches again
            self._weights.cut_anew(following.counts)
        plan, fresh, preparation = self._prepare(cluster, following)
        ring = self._rings.form() if self.engine is not None else self.form_first()
        self._has_caches = True
        if (engine := self.engine) is not None:
            engine.stage, engine.memory = preparation.stage, preparation.memory
            engine.kept = None if plan is None else plan.kept
            engine.fills_replays, engine.has_fresh = plan is not None and plan.is_by_starter, bool(fresh)
        self.restored_by = TOKENS if plan is None else REPLAY
        self._stages = self._stages_of(self._rings.cluster)
        before, self._numbers = self._numbers, self._rings.numbers
        self.is_exact = before in (None, self._numbers)
        return ring

    def form_first(self) -> LoopbackRing | TcpRing:
        """Close the run's first ring, as it was prepared.

        Raises:
            NodeLostError: of a node that could not take its place; RingError: of one that lives, for the second time.
        """
        try:
            ring = self._rings.form()
            self._numbers = self._rings.numbers
            return ring
        except NodeLostError as e:
            process = self.processes.get(e.node, "")
            self._unreached[process] += 1
            if self._unreached[process] > 1:  # the node is not lost, but its ring port cannot be reached
                raise RingError(str(e)) from None
            raise

    def _prepare(
        self, cluster: ClusterConfig, following: Next
    ) -> tuple[ReplayPlan | None, frozenset[str], Preparation]:
        """Get the nodes ready; how caches are restored, and which nodes have none."""
        engine, fresh = self.engine, following.fresh
        beside = [self._clients[name] for name in sorted(following.beside)]
        while self._may_replay(following) and (roles := replay_roles(replace(following, fresh=fresh))) is not None:
            preparation = self._rings.prepare_another(cluster, self.check, roles.by_name, beside)
            lacking = frozenset(following.names[1:]) - preparation.sent_rows.keys() - fresh
            if not lacking:
                plan = roles.plan({} if engine is None else engine.sent.counts, preparation.sent_rows)
                if plan is not None:
                    return plan, fresh, preparation
                break
            fresh |= lacking  # they were too long without a ring, or failed, and have let their caches go
        self._has_caches = False  # if this ring is not closed, the next one cannot use them
        return None, fresh, self._rings.prepare_another(cluster, self.check, None, beside)

    def _may_replay(self, following: Next) -> bool:
        if self.engine is None or self.engine.is_isolating or not self.engine.sent.counts:
            return False  # if the starter keeps no rows, no node does
        return not following.is_moved and self._has_caches and not self._rings.is_shared

    def check(self) -> None:
        if self.engine is None:
            self._check()
        elif self.engine.is_closing:
            raise EngineError("the run was ended while its ring was formed again")

    def admit(self, node: NodeConfig) -> ControlClient:
        client = self._clients[node.name] = ControlClient(node, self._cluster.keys)
        self._nodes[node.name] = node
        return client

    def _stages_of(self, cluster: ClusterConfig) -> list[Stage]:
        pairs = zip(cluster.nodes, self._weights.blocks, strict=True)
        return [Stage(node.name, start, stop) for node, (start, stop) in pairs]
