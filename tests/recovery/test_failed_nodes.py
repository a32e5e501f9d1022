"""A node drops its caches and connections, and its process lives: the same ring is formed again, with little said."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mdi.run.form
from mdi.control.client import ControlClient
from mdi.engine.sequence import SamplingParams
from mdi.engine.worker import SecondaryLoop
from mdi.errors import CheckpointError, Code, NodeLostError
from mdi.net.hello import Fault
from mdi.node.secondary import SecondaryNode
from mdi.run.loop import RingLoop
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, reference, write_checkpoint
from waiting import until

PROMPT, N_TOKENS = "The ring", 24


@contextlib.contextmanager
def ring(folder: Path, replay_memory: int) -> Iterator[tuple[list[SecondaryNode], Run]]:
    checkpoint = write_checkpoint(folder / "tiny", 4)
    options = StarterOptions(
        ckpt=checkpoint, prompt_style="none", device="cpu", layers="1,2,2", replay_memory=replay_memory
    )
    with secondaries(2, folder) as nodes:
        starter = Run(GivenNodes(cluster_of(nodes)), options, 80, n_texts=1)
        try:
            starter.open()
            yield nodes, starter
            starter.close()
        finally:
            starter.close()


def generate(starter: Run, at: dict[int, Callable[[], None]]) -> list[int]:
    """The tokens of the one text; after so many of them, something is done."""
    n = 0

    def show(text: str) -> None:
        nonlocal n
        n += 1
        at.get(n, lambda: None)()

    sample = starter.submit(PROMPT, encode(PROMPT), SamplingParams(N_TOKENS, temperature=0), on_text=show)
    starter.read()
    return list(sample.token_ids)


def fail(node: SecondaryNode) -> None:
    job, name = node.runs.latest, node.config.name
    assert job is not None and job.ring is not None
    job.ring.fail(Fault(name, "its caches and connections are dropped", name, Code.FAILED))


@pytest.mark.parametrize("failed", [0, 1])  # the rows that it needs are the starter's, or another node's
@pytest.mark.parametrize("replay_memory", [0, 1 << 20], ids=["tokens", "replay"])
def test_each_node_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay_memory: int, failed: int
) -> None:
    asked: list[tuple[str, str]] = []
    is_recovering = False
    request, message, next_ring = ControlClient.request, ControlClient.open_message, RingLoop.next_ring

    def note(self: ControlClient, method: str, path: str, *args: Any, **options: Any) -> Any:
        if is_recovering:
            asked.append((self.node.name, path))
        return request(self, method, path, *args, **options)

    def note_message(self: ControlClient, ask: str, *args: Any) -> Any:
        if is_recovering:
            asked.append((self.node.name, ask))
        return message(self, ask, *args)

    def recover(self: RingLoop, *args: Any) -> Any:
        nonlocal is_recovering
        is_recovering = args[0] is not None
        try:
            return next_ring(self, *args)
        finally:
            is_recovering = False

    monkeypatch.setattr(ControlClient, "request", note)
    monkeypatch.setattr(ControlClient, "open_message", note_message)
    monkeypatch.setattr(RingLoop, "next_ring", recover)
    with ring(tmp_path, replay_memory) as (nodes, starter):
        ids = generate(starter, {8: lambda: fail(nodes[failed])})
        recoveries = starter.metrics().recoveries
    assert ids == list(reference(PROMPT, N_TOKENS, 4))
    assert sorted(asked) == [("secondary0", "/init"), ("secondary1", "/init")]
    assert [(one["node"], one["replaced_by"]) for one in recoveries] == [(f"secondary{failed}",) * 2]
    assert [one["restored_by"] for one in recoveries] == ["replay" if replay_memory else "tokens"]
    assert [one["may_differ"] for one in recoveries] == [[]]


def test_a_stage_whose_weights_could_not_be_read_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken = threading.Event()
    step = SecondaryLoop.step

    def broken(self: SecondaryLoop) -> None:
        if is_broken.is_set():
            is_broken.clear()
            raise CheckpointError("a disk gave an error")
        step(self)

    monkeypatch.setattr(SecondaryLoop, "step", broken)
    with ring(tmp_path, 0) as (nodes, starter):
        before = [node.stages.listed for node in nodes]
        ids = generate(starter, {8: is_broken.set})
        after = [node.stages.listed for node in nodes]
    assert ids == list(reference(PROMPT, N_TOKENS, 4))
    assert sorted(old != new for old, new in zip(before, after, strict=True)) == [False, True]
    assert all(len(slots) == 1 for slots in after)


def test_a_node_whose_caches_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """Of the next ring; the run goes on."""

    def spoil() -> None:
        status_of = nodes[1].status_of
        nodes[1].status_of = lambda *args: {**status_of(*args), "caches": "many"}  # type: ignore[method-assign]
        fail(nodes[0])

    with ring(tmp_path, 0) as (nodes, starter):
        ids = generate(starter, {8: spoil})
        assert starter.names == ("starter", "secondary0")
    assert ids == list(reference(PROMPT, N_TOKENS, 4))


def test_rings_are_counted_so_that_late_requests_are_known(tmp_path: Path) -> None:
    numbers: list[int] = []

    def note() -> None:
        job = nodes[0].runs.latest
        assert job is not None
        numbers.append(int(job.request.epoch, 16) - int(job.run, 16))

    with ring(tmp_path, 0) as (nodes, starter):
        generate(starter, {4: note, 6: lambda: fail(nodes[0]), 12: note, 14: lambda: fail(nodes[1])})
        note()
    assert numbers == [1, 2, 3]


def test_rings_of_the_past_keep_no_buffers(tmp_path: Path) -> None:
    """Only what they measured is kept."""
    past: list[weakref.ref[Any]] = []
    frames: list[int] = []

    def break_it(node: SecondaryNode) -> None:
        past.append(weakref.ref(starter.ring.link))  # type: ignore[union-attr, arg-type]
        frames.append(starter.measured().frames)  # type: ignore[union-attr]
        fail(node)

    with ring(tmp_path, 1 << 20) as (nodes, starter):
        ids = generate(starter, {6: lambda: break_it(nodes[0]), 12: lambda: break_it(nodes[1])})
        until(lambda: (starter.measured(), gc.collect(), past[0]())[2] is None)  # it looks which rings are closed
        assert starter.measured().frames > frames[1] > frames[0] > 0
    assert ids == list(reference(PROMPT, N_TOKENS, 4))


def test_the_starter_has_no_caches_after_a_ring_that_could_not_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts were to be computed again, so it has let its caches go: no ring after that may replay them."""
    roles, close = mdi.run.form.replay_roles, mdi.run.form.close_starter_ring
    n_plans = n_closed = 0

    def plan_later(*args: Any) -> Any:
        nonlocal n_plans
        n_plans += 1
        return None if n_plans == 1 else roles(*args)

    def close_later(*args: Any, **options: Any) -> Any:
        nonlocal n_closed
        n_closed += 1
        if n_closed == 2:
            raise NodeLostError("secondary1", "its connection broke")
        return close(*args, **options)

    with ring(tmp_path, 1 << 20) as (nodes, starter):
        monkeypatch.setattr(mdi.run.form, "replay_roles", plan_later)
        monkeypatch.setattr(mdi.run.form, "close_starter_ring", close_later)
        n_closed = 1
        ids = generate(starter, {8: lambda: fail(nodes[0])})
    assert n_closed == 3 and ids == list(reference(PROMPT, N_TOKENS, 4))
