"""Nodes without files of the model: the parts of their blocks come from the nearest nodes that have them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from swarm_members import held_by, member_without_files, swarm_member
from test_swarm_runs import N_LAYER, PROMPT, opened, wanted

from mdi.checkpoint.source import open_source
from mdi.control.client import ControlClient
from mdi.control.messages import ForwardRequest, PartSpec
from mdi.control.swarm import ModelFacts, ModelRequest
from mdi.engine.sequence import SamplingParams
from mdi.errors import Code, ControlError
from mdi.node.secondary import SecondaryNode
from mdi.node.swarm_model import SwarmModel
from secondaries import entry_of
from tiny_checkpoint import encode, write_checkpoint
from waiting import until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("parts") / "ckpt", n_layer=N_LAYER)


@pytest.fixture(scope="module")
def name(checkpoint: Path) -> str:
    with contextlib.closing(open_source(checkpoint)) as source:
        return f"somebody/{source.model.upper()}"


def counted(node: SecondaryNode) -> list[ForwardRequest]:
    """What a node is asked to send."""
    asked: list[ForwardRequest] = []
    forward = node.forward

    def note(request: ForwardRequest) -> None:
        asked.append(request)
        forward(request)

    node.forward = note  # type: ignore[method-assign]
    return asked


def make_far(node: SecondaryNode) -> None:
    """Its answers come late."""
    answer, never = node.swarm, threading.Event()

    def late(request: Any) -> dict[str, Any]:
        never.wait(0.4)
        return answer(request)

    node.swarm = late  # type: ignore[method-assign]


def whole_ones(stack: contextlib.ExitStack, folder: Path, checkpoint: Path) -> list[SecondaryNode]:
    """Two nodes that have the whole model on their disks."""
    nodes: list[SecondaryNode] = []
    for i in range(2):
        node, member = stack.enter_context(swarm_member(i, folder, checkpoint, nodes, most_blocks=N_LAYER))
        nodes.append(node)
        until(lambda member=member: held_by(member) is not None)
    return nodes


@pytest.mark.slow
def test_parts_come_from_other_nodes_and_go_on_to_others(tmp_path: Path, checkpoint: Path, name: str) -> None:
    """The second node has its parts of the first. When that has gone, the third one has them of the second."""
    with contextlib.ExitStack() as stack:
        with swarm_member(0, tmp_path, checkpoint, most_blocks=N_LAYER) as (first, member):
            until(lambda: held_by(member) is not None)
            second, without = stack.enter_context(member_without_files(1, tmp_path, name, [first]))
            until(lambda: held_by(without) == range(N_LAYER))
        sent = counted(second)
        _, other = stack.enter_context(member_without_files(2, tmp_path, name, [second], most_blocks=2))
        until(lambda: held_by(other) is not None)
        assert len(sent) == 2 and other.announced is not None and not other.announced.is_whole
        with opened(second, checkpoint) as run:
            sample = run.submit(PROMPT, encode(PROMPT), SamplingParams(12, temperature=0))
            run.read()
        assert list(sample.token_ids) == wanted(12)


@pytest.mark.slow
def test_the_nearest_node_sends_them(tmp_path: Path, checkpoint: Path, name: str) -> None:
    with contextlib.ExitStack() as stack:
        nodes = whole_ones(stack, tmp_path, checkpoint)
        far, near = nodes
        sent = counted(far), counted(near)
        make_far(far)
        _, without = stack.enter_context(member_without_files(2, tmp_path, name, nodes, most_blocks=3))
        until(lambda: held_by(without) is not None)
        assert [len(one) for one in sent] == [0, 3]


@pytest.mark.slow
def test_a_node_that_cannot_send_is_passed_over(tmp_path: Path, checkpoint: Path, name: str) -> None:
    with contextlib.ExitStack() as stack:
        nodes = whole_ones(stack, tmp_path, checkpoint)

        def refuse(request: ForwardRequest) -> None:
            raise ControlError("it is gone", 404, code=Code.WEIGHTS)

        nodes[0].forward = refuse  # type: ignore[method-assign]
        make_far(nodes[1])
        _, without = stack.enter_context(member_without_files(2, tmp_path, name, nodes, most_blocks=3))
        until(lambda: held_by(without) is not None)


def test_strangers_get_and_give_no_parts(tmp_path: Path, checkpoint: Path) -> None:
    """A node sends parts to nodes that it has heard of, and takes those alone that it waits for."""
    with swarm_member(0, tmp_path, checkpoint, most_blocks=2) as (node, member):
        until(lambda: held_by(member) is not None)
        client, model = ControlClient(entry_of(node)), node.swarm_model
        assert model is not None
        (part,) = client.model(ModelRequest(model.weights, ("block.1", "block.99"))).parts
        asked = ForwardRequest("ab" * 8, part, 0, "other", "127.0.0.1", 1)
        for attempt in (
            lambda: client.forward(asked),
            lambda: client.send_part(part, node.process, 0, [b"x"]),
            lambda: client.model(ModelRequest("ab" * 32)),
        ):
            with pytest.raises(ControlError) as refused:
                attempt()
            assert (refused.value.status, refused.value.code) in ((404, "weights"), (409, "run"))


def test_facts_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    with contextlib.closing(open_source(checkpoint)) as source:
        facts = SwarmModel.of(source).facts
    told = facts.to_json()
    ModelFacts.from_json(told, "a node")
    model, n_head = told["model"], 2 * facts.model.config.n_head
    other = {**model, "config": {**model["config"], "n_head": n_head}}
    for change in ({"model": other}, {"parts": []}, {"parts": [vars(PartSpec("block.0", "ab" * 32, 1))]}):
        with pytest.raises(ControlError):
            SwarmModel(ModelFacts.from_json({**told, **change}, "a node"))
    with pytest.raises(ControlError):
        ModelFacts.from_json({**told, "model": {**model, "config": {}}}, "a node")
