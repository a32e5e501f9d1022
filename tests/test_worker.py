"""One ring of a run on a secondary: what becomes of it when it is ended before it has begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mdi.net.hello import Fault
from mdi.net.ring import TcpRing
from mdi.node.worker import RingWorker


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
    one, fault = job(), Fault("secondary0", "it was asked to end", "secondary0", "left")
    one.abort(fault)
    one.end()  # the process ends after that
    assert begun(one) == [fault]


def test_a_run_that_was_ended_before_it_began_ends_in_good_order() -> None:
    one = job()
    one.end()
    assert begun(one) == ["stop"]
    assert begun(job()) == []
