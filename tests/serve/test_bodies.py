"""Bodies of requests: a large one does not stop the loop that answers all others; what takes seconds to read is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest

from mdi.serve.api_errors import ApiError
from mdi.serve.completions import Completion
from mdi.serve.endpoint import LARGE_BYTES, MOST_LISTS, MOST_VALUES, Exchange

DEADLINE_S = 20.0


async def parsed(body: bytes, parse: Callable[[Any], Any]) -> Any:
    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)

    return await Exchange({"type": "http"}, receive, send).parsed(parse)


def read(body: bytes) -> Any:
    return asyncio.run(parsed(body, lambda value: value))


def test_the_loop_goes_on_while_a_large_body_is_read() -> None:
    is_parsing, has_gone_on = threading.Event(), threading.Event()

    def parse(value: Any) -> bool:
        is_parsing.set()
        return has_gone_on.wait(DEADLINE_S)

    async def scenario() -> None:
        reading = asyncio.create_task(parsed(b" " * LARGE_BYTES + b"{}", parse))
        while not is_parsing.is_set():
            await asyncio.sleep(0.01)
        has_gone_on.set()
        assert await reading

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[1,2]," * MOST_LISTS + b"1]",
        b"[" + b"{}," * MOST_LISTS + b"1]",
        b"[" + b"1," * (MOST_VALUES + 1) + b"1]",
        b"[" + b'"\\\\",' * (MOST_VALUES + 1) + b"1]",  # texts of one backslash
        b"{" + b'"a":0,' * (MOST_VALUES + 1) + b'"a":0}',
        b"[" + b'"",[],"",' * MOST_LISTS + b"1]",
    ],
)
def test_a_body_of_too_many_values_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert (caught.value.status, caught.value.body["error"]["code"]) == (400, "body_too_large")


@pytest.mark.parametrize(
    "value",
    [
        [1] * MOST_VALUES,
        [[1]] * (MOST_LISTS - 1),
        {"text": "[" * 100_000 + "," * MOST_VALUES},
        {"text": 'said: "[" \\' * 100_000, "\\": ["{" * 100_000]},
    ],
)
def test_a_large_body_is_read_as_it_was_sent(value: Any) -> None:
    assert read(json.dumps(value).encode()) == value


def test_a_body_is_utf_8() -> None:
    assert read(b"\xef\xbb\xbf[1]") == [1]
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(ApiError):
            read(json.dumps(['"'] + [[]] * LARGE_BYTES).encode(encoding))


class Unread(list[Any]):
    """Nobody may look at its members one by one."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("looked at")


@pytest.mark.parametrize("one", ["a", [1, 2]])
def test_too_many_prompts_are_refused_by_their_number(one: Any) -> None:
    with pytest.raises(ApiError) as caught:
        Completion({"prompt": Unread([one] * 33)})
    assert caught.value.status == 400
