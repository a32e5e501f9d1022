"""Several runs share the same secondaries: each has the right texts, and none is in another one's way."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mdi.node.worker
import mdi.run.setup
from frame_starter import FrameStarter, frame_starter
from loopback import DEADLINE_S
from mdi.checkpoint.parts import Part
from mdi.checkpoint.source import open_source
from mdi.checkpoint.store import BlockStore
from mdi.control.client import ControlClient
from mdi.control.messages import PartSpec
from mdi.engine.sequence import SamplingParams
from mdi.errors import Code, ControlError, EngineError, NodeLostError, RingError
from mdi.net.hello import Fault
from mdi.net.ring import TcpRing
from mdi.node.secondary import SecondaryNode
from mdi.node.worker import RingWorker, Waits
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.run.texts import SampleReader
from mdi.spec.extent import Extent
from mdi.spec.options import StarterOptions
from mdi.stages.starter_weights import StarterWeights
from secondaries import cluster_of, secondaries, secondary
from tiny_checkpoint import encode, reference, write_checkpoint
from waiting import until, until_gone

TEXTS = ("The ring", "Who are you?")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models, seeds 4, 5 and 6."""
    folder = tmp_path_factory.mktemp("models")
    return [write_checkpoint(folder / f"seed{seed}", seed) for seed in (4, 5, 6)]


@contextlib.contextmanager
def started(nodes: list[SecondaryNode], checkpoint: Path, layers: str = "1,2,2", **options: Any) -> Iterator[Run]:
    """A starter whose ring is closed."""
    chosen = StarterOptions(
        ckpt=checkpoint, prompt_style="none", device="cpu", layers=layers, **{"fixed": True, **options}
    )
    starter = Run(GivenNodes(cluster_of(nodes)), chosen, 80, n_texts=len(TEXTS))
    try:
        starter.open()
        yield starter
    finally:
        starter.close()


def texts_of(starter: Run, n_tokens: int) -> list[list[int]]:
    reader = SampleReader()
    params = SamplingParams(n_tokens, temperature=0)
    samples = [starter.submit(text, encode(text), params, reader=reader) for text in TEXTS]
    reader.read()
    starter.raise_failure()
    return [sample.token_ids for sample in samples]


def expected(seed: int, n_tokens: int) -> list[list[int]]:
    return [list(reference(text, n_tokens, seed)) for text in TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize("n_rings", [2, 3])
def test_rings_of_different_models_run_at_the_same_time(checkpoints: list[Path], tmp_path: Path, n_rings: int) -> None:
    found: dict[int, list[list[int]]] = {}
    with secondaries(2, tmp_path) as nodes, contextlib.ExitStack() as stack:
        starters = [stack.enter_context(started(nodes, one)) for one in checkpoints[:n_rings]]

        def generate(i: int) -> None:
            found[i] = texts_of(starters[i], 40)

        threads = [threading.Thread(target=generate, args=(i,)) for i in range(n_rings)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        for node in nodes:
            status = node.status(None)
            assert status["state"] == "RUNNING"
            assert [slot["state"] for slot in status["slots"]] == ["RUNNING"] * n_rings
            assert not any("run" in slot for slot in status["slots"]), "only who knows a run hears of it"
            own = node.status(starters[1].run_id)["slots"]
            assert [slot.get("run") for slot in own].count(starters[1].run_id) == 1
    assert found == {i: expected(4 + i, 40) for i in range(n_rings)}


def test_two_starters_that_send_the_same_parts_to_a_node(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins when half of a part is there, and what the first one sends is not received again."""
    pieces, send_part = StarterWeights.pieces, ControlClient.send_part
    is_half_there, is_second_sending = threading.Event(), threading.Event()
    n_received: Counter[str] = Counter()
    take = BlockStore.take

    def in_halves(self: StarterWeights, part: str) -> Iterator[bytes]:
        whole = b"".join(pieces(self, part))
        yield whole[: len(whole) // 2]
        is_half_there.set()
        is_second_sending.wait(DEADLINE_S)
        yield whole[len(whole) // 2 :]

    def count(self: BlockStore, path: Path, info: Part) -> None:
        n_received[info.name] += 1
        take(self, path, info)

    def send(self: ControlClient, part: PartSpec, *args: Any) -> None:
        if is_half_there.is_set():
            is_second_sending.set()
        send_part(self, part, *args)

    monkeypatch.setattr(StarterWeights, "pieces", in_halves)
    monkeypatch.setattr(ControlClient, "send_part", send)
    monkeypatch.setattr(BlockStore, "take", count)
    found: dict[int, list[list[int]]] = {}
    with secondaries(1, tmp_path) as nodes:

        def generate(i: int) -> None:
            with started(nodes, checkpoints[0], "2,3") as starter:
                found[i] = texts_of(starter, 8)

        threads = [threading.Thread(target=generate, args=(i,)) for i in range(2)]
        threads[0].start()
        assert is_half_there.wait(DEADLINE_S)
        threads[1].start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(nodes[0].store.parts()) == 3
    assert found == dict.fromkeys(range(2), expected(4, 8))
    assert n_received == {f"block.{i}": 1 for i in range(2, 5)}


def test_a_ring_that_breaks_leaves_the_other_one_alone(checkpoints: list[Path], tmp_path: Path) -> None:
    with secondaries(2, tmp_path) as nodes, started(nodes, checkpoints[0]) as going:
        with started(nodes, checkpoints[1]) as broken:
            assert broken.ring is not None
            broken.ring.link.fail(Fault("starter", "it failed", "starter", Code.ENGINE))  # type: ignore[union-attr]
            with pytest.raises((RingError, EngineError)):  # the engine may have ended before the text comes
                texts_of(broken, 5)
        assert texts_of(going, 30) == expected(4, 30)
        status = nodes[0].status(None)
        assert (status["state"], sorted(slot["state"] for slot in status["slots"])) == (
            "RUNNING",
            ["RUNNING", "UNUSED"],
        )


@pytest.fixture
def node(checkpoints: list[Path], tmp_path: Path) -> Iterator[SecondaryNode]:
    """One with the first model on its disk."""
    source = open_source(checkpoints[0])
    with secondary(0, tmp_path / "cache", weights=source) as made:
        yield made
    source.close()


def rows(n: int, n_embd: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_embd)).astype(np.float32)


@pytest.mark.slow
def test_a_neighbour_that_reads_nothing_stops_its_own_ring_only(node: SecondaryNode, checkpoints: list[Path]) -> None:
    """Frames are sent to it until the node's queue is full, and nothing is taken from it."""
    with frame_starter(node, checkpoints[0], capacity=2) as stuck:
        stuck.form(extent=Extent(300, 64))
        x = rows(300, stuck.n_embd)
        over = threading.Event()

        def send() -> None:
            number = 0
            while not over.is_set():
                stuck.ring.send(stuck.frame(number, x, 0))  # type: ignore[union-attr]
                number += 1

        thread = threading.Thread(target=send)
        thread.start()
        try:
            (turn,) = node.turns.turns
            until(lambda: turn.ring.next_link.is_full and not turn.ring.inbox.is_empty)
            assert turn.ring.next_link.is_full and not turn.ring.is_pending
            with started([node], checkpoints[0], "2,3") as going:
                assert texts_of(going, 20) == expected(4, 20)
            until(lambda: turn.ring.next_link.is_full)  # the system may have taken some more bytes meanwhile
        finally:
            over.set()
            stuck.ring.stop("enough")  # type: ignore[union-attr]
            stuck.drop()
            thread.join(DEADLINE_S)


def test_a_run_goes_on_over_another_ring_with_its_caches(node: SecondaryNode, checkpoints: list[Path]) -> None:
    x = rows(9, 64)
    with frame_starter(node, checkpoints[0]) as undisturbed:
        undisturbed.form()
        x = rows(9, undisturbed.n_embd)
        wanted = [undisturbed.compute(0, x[:6], 0), undisturbed.compute(1, x[6:], 6)]
    with frame_starter(node, checkpoints[0]) as starter:
        status = starter.form(keep_caches=True)
        assert status["caches_kept"] is False, "there were none"
        assert starter.compute(0, x[:6], 0) == wanted[0]
        stage = node.stages.listed[-1].stage
        starter.ring.fail(Fault("secondary7", "gone", "starter"))  # type: ignore[union-attr]
        status = starter.wait("IDLE")
        assert (status["error_code"], status["lost"]["node"]) == ("lost", "secondary7")
        assert "KEPT" in [slot["state"] for slot in status["slots"]]
        status = starter.form(keep_caches=True)
        assert status["caches_kept"] is True and starter.compute(0, x[6:], 6) == wanted[1]
        starter.init(keep_caches=True)  # in the middle of a ring
        starter.form(keep_caches=True)
        assert starter.compute(0, x[6:], 6) == wanted[1]
        starter.form()
        assert stage is not None and stage in [slot.stage for slot in node.stages.listed], "nothing was loaded again"
        with pytest.raises(NodeLostError):  # empty: there is nothing before position 6; a stage that raised is dropped
            starter.compute(0, x[6:], 6)


def test_a_run_that_was_stopped_has_no_further_ring(node: SecondaryNode, checkpoints: list[Path]) -> None:
    with frame_starter(node, checkpoints[0]) as starter:
        starter.form()
        starter.compute(0, rows(6, starter.n_embd), 0)
        starter.client.stop(starter.run)
        starter.wait("READY")
        with pytest.raises(ControlError) as caught:
            starter.init(keep_caches=True)
        assert (caught.value.status, caught.value.code) == (409, "stopped")
        assert all(not held.stage.caches.n_bytes for held in node.stages.listed if held.stage is not None)


def test_another_stage_is_prepared_beside_the_present_one(node: SecondaryNode, checkpoints: list[Path]) -> None:
    with frame_starter(node, checkpoints[0]) as starter:
        starter.form()
        (present,) = node.stages.listed
        longer = {"extent": Extent(300), "is_ahead": True}
        starter.init(**longer)
        starter.wait("READY")
        assert [held.use for held in node.stages.listed] == ["USED", "USED"]
        starter.compute(0, rows(3, starter.n_embd), 0)
        node.stages.available = lambda device: 1000
        with pytest.raises(ControlError) as caught:
            starter.init(**longer, quantize="int8")
        assert (caught.value.status, caught.value.code) == (507, "memory")
        starter.compute(1, rows(3, starter.n_embd), 3)
        assert present.use == "USED" and [one.state for one in node.runs.active] == ["RUNNING"]


def test_a_stage_that_was_prepared_beside_the_present_one_is_ready_for_the_next_ring(
    node: SecondaryNode, checkpoints: list[Path]
) -> None:
    """A ring that is given up meanwhile is ended alone; the next one has its stage, and all memory for caches."""
    with frame_starter(node, checkpoints[0]) as starter:
        starter.form()
        (present,), data = node.stages.listed, rows(6, starter.n_embd)
        starter.compute(0, data[:3], 0)
        longer = {"extent": Extent(300), "quantize": "int8"}
        epoch = starter.init(**longer, is_ahead=True)
        starter.wait("READY")
        ring = node.runs.find(starter.run)
        assert ring is not None and ring.request.epoch == epoch and len(node.runs.active) == 2
        starter.client.stop(starter.run, ring=epoch)
        until(lambda: [one.state for one in node.runs.active] == ["RUNNING"])
        starter.client.stop(starter.run, ring=node.runs.active[0].request.epoch)  # closed: it goes on
        starter.compute(1, data[3:5], 3)
        assert starter.client.status(starter.run)["state"] == "RUNNING"
        (_, following) = node.stages.listed
        stage = following.stage
        assert stage is not None and following.use == "UNUSED"
        starter.form(**longer)
        starter.compute(0, data, 0)
        assert following.stage is stage and (following.use, present.use) == ("USED", "UNUSED")


def test_a_ring_that_the_starter_has_closed_is_not_ended_for_the_next_one(
    node: SecondaryNode, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this node knows it last: the request for the next ring may be there before."""
    may_begin, begin, begins = threading.Event(), RingWorker.begin, RingWorker.begins_within

    def late(worker: RingWorker, ring: TcpRing) -> None:
        assert may_begin.wait(DEADLINE_S)
        begin(worker, ring)

    def asked(worker: RingWorker, timeout_s: float) -> bool:
        may_begin.set()
        return begins(worker, timeout_s)

    monkeypatch.setattr(RingWorker, "begin", late)
    monkeypatch.setattr(RingWorker, "begins_within", asked)
    with frame_starter(node, checkpoints[0]) as starter:
        wait = starter.wait
        monkeypatch.setattr(starter, "wait", lambda state: {} if state == "RUNNING" else wait(state))
        starter.form()
        starter.init(extent=Extent(300), is_ahead=True)
        starter.wait("READY")
        starter.compute(0, rows(3, starter.n_embd), 0)
        assert [one.state for one in node.runs.active] == ["RUNNING", "READY"]


def test_the_same_request_twice_is_one_ring(node: SecondaryNode, checkpoints: list[Path]) -> None:
    with frame_starter(node, checkpoints[0]) as starter:
        epoch = starter.init()
        starter.init(epoch)
        starter.wait("READY")
        assert len(node.runs.active) == 1


def test_a_run_may_want_a_node_for_itself(node: SecondaryNode, checkpoints: list[Path]) -> None:
    with frame_starter(node, checkpoints[0]) as first, frame_starter(node, checkpoints[0]) as second:
        first.form(extent=Extent(200, 1))
        with pytest.raises(ControlError) as caught:
            second.init(exclusive=True)
        assert (caught.value.status, caught.value.code) == (409, "busy")
        first.client.stop(first.run)
        first.wait("READY")
        second.form(exclusive=True)
        with frame_starter(node, checkpoints[0]) as third, pytest.raises(ControlError) as caught:
            third.init()
        assert caught.value.code == "busy"


@pytest.mark.parametrize("state", ["LOADING", "READY", "RUNNING"])
def test_a_starter_that_is_gone_takes_nothing_with_it(
    node: SecondaryNode, checkpoints: list[Path], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its run was doing: the other run goes on, and what was reserved is given back."""
    node.waits = Waits(lease_s=0.5)
    monkeypatch.setattr(mdi.run.setup, "SIGN_S", 0.05)  # the other run's starter may be slow, but it lives
    with started([node], checkpoints[0], "2,3") as going:
        gone = FrameStarter(node, checkpoints[0])
        try:
            if state == "LOADING":  # weights that nobody sends
                gone.init(parts=tuple(PartSpec(f"block.{i}", f"{i:064x}", 10) for i in range(5)))
            elif state == "READY":
                gone.init()
                gone.wait("READY")
            else:
                gone.form()
            job = node.runs.find(gone.run)
            assert job is not None and job.state == state
            gone.drop()
            assert job.has_ended.wait(DEADLINE_S)
        finally:
            gone.close()
        assert texts_of(going, 10) == expected(4, 10)
        assert [slot.use for slot in node.stages.listed].count("USED") == 1


def test_a_stage_that_is_dropped_gives_its_memory_back(checkpoints: list[Path], tmp_path: Path) -> None:
    """Neither the thread that computed for it nor the run that is remembered keeps it."""
    with secondaries(1, tmp_path) as nodes:
        with started(nodes, checkpoints[0], "2,3") as starter:
            texts_of(starter, 2)
            stage = weakref.ref(nodes[0].stages.listed[0].stage)
        until(nodes[0].stages.drop_unused)
        until_gone(stage)


@pytest.mark.slow
def test_short_runs_leave_nothing_behind(checkpoints: list[Path], tmp_path: Path) -> None:
    """MDI_RUNS says how many; after a few, each is like the one before."""
    n_runs = int(os.environ.get("MDI_RUNS", "8"))
    fds = Path("/proc/self/fd")
    seen: list[tuple[int, int, int]] = []
    with secondaries(2, tmp_path) as nodes:
        for i in range(n_runs):
            with started(nodes, checkpoints[i % 2]) as starter:
                texts_of(starter, 2)
                starter.close()
            n_fds = len(list(fds.iterdir())) if fds.is_dir() else 0
            seen.append((threading.active_count(), n_fds, sum(len(node.workers) for node in nodes)))
        for node in nodes:
            assert len(node.runs.rings) <= 17 and not node.runs.active
    assert max(n for n, _, _ in seen[4:]) <= max(n for n, _, _ in seen[:4])
    assert max(n for _, n, _ in seen[4:]) <= max(n for _, n, _ in seen[:4]) + 2
    assert max(n for _, _, n in seen) <= 4


def test_a_node_that_is_to_leave_says_so_and_goes_on_until_it_is_let_go(
    node: SecondaryNode, checkpoints: list[Path]
) -> None:
    with frame_starter(node, checkpoints[0]) as starter, frame_starter(node, checkpoints[0]) as other:
        starter.form(hand_over=True)
        assert node.may_hand_over
        node.leave()
        ring = starter.ring
        assert ring is not None and ring.recv(DEADLINE_S) is None and ring.leaving == ("secondary0",)
        assert starter.client.status(starter.run)["leaving"] is True
        starter.compute(0, rows(3, starter.n_embd), 0)
        with pytest.raises(ControlError) as caught:
            other.init()
        assert (caught.value.status, caught.value.code) == (503, "leaving")
        ring.stop("its blocks are elsewhere")
        until(lambda: not node.turns.is_running)  # the process ends


def test_blocks_of_a_node_that_leaves_are_taken_over_by_those_that_stay(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """No text notices."""
    with secondaries(2, tmp_path) as nodes, started(nodes, checkpoints[0], fixed=False) as starter:
        assert texts_of(starter, 5) == expected(4, 5)
        leaving = threading.Timer(0.05, nodes[0].leave)
        leaving.start()
        found = []
        while nodes[0].turns.is_running and len(found) < 100:
            found.append(texts_of(starter, 40))
        leaving.join(DEADLINE_S)
        assert not nodes[0].turns.is_running, "its process ends"
        found.append(texts_of(starter, 40))
        assert all(texts == expected(4, 40) for texts in found)
        assert starter.cluster.secondaries[0].name == "secondary1"


def test_a_node_whose_blocks_nobody_takes_over_leaves_in_the_end(node: SecondaryNode, checkpoints: list[Path]) -> None:
    node.waits = Waits(hand_over_s=0.3)
    with frame_starter(node, checkpoints[0]) as starter:
        starter.form()
        assert not node.may_hand_over, "its starter takes nothing over"
        starter.form(hand_over=True)
        node.leave()
        assert starter.ring is not None
        with pytest.raises(NodeLostError) as caught:
            while True:
                starter.ring.recv(DEADLINE_S)
        assert (caught.value.node, caught.value.code) == ("secondary0", "left")
