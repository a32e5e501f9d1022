"""Shares, rates and delays between two looks at a ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mdi.serve.live import Delays, NodeLook, shares, waited_for
from mdi.tracing.clocks import Reading
from mdi.tracing.spans import Activity, Span


def look(name: str, at_s: float, measured: Mapping[str, Any] | None = None, **others: Any) -> NodeLook:
    return NodeLook(name, at_s, measured or {}, **others)


def numbers(compute_s: float, wait_s: float, frames: int) -> dict[str, Any]:
    return {"compute_s": compute_s, "wait_s": wait_s, "send_s": 0.0, "bytes_sent": 1000 * frames, "frames": frames}


def test_shares_are_of_the_time_between_two_looks() -> None:
    before, now = look("a", 10.0, numbers(5.0, 2.0, 10)), look("a", 12.0, numbers(6.5, 2.4, 30))
    found = shares(before, now)
    assert found == {"busy": 0.75, "waiting": pytest.approx(0.2), "sending": 0.0, "bytes_s": 10_000.0}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, look("a", 1.0, numbers(1, 1, 1))),
        (look("a", 0.0), look("a", 1.0, numbers(1, 1, 1))),
        (look("a", 0.0, numbers(1, 1, 1)), look("a", 1.0)),
        (look("a", 0.0, numbers(9, 9, 9)), look("a", 1.0, numbers(1, 1, 1))),
    ],
)
def test_where_there_is_nothing_to_compare_nothing_is_said(before: NodeLook | None, now: NodeLook) -> None:
    assert set(shares(before, now).values()) == {None}


def test_a_frames_way_between_two_timers() -> None:
    """A's timer is 100 s ahead of ours, b's 40 s behind; frames take 3 ms, and one look's clock was read badly."""
    delays = Delays()
    sent = [Span(Activity.SEND, int((110 + i) * 1e9), int((110 + i) * 1e9) + 5, i) for i in range(3)]
    came = [Span(Activity.ARRIVAL, n := int((-30 + i + 0.003) * 1e9), n, i) for i in range(3)]
    a = look("a", 0.0, spans=sent, reading=Reading(10.0, 110.0, 1e-4))
    b = look("b", 0.0, spans=came, reading=Reading(10.0, -30.0, 2e-4))
    for one in (a, b, look("b", 0.0, reading=Reading(11.0, -28.5, 0.6))):
        delays.note(one)
    delay = delays.of(a, b)
    assert delay is not None
    assert delay[0] == pytest.approx(0.003, abs=1e-6) and delay[1] == pytest.approx(3e-4)
    assert delays.of(b, a) is None, "no frame of b's has come to a"
    assert delays.of(a, look("c", 0.0)) is None


def test_who_is_waited_for() -> None:
    def nodes(*busy: float | None) -> list[dict[str, Any]]:
        return [{"name": f"n{i}", "busy": share} for i, share in enumerate(busy)]

    assert waited_for(nodes(0.3, 0.95, 0.4)) == "n1"
    assert waited_for(nodes(0.3, 0.5)) is None
    assert waited_for(nodes(None, None)) is None
    assert waited_for(nodes(0.99)) is None and waited_for([]) is None
