"""A computing thread that never returns is noticed by the node's neighbours; one that is only slow is not taken for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopback import DEADLINE_S, Nodes, nodes
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec
from mdi.engine.sequence import SamplingParams
from mdi.errors import Code, ControlError, NodeLostError
from mdi.kernels import library
from mdi.model.plain import ModelConfig
from mdi.net.link import STUCK_BLOCKS, STUCK_S, Watch, Work, ping, work_in
from mdi.net.wire import HANDSHAKE_LIMITS, PLAIN, Frame, FrameType, Slice
from mdi.node.round_robin import RoundRobin, Turn
from mdi.node.worker import Waits
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId
from mdi.spec.options import StarterOptions
from mdi.stages.kernel_stage import KernelStage
from secondaries import cluster_of, entry_of, secondaries
from tiny_checkpoint import encode, reference, write_checkpoint
from waiting import until

PROMPT, N_TOKENS = "The ring", 24


@pytest.mark.parametrize("work", [Work(), Work(7), Work(1 << 40, 60.0), Work(0, 0.25)])
def test_a_ping_says_how_far_a_node_is(work: Work) -> None:
    frame = ping(5, work)
    assert PLAIN.header(PLAIN.head(frame)).type is FrameType.PING and len(frame.payload) <= HANDSHAKE_LIMITS.max_cols
    assert work_in(frame) == work
    if work == Work():
        assert PLAIN.head(frame) == PLAIN.head(Frame(FrameType.PING, 5)), "as before it said anything"


@pytest.mark.parametrize("payload", [b"", b"1234567", bytes(8), b"\xff" * 8, b"later versions may say more"])
def test_a_ping_of_a_node_that_says_nothing_of_its_computing(payload: bytes) -> None:
    """Of an older version, or of a later one."""
    assert work_in(Frame.message(FrameType.PING, 5, payload)).limit_s is None


def test_who_finishes_no_block_for_too_long_is_stuck() -> None:
    watch = Watch()
    assert watch.stuck_s(Work(3, 60.0), 100.0) is None
    assert watch.stuck_s(Work(3, 60.0), 160.0) is None
    assert watch.stuck_s(Work(3, 60.0), 161.0) == 61.0
    assert watch.stuck_s(Work(4, 60.0), 170.0) is None, "it goes on after all"
    assert watch.stuck_s(Work(4, 60.0), 231.0) == 61.0
    assert watch.stuck_s(Work(4), 300.0) is None, "it has nothing to do"
    assert watch.stuck_s(Work(4, 60.0), 330.0) is None
    assert watch.stuck_s(Work(4, 60.0), 361.0) == 61.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Blocking:
    """A ring with one frame after the other, and the loop that computes them, block by block, when it is told to."""

    is_pending = True

    def __init__(self) -> None:
        self.n_finished = self.n_read = self.n_steps = 0
        self.at_work, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def step(self) -> None:
        self.at_work.release()
        assert self.go_on.acquire(timeout=DEADLINE_S)
        self.n_steps += 1


@pytest.fixture
def turns() -> Iterator[tuple[RoundRobin, Blocking, Clock]]:
    clock, loop = Clock(), Blocking()
    made = RoundRobin(clock=clock)
    made.add(Turn(loop, loop, None, lambda: loop.n_finished, lambda: loop.n_read))  # type: ignore[arg-type]
    thread = threading.Thread(target=made.run)
    thread.start()
    assert loop.at_work.acquire(timeout=DEADLINE_S)
    yield made, loop, clock
    made.close()
    loop.go_on.release(1000)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_slow_frame_is_not_stuck_as_long_as_blocks_are_finished(turns: tuple[RoundRobin, Blocking, Clock]) -> None:
    one, loop, clock = turns
    seen = [one.work]
    for _ in range(20):  # 64 rows on a small board
        clock.now += 50
        assert not one.is_stuck
        loop.n_finished += 1
        seen.append(one.work)
    assert [work.n_finished for work in seen] == list(range(21)) and seen[0].limit_s == STUCK_S
    assert not one.is_stuck
    clock.now += STUCK_S + 1
    assert one.is_stuck
    loop.n_finished += 1
    assert not one.is_stuck


def test_the_limit_follows_the_time_of_a_block(turns: tuple[RoundRobin, Blocking, Clock]) -> None:
    one, loop, clock = turns
    for seconds, n_blocks, expected in ((40.0, 4, 200.0), (1.0, 1, 200.0), (100.0, 5, 400.0)):
        clock.now += seconds
        loop.n_finished += n_blocks
        loop.go_on.release()
        assert loop.at_work.acquire(timeout=DEADLINE_S)
        assert one.work.limit_s == expected == max(STUCK_S, STUCK_BLOCKS * expected / STUCK_BLOCKS)
    clock.now += 399
    assert not one.is_stuck
    clock.now += 2
    assert one.is_stuck


def test_a_thread_that_stands_still_at_its_first_block_is_stuck(turns: tuple[RoundRobin, Blocking, Clock]) -> None:
    """Also if nobody has asked before."""
    one, loop, clock = turns
    clock.now += STUCK_S + 1
    assert one.is_stuck
    loop.go_on.release()
    assert loop.at_work.acquire(timeout=DEADLINE_S)
    assert not one.is_stuck and one.work.n_finished > 0, "a frame without blocks is a sign as well"


def test_who_waits_for_other_nodes_of_a_group_is_not_stuck(turns: tuple[RoundRobin, Blocking, Clock]) -> None:
    one, _, clock = turns
    clock.now += STUCK_S + 1
    one.note_sign()
    assert not one.is_stuck


def test_a_slow_disk_is_not_a_stuck_thread(turns: tuple[RoundRobin, Blocking, Clock]) -> None:
    one, loop, clock = turns
    for _ in range(3):
        clock.now += STUCK_S + 1
        loop.n_read += 1 << 20
        assert not one.is_stuck
    clock.now += STUCK_S + 1
    assert one.is_stuck


# In a ring


def lost_by(ring: Nodes, index: int) -> NodeLostError:
    with pytest.raises(NodeLostError) as caught:
        ring.rings[index].recv(DEADLINE_S)
    return caught.value


def say(ring: Nodes, index: int, work: Any) -> None:
    for link in (ring.rings[index].next_link, ring.rings[index].previous_link):
        link.work = work


@pytest.mark.slow
@pytest.mark.parametrize("n_nodes", [2, 3])
def test_neighbours_notice_a_node_that_is_stuck(n_nodes: int) -> None:
    with nodes(n_nodes, silence_s=30.0) as ring:
        say(ring, 1, lambda: Work(5, 0.1))
        for index in range(n_nodes):
            error = lost_by(ring, index)
            assert (error.node, error.code) == ("secondary0", Code.STUCK)


@pytest.mark.slow
def test_neighbours_are_patient_with_a_node_that_is_slow() -> None:
    n_asked = 0

    def work() -> Work:
        nonlocal n_asked
        n_asked += 1
        return Work(n_asked // 4, 30.0) if n_asked < 8 else Work(8)

    with nodes(2, silence_s=30.0) as ring:
        say(ring, 1, work)
        until(lambda: n_asked >= 9)
        ring.rings[1].send(Frame(FrameType.BATCH, ring.epoch, 0, "float32", 1, 1, (Slice(1, 0, 1, 1),), (), bytes(4)))
        frame = ring.rings[0].recv(DEADLINE_S)
        assert frame is not None and frame.number == 0


@pytest.mark.slow
@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
def test_the_ring_goes_on_without_a_node_that_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, stuck, go_on = KernelStage.__call__, threading.Event(), threading.Event()
    halted: list[KernelStage] = []

    def may_halt(self: KernelStage, x: Any, slices: Any) -> Any:
        if stuck.is_set() and self in halted:
            assert go_on.wait(DEADLINE_S)
        return compute(self, x, slices)

    def show(text: str) -> None:
        nonlocal n
        n += 1
        if n == 6:
            stuck.set()

    n = 0
    monkeypatch.setattr(KernelStage, "__call__", may_halt)
    checkpoint = write_checkpoint(tmp_path / "tiny", 4)
    options = StarterOptions(ckpt=checkpoint, prompt_style="none", device="cpu", layers="1,2,2")
    with secondaries(2, tmp_path, waits=Waits(stuck_s=2.0)) as found:
        starter = Run(GivenNodes(cluster_of(found)), options, 80, n_texts=1)
        try:
            starter.open()
            (held,) = found[0].stages.listed
            assert isinstance(held.stage, KernelStage)
            halted.append(held.stage)
            sample = starter.submit(PROMPT, encode(PROMPT), SamplingParams(N_TOKENS, temperature=0), on_text=show)
            starter.read()
            recoveries = starter.metrics().recoveries
            with pytest.raises(ControlError) as refused:
                ControlClient(entry_of(found[0])).init(any_request())
            assert refused.value.code is Code.STUCK
            starter.close()
        finally:
            go_on.set()
            starter.close()
        until(lambda: not found[0].runs.active)
        assert not found[0].turns.is_stuck
    assert list(sample.token_ids) == list(reference(PROMPT, N_TOKENS, 4))
    assert [one["node"] for one in recoveries] == ["secondary0"] and "secondary0" not in recoveries[0]["replaced_by"]


def any_request() -> InitRequest:
    return InitRequest(
        run="b" * 16, epoch="b" * 16, index=1, names=("starter", "secondary0"), placement="p", next_addr="127.0.0.1",
        next_port=1, model=ModelId("m", ModelConfig(n_layer=1, n_embd=8, n_head=1), "c", "float32"), blocks=(0, 1),
        parts=(PartSpec("block.0", "a" * 64, 300),), extent=Extent(10),
    )  # fmt: skip
