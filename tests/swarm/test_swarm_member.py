"""Nodes that hold blocks of a model for all runs: they share them out, tell each other, and take over what is lost."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swarm_members import held_by, member_without_files, swarm_member, wait_covered

from mdi.control.client import ControlClient
from mdi.control.swarm import SwarmRequest
from mdi.errors import Code, ControlError, NoMemoryError, UsageError
from mdi.node import swarm_member as member_module
from mdi.node.secondary import SecondaryNode
from mdi.placement.balance import Served
from mdi.stages.store import StageStore
from secondaries import entry_of
from tiny_checkpoint import write_checkpoint
from waiting import DEADLINE_S, until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("swarm") / "ckpt", n_layer=5)


def test_nodes_share_blocks_out_and_know_of_each_other(tmp_path: Path, checkpoint: Path) -> None:
    """Each new node knows only the first one. The last one learns of all from it, and takes what they lack."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(swarm_member(0, tmp_path, checkpoint, most_blocks=2))]
        until(lambda: held_by(nodes[0][1]) == range(2))
        (slot,) = nodes[0][0].status(None)["slots"]
        assert (slot["state"], slot["blocks"]) == ("HELD", (0, 2))
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


def planned(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The processes that each look of a node sees; nobody moves."""
    found: list[set[str]] = []

    def noted(nodes: list[Served], n_layer: int) -> tuple[()]:
        found.append({one.name for one in nodes})
        return ()

    monkeypatch.setattr(member_module, "plan", noted)
    return found


def test_what_a_node_leaves_free_is_a_part_of_what_it_may_use(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, less than a twentieth of the machine's memory is free at any time."""
    monkeypatch.setattr(member_module, "memory_bytes", lambda: 1 << 30)
    looks, free = planned(monkeypatch), 60 << 20
    with swarm_member(
        0, tmp_path, checkpoint, most_blocks=2, spare_bytes=None, free_bytes=lambda: free
    ) as (_, member):  # fmt: skip
        until(lambda: len(looks) > 1)
        assert held_by(member) == range(2)
        free = 50 << 20
        until(lambda: member.has_given_back)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    """The next call fails, and those after it do not."""
    real, errors = getattr(owner, name), [error]

    def called(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (SecondaryNode, "profile", ControlError("it measures itself for another one", 409)),
        (StageStore, "acquire", NoMemoryError("another program had the memory for a second")),
        (member_module, "weakest_span", RuntimeError("what nobody has thought of")),
    ],
)
def test_a_node_that_fails_to_join_once_tries_again(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
) -> None:
    fail_once(monkeypatch, owner, name, error)
    with swarm_member(0, tmp_path, checkpoint, most_blocks=2) as (_, member):
        until(lambda: held_by(member) == range(2))


def test_a_node_that_cannot_take_blocks_again_at_once_does_so_later(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 40
    with swarm_member(
        0, tmp_path, checkpoint, most_blocks=3, spare_bytes=1 << 20, free_bytes=lambda: free
    ) as (node, member):  # fmt: skip
        until(lambda: held_by(member) == range(3))
        free = 0
        until(lambda: member.has_given_back and node.stages.listed == [])
        fail_once(monkeypatch, StageStore, "acquire", ControlError("no node has sent block.0", code=Code.WEIGHTS))
        free = 1 << 40
        until(lambda: held_by(member) == range(3) and len(node.stages.listed) == 1)


def test_a_round_that_fails_leaves_nothing_half_done(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails between what a node says of its new blocks and what it does."""
    free = 1 << 40
    with swarm_member(
        0, tmp_path, checkpoint, most_blocks=3, spare_bytes=1 << 20, free_bytes=lambda: free
    ) as (node, member):  # fmt: skip
        until(lambda: held_by(member) == range(3))
        fail_once(monkeypatch, StageStore, "remove", RuntimeError("what nobody has thought of"))
        free = 0
        until(lambda: member.has_given_back and node.stages.listed == [])


def test_an_announcement_of_a_model_with_other_blocks_is_dropped(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = planned(monkeypatch)
    with swarm_member(0, tmp_path, checkpoint, most_blocks=2) as (node, member):
        until(lambda: held_by(member) == range(2))
        own = member.announced
        assert own is not None
        bad = replace(own, process="ab" * 8, version=1, n_layer=9, stop=9)
        ControlClient(entry_of(node)).swarm(SwarmRequest(bad))
        n_before = len(looks)
        until(lambda: len(looks) > n_before + 1)
        assert looks[-1] == {own.process}


def test_a_node_that_cannot_take_part_ends_with_an_error(tmp_path: Path, checkpoint: Path, in_torch: None) -> None:
    """So whoever watches its process learns of it."""
    with swarm_member(0, tmp_path, checkpoint, most_blocks=2) as (node, member):
        until(lambda: node.config.name not in {thread.name for thread in threading.enumerate()})
        with pytest.raises(UsageError, match="kernels"):
            member.check()


def test_the_end_does_not_wait_for_a_node_that_sends(tmp_path: Path, checkpoint: Path) -> None:
    asked, goes_on = threading.Event(), threading.Event()
    with swarm_member(0, tmp_path, checkpoint, most_blocks=5) as (first, one):
        until(lambda: held_by(one) == range(5))

        def send(request: object) -> None:
            asked.set()
            goes_on.wait(DEADLINE_S)

        first.forward = send  # type: ignore[method-assign]
        assert one.announced is not None
        try:
            with member_without_files(1, tmp_path, one.announced.model, [first], 2):
                assert asked.wait(DEADLINE_S)
            assert [thread.name for thread in threading.enumerate()].count("swarm") == 1
        finally:
            goes_on.set()


def test_the_end_has_a_limit(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "CLOSE_S", 0.01)
    measures, goes_on = threading.Event(), threading.Event()
    has_measured = threading.Event()

    def measure(*args: object) -> None:
        measures.set()
        goes_on.wait(DEADLINE_S)
        has_measured.set()
        raise ControlError("it has ended")

    monkeypatch.setattr(SecondaryNode, "profile", measure)
    try:
        with swarm_member(0, tmp_path, checkpoint, most_blocks=2):
            assert measures.wait(DEADLINE_S)
        assert not has_measured.is_set()
    finally:
        goes_on.set()
