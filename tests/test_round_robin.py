"""The thread that computes for several rings: in turn, and never waiting for one of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from loopback import DEADLINE_S
from mdi.cancel import Cancel
from mdi.errors import ControlError, NodeLostError, RingEndedError
from mdi.node import round_robin
from mdi.node.round_robin import MainThreadTask, RoundRobin, Turn
from mdi.node.worker import AbandonedError


class FakeRing:
    """A ring with so many frames, and the loop that computes them; the ring ends when there are no more."""

    def __init__(self, name: str, n_frames: int, told: list[str], error: Exception | None = None) -> None:
        self.name, self.n_left, self.told, self.error = name, n_frames, told, error
        self.is_full = False

    @property
    def is_pending(self) -> bool:
        return not self.is_full

    def step(self) -> None:
        if not self.n_left:
            raise self.error or RingEndedError("the end")
        self.n_left -= 1
        self.told.append(self.name)


def turn_of(ring: FakeRing) -> Turn:
    return Turn(ring, ring, None)  # type: ignore[arg-type]


@pytest.fixture
def turns() -> Any:
    made = RoundRobin()
    yield made
    made.close()


def started(turns: RoundRobin) -> threading.Thread:
    thread = threading.Thread(target=turns.run)
    thread.start()
    return thread


def finish(turns: RoundRobin, thread: threading.Thread) -> None:
    turns.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_rings_that_have_frames_are_served_in_turn(turns: RoundRobin) -> None:
    told: list[str] = []
    parts = [turn_of(FakeRing(name, n, told)) for name, n in (("a", 4), ("b", 2), ("c", 4))]
    for part in parts:
        turns.add(part)
    thread = started(turns)
    for part in parts:
        part.wait()
    finish(turns, thread)
    assert "".join(told) == "abcabcacac"


def test_a_ring_waits_only_while_it_takes_part(turns: RoundRobin) -> None:
    thread = started(turns)
    time.sleep(0.3)  # the thread has nothing to do, and no ring is to blame
    begin = time.perf_counter()
    part = turn_of(FakeRing("a", 2, []))
    turns.add(part)
    part.wait()
    assert 0 <= part.wait_s <= time.perf_counter() - begin
    finish(turns, thread)


def test_what_came_before_the_first_frame_is_no_wait(turns: RoundRobin) -> None:
    ring = FakeRing("a", 2, [])
    ring.is_full = True
    part = turn_of(ring)
    turns.add(part)
    thread = started(turns)
    time.sleep(0.2)
    begin = time.perf_counter()
    with turns.changed:
        ring.is_full = False
        turns.changed.notify_all()
    part.wait()
    assert part.wait_s <= time.perf_counter() - begin
    finish(turns, thread)


def test_a_ring_whose_next_node_takes_nothing_does_not_stop_the_others(turns: RoundRobin) -> None:
    told: list[str] = []
    stuck, free = FakeRing("stuck", 2, told), FakeRing("free", 5, told)
    stuck.is_full = True
    one, other = turn_of(stuck), turn_of(free)
    turns.add(one)
    turns.add(other)
    thread = started(turns)
    other.wait()
    assert told == ["free"] * 5
    with turns.changed:
        stuck.is_full = False
        turns.changed.notify_all()
    one.wait()
    finish(turns, thread)
    assert told[5:] == ["stuck"] * 2


@pytest.mark.parametrize("error", [NodeLostError("secondary1", "gone"), MemoryError(), ValueError("odd")])
def test_what_ends_one_ring_ends_no_other(turns: RoundRobin, error: Exception) -> None:
    told: list[str] = []
    bad, good = turn_of(FakeRing("bad", 1, told, error)), turn_of(FakeRing("good", 3, told))
    turns.add(bad)
    turns.add(good)
    thread = started(turns)
    with pytest.raises(type(error)):
        bad.wait()
    good.wait()
    finish(turns, thread)
    assert told.count("good") == 3


def test_other_work_is_done_on_the_same_thread(turns: RoundRobin) -> None:
    thread = started(turns)
    task = MainThreadTask(lambda cancel: {"thread": threading.current_thread().name})
    turns.post(task)
    assert task.result(DEADLINE_S, lambda: None) == {"thread": thread.name}
    finish(turns, thread)
    late = MainThreadTask(lambda cancel: {})
    turns.post(late)
    with pytest.raises(ControlError) as caught:
        late.result(DEADLINE_S, lambda: None)
    assert caught.value.code == "leaving"


def test_the_end_of_the_thread_ends_what_takes_part(turns: RoundRobin) -> None:
    ring = FakeRing("a", 1, [])
    ring.is_full = True
    part, late = turn_of(ring), turn_of(ring)
    turns.add(part)
    thread = started(turns)
    finish(turns, thread)
    turns.add(late)
    for one in (part, late):
        with pytest.raises(AbandonedError) as caught:
            one.wait()
        assert caught.value.code == "left"


def test_an_interrupt_goes_through_and_ends_what_takes_part(turns: RoundRobin) -> None:
    ring = FakeRing("a", 0, [], error=None)
    part, other = turn_of(ring), turn_of(FakeRing("b", 0, []))

    def interrupted() -> None:
        raise KeyboardInterrupt

    ring.step = interrupted  # type: ignore[method-assign]
    turns.add(part)
    turns.add(other)
    with pytest.raises(KeyboardInterrupt):
        turns.run()
    with pytest.raises(AbandonedError):
        part.wait()


def test_work_ends_when_nobody_waits_for_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_robin, "SIGN_S", 0.01)

    def measure(cancel: Cancel) -> dict[str, Any]:
        cancel.wait(DEADLINE_S)
        raise AssertionError("it went on")

    def note() -> None:
        raise BrokenPipeError("the caller is gone")

    task = MainThreadTask(measure)
    working = threading.Thread(target=task.run)
    working.start()
    with pytest.raises(BrokenPipeError):
        task.result(DEADLINE_S, note)
    working.join(DEADLINE_S / 2)
    assert not working.is_alive()
