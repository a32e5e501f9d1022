"""Which standing nodes take the places of lost ones."""

from __future__ import annotations

from collections.abc import Sequence

from test_swarm_table import announced

from mdi.control.swarm import Announced
from mdi.run.policy import Form, Stage
from mdi.run.swarm import Swarm, SwarmPart

RING = (Stage("starter", 0, 0), Stage("a", 0, 2), Stage("b", 2, 4))
FIRST, LAST = announced(1 << 60, start=0, stop=2), announced(2 << 60, start=2, stop=4, block_s=9.0)
BOTH = announced(3 << 60, start=0, stop=4)


class Standing(Swarm):
    """Nodes that hold blocks."""

    def __init__(self, *nodes: Announced) -> None:
        super().__init__([], None, 0.0)
        self.nodes = list(nodes)

    @property
    def usable(self) -> list[Announced]:
        return self.nodes


def replaced(nodes: Sequence[Announced], *present: str) -> Form | None:
    part = SwarmPart(Standing(*nodes), BOTH.kind, (), [])
    return part.replacing(RING, frozenset({"starter", *present}), [one.label for one in nodes])


def test_one_node_takes_one_place() -> None:
    """Each stage has a node of its own, though the fastest node holds the blocks of both."""
    found = replaced([BOTH, LAST])
    assert found is not None and not found.is_moved
    assert [(one.name, one.start, one.stop) for one in found.stages] == [
        ("starter", 0, 0), (BOTH.label, 0, 2), (LAST.label, 2, 4),
    ]  # fmt: skip


def test_where_there_are_too_few_nodes_the_chain_is_another_one() -> None:
    found = replaced([BOTH])
    assert found is not None and found.is_moved
    assert [(one.name, one.start, one.stop) for one in found.stages] == [("starter", 0, 0), (BOTH.label, 0, 4)]
    assert replaced([FIRST]) is None


def test_nodes_of_a_model_with_another_number_of_blocks_take_no_place() -> None:
    other = announced(4 << 60, start=0, stop=4, n_layer=BOTH.n_layer + 1)
    assert replaced([other]) is None
