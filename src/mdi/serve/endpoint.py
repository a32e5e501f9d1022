"""One HTTP exchange of an endpoint: a body with a limit and a deadline, its turn, an answer at once or streamed, its errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.models import LoadedModel
from mdi.serve.process import ApiKey
from mdi.serve.request import CommonFields, TextPiece, Usage, check_beams, write_texts
from mdi.text.texts import TextStream

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"


def stream_event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


BODY_LIMIT_BYTES = 16 << 20
MOST_DROPPED_BYTES = 16 * BODY_LIMIT_BYTES
BODY_S = 30.0
LARGE_BYTES = 1 << 16
MOST_LISTS = 1 << 16  # and objects of a body; 4,096 messages have some 12,000
MOST_VALUES = 1 << 20  # such as token ids

Parsed = TypeVar("Parsed")

logger = logging.getLogger("mdi")


class Exchange:
    """Belongs to one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.is_streaming = False

    @property
    def key(self) -> ApiKey | None:
        """Whose request it is; see `mdi.serve.api`."""
        found: ApiKey | None = self.scope.get("mdi.key")
        return found

    async def parsed(self, parse: Callable[[Any], Parsed]) -> Parsed:
        """Parse the client's JSON with `parse`. A large body is read in a thread. Raises ApiError."""
        try:
            data = await asyncio.wait_for(self._read(), BODY_S)
        except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
            raise ApiError(408, f"the body did not come within {BODY_S:.0f} s", "timeout") from None
        if len(data) < LARGE_BYTES:
            return parse(json_of(data))
        return await asyncio.to_thread(lambda: parse(json_of(data)))

    async def _read(self) -> bytes:
        """One that is too large is read and dropped: a client that still writes sees no answer, only a broken connection."""
        data, n_bytes = bytearray(), 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            n_bytes += len(part)
            if n_bytes <= BODY_LIMIT_BYTES:
                data += part
            else:
                data.clear()
            if not message.get("more_body", False) or n_bytes > MOST_DROPPED_BYTES:
                break
        if n_bytes > BODY_LIMIT_BYTES:
            raise ApiError(413, f"the body has more than {BODY_LIMIT_BYTES >> 20} MB", "body_too_large")
        return bytes(data)

    async def beside_client(self, work: Awaitable[None]) -> None:
        """Do `work` until it is done or the client has gone away, which cancels it."""
        working = asyncio.ensure_future(work)
        going = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, going):
                task.cancel()
            await asyncio.gather(working, going, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer."""
        data = json.dumps(body, separators=(",", ":"))
        await Response(data, status, headers, "application/json")(self.scope, self._receive, self._send)

    async def push(self, data: bytes) -> None:
        """The next part of a stream, which begins with the first."""
        if not self.is_streaming:
            self.is_streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The end of a stream."""
        await self._send({"type": "http.response.body", "body": DONE})

    async def fail(self, error: ApiError) -> None:
        """Report an error to the client, in a form that fits the part of the answer that it has."""
        with contextlib.suppress(OSError):
            if self.is_streaming:
                await self.push(stream_event(error.body))
                await self.end()
            else:
                close = {"connection": "close"} if error.status in (408, 413) else {}
                await self.answer(error.body, error.status, {**error.headers, **close})


def json_of(body: bytes) -> Any:
    """Raises ApiError: it is no JSON, or would take seconds to read, in which Python does nothing else, thread or not."""
    if len(body) >= LARGE_BYTES:
        _check_counts(body)
    try:
        # JSON is UTF-8; json.loads would take bytes in UTF-16, too, in which the counts would be others
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise ApiError(400, f"the body is no JSON: {reason}"[:200], "invalid_json") from None


def _check_counts(body: bytes) -> None:
    outside = [body]
    if _n_lists(outside) > MOST_LISTS or _n_values(outside) > MOST_VALUES:  # or it is text that has such characters
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if plain.count(b'"') <= 4 * MOST_VALUES:
            outside = plain.split(b'"')[::2]
        if _n_lists(outside) > MOST_LISTS or _n_values(outside) > MOST_VALUES:
            raise ApiError(
                400, f"the body has more than {MOST_VALUES} values, or {MOST_LISTS} lists and objects", "body_too_large"
            )


def _n_lists(pieces: Sequence[bytes]) -> int:
    return sum(piece.count(b"[") + piece.count(b"{") for piece in pieces)


def _n_values(pieces: Sequence[bytes]) -> int:
    return sum(piece.count(b",") for piece in pieces)


class ClientGone(Exception):
    """The client left before its request was complete."""


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    """Infinite numbers are not valid in the JSON that is passed on."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


class EndpointJob(ABC):
    """A parsed request: the texts to generate, and the form of the answer. See completions.py and chat.py.

    Attributes:
        ID: beginning of the answer's id.
        OBJECT: type of the whole answer, as OpenAI names it.
        CHUNK: type of a streamed part.
        continues: whether the texts continue those of the prompts.
        fields: those that all requests have.
        n_texts: number of texts that the request asks for.
    """

    ID: str
    OBJECT: str
    CHUNK: str
    continues: bool
    fields: CommonFields
    n_texts: int

    async def run(self, api: ApiState, model: LoadedModel, exchange: Exchange) -> None:
        """Have the texts generated, and answer with them."""
        fields, prompts = self.fields, await self.prompts(model)
        check_beams(fields, exchange.key, model.context)
        usage = Usage(sum(map(len, prompts)))
        made = {"id": f"{self.ID}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.asked_name}

        async def push(*choices: dict[str, Any], **others: Any) -> None:
            await exchange.push(stream_event({**made, "object": self.CHUNK, "choices": list(choices), **others}))

        begun = self.begin(model, prompts)
        if fields.is_streamed:
            for choice in begun:
                await push(choice)
        async for piece in self.pieces(api, model, exchange.key, prompts):
            usage.count(piece, fields.n)
            new = self.piece(model, piece)
            if fields.is_streamed and new is not None:
                await push(new)
        if not fields.is_streamed:
            answer = {**made, "object": self.OBJECT, "choices": self.choices(), "usage": usage.to_json()}
            await exchange.answer(answer)
            return
        if fields.with_usage:
            await push(usage=usage.to_json())
        await exchange.end()

    @abstractmethod
    async def prompts(self, model: LoadedModel) -> list[list[int]]:
        """Ids of the prompts. Raises ApiError if the model cannot continue one of them."""

    def pieces(
        self, api: ApiState, model: LoadedModel, key: ApiKey | None, prompts: list[list[int]]
    ) -> AsyncIterator[TextPiece]:  # fmt: skip
        """Of all texts, as they come. Raises ApiError."""
        return write_texts(api, model, key, prompts, self.fields, partial(self.stream, model), self.stops(model))

    def stops(self, model: LoadedModel) -> tuple[str, ...]:
        """Stop strings besides those of the request."""
        return ()

    def stream(self, model: LoadedModel, stop: tuple[str, ...]) -> TextStream:
        """Makes words of the ids of a text, up to stop strings."""
        return TextStream(model.codec, stop, self.continues)

    @abstractmethod
    def begin(self, model: LoadedModel, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """First choices of a stream, before any token."""

    @abstractmethod
    def piece(self, model: LoadedModel, piece: TextPiece) -> dict[str, Any] | None:
        """Record a piece of a text; the choice that shows it, None if nothing can be shown yet."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """All choices, complete."""


class Endpoint:
    """An ASGI application that answers one path.

    Args:
        parse: makes a Job of the body. Raises ApiError.
    """

    def __init__(self, api: ApiState, parse: Callable[[Any], EndpointJob]) -> None:
        self._api = api
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            job = await exchange.parsed(self._parse)
            await exchange.beside_client(self._limited(job, exchange))
        except ClientGone:
            return
        except ApiError as e:
            await exchange.fail(e)
        except RecursionError:  # what could just be read may be too deep to be written again
            await exchange.fail(ApiError(400, "the body is nested too deeply", "invalid_json"))
        except Exception:
            logger.exception("a request failed")
            await exchange.fail(ApiError(500, "the server failed; its log has the reason", "internal"))

    def _limited(self, job: EndpointJob, exchange: Exchange) -> Coroutine[Any, Any, None]:
        work = self._run(job, exchange)
        return work if job.fields.deadline_s is None else _within(work, job.fields.deadline_s)

    async def _run(self, job: EndpointJob, exchange: Exchange) -> None:
        api, key = self._api, exchange.key
        owner, priority = ("", 0) if key is None else (key.name, key.priority)
        if (grammar := job.fields.grammar) is not None:
            await api.schemas.check(grammar["schema"], owner, priority)
        async with (
            api.models.using(job.fields.model) as model,
            api.queue(model.name).entered(owner, priority, job.n_texts // job.fields.n * job.fields.n_running),
        ):
            await job.run(api, model, exchange)


async def _within(work: Coroutine[Any, Any, None], deadline_s: float) -> None:
    try:
        await asyncio.wait_for(work, deadline_s)
    except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
        raise ApiError(504, f"it was not finished within {deadline_s:g} s", "deadline") from None
