"""Moves blocks away from nodes that have been slow for a minute (the rule of Petals, Borzunov et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.recovery.joins import gains
from mdi.recovery.moving import MovingCut
from mdi.recovery.paces import Paces
from mdi.recovery.replacement import Next, Stage, cut_over
from mdi.recovery.roll_call import GRACE_S

MOVE_GAIN = 1.2  # a round must then take so much less

# Seconds that a node has computed in its ring, and frames.
Computed = tuple[float, int]
Ask = Callable[[Sequence[str]], Mapping[str, Computed]]

logger = logging.getLogger("mdi")


class SlowNodes:
    """Not for several threads.

    Args:
        cut: cuts the model over nodes; it gets their slowness for the next cuts.
        ask: what nodes of the ring have computed so far, those that answer.
    """

    def __init__(self, cut: MovingCut, ask: Ask) -> None:
        self._cut = cut
        self._ask = ask
        self._paces = Paces()
        self._ring: Sequence[Stage] = ()
        self._has_moved = False  # then blocks may also come back

    def best(self, ring: Sequence[Stage], now: float) -> Next | None:
        """Another cut over the nodes of the ring, if some are slow and it gains enough."""
        names = [stage.name for stage in ring]
        if ring != self._ring:
            self._ring = ring
            self._paces.begin_again(names)
        expected = self._cut.expected_s(ring)
        for name, (compute_s, n_frames) in self._ask(names).items():
            self._paces.add(name, now, compute_s, n_frames, expected[name])
        factors = self._paces.factors(names)
        for name, factor in factors.items():
            self._cut.set_pace(name, factor)
        slow = [name for name, factor in factors.items() if factor > 1]
        if not slow and not self._has_moved:
            return None  # a cut that was asked for, or measured, stays
        found = cut_over(ring, {}, self._cut)
        if found is None or not gains(self._cut, ring, found, MOVE_GAIN):
            return None
        self._has_moved = bool(slow)
        if slow:
            logger.info("%s has been slow for a minute: other nodes take some of its blocks", ", ".join(slow))
        else:
            logger.info("no node is slow any more: blocks move back")
        return found


def computed_in(status: Mapping[str, Any]) -> Computed | None:
    """Compute time and frames in a secondary's status; None if there are none yet."""
    measured = status.get("measured")
    if not isinstance(measured, dict):
        return None
    return float(measured.get("compute_s", 0.0)), int(measured.get("frames", 0))


def ask_all(clients: Mapping[str, ControlClient], run: str, own: Callable[[], tuple[str, Computed]]) -> Ask:
    """Asks the secondaries of a run by name, all at the same time; the starter says what it knows of itself."""

    def ask_one(name: str) -> Computed | None:
        return computed_in(clients[name].status(run))

    def ask(names: Sequence[str]) -> dict[str, Computed]:
        asked = FanOut({name: partial(ask_one, name) for name in names if name in clients})
        asked.join(GRACE_S)
        name, computed = own()
        return {name: computed, **{name: found for name, found in asked.results.items() if found is not None}}

    return ask
