"""All nodes are asked at the same time who is there, and one that is far away is waited for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mdi.errors import ControlError
from mdi.run import nodes
from mdi.run.nodes import RollCall
from waiting import DEADLINE_S

LONG_S = 600.0  # nobody who waits so long passes a test


class Far:
    """A node that answers when it may."""

    def __init__(self, name: str) -> None:
        self.node = SimpleNamespace(name=name)
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def status(self, timeout_s: float) -> dict[str, Any]:
        self.asked.set()
        if not self.may_answer.wait(min(timeout_s, DEADLINE_S)):
            raise ControlError("it does not answer", problem="silent")
        return {"state": "IDLE", "process": "ab" * 8, "name": self.node.name, "memory": {"available_bytes": 1}}


def called(call: RollCall, suspected: frozenset[str], timeout_s: float, *clients: Any) -> set[str]:
    return set(call(clients, suspected, timeout_s).answers)


def test_a_far_node_has_its_time_and_one_that_was_lost_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares are seldom near."""
    monkeypatch.setattr(nodes, "GRACE_S", 0.0)
    far, lost, call = Far("far"), Far("lost"), RollCall()

    def answer() -> None:
        assert far.asked.wait(DEADLINE_S) and lost.asked.wait(DEADLINE_S)
        far.may_answer.set()

    answers = threading.Thread(target=answer)
    answers.start()
    try:
        assert called(call, frozenset({"lost"}), LONG_S, far, lost) == {"far"}
    finally:
        lost.may_answer.set()
        answers.join()


def test_a_silent_node_holds_others_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "GRACE_S", 0.0)
    silent, call = Far("silent"), RollCall()
    assert called(call, frozenset(), 0.01, silent) == set()
    try:
        assert called(call, frozenset(), LONG_S, silent) == set()
    finally:
        silent.may_answer.set()
