"""Threads that meet at an unlucky moment: the moments are made here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.run.loop
import mdi.serve.host
import mdi.serve.models
from loopback import DEADLINE_S
from mdi.cancel import Cancel, CancelledError
from mdi.control.messages import InitRequest, PartSpec
from mdi.errors import ControlError, EngineError, MdiError, NodeLostError, NoMemoryError, RingError, UsageError
from mdi.model.plain import ModelConfig
from mdi.net.ring import LoopbackRing
from mdi.node.runs import Runs
from mdi.node.worker import RingWorker
from mdi.run.form import Loaded
from mdi.run.loop import Change, Leaving, Lookout, RingLoop
from mdi.run.nodes import Losses
from mdi.run.policy import Answer, Better, Form, Policy, Roll, Stage
from mdi.serve.host import ModelHost
from mdi.serve.models import Models
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId
from waiting import until, until_gone


class Joins:
    """Finds nothing."""

    def best(self, ring: Any, processes: Any) -> None:
        return None


@pytest.mark.parametrize("error", [None, EngineError("the server is ending")])
def test_a_ring_that_is_closed_while_it_is_asked_who_leaves(error: EngineError | None) -> None:
    """Another thread closes it after it was read for the first time; what was seen is said once."""

    class Ring:
        n_read = 0
        number, stages, processes = 3, (), {}  # type: ignore[var-annotated]

        @property
        def link(self) -> Any:
            self.n_read += 1
            return SimpleNamespace(leaving=("a",)) if self.n_read in (1, 3) else None

    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ring: Any = Ring()
    nothing: Any = Joins()
    cancel = Cancel()
    lookout = Lookout(nothing, lambda: ring, seen.put, cancel)
    until(lambda: ring.n_read > 3)
    cancel.cancel(error)
    lookout.join()
    assert seen.get_nowait() == Leaving("a", 3) and seen.empty()


def test_a_loss_between_two_attempts_ends_the_next_one_and_only_that() -> None:
    losses, loss = Losses(Cancel()), NodeLostError("a", "it has ended")
    losses.add(loss)
    with pytest.raises(NodeLostError) as found, losses.attempt() as attempt:
        attempt.check()
    assert found.value is loss
    with losses.attempt() as attempt:
        attempt.check()


# Events at an unlucky moment


class Engine:
    """One that computes until it is left, closed, or its ring breaks; a ring is left at its next frame.

    Attributes:
        breaks: rings that break, by their numbers.
    """

    last_token_s = first_token_s = None
    sent: Any = SimpleNamespace(counts={})
    is_isolating = False

    def __init__(self, *breaks: int) -> None:
        self.breaks = set(breaks)
        self.in_flight: dict[int, Any] = {}
        self.n_known: dict[int, int] = {}
        self.ran: list[int] = []
        self.is_closed = threading.Event()
        self._left: int | None = None
        self._breaks_off = False
        self._changed = threading.Condition()

    def run(self, ring: Any, until_idle: bool) -> None:
        self.ran.append(ring.epoch)
        if ring.epoch in self.breaks:
            raise RingError("it broke")
        with self._changed:
            is_over = lambda: self.is_closed.is_set() or self._left == ring.epoch or self._breaks_off  # noqa: E731
            assert self._changed.wait_for(is_over, DEADLINE_S)
            if self._breaks_off:
                self._breaks_off = False
                raise RingError("it broke")

    def break_off(self) -> None:
        """Break the ring that is computed over."""
        with self._changed:
            self._breaks_off = True
            self._changed.notify_all()

    def leave(self, epoch: int) -> None:
        with self._changed:
            self._left = epoch
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.is_closed.set()
            self._changed.notify_all()

    def end_all(self) -> None: ...


class Ahead:
    """The stages of a ring that are loaded ahead, until `end`.

    Attributes:
        ended: "closed" once they are part of a ring, "given up" if nobody wants them.
    """

    failed: str | None = None
    ended = ""

    def __init__(self, plan: Form, put: Callable[[Any], None]) -> None:
        self.plan, self._put = plan, put
        self.error: MdiError | None = None

    def end(self, error: MdiError | None = None) -> None:
        self.error = error
        made: Any = self
        self._put(Loaded(made))

    def close(self) -> None:
        self.ended = "closed"

    def give_up(self) -> None:
        self.ended = "given up"


class Rings:
    """A former whose rings are numbers; `before` is called before each is formed, and may raise.

    Attributes:
        formed: names of the nodes of each ring that could be formed; `closed`, numbers of those that were closed.
    """

    def __init__(self, before: Callable[[int], None] = lambda n: None) -> None:
        self.n = 0
        self.before = before
        self.formed: list[tuple[str, ...]] = []
        self.closed: list[int] = []
        self.ring: Any = None
        self.reached: dict[str, str] = {}
        self.loading: list[Ahead] = []

    def load_ahead(self, plan: Form, cancel: Cancel, put: Callable[[Any], None], timeout_s: float | None = None) -> Any:
        self.loading.append(Ahead(plan, put))
        return self.loading[-1]

    def form(self, plan: Form, cancel: Cancel, rows: Any = None) -> Any:
        self.n += 1
        self.close_links()
        self.before(self.n)
        self.formed.append(plan.names)
        link = LoopbackRing(1, self.n)
        self.ring = SimpleNamespace(
            number=self.n, stages=plan.stages, processes={name: f"{name}-1" for name in plan.names[1:]}, link=link,
            computed=link, stage=SimpleNamespace(at_starter=None), memory=None, replay=None, has_fresh=False, is_exact=True,
            n_frames=1, may_guess=True, is_deep=True, prefixes=None,
        )  # fmt: skip
        return self.ring

    def close_links(self, is_awaited: bool = True) -> None:
        if self.ring is not None and self.ring.link is not None:
            self.closed.append(self.ring.number)
            self.ring.link = None


RING = (Stage("starter", 0, 2), Stage("a", 2, 4), Stage("b", 4, 6))
BETTER = Form((Stage("starter", 0, 3), Stage("a", 3, 6)), is_moved=True)


def started(rings: Rings, engine: Engine, is_fixed: bool = False) -> tuple[RingLoop, Cancel]:
    """A loop over nodes that always answer; `b` is in the ring, or can be."""

    def roll(clients: Any, awaited: Any, timeout_s: float) -> Roll:
        return Roll({name: Answer(name, f"{name}-1", "IDLE", 1, False) for name in ("a", "b")}, frozenset())

    former: Any = rings
    cancel = Cancel()
    policy = Policy(RING, (), lambda stages, most: (3, 3) if len(stages) == 2 else None, 0.0, is_fixed)
    loop = RingLoop(former, policy, [], cancel, Losses(cancel), "starter", roll)
    made: Any = engine
    loop.start(made, loop.next_ring(None), None)
    return loop, cancel


def ended(loop: RingLoop, cancel: Cancel) -> None:
    cancel.cancel()
    loop.close()


def test_a_ring_that_is_formed_after_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdi.run.loop, "JOIN_S", 0.01)
    forming, may_form = threading.Event(), threading.Event()

    def wait(n: int) -> None:
        if n == 2:
            forming.set()
            assert may_form.wait(DEADLINE_S)

    rings, engine = Rings(wait), Engine(1)
    loop, cancel = started(rings, engine)
    assert forming.wait(DEADLINE_S)
    ended(loop, cancel)
    assert rings.closed == [1]
    may_form.set()
    until(lambda: rings.closed == [1, 2])
    assert engine.ran == [1] and loop.failure is None


@pytest.mark.slow
def test_a_ring_that_broke_is_not_kept() -> None:
    """Its caches would take their memory as long as the run goes on."""
    rings, engine = Rings(), Engine()
    loop, cancel = started(rings, engine)
    for number in (2, 3):
        link = weakref.ref(rings.ring.computed)
        until(lambda: loop.running is not None)
        engine.break_off()
        until(lambda number=number: loop.running is not None and loop.running.number == number)  # type: ignore[misc]
        until_gone(link)
    ended(loop, cancel)


@pytest.mark.parametrize("is_first", [True, False], ids=["its own error", "another one's"])
def test_what_was_made_for_a_ring_that_could_not_be_formed_is_not_kept(is_first: bool) -> None:
    """Nobody waits for the garbage collector: stages are large."""
    made: list[weakref.ref[object]] = []

    def refuse(n: int) -> None:
        stage = LoopbackRing(1, n)
        if n == 2:
            made.append(weakref.ref(stage))
            try:
                raise NodeLostError("b", "no link")
            except NodeLostError:
                if is_first:
                    raise
                raise NodeLostError("b", "it cannot be formed") from None

    gc.disable()
    try:
        rings, engine = Rings(refuse), Engine(1)
        loop, cancel = started(rings, engine)
        until(lambda: loop.running is not None and loop.running.number == 3)
        assert made[0]() is None
    finally:
        gc.enable()
    ended(loop, cancel)


def test_other_adapters_that_are_wanted_while_a_ring_is_left_are_refused() -> None:
    asked = threading.Event()

    class Late(Engine):
        """Says first that it is to leave its ring, which it does when that is said again."""

        def leave(self, epoch: int) -> None:
            if asked.is_set():
                super().leave(epoch)
            asked.set()

    rings, engine, change = Rings(), Late(), Change(())
    loop, cancel = started(rings, engine)
    loop.put(Better(BETTER, RING))
    until(lambda: bool(rings.loading))
    rings.loading[0].end()
    assert asked.wait(DEADLINE_S)
    loop.put(change)
    with pytest.raises(EngineError, match="the ring is becoming another one: try again"):
        change.done.result(DEADLINE_S)
    until(lambda: loop.running is not None and loop.running.number == 2)
    ended(loop, cancel)


def test_other_adapters_that_are_wanted_after_a_run_are_refused() -> None:
    class Ending(Engine):
        is_over = threading.Event()

        def end_all(self) -> None:
            self.is_over.set()

    engine, change = Ending(), Change(())
    loop, cancel = started(Rings(), engine)
    engine.close()
    assert engine.is_over.wait(DEADLINE_S)
    loop.put(change)
    with pytest.raises(EngineError, match="the run has ended"):
        change.done.result(DEADLINE_S)
    ended(loop, cancel)


def test_a_node_that_leaves_while_another_ring_is_formed_is_relieved_afterwards() -> None:
    """It says so between two rings, and again in the one that comes."""

    is_started = threading.Event()

    def say(n: int) -> None:
        if n == 2:
            assert is_started.wait(DEADLINE_S)
            loop.put(Leaving("a", 1))

    rings, engine = Rings(say), Engine(1)
    loop, cancel = started(rings, engine)
    is_started.set()
    until(lambda: loop.running is not None and loop.running.number == 2)
    loop.put(Leaving("a", 2))
    until(lambda: bool(rings.loading))
    rings.loading[0].end()
    until(lambda: loop.running is not None and loop.running.number == 3)
    loop.put(Leaving("b", 2))  # of a ring that has ended
    ended(loop, cancel)
    assert rings.formed == [("starter", "a", "b")] * 2 + [("starter", "b")] and engine.ran == [1, 2, 3]


@pytest.mark.parametrize("error", [EngineError("no memory"), UsageError("no such device"), RingError("no link")])
def test_a_voluntary_move_that_fails_leaves_the_run_as_it_was(error: MdiError) -> None:
    def refuse(n: int) -> None:
        if n == 2:
            raise error

    rings, engine = Rings(refuse), Engine()
    loop, cancel = started(rings, engine)
    loop.put(Better(BETTER, RING))
    until(lambda: bool(rings.loading))
    rings.loading[0].end()
    until(lambda: loop.running is not None and loop.running.number == 3)
    loop.put(Better(BETTER, RING))  # seen again: it is not tried again
    loop.put(Better(replace(BETTER, stages=RING[:1]), RING[:2]))  # of another ring
    ended(loop, cancel)
    assert rings.formed == [("starter", "a", "b")] * 2 and engine.ran == [1, 3]
    assert loop.failure is None and not loop.recoveries
    assert [one.ended for one in rings.loading] == ["given up"], "the ring before was formed again"


def test_a_better_ring_that_cannot_be_loaded_ahead_changes_nothing() -> None:
    rings, engine = Rings(), Engine()
    loop, cancel = started(rings, engine)
    loop.put(Better(BETTER, RING))
    loop.put(Better(BETTER, RING))  # while the first is loaded
    until(lambda: bool(rings.loading))
    rings.loading[0].end(NoMemoryError("no room for both"))
    until(lambda: rings.loading[0].ended == "given up")
    loop.put(Better(BETTER, RING))  # not tried again
    loop.put(Leaving("nobody", 1))
    assert loop.running is not None and loop.running.number == 1
    ended(loop, cancel)
    assert engine.ran == [1] and rings.formed == [("starter", "a", "b")] and len(rings.loading) == 1
    assert loop.failure is None and not loop.recoveries and loop.policy.refused == BETTER


def test_a_ring_that_breaks_while_the_next_one_is_loaded_is_restored_first() -> None:
    rings, engine = Rings(), Engine()
    loop, cancel = started(rings, engine)
    loop.put(Better(BETTER, RING))
    until(lambda: bool(rings.loading))
    engine.break_off()
    until(lambda: loop.running is not None and loop.running.number == 2)
    assert rings.loading[0].ended == "given up"
    rings.loading[0].end()  # too late
    loop.put(Better(BETTER, RING))
    until(lambda: len(rings.loading) == 2)
    ended(loop, cancel)
    assert rings.loading[1].ended == "given up", "the run has ended"
    assert engine.ran == [1, 2] and rings.formed == [("starter", "a", "b")] * 2


@pytest.mark.parametrize("error", [None, CancelledError("too late")])
def test_a_node_that_leaves_while_a_better_ring_is_loaded(error: MdiError | None) -> None:
    """What is loaded then is the ring without it; if that cannot be done in time, the ring is left all the same."""
    rings, engine = Rings(), Engine()
    loop, cancel = started(rings, engine)
    loop.put(Better(BETTER, RING))
    loop.put(Leaving("a", 1))
    until(lambda: len(rings.loading) == 2)
    better, without = rings.loading
    assert better.ended == "given up" and without.plan.names == ("starter", "b") and loop.running is not None
    without.end(error)
    until(lambda: loop.running is not None and loop.running.number == 2)
    ended(loop, cancel)
    assert rings.formed == [("starter", "a", "b"), ("starter", "b")]
    assert without.ended == ("closed" if error is None else "given up")


def test_a_fixed_run_ends_with_its_ring() -> None:
    rings, engine = Rings(), Engine(1)
    loop, cancel = started(rings, engine, is_fixed=True)
    until(lambda: loop.failure is not None)
    ended(loop, cancel)
    assert engine.ran == [1] and loop.failure is not None and loop.failure.code == RingError.code


# Requests that come late


def request(number: int) -> InitRequest:
    return InitRequest(
        run="a" * 16, epoch=f"{int('a' * 16, 16) + number:016x}", index=1, names=("starter", "secondary0"), placement="p",
        next_addr="127.0.0.1", next_port=1, model=ModelId("m", ModelConfig(n_layer=1), "c", "float32"),
        blocks=(0, 1), parts=(PartSpec("block.0", "a" * 64, 300),), extent=Extent(10),
    )  # fmt: skip


def ring(made: InitRequest) -> RingWorker:
    unused: Any = None
    return RingWorker("secondary0", "", made, unused, unused, unused, unused, unused, 10.0)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_late_request_for_an_earlier_ring_does_not_replace_the_present_one(is_over: bool) -> None:
    runs = Runs("secondary0")
    present = ring(request(2))
    runs.add(present)
    if is_over:
        present.finish(None)
    with pytest.raises(ControlError) as caught:
        runs.admit(request(1))
    assert (caught.value.status, caught.value.code) == (409, "run")
    assert not present.is_stopped and runs.find(present.run) is present
    assert not runs.admit(request(2)) or is_over, "the same one, again"


def test_a_request_for_a_later_ring_replaces_the_present_one() -> None:
    runs = Runs("secondary0")
    present = ring(request(2))
    runs.add(present)
    ended = threading.Thread(target=lambda: (until(lambda: present.is_stopped), present.finish(None)))
    ended.start()
    assert runs.admit(request(3)) and present.is_replaced
    ended.join(DEADLINE_S)


# Asking a node that loads


# Models of a server


def test_two_models_that_are_given_up_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One because nobody uses it, the other for a third one: a request enters neither until it is unloaded."""
    entered: list[bool] = []

    class Client:
        is_gone = False

        def __init__(self) -> None:
            self.models = {"a": {}, "b": {}}
            self.state = SimpleNamespace(models=self.models, is_serving=lambda name: name in self.models)
            self.may_unload = {"a": asyncio.Event(), "b": asyncio.Event()}

        async def wait_for_change(self) -> None:
            await asyncio.sleep(0)

        def notify(self) -> None: ...

        async def ask(self, what: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            if what == "load":
                return {"code": "memory" if self.models else ""}
            await self.may_unload[args["model"]].wait()
            self.models.pop(args["model"], None)
            return {"code": ""}

    async def changed(condition: Callable[[], object]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("what was waited for did not happen")

    @dataclass
    class Read:
        tool_parser: str | None = None

    async def scenario() -> None:
        client: Any = Client()
        catalog: Any = SimpleNamespace(
            names=lambda: ["a", "b", "c"], model_of=lambda name: name, adapters={}, meant=lambda name: name
        )
        models = Models(client, catalog, lambda: None)
        for name in ("b", "a"):  # b is the one unused for longest
            await use(models, name)
        idle = asyncio.create_task(models.give_up_unused(0.0))
        await changed(lambda: "a" in models.leaving)
        using = asyncio.create_task(use(models, "c"))
        await changed(lambda: "b" in models.leaving or len(client.models) < 2)
        client.may_unload["a"].set()
        await changed(lambda: "a" not in client.models and "a" not in models.leaving)
        entered.append("b" in models.leaving)
        client.may_unload["b"].set()
        await changed(lambda: not client.models and not models.leaving)
        for task in (idle, using):
            task.cancel()
        await asyncio.gather(idle, using, return_exceptions=True)

    async def use(models: Models, name: str) -> None:
        async with models.using(name):
            pass

    monkeypatch.setattr(mdi.serve.models, "LoadedModel", SimpleNamespace(of=lambda facts: Read()))
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    assert entered == [True]


class StuckLines:
    """To an API process that reads nothing after a certain line."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.is_stuck = threading.Event()

    def send(self, message: Any) -> bool:
        if message["status"]["text"] == "a line too much":
            self.is_stuck.set()
            assert self.go_on.wait(DEADLINE_S)
        return True


def host_of(lines: Any) -> ModelHost:
    catalog: Any = SimpleNamespace(
        first_name="m", folders=lambda: {"m": Path("m")}, model_of=lambda name: name, adapters={}
    )
    nodes: Any = SimpleNamespace(check=lambda: None, swarm=None)
    options: Any = SimpleNamespace(layers="1", chunk=None)
    return ModelHost(nodes, options, catalog, 10, lines)


def test_what_other_threads_log_while_a_model_is_loaded_does_not_wait_for_the_api(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, go_on, lines = threading.Event(), threading.Event(), StuckLines()

    class Opening:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def open(self, cancel: Any) -> None:
            opened.set()
            assert go_on.wait(DEADLINE_S)
            raise EngineError("that is enough")

    def log() -> None:
        for text in ("a line too much", "another one"):
            logging.getLogger("mdi").warning(text)

    monkeypatch.setattr(mdi.serve.host, "Run", Opening)
    host = host_of(lines)
    failed: list[Exception] = []

    def run() -> None:
        try:
            host.run()
        except EngineError as e:
            failed.append(e)

    loader, engine = threading.Thread(target=run), threading.Thread(target=log)
    loader.start()
    assert opened.wait(DEADLINE_S)
    engine.start()
    assert lines.is_stuck.wait(DEADLINE_S)
    engine.join(5.0)
    was_waiting = engine.is_alive()
    go_on.set()
    lines.go_on.set()
    for thread in (loader, engine):
        thread.join(DEADLINE_S)
    host.close()
    assert not was_waiting and len(failed) == 1


def test_a_model_whose_folder_has_gone_leaves_nothing_that_listens_to_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*args: Any, **options: Any) -> None:
        raise KeyError("m")

    monkeypatch.setattr(mdi.serve.host, "Run", session)
    log, host = logging.getLogger("mdi"), host_of(StuckLines())
    before = log.handlers.copy()
    with pytest.raises(KeyError):
        host.run()
    left = [handler for handler in log.handlers if handler not in before]
    for handler in left:
        log.removeHandler(handler)
    host.close()
    assert left == []


def test_who_wants_a_model_of_a_server_that_has_ended_is_told() -> None:
    host = host_of(StuckLines())
    host.close()
    told: list[str] = []

    def want() -> None:
        try:
            host.want("m")
        except EngineError as e:
            told.append(e.code)

    asking = threading.Thread(target=want, daemon=True)
    asking.start()
    asking.join(DEADLINE_S / 4)
    assert told == ["engine"]


def test_a_ring_that_is_lost_does_not_wait_until_another_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, go_on, asked = threading.Event(), threading.Event(), threading.Event()

    class Opening:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def open(self, cancel: Any) -> None:
            opened.set()
            assert go_on.wait(DEADLINE_S)
            raise EngineError("that is enough")

    def fail() -> None:
        asked.set()

    monkeypatch.setattr(mdi.serve.host, "Run", Opening)
    host = host_of(StuckLines())
    loaded: Any = SimpleNamespace(
        name="lost", run=SimpleNamespace(raise_failure=fail, close=lambda error: None, neighbour=None),
        outlet=SimpleNamespace(close=lambda: None),
    )  # fmt: skip
    host.loaded["lost"] = loaded

    def run() -> None:
        with contextlib.suppress(EngineError):
            host.run()

    loader = threading.Thread(target=run)
    loader.start()
    try:
        assert opened.wait(DEADLINE_S)
        assert asked.wait(DEADLINE_S / 2)
    finally:
        go_on.set()
        loader.join(DEADLINE_S)
        host.close()
