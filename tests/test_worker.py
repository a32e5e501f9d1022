"""One ring of a run on a secondary: what becomes of it, and of its caches, when it is ended or breaks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

import mdi.node.worker
from mdi.errors import Code, NodeLostError
from mdi.net.hello import Fault
from mdi.net.ring import TcpRing
from mdi.node.worker import RingWorker
from waiting import DEADLINE_S


class Ring:
    def __init__(self) -> None:
        self.ends: list[object] = []

    def stop(self, reason: str) -> None:
        self.ends.append("stop")

    def fail(self, fault: Fault) -> None:
        self.ends.append(fault)


def begun(job: RingWorker) -> list[object]:
    ring = Ring()
    job.begin(cast(TcpRing, ring))
    return ring.ends


def job() -> RingWorker:
    unused: Any = None
    request: Any = SimpleNamespace(run="a" * 16)
    return RingWorker("secondary0", "", request, unused, unused, unused, unused, unused, 10.0)


def test_a_node_that_leaves_while_the_ring_is_closed_is_lost_and_does_not_end_the_run() -> None:
    """A STOP would tell the starter that the run was ended on purpose: random faults, seed 41, run 106."""
    one, fault = job(), Fault("secondary0", "it was asked to end", "secondary0", Code.LEFT)
    one.abort(fault)
    one.end()  # the process ends after that
    assert begun(one) == [fault]


def test_a_run_that_was_ended_before_it_began_ends_in_good_order() -> None:
    one = job()
    one.end()
    assert begun(one) == ["stop"]
    assert begun(job()) == []


class BreaksRing:
    """In the place of the stages' store: the ring of a run with caches breaks because of another node.

    Attributes:
        kept: whether the caches were kept, each time they were given back.
        before: called before the ring breaks.
    """

    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.before: Callable[[], None] = lambda: None

    def complete(self, *args: Any) -> None:
        self.before()
        raise NodeLostError("secondary1", "its connection broke")

    def release(self, held: Any, owner: str, is_kept: bool = False, is_failed: bool = False) -> None:
        self.kept.append(is_kept)


def with_caches(store: BreaksRing) -> RingWorker:
    unused: Any = None
    request: Any = SimpleNamespace(run="a" * 16, epoch="b" * 16, index=1, names=("starter", "secondary0", "secondary1"))
    computing = SimpleNamespace(threads=None)
    held: Any = SimpleNamespace(stage=object(), has_caches=True, spec=SimpleNamespace(computing=computing))
    return RingWorker("secondary0", "", request, held, unused, cast(Any, store), unused, unused, 10.0)


def test_caches_of_a_broken_ring_are_kept_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdi.node.worker, "KEPT_S", 0.05)
    store = BreaksRing()
    one = with_caches(store)
    one.start()
    one.join(DEADLINE_S)
    kept = list(store.kept)
    one.end()  # a thread that still waits ends, too
    one.join(DEADLINE_S)
    assert kept == [True, False]


def test_a_run_that_was_ended_keeps_no_caches() -> None:
    """Even where another node is lost at the same moment."""
    store = BreaksRing()
    one = with_caches(store)
    store.before = lambda: one.abort(Fault("", "the run was stopped", "secondary0", Code.RUN))
    one.start()
    one.join(DEADLINE_S)
    assert store.kept == [False]
