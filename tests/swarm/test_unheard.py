"""Nodes that do not answer are asked less and less."""

from __future__ import annotations

from mdi.control.meeting import Unanswered


def test_the_time_doubles_until_a_node_answers() -> None:
    now = 0.0
    unheard = Unanswered(2.0, 10.0, lambda: now)
    times = []
    for _ in range(4):
        unheard.add("a")
        begin = now
        while unheard.is_avoided("a"):
            now += 0.5
        times.append(now - begin)
    assert times == [2.0, 4.0, 8.0, 10.0] and not unheard.is_avoided("b")
    unheard.remove("a")
    unheard.add("a")
    now += 2.0
    assert not unheard.is_avoided("a")
