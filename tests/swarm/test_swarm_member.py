"""Nodes that hold blocks of a model for all runs: they share them out, tell each other, and take over what is lost."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from swarm_members import held_by, swarm_member, wait_covered

from tiny_checkpoint import write_checkpoint
from waiting import until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("swarm") / "ckpt", n_layer=5)


def test_nodes_share_blocks_out_and_know_of_each_other(tmp_path: Path, checkpoint: Path) -> None:
    """Each new node knows only the first one. The last one learns of all from it, and takes what they lack."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(swarm_member(0, tmp_path, checkpoint, most_blocks=2))]
        until(lambda: held_by(nodes[0][1]) == range(2))
        for i in (1, 2):
            nodes.append(stack.enter_context(swarm_member(i, tmp_path, checkpoint, [nodes[0][0]], most_blocks=2)))
            until(lambda: held_by(nodes[-1][1]) is not None)
        wait_covered(lambda: [one for _, one in nodes], 5)
        until(lambda: all(sum(one.is_ready for one in node.table.nodes) == 3 for node, _ in nodes))
        spans = {one.process: range(one.start, one.stop) for one in nodes[2][0].table.nodes}
        assert spans == {node.process: held_by(stands) for node, stands in nodes}
        assert len({one.kind for one in nodes[0][0].table.nodes}) == 1


def test_a_span_that_is_lost_is_taken_over(tmp_path: Path, checkpoint: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(swarm_member(0, tmp_path, checkpoint, most_blocks=3))
        until(lambda: held_by(first[1]) == range(3))
        with swarm_member(1, tmp_path, checkpoint, [first[0]], most_blocks=3) as second:
            until(lambda: held_by(second[1]) == range(2, 5))
            third = stack.enter_context(swarm_member(2, tmp_path, checkpoint, [first[0]], most_blocks=3))
            until(lambda: held_by(third[1]) is not None)
        # The second one said that it leaves.
        wait_covered(lambda: [first[1], third[1]], 5)


def test_a_node_whose_memory_others_need_gives_its_blocks_back_and_takes_some_again(
    tmp_path: Path, checkpoint: Path
) -> None:
    free = 1 << 40
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(swarm_member(0, tmp_path, checkpoint, most_blocks=5))
        until(lambda: held_by(first[1]) == range(5))
        node, short = stack.enter_context(
            swarm_member(
                1, tmp_path, checkpoint, [first[0]], most_blocks=3, spare_bytes=1 << 20, free_bytes=lambda: free
            )
        )
        until(lambda: held_by(short) == range(3))
        free = (1 << 20) - 1
        until(lambda: short.has_given_back and node.stages.listed == [])
        until(lambda: not any(one.stop for one in first[0].table.nodes if one.process == node.process))
        free = 1 << 40
        until(lambda: held_by(short) == range(3) and len(node.stages.listed) == 1)
