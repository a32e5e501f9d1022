"""Asks all nodes at the same time, to see which of them answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.errors import ControlError
from mdi.run.policy import Answer, Roll

# If nothing listens on a port, the process is gone; the machine itself reports that.
GONE = ("refused",)
GRACE_S = 0.5

# `call_roll`, or another one in its place.
CallRoll = Callable[[Sequence[ControlClient], frozenset[str], float], Roll]

logger = logging.getLogger(__name__)


def call_roll(clients: Sequence[ControlClient], awaited: frozenset[str], timeout_s: float) -> Roll:
    """Ask all nodes at the same time.

    Args:
        awaited: nodes that get `timeout_s` to answer; the others get GRACE_S.
    """
    begin = time.monotonic()
    gone: set[str] = set()

    def ask(client: ControlClient) -> Answer:
        try:
            return Answer.from_json(client.node.name, client.status(timeout_s=timeout_s))
        except ControlError as e:
            logger.debug("%s does not answer: %s", client.node.name, e)
            if e.problem in GONE:
                gone.add(client.node.name)
            raise

    calls = {client.node.name: partial(ask, client) for client in clients}
    first = FanOut({name: call for name, call in calls.items() if name in awaited})
    others = FanOut({name: call for name, call in calls.items() if name not in awaited})
    first.join(timeout_s)
    others.join(max(0.0, begin + GRACE_S - time.monotonic()))
    found = {**first.results, **others.results}
    return Roll({name: found[name] for name in calls if name in found}, frozenset(gone))


def free_nodes(clients: Sequence[ControlClient]) -> list[str]:
    """Names of those nodes that a run can be begun with now."""
    answers = call_roll(clients, frozenset(), GRACE_S).answers
    return [name for name, answer in answers.items() if answer.is_free]
