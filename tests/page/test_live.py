"""Shares, rates and delays between two looks at a ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mdi.engine.recorder import Activity, Span
from mdi.run.trace import Reading
from mdi.serve.snapshot import N_STEPS, STEP_S, Delays, History, NodeLook, node_state, ring_words, shares, waited_for


def look(name: str, at_s: float, measured: Mapping[str, Any] | None = None, **others: Any) -> NodeLook:
    return NodeLook(name, at_s, measured or {}, **others)


def numbers(compute_s: float, wait_s: float, frames: int) -> dict[str, Any]:
    return {"compute_s": compute_s, "wait_s": wait_s, "send_s": 0.0, "bytes_sent": 1000 * frames, "frames": frames}


def test_shares_are_of_the_time_between_two_looks() -> None:
    before, now = look("a", 10.0, numbers(5.0, 2.0, 10)), look("a", 12.0, numbers(6.5, 2.4, 30))
    found = shares(before, now)
    assert found == {"busy": 0.75, "waiting": pytest.approx(0.2), "sending": 0.0, "bytes_s": 10_000.0}


def test_the_shares_of_a_node_are_no_more_than_its_time() -> None:
    """A wait of 9 s that has just ended is measured in the second in which it did."""
    before = look("a", 10.0, numbers(5.0, 2.0, 10))
    found = shares(before, look("a", 11.0, {**numbers(5.08, 11.0, 30), "send_s": 0.01}))
    assert found["busy"] == pytest.approx(0.08) and found["sending"] == pytest.approx(0.01)
    assert found["waiting"] == pytest.approx(0.91)


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


def spans_of(way: list[float], ahead_s: float) -> list[Span]:
    """A node's spans, of its own timer: three frames come at way[0] and leave at way[1]."""
    found = []
    for i in range(3):
        came, left = (round((ahead_s + i + at) * 1e9) for at in way)
        found += [Span(Activity.ARRIVAL, came, came, i), Span(Activity.SEND, left, left + 5, i)]
    return found


def test_frames_ways_between_timers() -> None:
    """The second timer is 100 s ahead, the third 40 s behind; links take 3, 5 and 4 ms; one look's clock was read badly."""
    delays = Delays()
    start = [Span(Activity.SEND, round(i * 1e9), round(i * 1e9), i) for i in range(3)]
    start += [Span(Activity.ARRIVAL, n := round((i + 0.014) * 1e9), n, i) for i in range(3)]
    looks = [
        look("a", 0.0, spans=start, reading=Reading(10.0, 10.0, 0.0)),
        look("b", 0.0, spans=spans_of([0.003, 0.004], 100.0), reading=Reading(10.0, 110.0, 1e-6)),
        look("c", 0.0, spans=spans_of([0.009, 0.010], -40.0), reading=Reading(10.0, -30.0, 2e-6)),
    ]
    for one in (*looks, look("c", 0.0, reading=Reading(11.0, -28.5, 0.6))):
        delays.note(one)
    found = delays.of(looks)
    assert all(one is not None for one in found)
    assert [one[0] for one in found if one] == pytest.approx([0.003, 0.005, 0.004], abs=1e-5)
    assert [one[1] for one in found if one] == pytest.approx([1e-6, 3e-6, 2e-6])
    assert delays.of([looks[0], look("d", 0.0)]) == [None, None], "nothing is known of d"


def test_who_is_waited_for() -> None:
    def nodes(*busy: float | None) -> list[dict[str, Any]]:
        return [{"name": f"n{i}", "busy": share} for i, share in enumerate(busy)]

    assert waited_for(nodes(0.3, 0.95, 0.4)) == "n1"
    assert waited_for(nodes(0.3, 0.5)) is None
    assert waited_for(nodes(None, None)) is None
    assert waited_for(nodes(0.99)) is None and waited_for([]) is None


@pytest.mark.parametrize(
    ("running", "tokens_s", "waits_for", "is_here", "trouble", "wanted"),
    [
        (0, 0.0, None, True, "", ("idle", "Ready: no request at the moment.")),
        (2, 9.0, None, True, "", ("working", "Network-bound: frames spend most of their time on links.")),
        (
            1,
            9.0,
            None,
            True,
            "",
            ("working", "1 text has its token on one node after the other: 2 or more keep all nodes busy."),
        ),
        (2, 9.0, "n1", True, "", ("working", "Limited by n1, which computes 93% of the time.")),
        (2, 0.0, None, True, "", ("working", "No token has come in the last second.")),
        (2, 0.0, None, False, "", ("working", "No answer from n1.")),
        (2, 9.0, "n1", False, "n1 is lost", ("recovering", "n1 is lost.")),
        (0, 0.0, None, True, "n1 is lost", ("recovering", "n1 is lost.")),
    ],
)
def test_what_is_said_of_a_ring(
    running: int, tokens_s: float, waits_for: str | None, is_here: bool, trouble: str, wanted: tuple[str, str]
) -> None:
    nodes = [{"name": "n0", "is_here": True, "busy": 0.1}, {"name": "n1", "is_here": is_here, "busy": 0.93}]
    ring = {"nodes": nodes, "texts": {"running": running}, "tokens_s": tokens_s, "waits_for": waits_for}
    assert ring_words(ring, trouble) == wanted


def test_what_is_said_of_a_node() -> None:
    assert [node_state(own, "") for own in ("RUNNING", "LOADING", "")] == ["SERVING", "LOADING", ""]
    assert [node_state(own, "lost") for own in ("RUNNING", "IDLE", "")] == ["WAITING", "WAITING", ""]


def test_the_history_has_steps_of_all_tokens_and_of_the_nodes_that_had_them() -> None:
    history = History()
    assert history.after(100.0, 1000, {"a": 7, "b": 7})["total"] == [], "what came before is not of this time"
    assert history.after(100.0 + STEP_S / 2, 1040, {"a": 8, "b": 8})["total"] == []
    history.after(100.0 + STEP_S, 1050, {"a": 9, "b": 9})
    history.after(100.0 + 2 * STEP_S, 1100, {"a": 10, "b": 9})
    found = history.after(100.0 + 3 * STEP_S, 1100, {"a": 10})
    assert found["total"] == [50 / STEP_S, 50 / STEP_S, 0.0]
    assert found["nodes"] == {"a": [10.0, 10.0, 0.0], "b": [10.0, 0.0, None]}, "b had nothing to do, and then was lost"


def test_the_history_is_ten_minutes_long_and_begins_anew_with_a_ring() -> None:
    history = History()
    for i in range(3 * N_STEPS):
        found = history.after(i * STEP_S, i, {"a": i})
    assert len(found["total"]) == len(found["nodes"]["a"]) == N_STEPS and N_STEPS * STEP_S == 600
    assert history.after(1e6, 0, {"a": 0})["total"] == found["total"], "fewer tokens are those of another engine"
