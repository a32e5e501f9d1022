"""A client that goes away frees its text, wherever that is: in the prompt, in the queue, being written, streamed or not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from own_server import OwnServer, right, run, server

from mdi.engine.sequence import Plan
from mdi.node.secondary import SecondaryNode
from mdi.serve.completions import COMPLETIONS
from mdi.serve.endpoint import Endpoint, Surface
from mdi.serve.messages import MESSAGES, TOKEN_COUNTS
from mdi.serve.ollama import CHATS, GENERATIONS
from mdi.serve.responses import RESPONSES
from tiny_checkpoint import encode

WORDS = "The ring is closed link by link. "
ASKED = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 200}
PROMPTS: dict[Surface, dict[str, Any]] = {
    COMPLETIONS: {"prompt": encode(WORDS) * 8, "max_tokens": 200},
    RESPONSES: {"input": WORDS, "max_output_tokens": 200},
    MESSAGES: ASKED,
    TOKEN_COUNTS: ASKED,
    CHATS: {**ASKED, "options": {"num_predict": 200}},
    GENERATIONS: {"prompt": WORDS, "options": {"num_predict": 200}},
}


class Client:
    """One request, whose client may go away."""

    def __init__(self, made: OwnServer, surface: Surface = COMPLETIONS, **fields: Any) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps({**PROMPTS[surface], "temperature": 0, **fields}).encode()
        scope = {"type": "http"}
        self.task = asyncio.create_task(Endpoint(made.api, surface)(scope, self._receive, self._send))

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._body is None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    async def go(self) -> None:
        """Away; returns when the server has noticed."""
        self._gone.set()
        await self.task


class Gate:
    """Holds the engine up before the first frame from `number` on, until it is opened. To be made before its texts come."""

    def __init__(self, made: OwnServer, number: int) -> None:
        self._engine = made.engine
        self.is_reached, self.is_reported, self._is_open = threading.Event(), threading.Event(), threading.Event()
        schedule, cancel = self._engine.scheduler.schedule, self._engine.cancel

        def held() -> Plan | None:
            plan = schedule()
            if plan is not None and plan.number >= number:
                self.is_reached.set()
                assert self._is_open.wait(60)
            return plan

        def told(seq_id: int, reason: str = "cancelled") -> None:
            cancel(seq_id, reason)
            self.is_reported.set()

        self._engine.scheduler.schedule = held  # type: ignore[method-assign]
        self._engine.cancel = told  # type: ignore[method-assign]

    async def open(self, made: OwnServer) -> None:
        """When the engine was told that a text is not wanted any more; returns when it has none left."""
        await made.until(self.is_reported.is_set)
        self._is_open.set()
        await made.until(lambda: self._engine.texts()[:2] == (0, 0))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_in_its_prompt(folder: Path, nodes: list[SecondaryNode], is_streamed: bool) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            made.engine.scheduler.chunk_rows = 8
            gate = Gate(made, 4)
            client = Client(made, max_tokens=50, stream=is_streamed)
            await made.until(gate.is_reached.is_set)
            await client.go()
            await gate.open(made)
            assert made.engine.n_tokens == 0 and not client.sent
            assert await made.write("one", 10) == right("one", 10)

    run(scenario())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_in_the_middle_of_its_text(folder: Path, nodes: list[SecondaryNode], is_streamed: bool) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            gate = Gate(made, 20)
            client = Client(made, stream=is_streamed, n=2)
            await made.until(gate.is_reached.is_set)
            await client.go()
            await gate.open(made)
            assert 0 < made.engine.n_tokens < 60 and bool(client.sent) == is_streamed

    run(scenario())


@pytest.mark.parametrize(
    "surface", [RESPONSES, MESSAGES, CHATS, GENERATIONS], ids=["responses", "messages", "ollama", "ollama prompt"]
)
def test_in_the_middle_of_a_stream_of_events(
    surface: Surface, folder: Path, nodes: list[SecondaryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing but signs of life comes."""
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.05)

    async def scenario() -> None:
        async with server(folder, nodes) as made:
            gate = Gate(made, 20)
            client = Client(made, surface, stream=True)
            await made.until(gate.is_reached.is_set)
            n_sent = len(client.sent)
            await made.until(lambda: len(client.sent) > n_sent + 2)
            await client.go()
            n_sent = len(client.sent)
            await gate.open(made)
            assert 0 < made.engine.n_tokens < 60
            await asyncio.sleep(0.3)
            assert len(client.sent) == n_sent and client.sent[-1]["more_body"], "nothing after it has gone"

    run(scenario())


def test_tokens_are_counted_in_the_queue(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes, max_running=1) as made:
            gate = Gate(made, 5)
            first = Client(made, stream=True, max_tokens=6)
            await made.until(gate.is_reached.is_set)
            going, counting = (Client(made, TOKEN_COUNTS) for _ in range(2))
            await made.until(lambda: made.api.counts["waiting"] == 2)
            await going.go()
            assert made.api.counts["waiting"] == 1 and not going.sent and not counting.sent
            gate._is_open.set()
            await asyncio.gather(first.task, counting.task)
            assert json.loads(counting.sent[1]["body"])["input_tokens"] > 10 and made.engine.n_tokens == 6

    run(scenario())


def test_in_the_queue(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes, max_running=1) as made:
            gate = Gate(made, 5)
            first = Client(made, max_tokens=6, stream=True)
            await made.until(gate.is_reached.is_set)
            second, third = (Client(made, max_tokens=6) for _ in range(2))
            await made.until(lambda: made.api.counts["waiting"] == 2)
            await second.go()
            assert made.api.counts == {"running": 1, "waiting": 1, "limit": 512} and not second.sent
            gate._is_open.set()
            await asyncio.gather(first.task, third.task)
            assert made.engine.n_tokens == 12, "the second was never begun"
            assert third.sent[0]["status"] == 200

    run(scenario())


def test_while_its_model_is_loaded(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            client = Client(made, model="two", max_tokens=6)
            await made.until(lambda: made.models.loading == "two")
            await client.go()
            assert await made.write("two", 6) == right("two", 6) and not client.sent

    run(scenario())
