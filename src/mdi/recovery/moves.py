"""Changes of a ring without a loss: a node is back or new, is about to leave, or has become slow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from mdi.recovery.joins import Joins
from mdi.recovery.keeper import RingKeeper
from mdi.recovery.slow_nodes import SlowNodes

NOTICE_S = 0.25  # how often it is asked whether a node is about to leave
LOOK_S = 5.0  # how often nodes are asked

logger = logging.getLogger("mdi")


class Moves:
    """Looks, in the thread `ring-moves`, whether another ring would be better, and has the engine leave the present one.

    Args:
        keeper: forms the ring that was found.
        slow: looks for nodes that have become slow.
        joins: looks for nodes outside of the ring that it would be faster with.
        leaving: names of nodes of the ring that have said that they will end.
        leave: has the engine return at the next frame boundary.
    """

    def __init__(
        self, keeper: RingKeeper, slow: SlowNodes, joins: Joins, leaving: Callable[[], Sequence[str]],
        leave: Callable[[], None],
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._slow = slow
        self._joins = joins
        self._leaving = leaving
        self._leave = leave
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
                except Exception:  # texts continue in the present ring
                    logger.warning("warning: looking for a better ring failed", exc_info=True)

    def _look(self) -> None:
        ring = self._keeper.stages
        better = self._slow.best(ring, time.monotonic()) or self._joins.best(ring)
        if (
            better is not None
            and better != self._keeper.refused
            and self._keeper.stages == ring
            and not self._keeper.is_busy
        ):
            self._keeper.plan(better)
            self._leave()
