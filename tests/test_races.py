"""Threads that meet at an unlucky moment: the moments are made here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.node.driver
import mdi.serve.host
import mdi.serve.models
from loopback import DEADLINE_S
from mdi.control.messages import InitRequest, PartSpec
from mdi.errors import ControlError, EngineError, RingError
from mdi.machine.computing import Computing
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.node.driver import EngineThread
from mdi.node.job import Job
from mdi.node.run_rings import RunRings
from mdi.node.runs import Runs, ring_number_extension, ring_number_of
from mdi.node.setup import growing_pauses
from mdi.serve.host import ModelHost
from mdi.serve.models import Models
from waiting import until


class Leaving(TcpRing):
    """One of whose nodes will end."""

    leaving = ("a",)

    def __init__(self) -> None: ...


def test_a_ring_that_is_closed_while_it_is_asked_who_leaves() -> None:
    class Rings(RunRings):
        """Whose ring another thread closes after it was read for the first time."""

        n_read = 0

        def __getattribute__(self, name: str) -> Any:
            if name != "ring":
                return super().__getattribute__(name)
            self.n_read += 1
            return Leaving() if self.n_read == 1 else None

    nothing: Any = None
    rings = Rings(nothing, nothing, 1)
    assert tuple(rings.leaving) == ("a",) and tuple(rings.leaving) == ()


# A ring that is formed after the end


class Engine:
    """One that is only closed."""

    is_closing = False
    n_runs = 0

    def run(self, ring: Any, until_idle: bool) -> None:
        self.n_runs += 1
        raise RingError("it broke")

    def close(self) -> None:
        self.is_closing = True

    def end_all(self) -> None: ...


def test_a_ring_that_is_formed_after_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdi.node.driver, "JOIN_S", 0.01)
    forming, formed, late = threading.Event(), threading.Event(), LoopbackRing(1)

    class Keeper:
        def after_loss(self, error: RingError) -> LoopbackRing:
            forming.set()
            assert formed.wait(DEADLINE_S)
            return late

        after_leave: Any = None

    engine: Any = Engine()
    driver = EngineThread(engine, LoopbackRing(1), "starter", keeper=Keeper())
    assert forming.wait(DEADLINE_S)
    driver.close()
    assert not late.inbox.closed
    formed.set()
    until(lambda: late.inbox.closed)
    assert engine.n_runs == 1 and driver.failure is None


# Requests that come late


def request(epoch: str, **extensions: Any) -> InitRequest:
    return InitRequest(
        run="a" * 16, epoch=epoch * 16, index=1, names=("starter", "secondary0"), placement="p", next_addr="127.0.0.1",
        next_port=1, model="m", config={"n_layer": 1}, config_hash="c", stored_dtype="float32", blocks=(0, 1),
        parts=(PartSpec("block.0", "a" * 64, 300),), max_length=10, extensions=extensions,
    )  # fmt: skip


def job(made: InitRequest) -> Job:
    slot: Any = SimpleNamespace(run=made.run, sent=None)
    return Job(made, Computing("cpu", "float32", "float32", None), slot)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_late_request_for_an_earlier_ring_does_not_replace_the_present_one(is_over: bool) -> None:
    runs = Runs("secondary0")
    present = job(request("b", **ring_number_extension(2)))
    runs.add(present)
    if is_over:
        present.finish(None)
    with pytest.raises(ControlError) as caught:
        runs.replace(request("c", **ring_number_extension(1)))
    assert (caught.value.status, caught.value.code) == (409, "run")
    assert not present.stopped and runs.find(present.run) is present
    assert not runs.replace(request("b", **ring_number_extension(2))) or is_over, "the same one, again"


@pytest.mark.parametrize("extensions", [ring_number_extension(3), {"ring": 2}])
def test_a_request_for_a_later_ring_replaces_the_present_one(extensions: dict[str, Any]) -> None:
    runs = Runs("secondary0")
    present = job(request("b", **ring_number_extension(2)))
    runs.add(present)
    ended = threading.Thread(target=lambda: (until(lambda: present.stopped), present.finish(None)))
    ended.start()
    assert runs.replace(request("c", **extensions)) and present.is_replaced
    ended.join(DEADLINE_S)


@pytest.mark.parametrize("number", [None, "3", True, [1]])
def test_a_starter_that_does_not_count_its_rings(number: Any) -> None:
    assert ring_number_of(request("b", ring=number)) == 0 == ring_number_of(request("b"))


# Asking a node that loads


def test_a_node_that_loads_for_minutes_is_asked_less_often() -> None:
    pauses, asked = growing_pauses(), []
    while sum(asked) < 60:
        asked.append(next(pauses))
    assert asked[0] == 0.03 and asked == sorted(asked) and max(asked) == 0.5
    assert len(asked) < 150 < 60 / 0.03


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

        async def notify(self) -> None: ...

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

    async def scenario() -> None:
        client: Any = Client()
        catalog: Any = SimpleNamespace(names=lambda: ["a", "b", "c"])
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

    monkeypatch.setattr(mdi.serve.models, "LoadedModel", SimpleNamespace(of=lambda facts: object()))
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
    catalog: Any = SimpleNamespace(first_name="m", folders=lambda: {"m": Path("m")})
    nodes: Any = SimpleNamespace(check=lambda: None)
    options: Any = SimpleNamespace(layers="1", chunk=None)
    return ModelHost(nodes, options, catalog, 10, lines)


def test_what_other_threads_log_while_a_model_is_loaded_does_not_wait_for_the_api(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, go_on, lines = threading.Event(), threading.Event(), StuckLines()

    class Opening:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def open(self) -> None:
            opened.set()
            assert go_on.wait(DEADLINE_S)
            raise EngineError("that is enough")

    def log() -> None:
        for text in ("a line too much", "another one"):
            logging.getLogger("mdi").warning(text)

    monkeypatch.setattr(mdi.serve.host, "Session", Opening)
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

    monkeypatch.setattr(mdi.serve.host, "Session", session)
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

        def open(self) -> None:
            opened.set()
            assert go_on.wait(DEADLINE_S)
            raise EngineError("that is enough")

    def fail() -> None:
        asked.set()

    monkeypatch.setattr(mdi.serve.host, "Session", Opening)
    host = host_of(StuckLines())
    loaded: Any = SimpleNamespace(
        name="lost", node=SimpleNamespace(raise_failure=fail, engine=SimpleNamespace(memory=None)),
        session=SimpleNamespace(close=lambda error: None), outlet=SimpleNamespace(close=lambda: None),
    )  # fmt: skip
    host.loaded["lost"] = loaded

    def run() -> None:
        with contextlib.suppress(EngineError):
            host.run()

    loader = threading.Thread(target=run)
    loader.start()
    try:
        assert opened.wait(DEADLINE_S)
        assert asked.wait(2.0)
    finally:
        go_on.set()
        loader.join(DEADLINE_S)
        host.close()
