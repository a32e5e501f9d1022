"""Which nodes answer, all asked at the same time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdi.control.client import ControlClient
from mdi.errors import ControlError

# Where nobody listens on a port, the process is gone: the machine itself says so.
GONE = ("refused",)
GRACE_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a node says of itself.

    Attributes:
        process: a number that its process drew: another one than before means that it was started anew.
        available_bytes: memory for weights and caches.
        is_leaving: whether it was told to end, and waits for its blocks to be taken over.
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
        is_number = isinstance(free, int) and not isinstance(free, bool)
        return cls(
            name, str(data.get("process", "")), str(data.get("state", "")), free if is_number else 0,
            data.get("leaving") is True,
        )  # fmt: skip


@dataclass(frozen=True)
class Roll:
    """Who answered, by name, and whose process is gone for certain; all others are silent."""

    answers: dict[str, Answer]
    gone: frozenset[str]


def call_roll(clients: Sequence[ControlClient], awaited: frozenset[str], timeout_s: float) -> Roll:
    """Ask all nodes at the same time.

    Args:
        awaited: nodes that get `timeout_s` for their answers; the others are silent if they do not answer in GRACE_S.
    """
    answers: dict[str, Answer] = {}
    gone: set[str] = set()
    pending = {client.node.name for client in clients}
    changed = threading.Condition()

    def ask(client: ControlClient) -> None:
        name = client.node.name
        answer = None
        is_gone = False
        try:
            answer = Answer.from_json(name, client.status(timeout_s=timeout_s))
        except ControlError as e:
            logger.debug("%s does not answer: %s", name, e)
            is_gone = e.problem in GONE
        with changed:
            if answer is not None:
                answers[name] = answer
            if is_gone:
                gone.add(name)
            pending.discard(name)
            changed.notify_all()

    for client in clients:
        threading.Thread(target=ask, args=(client,), name=f"ask-{client.node.name}", daemon=True).start()
    with changed:
        changed.wait_for(lambda: not pending, min(GRACE_S, timeout_s))
        changed.wait_for(lambda: pending.isdisjoint(awaited), max(0.0, timeout_s - GRACE_S))
        return Roll(dict(answers), frozenset(gone))
