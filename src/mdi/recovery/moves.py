"""Changes of a ring that nobody has to wait for: a node that is back or new, one that is about to leave, one that is slow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.recovery.keeper import RingKeeper
from mdi.recovery.moving import MovingCut
from mdi.recovery.nodes import GRACE_S, call_roll
from mdi.recovery.paces import Paces
from mdi.recovery.replacement import Next, Stage, cut_over

NOTICE_S = 0.25  # how often it is asked whether a node is about to leave
LOOK_S = 5.0  # how often nodes are asked
JOIN_GAIN = 1.1  # a node is taken in if a round then takes so much less
MOVE_GAIN = 1.2  # blocks are moved away from slow nodes if a round then takes so much less: Petals' rule

logger = logging.getLogger("mdi")


class Moves:
    """Looks, in the thread `ring-moves`, whether another ring would be better, and has the engine leave the present one.

    Args:
        keeper: forms the ring that was found.
        cut: how the model is cut over nodes.
        clients: of all nodes that may take part.
        spares: those that are not taken in: they wait for a loss.
        leaving: names of nodes of the ring that have said that they will end.
        leave: has the engine return at the next frame boundary.
    """

    def __init__(
        self, keeper: RingKeeper, cut: MovingCut, clients: Sequence[ControlClient], spares: Sequence[str],
        leaving: Callable[[], Sequence[str]], leave: Callable[[], None],
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._cut = cut
        self._clients = {client.node.name: client for client in clients}
        self._spares = frozenset(spares)
        self._leaving = leaving
        self._leave = leave
        self._paces = Paces()
        self._ring: Sequence[Stage] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ring-moves", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        next_look = time.monotonic() + LOOK_S
        while not self._over.wait(NOTICE_S):
            if self._keeper.is_busy:
                continue
            leaving = self._leaving()
            if leaving:
                self._keeper.plan_without(leaving[0])
                self._leave()
            elif time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_S
                try:
                    self._look()
                except Exception:  # texts go on as they are
                    logger.debug("looking for a better ring failed", exc_info=True)

    def _look(self) -> None:
        ring = self._keeper.stages
        if ring != self._ring:
            self._ring = ring
            self._paces.forget()
        better = self._with_another(ring) or self._without_slow(ring)
        if better is not None and self._keeper.stages == ring and not self._keeper.is_busy:
            self._keeper.plan(better)
            self._leave()

    def _with_another(self, ring: Sequence[Stage]) -> Next | None:
        """The best ring with one node more that is there, if it gains enough."""
        used = {stage.name for stage in ring}
        others = [client for name, client in self._clients.items() if name not in used | self._spares]
        if not others:
            return None
        roll = call_roll(others, frozenset(), GRACE_S)
        free = [name for name, answer in roll.answers.items() if answer.is_free and self._keeper.may_use(name)]
        for name in free:
            if (found := better_with(ring, name, self._cut)) is not None:
                logger.info("%s is taken in: it makes the ring faster", name)
                return found
        return None

    def _without_slow(self, ring: Sequence[Stage]) -> Next | None:
        """Another cut, if a node has become so slow that it gains enough."""
        clients = [self._clients[stage.name] for stage in ring[1:]]
        asked = FanOut({client.node.name: client.status for client in clients})
        asked.join(GRACE_S)
        now = time.monotonic()
        for name, status in asked.results.items():
            measured = status.get("measured")
            if isinstance(measured, dict):
                self._paces.add(name, now, float(measured.get("compute_s", 0.0)), int(measured.get("frames", 0)))
            self._cut.set_pace(name, self._paces.factor(name))
        slow = [stage.name for stage in ring[1:] if self._paces.factor(stage.name) > 1]
        if not slow:
            return None
        found = cut_over(ring, {}, self._cut)
        if found is None or not _gains(self._cut, ring, found, MOVE_GAIN):
            return None
        logger.info("%s has been slow for a minute: others take some of its blocks", ", ".join(slow))
        return found


def better_with(ring: Sequence[Stage], name: str, cut: MovingCut) -> Next | None:
    """The ring with one node more, at the place where the least has to be moved; None if it does not gain JOIN_GAIN."""
    best: Next | None = None
    best_s = float("inf")
    for place in range(1, len(ring) + 1):
        holders = [*ring[:place], Stage(name, 0, 0), *ring[place:]]
        found = cut_over(holders, {}, cut)
        if (
            found is not None
            and _gains(cut, ring, found, JOIN_GAIN)
            and (s := cut.moving_s(holders, found.counts)) < best_s
        ):
            best, best_s = found, s
    return best


def _gains(cut: MovingCut, ring: Sequence[Stage], found: Next, gain: float) -> bool:
    now_s = cut.round_s(ring, [stage.stop - stage.start for stage in ring])
    return cut.round_s(found.stages, found.counts) * gain <= now_s
