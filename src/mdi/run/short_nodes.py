"""Nodes that are to leave memory of their machines to others (`--spare-memory`): they have fewer blocks while less is free."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mdi.control.client import ControlClient, FanOut
from mdi.control.meeting import ASK_S
from mdi.run.cut import MovingCut
from mdi.run.form import Ring
from mdi.run.policy import Form, Stage, computing
from mdi.units import size

ROOM_S = 60.0  # for how long there must be room before a node may have its blocks again
REST_S = 60.0  # between two searches for the same: what was not taken will not be now

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Free:
    """Bytes of a node's machine that are free, and that are to be."""

    free: int
    spare: int


class ShortNodes:
    """A node is short if it was at two looks. All who plan with `cut` know how many blocks it may have then.

    It may have as many as before once twice the spare memory was free for ROOM_S, beside what the blocks take.

    Args:
        run: its id, as the nodes know it.
        cut: knows how large the blocks are, and what a round takes.
    """

    def __init__(self, run: str, cut: MovingCut, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._cut = cut
        self._clock = clock
        self._ring = 0
        self._asked: list[ControlClient] = []  # nodes of the ring that have spare memory, or have not answered yet
        self._short: frozenset[str] = frozenset()  # at the last look
        self._most: dict[str, int] = {}  # blocks of nodes that were short
        self._had: dict[str, int] = {}  # blocks of these nodes before
        self._room_since: dict[str, float] = {}
        self._less_after = self._more_after = 0.0
        self._before: tuple[Stage, ...] | None = None  # the ring, before its first node was short

    def best(self, ring: Ring) -> Form | None:
        """The ring with fewer blocks on nodes that are short; or again as before, if that gains enough."""
        stages, now = computing(ring.stages), self._clock()
        if ring.number != self._ring:
            self._ring, self._asked, self._short = ring.number, list(ring.clients), frozenset()
            self._less_after = self._more_after = now
        told = self._ask()
        has = {stage.name: stage for stage in stages if stage.stop > stage.start}
        short = {name for name, one in told.items() if name in has and one.free < one.spare}
        both, self._short = sorted(short & self._short), frozenset(short)
        self._give_back(has, told, now)
        if both and now >= self._less_after:
            self._less_after = now + REST_S
            return self._fewer(stages, both, {name: (has[name], one) for name, one in told.items() if name in has})
        if self._before == stages and not self._most:
            self._before = None
        if self._before is None or now < self._more_after:
            return None
        self._more_after = now + REST_S
        return self._cut.cut_again(stages, self._before)

    def _fewer(
        self, stages: Sequence[Stage], short: Sequence[str], told: Mapping[str, tuple[Stage, Free]]
    ) -> Form | None:
        """The cut in which short nodes have as many blocks less as their memory needs, if others have room for them."""
        most = {}
        for name, (stage, one) in told.items():
            n_now, n_room = stage.stop - stage.start, math.floor((one.free - one.spare) / self._cut.weight_bytes(stage))
            most[name] = max(1, n_now + n_room) if name in short else n_now + max(0, n_room)
        most |= {name: min(n, most.get(name, n)) for name, n in self._most.items()}
        found = self._cut.with_fewer(stages, most)
        counts = {} if found is None else dict(zip(found.names, found.counts, strict=True))
        for name in short:
            stage, one = told[name]
            n_now = stage.stop - stage.start
            self._had.setdefault(name, n_now)
            self._most[name] = n_then = min(n_now, counts.get(name, n_now))
            words = f"{name} has {size(one.free)} of memory free, and is to leave {size(one.spare)}"
            if n_then < n_now:
                logger.info("%s: the number of its blocks becomes %d instead of %d", words, n_then, n_now)
        self._cut.limit(self._most)
        if self._before is None:
            self._before = tuple(stages)
        return found

    def _give_back(self, has: Mapping[str, Stage], told: Mapping[str, Free], now: float) -> None:
        """Nodes that have had room for long enough, or are in the ring no more, may have any number of blocks."""
        n_before = len(self._most)
        for name in list(self._most):
            if (stage := has.get(name)) is None:
                del self._most[name], self._had[name]
                self._room_since.pop(name, None)
                continue
            n_lacking = max(0, self._had[name] - (stage.stop - stage.start))
            one = told.get(name)
            if one is None or one.free <= 2 * one.spare + n_lacking * self._cut.weight_bytes(stage):
                self._room_since.pop(name, None)
            elif now - self._room_since.setdefault(name, now) >= ROOM_S:
                del self._most[name], self._had[name], self._room_since[name]
                logger.info("%s has %s of memory free again: it may have more blocks", name, size(one.free))
        if len(self._most) < n_before:
            self._more_after = now
            self._cut.limit(self._most)

    def _ask(self) -> dict[str, Free]:
        asked = FanOut({client.node.name: partial(self._told, client) for client in self._asked})
        asked.join(ASK_S)
        results = dict(asked.results)
        # How much is spare does not change while a node lives, and with another process of it the ring is another one.
        self._asked = [client for client in self._asked if results.get(client.node.name, True) is not None]
        return {name: one for name, one in results.items() if one is not None}

    def _told(self, client: ControlClient) -> Free | None:
        memory = client.status(self._run, ASK_S).get("memory")
        free, spare = (memory.get(key) if isinstance(memory, dict) else None for key in ("free_bytes", "spare_bytes"))
        if not isinstance(free, int) or not isinstance(spare, int) or free < 0 or spare <= 0:
            return None
        return Free(free, spare)
