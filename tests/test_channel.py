"""The queue between two threads: order, bounds, and that closing and waking never leave anybody waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mdi.net.link import Channel

DEADLINE_S = 30.0


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_items_come_in_order_and_the_first_may_be_passed_by() -> None:
    channel: Channel[int] = Channel(2)
    assert channel.put(1) and channel.put(2)
    assert channel.put_first(0)  # beyond the capacity
    assert [channel.get() for _ in range(3)] == [0, 1, 2]


def test_get_ends_after_its_time() -> None:
    channel: Channel[int] = Channel(1)
    assert channel.get(0.01) is None and not channel.closed
    assert channel.wait_s > 0


def test_put_waits_for_space() -> None:
    channel: Channel[int] = Channel(1)
    channel.put(1)
    thread, results = in_thread(lambda: channel.put(2))
    assert channel.get() == 1
    assert channel.get(DEADLINE_S) == 2
    thread.join(DEADLINE_S)
    assert results == [True]


@pytest.mark.parametrize("n_waiting", [1, 3])
def test_close_wakes_readers_and_drops_what_is_queued(n_waiting: int) -> None:
    channel: Channel[int] = Channel(1)
    waiting = [in_thread(channel.get) for _ in range(n_waiting)]
    channel.close()
    for thread, results in waiting:
        thread.join(DEADLINE_S)
        assert results == [None]
    assert not channel.put(1) and not channel.put_first(1)
    assert channel.get() is None and channel.closed


def test_close_wakes_a_writer() -> None:
    channel: Channel[int] = Channel(1)
    channel.put(1)
    thread, results = in_thread(lambda: channel.put(2))
    channel.close()
    thread.join(DEADLINE_S)
    assert results == [False]
    assert channel.get() is None


def test_wake_ends_one_wait() -> None:
    channel: Channel[int] = Channel(1)
    thread, results = in_thread(channel.get)
    channel.wake()
    thread.join(DEADLINE_S)
    assert results == [None] and not channel.closed
    assert channel.get(0.01) is None


def test_wakes_that_nobody_waits_for_are_one_and_take_no_space() -> None:
    channel: Channel[int] = Channel(1)
    for _ in range(10):
        channel.wake()
    assert channel.put(1)  # would wait for ever if a wake took room
    assert channel.get() == 1
    channel.wake()
    channel.wake()
    assert channel.get(DEADLINE_S) is None
    assert channel.put(2) and channel.get(DEADLINE_S) == 2


def test_nothing_is_lost_between_many_writers_and_one_reader() -> None:
    channel: Channel[tuple[int, int]] = Channel(3)

    def write(writer: int) -> None:
        for i in range(200):
            channel.put((writer, i))
            channel.wake()

    threads = [in_thread(lambda w=w: write(w))[0] for w in range(4)]
    found: list[tuple[int, int]] = []
    while len(found) < 800:
        item = channel.get(DEADLINE_S)
        if item is not None:
            found.append(item)
    for thread in threads:
        thread.join(DEADLINE_S)
    for writer in range(4):
        assert [i for w, i in found if w == writer] == list(range(200))
