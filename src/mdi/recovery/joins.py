"""Nodes outside of a ring that would make it faster: those of its beginning, and those that start while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mdi.config import NodeConfig
from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.partition.profile import NodeProfile
from mdi.recovery.keeper import RingKeeper
from mdi.recovery.moving import MovingCut
from mdi.recovery.replacement import Next, Stage, cut_over
from mdi.recovery.roll_call import GRACE_S, Answer, call_roll

JOIN_GAIN = 1.1  # a node joins if a round then takes so much less

# Nodes that were found, by the numbers of their processes.
Newcomers = Callable[[], Mapping[str, NodeConfig]]
Measure = Callable[[ControlClient], NodeProfile]

logger = logging.getLogger("mdi")


def nobody() -> Mapping[str, NodeConfig]:
    return {}


class Joins:
    """See the module. Not for several threads.

    Args:
        keeper: knows the ring, and gets new nodes.
        cut: how the model is cut over nodes.
        clients: of all nodes that may take part, by name.
        spares: those that are not taken in: they wait for a loss.
        newcomers: nodes that were found besides.
        measure: asks a node that has come how fast it is, which takes seconds; None where no node was measured.
    """

    def __init__(
        self, keeper: RingKeeper, cut: MovingCut, clients: dict[str, ControlClient], spares: frozenset[str],
        newcomers: Newcomers = nobody, measure: Measure | None = None,
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._cut = cut
        self._clients = clients
        self._spares = spares
        self._newcomers = newcomers
        self._measure = measure
        self._measuring: dict[str, FanOut[NodeProfile]] = {}

    def best(self, ring: Sequence[Stage]) -> Next | None:
        """The best ring with one more present node, if it gains enough."""
        used = {stage.name for stage in ring}
        outside = [client for name, client in self._clients.items() if name not in used]
        answers = call_roll(outside, frozenset(), GRACE_S).answers if outside else {}
        answers.update(self._admit({answer.process for answer in answers.values()}))
        for name, answer in answers.items():
            is_wanted = answer.is_free and name not in self._spares and self._keeper.may_use(name)
            if is_wanted and self._is_known(name) and (found := better_with(ring, name, self._cut)) is not None:
                logger.info("%s joins the ring and makes it faster", name)
                return replace(found, beside=frozenset(answers) - {name})
        return None

    def _admit(self, outside: set[str]) -> dict[str, Answer]:
        """Admit new nodes; returns their answers."""
        heard = self._newcomers()
        known = {*outside, *self._keeper.processes.values()}
        places = {(client.node.addr, client.node.port) for client in self._clients.values()}
        come = []
        for process, node in heard.items():
            if process in known or (node.addr, node.port) in places:
                continue
            number = next(n for n in range(len(self._clients) + 1) if f"secondary{n}" not in self._clients)
            client = self._keeper.admit(node, f"secondary{number}")
            self._clients[client.node.name] = client
            logger.info("found %s at %s:%d: it is %s", node.name, node.addr, node.port, client.node.name)
            come.append(client)
            if self._measure is not None:
                self._measuring[client.node.name] = FanOut({client.node.name: partial(self._measure, client)})
        return dict(call_roll(come, frozenset(), GRACE_S).answers) if come else {}

    def _is_known(self, name: str) -> bool:
        """Whether its times are known, if they are needed; without them it counts as a mean node."""
        asked = self._measuring.get(name)
        if asked is None:
            return True
        if asked.is_working:
            return False
        del self._measuring[name]
        if name in asked.results:
            self._cut.learn(asked.results[name])
        return True


def better_with(ring: Sequence[Stage], name: str, cut: MovingCut) -> Next | None:
    """The ring with one more node, at the place where the fewest bytes move; None if it does not gain JOIN_GAIN."""
    best: Next | None = None
    best_s = float("inf")
    for place in range(1, len(ring) + 1):
        holders = [*ring[:place], Stage(name, 0, 0), *ring[place:]]
        found = cut_over(holders, {}, cut)
        if (
            found is not None
            and gains(cut, ring, found, JOIN_GAIN)
            and (s := cut.moving_s(holders, found.counts)) < best_s
        ):
            best, best_s = found, s
    return best


def gains(cut: MovingCut, ring: Sequence[Stage], found: Next, gain: float) -> bool:
    """Whether a round takes `gain` times less with another cut, or with other nodes."""
    now_s = cut.round_s(ring, [stage.stop - stage.start for stage in ring])
    return cut.round_s(found.stages, found.counts) * gain <= now_s
