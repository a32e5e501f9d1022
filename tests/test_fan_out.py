"""Several nodes asked at the same time."""

from __future__ import annotations

import threading

import pytest

from mdi.cancel import Cancel
from mdi.control.client import FanOut
from mdi.errors import ControlError


def test_results_come_in_the_order_of_the_calls() -> None:
    first = threading.Event()

    def one() -> int:
        assert first.wait(20)
        return 1

    def two() -> int:
        first.set()
        return 2

    assert FanOut({"a": one, "b": two}).wait(timeout_s=20) == [1, 2]
    assert FanOut({}).wait() == []


def test_an_error_ends_the_waiting_for_the_others() -> None:
    ended = threading.Event()
    try:
        with pytest.raises(ZeroDivisionError):
            FanOut({"a": lambda: ended.wait(20), "b": lambda: 1 / 0}).wait(timeout_s=20)
    finally:
        ended.set()


def test_who_does_not_answer_is_named() -> None:
    ended = threading.Event()
    try:
        asked = FanOut({"a": lambda: True, "b": lambda: ended.wait(20)})
        with pytest.raises(ControlError) as e:
            asked.wait(timeout_s=0.1)
        assert "100 ms" in str(e.value) and e.value.code == "control"
        asked.join(0.0)
        assert asked.results == {"a": True}
    finally:
        ended.set()


def test_a_cancel_ends_the_waiting() -> None:
    ended, cancel = threading.Event(), Cancel()
    cancel.cancel(KeyboardInterrupt())
    try:
        with pytest.raises(KeyboardInterrupt):
            FanOut({"a": lambda: ended.wait(20)}).wait(cancel)
    finally:
        ended.set()
