"""The token that ends waiting."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from mdi.cancel import Cancel, CancelledError
from mdi.errors import NodeLostError


def test_a_token_goes_on_until_it_is_cancelled() -> None:
    token = Cancel()
    token.check()
    token.wait(0)
    token.cancel()
    with pytest.raises(CancelledError):
        token.check()


def test_only_the_first_error_counts() -> None:
    token = Cancel()
    first = NodeLostError("secondary0", "gone")
    token.cancel(first)
    token.cancel(ValueError())
    assert token.error is first


def test_a_child_ends_with_its_parent_and_not_the_other_way_round() -> None:
    parent = Cancel()
    one, other = parent.child(), parent.child()
    one.cancel()
    assert one.is_cancelled and not other.is_cancelled and not parent.is_cancelled
    error = NodeLostError("secondary0", "gone")
    parent.cancel(error)
    assert other.error is error and parent.child().error is error


def test_a_closed_child_is_forgotten() -> None:
    parent = Cancel()
    with parent.child() as child:
        gone = weakref.ref(child)
    del child
    gc.collect()
    assert gone() is None, "its parent does not keep it"


def test_the_deadline_of_a_parent_ends_a_child() -> None:
    parent = Cancel(0.0, late=lambda: NodeLostError("secondary0", "late"))
    child = parent.child(60)
    assert child.left_s(5) == 0
    with pytest.raises(NodeLostError):
        child.wait(60)


def test_waiting_is_woken() -> None:
    parent = Cancel()
    child = parent.child()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            child.wait(600)
        except CancelledError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    parent.cancel()
    thread.join(60)
    assert len(errors) == 1 and not thread.is_alive()


def test_a_blocked_call_is_woken_once_and_not_afterwards() -> None:
    token, woken = Cancel(), []
    with token.waking(lambda: woken.append(1)):
        token.cancel()
        token.cancel()
    assert woken == [1]
    with token.waking(lambda: woken.append(2)):
        assert woken == [1, 2]
    fresh = Cancel()
    with fresh.waking(lambda: woken.append(3)):
        pass
    fresh.cancel()
    assert woken == [1, 2]
