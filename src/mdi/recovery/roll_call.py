"""Asks all nodes at the same time, to see which of them answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.errors import ControlError

# If nothing listens on a port, the process is gone; the machine itself reports that.
GONE = ("refused",)
GRACE_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a node says of itself.

    Attributes:
        process: a number that its process drew: another one than before means that it was started again.
        available_bytes: memory for weights and caches.
        is_leaving: whether it was told to end, and waits until other nodes have its blocks.
    """

    name: str
    process: str
    state: str
    available_bytes: int
    is_leaving: bool

    @property
    def is_free(self) -> bool:
        """Whether a run can be begun with it."""
        return self.state in ("IDLE", "READY") and not self.is_leaving

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> Answer:
        memory = data.get("memory")
        free = memory.get("available_bytes") if isinstance(memory, dict) else None
        n_free = free if isinstance(free, int) and not isinstance(free, bool) else 0
        is_leaving = data.get("leaving") is True
        return cls(name, str(data.get("process", "")), str(data.get("state", "")), n_free, is_leaving)


@dataclass(frozen=True)
class Roll:
    """The nodes that answered, by name, and those whose process is certainly gone; all others are silent."""

    answers: dict[str, Answer]
    gone: frozenset[str]


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
    return Roll({**first.results, **others.results}, frozenset(gone))


def free_nodes(clients: Sequence[ControlClient]) -> list[str]:
    """Names of those nodes that a run can be begun with now."""
    answers = call_roll(clients, frozenset(), GRACE_S).answers
    return [name for name, answer in answers.items() if answer.is_free]
