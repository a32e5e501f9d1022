"""What is done for each token in a shorter way than by the libraries, beside what these do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from mdi.serve import openai
from mdi.serve.api import Connection
from mdi.serve.completions import COMPLETIONS, Completion
from mdi.serve.endpoint import PART_BYTES, Exchange, compact
from mdi.serve.engine_client import GeneratedTexts, TextEvent
from mdi.serve.prometheus import TOKEN_BUCKETS_S, ApiMetrics
from mdi.serve.quotas import Quotas
from mdi.serve.request import Opened
from mdi.text.answers.events import End, Text
from mdi.text.drawing import OWN

ASKED = {
    "GET": b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "HEAD": b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n",
    "old": b"GET / HTTP/1.0\r\nhost: a\r\n\r\n",
}
PARTS = [b"data: a\n\n", b"", b"x" * 70_000, b"\xff\r\n0\r\n\r\n"]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("headers", [[], [("content-length", str(sum(map(len, PARTS))))]], ids=["stream", "whole"])
def test_a_stream_has_the_bytes_that_h11_writes(asked: str, headers: list[tuple[str, str]]) -> None:
    def written(made: h11.Connection) -> list[bytes | None]:
        found: list[bytes | None] = []
        for _ in range(1 if asked == "old" else 2):  # requests of one connection
            made.receive_data(ASKED[asked])
            while type(made.next_event()) is not h11.EndOfMessage:
                pass
            response = h11.Response(status_code=200, headers=headers)
            parts = [] if asked == "HEAD" else PARTS
            found += [made.send(one) for one in (response, *(h11.Data(data=one) for one in parts), h11.EndOfMessage())]
            if asked != "old":
                made.start_next_cycle()
        return found

    assert written(Connection(h11.SERVER)) == written(h11.Connection(h11.SERVER))


def test_nothing_is_sent_of_a_stream_whose_end_has_been_sent() -> None:
    made = Connection(h11.SERVER)
    made.receive_data(ASKED["GET"])
    made.next_event()
    for event in (h11.Response(status_code=200, headers=[]), h11.Data(data=b"a"), h11.EndOfMessage()):
        made.send(event)
    with pytest.raises(h11.LocalProtocolError):
        made.send(h11.Data(data=b"b"))


def test_tokens_of_a_step_are_sent_together_and_each_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_texts, n_steps, encoded = 4, 5, 0
    texts = GeneratedTexts(lambda message: None, lambda number: None)
    sent: list[bytes] = []

    def counted(data: Any) -> str:
        nonlocal encoded
        encoded += 1
        return compact(data)

    class Letters:
        is_stopped = False

        def feed(self, ids: Sequence[int]) -> list[Any]:
            return [Text("".join(chr(97 + i) for i in ids))]

        def close(self, is_cut: bool) -> list[Any]:
            return [End("length")]

    class Spelling(Completion):
        async def opened(self, model: Any) -> Opened:
            return Opened([[1]], cast(Any, Letters))

    def generate(requests: Any) -> GeneratedTexts:
        for number in range(n_texts):
            texts.add(number, number)
        return texts

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("more_body"):
            sent.append(message["body"])

    async def scenario() -> None:
        exchange = Exchange({"type": "http"}, cast(Any, None), send)
        asked = Spelling({"prompt": "a", "stream": True, "n": n_texts, "max_tokens": n_steps})
        writing = asyncio.create_task(COMPLETIONS.answer(asked, cast(Any, api), cast(Any, model), exchange))
        await asyncio.sleep(0)
        for step in range(n_steps):
            for number in range(n_texts):
                texts.take(number, TextEvent([step], "length" if step == n_steps - 1 else None, None, 0))
            while texts.has_next:
                await asyncio.sleep(0)
        await writing

    codec = SimpleNamespace(drawing=OWN, decode=lambda ids: "a")
    model = SimpleNamespace(codec=codec, context=99, name="one", asked_name="one", adapter="")
    api = SimpleNamespace(engine=SimpleNamespace(generate=generate), observe=[], quotas=Quotas(()))
    monkeypatch.setattr(openai, "compact", counted)
    asyncio.run(asyncio.wait_for(scenario(), 60))
    found = [[json.loads(line[6:])["choices"][0] for line in part.split(b"\n\n") if line] for part in sent]
    assert [[(one["index"], one["text"]) for one in part] for part in found] == [
        [(number, chr(97 + step)) for number in range(n_texts)] for step in range(n_steps)
    ]
    assert encoded == 1 + n_texts * n_steps


def test_what_waits_for_a_slow_reader_is_sent_in_parts() -> None:
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("more_body"):
            sent.append(message["body"])

    async def scenario() -> None:
        exchange = Exchange({"type": "http"}, cast(Any, None), send)
        for i in range(10_000):
            await exchange.push(b"%08d" % i, is_followed=i < 9999)

    asyncio.run(scenario())
    assert b"".join(sent) == b"".join(b"%08d" % i for i in range(10_000))
    assert len(sent) == 5 and max(map(len, sent)) == PART_BYTES


def test_tokens_of_a_text_that_was_ended_hold_back_no_other_text() -> None:
    texts = GeneratedTexts(lambda message: None, lambda number: None)
    for number in range(3):
        texts.add(number, number)
    for number in (0, 1, 0):
        texts.take(number, TextEvent([number], None, None, 0))
    texts.cancel(0)
    assert texts.has_next
    texts.cancel(1)
    assert not texts.has_next
    texts.take(2, TextEvent([2], "length", None, 0))
    assert texts.has_next


def test_times_between_tokens_are_counted_as_the_library_does() -> None:
    registry = CollectorRegistry()
    theirs = Histogram(
        "mdi_token_seconds", "From one token of a text to its next", buckets=TOKEN_BUCKETS_S, registry=registry
    )
    api = SimpleNamespace(
        counts={"waiting": 0, "running": 0},
        engine=SimpleNamespace(status={}),
        quotas=SimpleNamespace(uses={}),
        rings={},
    )
    ours = ApiMetrics(cast(Any, api))
    for n, since_s in ((1, 0.0625), (4, 0.25), (2, 64.0), (1, 0.0), (1, TOKEN_BUCKETS_S[0]), (8, 0.0078125)):
        ours.tokens("", n, since_s)
        for _ in range(n if since_s > 0 else 0):
            theirs.observe(since_s / n)

    def lines(text: bytes) -> list[str]:
        return [line for line in text.decode().splitlines() if "mdi_token_seconds" in line and "_created" not in line]

    found = lines(generate_latest(registry))
    assert lines(ours.exposition()[0]) == found and len(found) == len(TOKEN_BUCKETS_S) + 5
