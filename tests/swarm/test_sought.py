"""While a run seeks a ring, it goes on asking who holds the blocks: they move meanwhile, and what it knows expires."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_swarm_table import Clock

from mdi.cancel import Cancel
from mdi.run.loop import Lookout
from mdi.run.policy import Stage
from mdi.run.swarm import FORGET_S, SwarmLook
from waiting import until


class Asking:
    n_asked = 0

    def best(self, ring: object, processes: object) -> None:
        raise AssertionError("there is no ring")

    def while_sought(self) -> None:
        self.n_asked += 1
        if self.n_asked == 1:
            raise OSError("no network for a moment")


@pytest.mark.slow
def test_nodes_are_asked_while_there_is_no_ring() -> None:
    asking, cancel = Asking(), Cancel()
    lookout = Lookout(asking, lambda: None, lambda event: None, cancel)
    until(lambda: asking.n_asked > 1)
    cancel.cancel()
    lookout.join()


class Known:
    """The clients of a run."""

    def __init__(self, *names: str) -> None:
        self.clients: dict[str, Any] = dict.fromkeys(names)

    def admit(self, node: Any) -> Any:
        self.clients[node] = None

    def forget(self, name: str) -> None:
        self.clients = {one: None for one in self.clients if one != name}


def test_nodes_that_are_gone_for_long_are_forgotten() -> None:
    """Each restart of a machine is another node: in a run of days they would be ever more. Those of the ring stay."""
    clock, nodes = Clock(), Known("a", "b", "c")
    swarm: Any = SimpleNamespace(look=lambda cancel: None, present={}, known={"c"})
    look = SwarmLook(nodes, swarm, Cancel(), clock)
    ring = (Stage("starter", 0, 0), Stage("a", 0, 4))
    look.best(ring, {})
    clock.now = FORGET_S
    look.best(ring, {})
    assert set(nodes.clients) == {"a", "b", "c"}
    clock.now += 1
    look.while_sought()
    assert set(nodes.clients) == {"a", "b", "c"}, "while a ring is sought, nobody is forgotten"
    look.best(ring, {})
    assert set(nodes.clients) == {"a", "c"}
    swarm.known = set()
    look.best(ring, {})
    clock.now += FORGET_S
    swarm.known = {"c"}
    look.best(ring, {})
    swarm.known = set()
    clock.now += FORGET_S
    look.best(ring, {})
    assert set(nodes.clients) == {"a", "c"}, "it was heard of meanwhile"
