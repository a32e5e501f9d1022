"""JSON schemas that cost too much, and texts that are cancelled while their schema is compiled."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, cast

import psutil
import pytest

from mdi.errors import UsageError
from mdi.serve.admission import Admission
from mdi.serve.api_errors import ApiError
from mdi.serve.backend import Backend
from mdi.serve.host import ModelHost
from mdi.serve.process import Lines
from mdi.serve.schemas import MOST_CHECKS, SchemaChecks
from waiting import until

DEADLINE_S = 120.0
GOOD = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SLOW = {  # llguidance takes minutes
    "type": "object",
    "properties": {f"{i:x}": {"type": "string"} for i in range(600)},
    "patternProperties": {f"^x{i}$": {} for i in range(600)},
    "additionalProperties": False,
}
BAD = {
    "it takes too long": SLOW,
    "it has too many properties": {"type": "object", "properties": {f"{i:x}": {} for i in range(20000)}},
    "it ends the process": {"type": "object", "required": [f"{i:x}" for i in range(30000)]},
    "it is too long": {"enum": ["x" * (1 << 18)]},
    "llguidance does not know it": {"not": {"type": "string"}},
    "its pattern is none": {"type": "string", "pattern": "("},
}


def checking(scenario: Callable[[SchemaChecks], Awaitable[None]]) -> None:
    async def limited() -> None:
        checks = SchemaChecks(Admission(MOST_CHECKS, 2, what="schemas"))
        try:
            await asyncio.wait_for(scenario(checks), DEADLINE_S)
        finally:
            checks.close()

    before = psutil.Process().children()
    asyncio.run(limited())
    assert psutil.Process().children() == before


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD)
def test_a_schema_that_cannot_be_used_is_refused_and_the_next_one_is_checked(what: str) -> None:
    async def scenario(checks: SchemaChecks) -> None:
        with pytest.raises(ApiError) as caught:
            await checks.check(BAD[what], "a", 0)
        assert caught.value.status == 400
        await checks.check(GOOD, "a", 0)

    checking(scenario)


def test_a_slow_schema_does_not_hold_up_others() -> None:
    async def scenario(checks: SchemaChecks) -> None:
        slow = asyncio.create_task(checks.check(SLOW, "a", 0))
        await asyncio.sleep(0)
        await checks.check(GOOD, "a", 0)
        await checks.check(GOOD, "a", 0)
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)

    checking(scenario)


def test_a_client_that_goes_away_leaves_no_process_for_the_next_one() -> None:
    async def scenario(checks: SchemaChecks) -> None:
        await checks.check(GOOD, "a", 0)
        going = asyncio.create_task(checks.check(GOOD, "a", 0))
        await asyncio.sleep(0)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        with pytest.raises(ApiError):
            await checks.check({"not": {}}, "a", 0)  # and not the answer to the schema before

    checking(scenario)


def test_schemas_wait_in_a_queue_with_a_limit() -> None:
    async def scenario(checks: SchemaChecks) -> None:
        done: list[str] = []

        async def one(owner: str) -> None:
            await checks.check(GOOD, owner, 0)
            done.append(owner)

        tasks = [asyncio.create_task(one(owner)) for owner in ("a", "a", "a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await checks.check(GOOD, "c", 0)
        assert caught.value.status == 429 and "2 schemas run and 2 wait" in str(caught.value)
        await asyncio.gather(*tasks)
        assert sorted(done) == ["a", "a", "a", "b"]
        await checks.check(GOOD, "c", 0)

    checking(scenario)


class Host:
    """Compiles no schema before it may, and knows which texts were begun and cancelled."""

    def __init__(self) -> None:
        self.may_compile, self.is_compiling = threading.Event(), threading.Event()
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.compiled: list[str] = []
        self.error: Exception | None = None
        self.is_beginning, self.may_begin = threading.Event(), threading.Event()
        self.may_begin.set()

    def constraint(self, model: str, wanted: dict[str, Any], request: int) -> str:
        self.is_compiling.set()
        assert wanted["schema"] == "quick" or self.may_compile.wait(DEADLINE_S)
        self.compiled.append(wanted["schema"])
        if self.error is not None:
            raise self.error
        return "constraint"

    def submit(self, model: str, wanted: Mapping[str, Any], constraint: object) -> None:
        self.is_beginning.set()
        self.may_begin.wait(1.0)
        self.begun.append(wanted["id"])

    def cancel(self, number: int) -> None:
        self.may_begin.set()
        if number in self.begun:
            self.cancelled.append(number)

    def leave(self) -> None:
        pass


class Joined:
    """A backend with that host, and the API process's end of the line to it."""

    def __init__(self) -> None:
        self.host = Host()
        ours, theirs = socket.socketpair()
        self.lines = Lines(theirs)
        self.backend = Backend(Lines(ours), cast(ModelHost, self.host), {}, dict)
        self.told = (one for one in self.lines if one["is"] != "rings")

    def generate(self, number: int, schema: str | None) -> None:
        grammar = None if schema is None else {"type": "schema", "schema": schema}
        text = {
            "do": "generate",
            "id": number,
            "request": number,
            "model": "one",
            "ids": [1],
            "sampling": {},
            "owner": "",
            "grammar": grammar,
        }
        self.lines.send(text)

    def cancel(self, number: int) -> None:
        self.lines.send({"do": "cancel", "id": number})


@pytest.fixture
def joined() -> Iterator[Joined]:
    made = Joined()
    yield made
    made.host.may_compile.set()
    made.host.may_begin.set()
    made.backend.close()
    made.lines.close()


def test_a_schema_that_is_compiled_holds_up_no_other_one(joined: Joined) -> None:
    joined.generate(1, "slow")
    assert joined.host.is_compiling.wait(DEADLINE_S)
    joined.generate(2, "quick")
    joined.generate(3, None)
    until(lambda: sorted(joined.host.begun) == [2, 3])
    joined.host.may_compile.set()
    until(lambda: sorted(joined.host.begun) == [1, 2, 3])


def test_a_text_that_is_cancelled_while_its_schema_is_compiled_is_not_begun(joined: Joined) -> None:
    joined.generate(1, "slow")
    assert joined.host.is_compiling.wait(DEADLINE_S)
    joined.cancel(1)
    joined.generate(2, None)
    until(lambda: joined.host.begun == [2])  # so the cancel before it has been read
    joined.host.may_compile.set()
    joined.generate(3, "quick")
    until(lambda: joined.host.begun == [2, 3] and len(joined.host.compiled) == 2)


def test_a_schema_whose_text_was_cancelled_is_not_compiled(joined: Joined) -> None:
    for number in (1, 2):
        joined.generate(number, "slow")
    joined.generate(3, "never")
    joined.cancel(3)
    joined.generate(4, None)
    until(lambda: joined.host.begun == [4])
    joined.host.may_compile.set()
    joined.generate(5, "quick")
    until(lambda: sorted(joined.host.begun) == [1, 2, 4, 5])
    assert "never" not in joined.host.compiled


def test_a_text_that_is_cancelled_while_it_is_begun_is_cancelled(joined: Joined) -> None:
    joined.host.may_begin.clear()  # by the cancel, if that does not wait; else by the time
    joined.generate(1, "quick")
    assert joined.host.is_beginning.wait(DEADLINE_S)
    joined.cancel(1)
    joined.generate(2, None)
    until(lambda: joined.host.begun == [1, 2])
    assert joined.host.cancelled == [1]


def test_a_schema_that_is_refused_is_told_and_forgotten(joined: Joined) -> None:
    joined.host.error = UsageError("no text matches it")
    joined.generate(1, "quick")
    refused = next(joined.told)
    assert (refused["is"], refused["id"], refused["status"]) == ("refused", 1, 400)
