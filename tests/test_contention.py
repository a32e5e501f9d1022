"""What a node takes of its machine: alone and at the same time as others, when it is told to."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mdi.control.messages import AFTER_MS_LIMIT, N_SLOTS_LIMIT, ProfileRequest, Slots
from mdi.errors import ControlError
from mdi.measure import contention
from mdi.measure.contention import machine_share, slots_of

CPU = "cpu"


def test_slots_of_a_machine() -> None:
    slots = slots_of(3, time.monotonic() + AFTER_MS_LIMIT / 1000)
    assert [(s.place, s.n_nodes) for s in slots] == [(0, 3), (1, 3), (2, 3)]
    assert len({s.after_ms for s in slots}) == 1 and 0 < slots[0].after_ms <= AFTER_MS_LIMIT
    assert slots_of(2, time.monotonic() - 5)[0].after_ms == 0


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((30.0, 30.0), 1 / 3), ((30.0, 20.0), 0.5), ((30.0, 5.0), 1.0), ((20.0, 30.0), 1 / 3), ((0.0, 30.0), 0.0)],
)
def test_the_part_of_the_machine(monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float], expected: float) -> None:
    """As much slower together as the machine is short of what all want; no less than an even part, no more than all."""
    given = iter(rates)
    monkeypatch.setattr(contention, "rate", lambda call, begin: next(given))
    assert machine_share(Slots(0, 1, 3), 1 << 20, CPU) == pytest.approx(expected)


def test_nodes_take_turns_and_then_all_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes in threads: each one's slots, by the times at which it began them."""
    monkeypatch.setattr(contention, "SLOT_S", 0.05)
    begins: list[float] = []
    rate = contention.rate

    def watched(call: Any, begin: float) -> float:
        begins.append(begin)
        return rate(call, begin)

    monkeypatch.setattr(contention, "rate", watched)
    shares: list[float] = []
    slots = slots_of(2, time.monotonic() + 0.1)
    threads = [threading.Thread(target=lambda s=s: shares.append(machine_share(s, 1 << 16, CPU))) for s in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first = min(begins)
    places = sorted(round((begin - first) / 0.05, 1) for begin in begins)
    assert len(shares) == 2 and all(share == 0 or 0.5 <= share <= 1 for share in shares)
    assert places[0] == 0 and len(places) == 4


def test_a_node_that_comes_too_late_says_nothing() -> None:
    assert contention.rate(lambda: None, time.monotonic() - 10) == 0


@pytest.mark.parametrize(
    "slots",
    [
        {"after_ms": AFTER_MS_LIMIT + 1, "place": 0, "n_nodes": 2},
        {"after_ms": 0, "place": 2, "n_nodes": 2},
        {"after_ms": 0, "place": 0, "n_nodes": N_SLOTS_LIMIT + 1},
        {"after_ms": -1, "place": 0, "n_nodes": 2},
        {"place": 0, "n_nodes": 2},
        [],
    ],
)
def test_a_peer_cannot_make_a_node_wait(slots: Any) -> None:
    request = ProfileRequest({"n_layer": 1}, "h", "float32").to_json()
    assert ProfileRequest.from_json({**request, "slots": {"after_ms": 5, "place": 1, "n_nodes": 2}}).slots == Slots(
        5, 1, 2
    )
    with pytest.raises(ControlError) as caught:
        ProfileRequest.from_json({**request, "slots": slots})
    assert caught.value.status == 400
