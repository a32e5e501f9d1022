"""Another API is two functions, a body in and events out; its streams and errors have its own form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mdi.serve.api_errors import ApiError
from mdi.serve.chat import CHATS, Chat
from mdi.serve.completions import COMPLETIONS
from mdi.serve.conversation import Conversation, Turn
from mdi.serve.endpoint import Answers, Endpoint, Exchange, Surface
from mdi.serve.messages import MESSAGES, MessageRequest
from mdi.serve.models import LoadedModel
from mdi.serve.quotas import Quotas
from mdi.serve.request import Opened, RequestFields, TextPiece, Usage, common_fields
from mdi.serve.responses import RESPONSES, ResponseRequest
from mdi.text.answers.events import End, Reasoning, Text
from test_harmony import ANALYSIS, CALL, FINAL, NEXT, engine_that_says, model_of, write_texts

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Question:
    def __init__(self, body: Any) -> None:
        if "ask" not in body:
            raise ApiError(400, "nothing is asked", "no_question")
        self.fields, self.n_texts = common_fields(RequestFields(stream=True), None, None), 1
        self.conversation = Conversation([Turn("user", body["ask"])])

    async def opened(self, model: LoadedModel) -> Opened:
        return await self.conversation.opened(model, self.fields)


async def write(asked: Question, answers: Answers, exchange: Exchange) -> None:
    exchange.failure = lambda e: f"wrong: {e}".encode()
    async for piece in answers.pieces():
        for event in piece.events:
            await exchange.push(json.dumps([type(event).__name__, *event]).encode() + b"\n")
    await exchange.end(json.dumps(answers.usage.n_completion).encode())


LINES = Surface(Question, write, lambda e: {"wrong": str(e)}, "text/lines")


def asked(folder: Path, surface: Surface, body: Any, written: str, reason: str) -> tuple[list[Any], bytes]:
    """The beginnings of an endpoint's answer, and what it consists of."""
    model, sent = model_of(folder), list[MutableMapping[str, Any]]()

    @asynccontextmanager
    async def using(name: str) -> AsyncIterator[LoadedModel]:
        yield model

    async def receive() -> MutableMapping[str, Any]:
        if not sent and not receiving:
            receiving.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode()}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    receiving: list[bool] = []
    engine = engine_that_says(written, reason)
    queue = SimpleNamespace(entered=lambda *given: using(""))
    models = SimpleNamespace(using=using)
    api = SimpleNamespace(engine=engine, observe=[], models=models, queue=lambda name: queue, quotas=Quotas(()))

    async def scenario() -> None:
        try:
            await Endpoint(cast(Any, api), surface)({"type": "http"}, receive, send)
        finally:
            model.template.close()

    asyncio.run(scenario())
    begins = [(one["status"], dict(one["headers"])[b"content-type"]) for one in sent if "status" in one]
    return begins, b"".join(one.get("body", b"") for one in sent)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Server-sent events, each named as its data says."""
    parts = [part.decode().split("\n") for part in data.split(b"\n\n")]
    assert parts.pop() == [""]
    events = [json.loads(second.removeprefix("data: ")) for _, second in parts]
    assert [first for first, _ in parts] == [f"event: {event['type']}" for event in events]
    return events


def test_events_come_in_their_order(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    begins, data = asked(folder, LINES, {"ask": "Where?"}, f"{ANALYSIS}Hm{NEXT}{FINAL}Yes<|return|>", "eos")
    assert begins == [(200, b"text/lines")]
    *lines, usage = data.splitlines()
    events = [json.loads(line) for line in lines]
    kinds = [kind for kind, *_ in events]
    assert list(dict.fromkeys(kinds)) == ["Reasoning", "Text", "End"] and events[-1] == ["End", "stop", ""]
    assert "".join(text for kind, text, *_ in events if kind == "Text") == "Yes" and int(usage) > 5


def test_errors_are_in_its_form(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    begins, data = asked(folder, LINES, {}, FINAL, "eos")
    assert (begins, json.loads(data)) == ([(400, b"application/json")], {"wrong": "nothing is asked"})
    begins, data = asked(folder, LINES, {"ask": "Where?"}, f"{FINAL}Yes", "memory")
    assert [status for status, _ in begins] == [200] and data.endswith(
        b"wrong: the nodes could not go on with this text"
    )


def test_openais_stream_says_an_error_and_ends(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Where?"}], "stream": True}
    begins, data = asked(write_texts(tmp_path / "texts"), CHATS, body, f"{FINAL}Yes", "memory")
    assert begins == [(200, b"text/event-stream; charset=utf-8")]
    *_, error, done, rest = data.split(b"\n\n")
    assert json.loads(error[6:])["error"]["code"] == "engine_memory" and (done, rest) == (b"data: [DONE]", b"")


ASKED = {"messages": [{"role": "user", "content": "Where?"}], "stream": True}
PROMPT = {"prompt": "Where?", "stream": True}


BOTH = pytest.mark.parametrize(("surface", "body"), [(CHATS, ASKED), (COMPLETIONS, PROMPT)], ids=["chat", "prompt"])


@BOTH
def test_openais_streams_have_comments_while_a_prompt_is_computed(
    surface: Surface, body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = write_texts(tmp_path / "texts"), f"{FINAL}Yes.<|return|>"
    begins, quiet = asked(folder, surface, body, written, "eos+0.3")
    assert b"\n:" not in quiet and not quiet.startswith(b":"), "not at once"
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.05)
    same_begins, data = asked(folder, surface, body, written, "eos+0.3")
    *events, done, rest = data.split(b"\n\n")
    assert begins == same_begins and [event.startswith(b":") for event in events[:2]] == [True, True]
    kept = [event for event in events if not event.startswith(b":")]
    assert len(kept) == quiet.count(b"data: {") and (done, rest) == (b"data: [DONE]", b"")
    _, whole = asked(folder, surface, {**body, "stream": False}, written, "eos+0.3")
    assert json.loads(whole)["choices"], "an answer in one piece has none"


@BOTH
def test_an_error_has_its_status_until_something_was_sent(
    surface: Surface, body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_texts(tmp_path / "texts")
    begins, data = asked(folder, surface, body, "", "memory+0.3")
    assert begins == [(500, b"application/json")] and json.loads(data)["error"]["code"] == "engine_memory"
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.05)
    begins, data = asked(folder, surface, body, "", "memory+0.3")
    first, *_, error, done, rest = data.split(b"\n\n")
    assert [status for status, _ in begins] == [200] and first.startswith(b":")
    assert json.loads(error[6:])["error"]["code"] == "engine_memory" and (done, rest) == (b"data: [DONE]", b"")


@pytest.mark.parametrize("reason", ["eos", "length"])
def test_a_call_ends_a_chat_as_a_call_only_if_it_was_not_cut_off(reason: str, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Where?"}], "tools": [TOOL]}
    _, data = asked(write_texts(tmp_path / "texts"), CHATS, body, f"{CALL}<|start|>assistant{CALL}", reason)
    (choice,) = json.loads(data)["choices"]
    assert choice["finish_reason"] == ("tool_calls" if reason == "eos" else "length")
    assert Chat(body).n_texts == 1 and choice["message"]["tool_calls"]


@pytest.mark.slow
def test_a_silent_stream_gets_signs_of_life_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.3)
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def scenario() -> None:
        exchange = Exchange({"type": "http"}, cast(Any, None), send)
        await exchange.push(b"first")
        async with exchange.kept_alive(None):
            await asyncio.sleep(0.5)
        assert sent == [b"", b"first"], "an answer in one piece has none"
        async with exchange.kept_alive(lambda: b"alive"):
            for _ in range(20):  # one that says something gets none
                await asyncio.sleep(0.01)
                await exchange.push(b"word")
            assert b"alive" not in sent
            while sent.count(b"alive") < 3:
                await asyncio.sleep(0.01)
        n_sent = len(sent)
        await asyncio.sleep(0.5)
        assert len(sent) == n_sent, "not behind the end"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_sign_of_life_is_sent_before_anything_takes_a_later_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.01)
    sent: list[int] = []
    numbers = count(1)

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            sent.append(int(message["body"]))

    def sign() -> bytes:
        number = next(numbers)
        asyncio.get_running_loop().call_soon(
            lambda: sent.append(next(numbers))
        )  # another event, as soon as there can be one
        return str(number).encode()

    async def scenario() -> None:
        exchange = Exchange({"type": "http"}, cast(Any, None), send)
        await exchange.push(b"0")
        async with exchange.kept_alive(sign):
            while len(sent) < 5:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert sent == sorted(sent)


@pytest.mark.parametrize(("surface", "kind"), [(MESSAGES, MessageRequest), (RESPONSES, ResponseRequest)])
def test_what_is_taken_back_is_not_in_a_whole_answer_and_what_was_cached_is_told(
    surface: Surface, kind: type[Any]
) -> None:
    pieces = [
        TextPiece(0, [Reasoning("wrong"), Text("wrong")], [1, 2]),
        TextPiece(0, [Text("right")], [3], n_before=2),
        TextPiece(0, [Text(" here"), End("stop")], [4]),
    ]
    sent: list[bytes] = []

    async def given() -> AsyncIterator[TextPiece]:
        for piece in pieces:
            yield piece

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    answers = SimpleNamespace(model=SimpleNamespace(asked_name="m"), usage=Usage(7, cached={0: 5}), pieces=given)
    user = [{"role": "user", "content": "a"}]
    body = kind({"messages": user, "input": user, "max_tokens": 9})
    asyncio.run(surface.write(body, cast(Any, answers), Exchange({"type": "http"}, cast(Any, None), send)))
    told = json.loads(b"".join(sent))
    (block,) = told["content"] if surface is MESSAGES else told["output"][0]["content"]
    assert block["text"] == "right here"
    usage = told["usage"]
    if surface is MESSAGES:  # which counts what was cached apart
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 5)
    else:
        assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (7, 5)
