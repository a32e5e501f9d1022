"""The engine process as the API process sees it: texts that it generates, and its reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mdi.errors import WireError
from mdi.serve.api_errors import ApiError
from mdi.serve.process import Splitter, packed

STARTING = {"state": "loading", "model": "", "text": "starting", "done": 0.0, "load": 0}

logger = logging.getLogger("mdi")


class TextEvent(NamedTuple):
    """New tokens of one text; the last one has a reason.

    Attributes:
        logprobs: for each token, if they were asked for: its own, and the best ones' [[token, logprob], ...].
        n_cached: tokens of its prompt that did not have to be computed.
        n_accepted, n_rejected: tokens of its prediction that were drawn, and those that were guessed in vain; with the end.
        n_kept: of the tokens that came before these, so many stay, and the others were wrong; None: all stay.
        pooled: with the end of a text that is embedded: float32 numbers, little-endian, in base64.
    """

    tokens: list[int]
    finish_reason: str | None
    logprobs: list[Any] | None
    n_cached: int
    n_accepted: int = 0
    n_rejected: int = 0
    n_kept: int | None = None
    pooled: str = ""


class GeneratedTexts:
    """Texts that the engine continues together. As a context manager it cancels those that have not ended when it is left."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None], forget: Callable[[int], None]) -> None:
        self._events: asyncio.Queue[tuple[int, TextEvent | ApiError]] = asyncio.Queue()
        self._send = send
        self._forget = forget
        self._live: dict[int, int] = {}  # number at the engine -> index here

    def add(self, number: int, index: int) -> None:
        self._live[number] = index

    def take(self, number: int, event: TextEvent | ApiError) -> None:
        """Of the client: what came for one of them."""
        index = self._live[number]
        if isinstance(event, ApiError) or event.finish_reason is not None:
            self._drop(number)
        self._events.put_nowait((index, event))

    def cancel(self, index: int | None = None) -> None:
        """The engine frees one of them, or all; no more events come, and those that have come already are dropped."""
        for number in [number for number, own in self._live.items() if index in (None, own)]:
            self._drop(number)
            with contextlib.suppress(ApiError):  # the engine has gone
                self._send({"do": "cancel", "id": number})
        for own, event in [self._events.get_nowait() for _ in range(self._events.qsize())]:
            if isinstance(event, ApiError) or index not in (None, own):
                self._events.put_nowait((own, event))

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextEvent]]:
        """Index and event, until all have ended. Raises ApiError."""
        while self._live or not self._events.empty():
            index, event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            yield index, event

    @property
    def has_next(self) -> bool:
        """Whether an event has come already."""
        return not self._events.empty()

    def _drop(self, number: int) -> None:
        del self._live[number]
        self._forget(number)

    def __enter__(self) -> GeneratedTexts:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


@dataclass
class EngineState:
    """State of the engine process, by the name of a model.

    Attributes:
        statuses: {"state": "loading" | "serving" | "idle" | "failed", "model": its name, "text": for a person, "done": from 0
            to 1, "load": which attempt to load a model it is about}; the one that was sent last is the last.
        models: what is needed to read and write a model's texts.
        rings: the latest `mdi.serve.snapshot`.
        n_waiting: texts for which the nodes' caches have no memory yet.
        events: what has happened since the server began, as `mdi.serve.backend.History` keeps it.
    """

    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    rings: dict[str, dict[str, Any]] = field(default_factory=dict)
    n_waiting: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def is_serving(self, name: str) -> bool:
        return name in self.statuses and self.statuses[name]["state"] == "serving"

    @property
    def status(self) -> dict[str, Any]:
        """Of all together: that of a model that serves, if there is one, else the one that was sent last."""
        serving = [status for status in self.statuses.values() if status["state"] == "serving"]
        last = next(reversed(self.statuses.values()), STARTING)
        loads = max((status["load"] for status in self.statuses.values()), default=0)
        return {**(serving[-1] if serving else last), "load": loads}


class EngineClient:
    """Speaks with the engine process. Belongs to one event loop.

    Attributes:
        changed: set when status or model are other ones; then there is another event in its place.
        on_memory: called when more or fewer texts wait for memory in the engine.
    """

    def __init__(self, on_drain: Callable[[], None]) -> None:
        self.state = EngineState()
        self.changed = asyncio.Event()
        self.is_gone = False
        self.on_memory: Callable[[], None] = lambda: None
        self._on_drain = on_drain
        self._numbers = itertools.count()
        self._live: dict[int, GeneratedTexts] = {}
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.WriteTransport | None = None

    @property
    def status(self) -> dict[str, Any]:
        return self.state.status

    async def run(self, sock: socket.socket) -> None:
        """Read the engine's messages until it is gone; then all waiting requests get an error."""
        loop = asyncio.get_running_loop()
        reading = _Reading(self._take)
        self._writer, _ = await loop.create_connection(lambda: reading, sock=sock)
        try:
            await reading.end.wait()
        finally:
            self.is_gone = True
            error = ApiError(503, "the engine has ended", "engine_ended")
            for number, texts in list(self._live.items()):
                texts.take(number, error)
            for question in self._questions.values():
                if not question.done():
                    question.set_exception(error)
            self._writer.close()
            self.notify()

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> GeneratedTexts:
        """Have texts continued, see `mdi.serve.backend`; one of each request, or `n`. Raises ApiError if the engine is gone."""
        texts = GeneratedTexts(self.tell, self._forget)
        indices, together = itertools.count(), next(self._numbers)
        for request in requests:
            numbers = list(itertools.islice(self._numbers, request.get("n", 1)))
            self.tell({**request, "do": "generate", "request": together, "id": numbers[0], "numbers": numbers})
            for number in numbers:
                texts.add(number, next(indices))
                self._live[number] = texts
        return texts

    async def ask(self, what: str, args: Mapping[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
        """One question to the engine process (`mdi.serve.backend`). Raises ApiError."""
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell({"do": "ask", "id": number, "what": what, "args": args})
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
            raise ApiError(504, f"{what} took longer than {timeout_s:g} s", "timeout") from None
        finally:
            del self._questions[number]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Raises ApiError if the engine is gone."""
        if self._writer is None or self.is_gone:
            raise ApiError(503, "the engine has ended", "engine_ended")
        self._writer.write(packed(message))

    def _forget(self, number: int) -> None:
        self._live.pop(number, None)

    async def wait_for_change(self) -> None:
        """Return when the status is another one."""
        await self.changed.wait()

    def _take(self, message: dict[str, Any]) -> None:
        what = message.get("is")
        if what == "events":
            for number, *told in message["events"]:
                self._hand_on(number, TextEvent(*told))
            if message["waiting"] != self.state.n_waiting.get(message["model"]):
                self.state.n_waiting[message["model"]] = message["waiting"]
                self.on_memory()
        elif what == "refused":
            self._hand_on(message["id"], ApiError(message["status"], message["message"], message["code"]))
        elif what == "rings":
            self.state.rings = message["rings"]
        elif what == "history":
            self.state.events = message["history"]
        elif what == "answer":
            self._answer(message)
        elif what == "drain":
            self._on_drain()
        elif what in ("status", "model"):
            told = message[what]
            if what == "model":
                self.state.models[told["name"]] = told
            else:
                self.state.statuses.pop(told["model"], None)
                self.state.statuses[told["model"]] = told
                if told["state"] != "serving":
                    self.state.n_waiting.pop(told["model"], None)
            self.notify()

    def _hand_on(self, number: int, event: TextEvent | ApiError) -> None:
        if (texts := self._live.get(number)) is not None:  # else it was cancelled
            texts.take(number, event)

    def _answer(self, message: dict[str, Any]) -> None:
        question = self._questions.get(message["id"])
        if question is None or question.done():
            return
        if message.get("error") is None:
            question.set_result(message["result"])
        else:
            question.set_exception(ApiError(message.get("status", 500), message["error"], "engine"))

    def notify(self) -> None:
        """Wake those that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


class _Reading(asyncio.Protocol):
    """Hands the engine's messages on as they come: a stream and a task that reads it would be another turn of the loop for
    every token.

    Attributes:
        end: set when no more messages come.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        self.end = asyncio.Event()
        self._take = take
        self._splitter = Splitter()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._splitter.feed(data):
                self._take(message)
        except (WireError, ValueError) as e:
            self.connection_lost(e)

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            logger.error("the connection to the engine is lost: %s", error)
        self.end.set()
