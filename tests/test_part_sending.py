"""Parts that one node has and another one lacks go from the one to the other; the starter sends what nobody else can."""

from __future__ import annotations

import hashlib
import io
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_keys import key_file
from loopback import DEADLINE_S
from mdi.cancel import Cancel
from mdi.checkpoint.parts import from_offset
from mdi.control.client import ControlClient
from mdi.control.messages import ForwardRequest, PartSpec
from mdi.engine.sequence import SamplingParams
from mdi.errors import Code, ControlError, NodeLostError
from mdi.node import forwards
from mdi.node.forwards import N_FORWARDS
from mdi.node.secondary import SecondaryNode
from mdi.node.worker import RingWorker
from mdi.run.nodes import GivenNodes
from mdi.run.part_sending import Holders, PartSending
from mdi.run.policy import Better, Form, Stage
from mdi.run.run import Run
from mdi.spec.cluster import NodeConfig, standalone
from mdi.spec.options import StarterOptions
from mdi.stages.starter_weights import StarterWeights
from node_ports import BareNode, ports_of
from secondaries import cluster_of, entry_of, secondaries, secondary
from tiny_checkpoint import encode, write_checkpoint
from waiting import until

RUN = "0123456789abcdef"
BYTES = bytes(range(256)) * 40
PART = PartSpec("block.1", hashlib.sha256(BYTES).hexdigest(), len(BYTES))


def ended_ring() -> RingWorker:
    unused: Any = None
    request: Any = SimpleNamespace(run=RUN, epoch=RUN, hand_over=False)
    ring = RingWorker("secondary0", "", request, unused, unused, unused, unused, unused, 10.0)
    ring.finish(None)
    return ring


class Waiting(BareNode):
    """Waits for weights."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int, bytes]] = []

    def status(self, run: str | None) -> dict[str, Any]:
        return {"name": "b", "version": "9", "state": "LOADING"}

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        self.got.append((run, sha256, b"".join(iter(lambda: read(1000), b""))))
        assert len(self.got[-1][2]) == n_bytes


@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("have", [0, 700])
def test_a_node_sends_what_it_has(tmp_path: Path, is_keyed: bool, have: int) -> None:
    keys = key_file(tmp_path / "cluster.key") if is_keyed else None
    target = Waiting()
    with ports_of(target, keys, "b") as there, secondary(0, tmp_path / "a", keys=keys) as node:
        client = ControlClient(entry_of(node), keys)
        request = ForwardRequest(RUN, PART, have, "b", "127.0.0.1", there.port_in)
        node.runs.add(ended_ring())
        with pytest.raises(ControlError) as caught:
            client.forward(request)
        assert caught.value.status == 404 and not target.got
        node.store.receive(PART, 0, io.BytesIO(BYTES).read)
        client.forward(request)
        if is_keyed:
            with pytest.raises(ControlError):
                ControlClient(entry_of(node)).forward(request)
    assert target.got == [(RUN, PART.sha256, BYTES[have:])]


@pytest.fixture
def tarpit() -> Iterator[int]:
    """A port that takes connections and bytes, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_node_sends_parts_only_in_its_own_runs(tmp_path: Path, tarpit: int) -> None:
    with secondary(0, tmp_path / "a") as node:
        node.store.receive(PART, 0, io.BytesIO(BYTES).read)
        with pytest.raises(ControlError) as caught:
            ControlClient(entry_of(node)).forward(ForwardRequest(RUN, PART, 0, "b", "127.0.0.1", tarpit))
    assert (caught.value.status, caught.value.code) == (409, "run")


@pytest.mark.slow
def test_nodes_that_take_nothing_do_not_hold_this_one(
    tmp_path: Path, tarpit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few are waited for; the node refuses the next one at once, and is there for the others."""
    monkeypatch.setattr(forwards, "FORWARD_ANSWER_S", 4.0)
    errors: list[ControlError] = []

    def ask(node: SecondaryNode) -> None:
        with pytest.raises(ControlError) as caught:
            ControlClient(entry_of(node)).forward(ForwardRequest(RUN, PART, 0, "b", "127.0.0.1", tarpit))
        errors.append(caught.value)

    with secondary(0, tmp_path / "a") as node:
        node.runs.add(ended_ring())
        node.store.receive(PART, 0, io.BytesIO(BYTES).read)
        threads = [threading.Thread(target=ask, args=(node,)) for _ in range(N_FORWARDS + 3)]
        for thread in threads:
            thread.start()
        until(lambda: len(errors) >= 3)
        assert [(e.status, e.code) for e in errors[:3]] == [(409, "busy")] * 3
        assert ControlClient(entry_of(node)).status()["state"] == "READY"
        for thread in threads:
            thread.join(DEADLINE_S)
        assert {e.status for e in errors[3:]} == {500} and len(errors) == len(threads)
        ask(node)
        assert errors[-1].status == 500, "there is a place again"


def test_a_part_that_is_taken_too_slowly_is_given_up() -> None:
    times = iter([1.0, 2.0, 3.0])
    pieces = forwards.until(2.5, [b"a", b"b", b"c"], lambda: next(times))
    assert [next(pieces), next(pieces)] == [b"a", b"b"]
    with pytest.raises(ControlError) as caught:
        next(pieces)
    assert caught.value.status == 504


class Fake:
    """A node that others are asked of, and the starter's weights."""

    def __init__(self, name: str, problem: ControlError | None = None) -> None:
        self.node = NodeConfig(name, "h", 1, 1)
        self.problem = problem
        self.asked: list[tuple[str, int]] = []
        self.sent = b""

    def forward(self, request: ForwardRequest) -> None:
        self.asked.append((request.node, request.offset))
        if self.problem is not None:
            raise self.problem

    def send_part(self, part: PartSpec, run: str, offset: int, pieces: Iterator[bytes]) -> None:
        self.sent += b"".join(pieces)


def sending(target: Fake, missing: dict[PartSpec, int], *holders: Fake, beside: Sequence[Fake] = ()) -> Any:
    weights: Any = SimpleNamespace(pieces=lambda name: iter([BYTES[:300], BYTES[300:]]))
    of: Any = Holders({PART.sha256: list(holders)}, beside)  # type: ignore[dict-item, arg-type]
    client: Any = target
    return PartSending(client, RUN, weights, of, Cancel(), lambda: missing)


def test_the_holder_that_has_sent_the_least_sends() -> None:
    target, one, two = Fake("b"), Fake("a"), Fake("c")
    send = sending(target, {}, target, one, two)
    for _ in range(3):
        send.send(PART, 5)
    assert (len(one.asked), len(two.asked)) == (2, 1) and one.asked[0] == ("b", 5)
    assert not target.asked and not target.sent


def test_the_starter_goes_on_where_a_holder_failed() -> None:
    target, holder = Fake("b"), Fake("a", ControlError("gone", 500))
    sending(target, {PART: 400}, holder).send(PART, 0)
    assert target.sent == BYTES[400:] and holder.asked == [("b", 0)]
    whole = Fake("b")
    sending(whole, {}, holder).send(PART, 0)
    assert not whole.sent, "only the holder's answer was lost"


def test_nodes_beside_the_ring_are_asked_for_what_no_node_of_it_has() -> None:
    lacks = ControlError("not here", 404, code=Code.WEIGHTS)
    target, without, there, last = Fake("b"), Fake("a", lacks), Fake("c"), Fake("d")
    sending(target, {}, without, beside=[without, there, last]).send(PART, 7)
    assert (without.asked, there.asked, last.asked, target.sent) == ([("b", 7)], [("b", 7)], [], b"")
    sending(target, {}, without, beside=[Fake("c", lacks)]).send(PART, 0)
    assert target.sent == BYTES


def test_a_node_that_has_no_part_in_the_run_is_no_reason_to_stop_asking() -> None:
    target, outside, there = Fake("b"), Fake("a", ControlError("no part", 409, code=Code.RUN)), Fake("c")
    sending(target, {}, outside, there).send(PART, 0)
    assert (there.asked, target.sent) == ([("b", 0)], b"")


def test_a_connection_that_breaks_is_no_lost_node() -> None:
    """The node is asked what it has, and gets the rest; who takes nothing time and again is lost."""
    target, missing = Fake("b"), {PART: 0}

    def break_off(part: PartSpec, run: str, offset: int, pieces: Iterator[bytes]) -> None:
        missing[PART] = min(offset + 4000, PART.n_bytes - 100)
        target.sent += b"".join(pieces)[: missing[PART] - offset]
        if target.problem is None:
            return
        raise target.problem

    target.send_part = break_off  # type: ignore[method-assign]
    target.problem = ControlError("reset", problem="closed")
    with pytest.raises(NodeLostError):
        sending(target, missing).send(PART, 0)
    assert target.sent == BYTES[:-100], "as long as bytes arrive it goes on"


def test_pieces_from_an_offset() -> None:
    for skip in (0, 1, 2, 3, 5, 6):
        assert b"".join(from_offset([b"abc", b"", b"def"], skip)) == b"abcdef"[skip:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "following",
    [
        Form((Stage("starter", 0, 1), Stage("secondary0", 1, 2), Stage("secondary1", 2, 5)), is_moved=True),
        Form((Stage("starter", 0, 1), Stage("secondary0", 1, 5)), is_moved=True, outside=frozenset({"secondary1"})),
    ],
    ids=["in the ring", "beside it"],
)
def test_blocks_that_move_come_from_the_node_that_had_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, following: Form
) -> None:
    ckpt = write_checkpoint(tmp_path / "tiny", with_end=False, block_size=2048)
    options = StarterOptions(ckpt=ckpt, prompt_style="none", device="cpu", layers="1,3,1")
    with secondaries(2, tmp_path) as nodes, Run(GivenNodes(cluster_of(nodes)), options, 400, n_texts=1) as starter:
        monkeypatch.setattr(
            StarterWeights, "pieces", lambda self, part: pytest.fail("the starter is asked for weights")
        )
        sample = starter.submit("The ring", encode("The ring"), SamplingParams(300, temperature=0))
        assert starter.ring is not None
        starter.loop.put(Better(following, starter.ring.stages))
        reader = threading.Thread(target=starter.read)
        reader.start()
        reader.join(DEADLINE_S)
        until(lambda: starter.names == following.names)  # a fast text may end before the blocks have moved
        assert not starter.n_recoveries
        assert starter.model.weights.blocks == [(stage.start, stage.stop) for stage in following.stages]
        alone = StarterOptions(ckpt=ckpt, prompt_style="none", device="cpu")
    assert len(sample.token_ids) == 300
    with Run(GivenNodes(standalone()), alone, 400, n_texts=1) as starter:
        same = starter.submit("The ring", encode("The ring"), SamplingParams(300, temperature=0))
        starter.read()
    assert same.token_ids == sample.token_ids
