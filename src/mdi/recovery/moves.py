"""Changes of a ring that nobody has to wait for: a node that is back or new, one that is about to leave, one that is slow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.recovery.joins import Joins, gains
from mdi.recovery.keeper import RingKeeper
from mdi.recovery.moving import MovingCut
from mdi.recovery.nodes import GRACE_S
from mdi.recovery.paces import Paces
from mdi.recovery.replacement import Next, Stage, cut_over

NOTICE_S = 0.25  # how often it is asked whether a node is about to leave
LOOK_S = 5.0  # how often nodes are asked
MOVE_GAIN = 1.2  # blocks are moved away from slow nodes if a round then takes so much less: Petals' rule

logger = logging.getLogger("mdi")


class Moves:
    """Looks, in the thread `ring-moves`, whether another ring would be better, and has the engine leave the present one.

    Args:
        keeper: forms the ring that was found.
        cut: how the model is cut over nodes.
        clients: of all nodes that may take part, by name.
        joins: looks for nodes outside of the ring that it would be faster with.
        leaving: names of nodes of the ring that have said that they will end.
        leave: has the engine return at the next frame boundary.
    """

    def __init__(
        self, keeper: RingKeeper, cut: MovingCut, clients: Mapping[str, ControlClient], joins: Joins,
        leaving: Callable[[], Sequence[str]], leave: Callable[[], None],
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._cut = cut
        self._clients = clients
        self._joins = joins
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
        better = self._joins.best(ring) or self._without_slow(ring)
        if better is not None and self._keeper.stages == ring and not self._keeper.is_busy:
            self._keeper.plan(better)
            self._leave()

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
        if found is None or not gains(self._cut, ring, found, MOVE_GAIN):
            return None
        logger.info("%s has been slow for a minute: others take some of its blocks", ", ".join(slow))
        return found
