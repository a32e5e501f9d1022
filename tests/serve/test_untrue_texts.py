"""Texts of a server while a node gives wrong rows: they are continued behind the tokens that count."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from own_server import right, run, server

from lying_nodes import LIARS, make_lie
from mdi.engine.sequence import UNTRUE, Event, Request, SamplingParams
from mdi.engine.sequence import Sequence as Text
from mdi.kernels import library
from mdi.node.secondary import SecondaryNode
from mdi.serve.api_errors import ApiError
from mdi.serve.completions import COMPLETIONS, Completion
from mdi.serve.engine_client import TextEvent
from mdi.serve.host import Outlet
from mdi.serve.quotas import Quotas
from mdi.serve.request import Opened
from mdi.text.answers import events as answer_events
from mdi.text.drawing import OWN


@pytest.mark.skipif(library.load() is None, reason="needs the kernels")
def test_texts_go_on_when_a_node_lies(folder: Path, nodes: list[SecondaryNode]) -> None:
    make_lie(nodes[0], LIARS["after many rows"])

    async def scenario() -> None:
        async with server(folder, nodes, verify=1.0) as made:
            found = await asyncio.gather(*(made.write("one", 60) for _ in range(4)))
            assert found == [right("one", 60)] * 4
            verifier = made.host.loaded["one"].run.verifier
            assert verifier is not None and [one.nodes for one, _ in verifier.found] == [("secondary0",)]

    run(scenario())


class Matching:
    """A constraint that notes what it takes."""

    def __init__(self, taken: Sequence[int] = ()) -> None:
        self.taken = list(taken)

    def take(self, token: int) -> bool:
        self.taken.append(token)
        return False

    def copy(self) -> Matching:
        return Matching(self.taken)


class Engine:
    """Texts are what a test says."""

    verifier = object()

    def __init__(self) -> None:
        self.asked: list[tuple[Request, list[int], Any]] = []
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def submit(self, ids: Any, params: SamplingParams, **others: Any) -> Request:
        text = Text(len(self.asked), tuple(ids), params, 100)
        text.ids += others["generated"]
        self.events = others["events"]
        request = Request(text, self.events, None, lambda seq_id, reason: None)
        self.asked.append((request, list(others["generated"]), others["constraint"]))
        return request

    def texts(self) -> tuple[int, int, int]:
        return 0, 0, 0


WANTED = {
    "sampling": {"n_tokens": 9, "logit_bias": []}, "ids": [1], "owner": "", "numbers": [7],
}  # fmt: skip


def told_of(first: list[int], n_kept: int, again: list[int], reason: str | None = "length") -> tuple[Engine, list[Any]]:
    """What the API process hears of a text of which the first `n_kept` tokens were right, and `again` follow."""
    sent: list[Any] = []
    engine = Engine()
    lines = SimpleNamespace(send=lambda message: sent.extend(message["events"]))
    outlet = Outlet("one", cast(Any, engine), cast(Any, SimpleNamespace(eos_ids=(), suppressed=())), cast(Any, lines))
    outlet.submit(WANTED, cast(Any, Matching()))
    engine.events.put(Event(0, tuple(first), None))
    engine.events.put(Event(0, (), UNTRUE, n_kept=n_kept))
    while len(engine.asked) < 2:
        pass
    for token in again[:-1]:
        engine.events.put(Event(1, (token,), None))
    engine.events.put(Event(1, tuple(again[-1:]), reason))
    outlet.close()
    return engine, sent


def test_tokens_that_are_drawn_again_are_told_once() -> None:
    engine, sent = told_of([5, 6, 7, 8], 2, [7, 8, 9])
    assert engine.asked[1][1] == [5, 6] and engine.asked[1][2].taken == [5, 6]
    assert [(list(tokens), reason, *more) for _, tokens, reason, _, _, *more in sent] == [
        ([5, 6, 7, 8], None), ([9], "length"),
    ]  # fmt: skip
    assert {message[0] for message in sent} == {7}


@pytest.mark.parametrize("again", [[7, 3, 4], [7]], ids=["others", "an earlier end"])
def test_tokens_that_were_wrong_are_taken_back(again: list[int]) -> None:
    _, sent = told_of([5, 6, 7, 8], 2, again)
    text: list[int] = []
    for _, tokens, _, _, _, *more in sent:
        if len(more) == 3:
            assert more[2] == 3
            del text[more[2] :]
        text += tokens
    assert text == [5, 6, *again] and sent[-1][2] == "length"


def answered(events: Sequence[TextEvent], is_streamed: bool) -> tuple[list[Any], list[Any]]:
    """The whole answer to a completion, and the pieces of a stream, for these events."""
    answers: list[Any] = []
    sent: list[Any] = []

    class Detokenizing:
        is_plain = True

    class Texts:
        has_next = False

        async def __aiter__(self) -> AsyncIterator[tuple[int, TextEvent]]:
            for event in events:
                yield 0, event

        def cancel(self, index: int) -> None: ...

    @contextmanager
    def generate(requests: Any) -> Iterator[Texts]:
        yield Texts()

    async def push(data: bytes, is_followed: bool) -> None:
        sent.append(json.loads(data[6:])["choices"][0]["text"])

    async def answer(body: Any) -> None:
        answers.append((body["choices"][0], body["usage"]["completion_tokens"]))

    async def end(data: bytes) -> None: ...

    class Letters:
        """Of the alphabet, as words."""

        is_stopped = False

        def feed(self, ids: Sequence[int]) -> list[Any]:
            return [answer_events.Text("".join(chr(97 + i) for i in ids))]

        def close(self, is_cut: bool) -> list[Any]:
            return [answer_events.End("length" if is_cut else "stop")]

    class Spelling(Completion):
        async def opened(self, model: Any) -> Opened:
            return Opened([[1]], cast(Any, Letters))

    codec = SimpleNamespace(token_bytes=lambda i: bytes([97 + i]), drawing=OWN)
    model = SimpleNamespace(codec=codec, context=99, name="one", asked_name="one", adapter="")
    api = SimpleNamespace(engine=SimpleNamespace(generate=generate), observe=[], quotas=Quotas(()))
    exchange = SimpleNamespace(key=None, push=push, end=end, answer=answer, kept_alive=nullcontext)
    job = Spelling({"prompt": "a", "stream": is_streamed, "logprobs": 1})
    asyncio.run(COMPLETIONS.answer(job, cast(Any, api), cast(Any, model), cast(Any, exchange)))
    return answers, sent


def events(*pieces: tuple[list[int], int | None]) -> list[TextEvent]:
    made = [TextEvent(ids, None, [(-1.0, [(i, -1.0)]) for i in ids], 0, n_kept=kept) for ids, kept in pieces]
    return [*made, TextEvent([], "length", None, 0)]


WRONG = ([0, 1, 2], None), ([3], None), ([4, 5], 1), ([6], None)


def test_an_answer_has_the_right_tokens_alone() -> None:
    ((choice, n_tokens),), _ = answered(events(*WRONG), False)
    assert (choice["text"], choice["finish_reason"], n_tokens) == ("aefg", "length", 4)
    assert choice["logprobs"]["tokens"] == ["a", "e", "f", "g"] and choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_a_stream_whose_wrong_tokens_were_sent_ends_with_an_error() -> None:
    with pytest.raises(ApiError) as told:
        answered(events(*WRONG), True)
    assert (told.value.status, told.value.body["error"]["code"]) == (500, "engine_untrue")
    _, sent = answered(events(*WRONG[:2]), True)
    assert "".join(itertools.chain(sent)) == "abcd"
