"""One HTTP exchange of an endpoint: a body with a limit and a deadline, its turn, an answer at once or streamed, its errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.engine_client import TextEvent
from mdi.serve.known import TOGETHER, known_texts
from mdi.serve.models import LoadedModel
from mdi.serve.process import ApiKey
from mdi.serve.request import CommonFields, Opened, TextPiece, Usage, check_beams, write_texts

EVENTS = "text/event-stream; charset=utf-8"
BODY_LIMIT_BYTES = 16 << 20
MOST_DROPPED_BYTES = 16 * BODY_LIMIT_BYTES
BODY_S = 30.0
SIGN_S = 10.0  # clients and proxies give a stream up that says nothing for longer
PART_BYTES = 16 << 10  # of a stream, that are sent at once
LARGE_BYTES = 1 << 16
MOST_LISTS = 1 << 16  # and objects of a body; 4,096 messages have some 12,000
MOST_VALUES = 1 << 20  # such as token ids

Parsed = TypeVar("Parsed")
compact: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode  # one for all answers and their events

logger = logging.getLogger("mdi")


class Exchange:
    """Belongs to one request.

    Args:
        media_type: of an answer that is streamed.

    Attributes:
        failure: the end of a stream that is an error; who streams sets it before the first part.
    """

    failure: Callable[[ApiError], bytes]

    def __init__(self, scope: Scope, receive: Receive, send: Send, media_type: str = EVENTS) -> None:
        self.scope = scope
        self._media_type = media_type
        self._receive = receive
        self._send = send
        self._last_s = 0.0  # when a part of the stream was sent last, or its text was begun
        self._waiting = b""  # parts that go with the next one
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
        self, body: Mapping[str, Any] | bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer, which may be JSON already."""
        data = body if isinstance(body, bytes) else compact(body)
        await Response(data, status, headers, "application/json")(self.scope, self._receive, self._send)

    async def push(self, data: bytes, is_followed: bool = False) -> None:
        """The next part of a stream, which begins with the first.

        Args:
            is_followed: another part comes at once, and both are sent together, up to PART_BYTES: thousands may wait for a
                client that reads slowly.
        """
        self._waiting += data
        if self._waiting and (not is_followed or len(self._waiting) >= PART_BYTES):
            await self._push(more=True)

    async def _push(self, more: bool) -> None:
        if not self.is_streaming:
            self.is_streaming = True
            headers = {"content-type": self._media_type, "cache-control": "no-cache", "x-accel-buffering": "no"}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        data, self._waiting = self._waiting, b""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._last_s = time.monotonic()

    @asynccontextmanager
    async def kept_alive(self, sign: Callable[[], bytes] | None) -> AsyncIterator[None]:
        """Push a sign of life whenever there was nothing else for SIGN_S, as while a prompt is computed, or a call is written,
        which comes as a whole. A stream may begin with one: until then an error has its own status.

        Args:
            sign: makes one; None: nothing is streamed.
        """
        if sign is None:
            yield
            return
        self._last_s = time.monotonic()

        async def push_sign() -> None:
            await self.push(sign())  # without a turn of the loop between them: a sign may have the number of an event

        async def keep() -> None:
            while True:
                await asyncio.sleep(self._last_s + SIGN_S - time.monotonic())
                if time.monotonic() - self._last_s >= SIGN_S:
                    await asyncio.shield(push_sign())  # who counts what it sends has counted this one

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def end(self, data: bytes = b"") -> None:
        """The end of a stream."""
        self._waiting += data
        await self._push(more=False)


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


class Asked(Protocol):
    """A request, as a surface has read it.

    Attributes:
        n_texts: that are wanted.
    """

    fields: CommonFields
    n_texts: int

    async def opened(self, model: LoadedModel) -> Opened:
        """What is asked of a model. Raises ApiError if the model cannot continue one of the prompts."""


class Answers:
    """What a surface writes of."""

    def __init__(self, api: ApiState, model: LoadedModel, key: ApiKey | None, opened: Opened, asked: Asked) -> None:
        self.model, self.opened, self.fields = model, opened, asked.fields
        self.usage = Usage(sum(map(len, opened.prompts)))
        self._texts = write_texts(api, model, key, opened, asked.fields)
        self._api, self._owner, self._n_together = api, "" if key is None else key.name, _most_together(key)

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Of all texts, as they come. Raises ApiError."""
        async for piece in self._texts:
            self.usage.count(piece, self.fields.n)
            yield piece

    async def known(self, wanted: Mapping[str, Any]) -> AsyncIterator[tuple[int, TextEvent]]:
        """Number and events of each prompt, where no token is wanted: see mdi.serve.backend. Raises ApiError."""
        api, model, n_ended = self._api, self.model, 0
        for prompt in self.opened.prompts:
            for observer in api.observe:
                observer.began(self._owner, model.name, len(prompt))
        try:
            async for index, event in known_texts(
                api, model, self._owner, self.opened.prompts, wanted, self._n_together
            ):
                n_ended += event.finish_reason is not None
                yield index, event
        finally:
            for observer in api.observe:
                for number in range(len(self.opened.prompts)):
                    observer.ended("length" if number < n_ended else "cancelled")


class Surface(NamedTuple):
    """One API: a request in, events out.

    Attributes:
        read: makes what is asked of a body. Raises ApiError.
        write: writes what `read` made of it and the answers to the client, streamed or not.
        error: the body of an answer that is an error, also where the path was not let through to `read`.
        media_type: of a stream.
        is_in_parts: whether the texts of a request are computed in parts, of as many as the key may have at the same time.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Answers, Exchange], Awaitable[None]]
    error: Callable[[ApiError], Mapping[str, Any]]
    media_type: str = EVENTS
    is_in_parts: bool = False

    async def answer(self, asked: Asked, api: ApiState, model: LoadedModel, exchange: Exchange) -> None:
        """Have the texts generated, and write them."""
        opened = await asked.opened(model)
        if opened.grammar is not None:
            await api.schemas.check(opened.grammar["lark"], *whose(exchange.key))
        check_beams(asked.fields, exchange.key, model.context)
        api.quotas.check_tokens(whose(exchange.key)[0])
        await self.write(asked, Answers(api, model, exchange.key, opened, asked), exchange)


def whose(key: ApiKey | None) -> tuple[str, int]:
    """In queues: the owner of a request, and its priority."""
    return ("", 0) if key is None else (key.name, key.priority)


def _most_together(key: ApiKey | None) -> int:
    """Texts of which all tokens are known, of one request."""
    return min(TOGETHER, key.texts) if key is not None and key.texts else TOGETHER


class Endpoint:
    """An ASGI application that answers one path."""

    def __init__(self, api: ApiState, surface: Surface) -> None:
        self._api = api
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._surface.media_type)
        try:
            asked = await exchange.parsed(self._surface.read)
            await exchange.beside_client(self._limited(asked, exchange))
        except ClientGone:
            return
        except ApiError as e:
            await self._fail(exchange, e)
        except RecursionError:  # what could just be read may be too deep to be written again
            await self._fail(exchange, ApiError(400, "the body is nested too deeply", "invalid_json"))
        except Exception:
            logger.exception("a request failed")
            await self._fail(exchange, ApiError(500, "the server failed; its log has the reason", "internal"))

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        """Report an error to the client, in a form that fits the part of the answer that it has."""
        with contextlib.suppress(OSError):
            if exchange.is_streaming:
                await exchange.end(exchange.failure(error))
            else:
                close = {"connection": "close"} if error.status in (408, 413) else {}
                await exchange.answer(self._surface.error(error), error.status, {**error.headers, **close})

    def _limited(self, asked: Asked, exchange: Exchange) -> Coroutine[Any, Any, None]:
        work = self._run(asked, exchange)
        return work if asked.fields.deadline_s is None else _within(work, asked.fields.deadline_s)

    async def _run(self, asked: Asked, exchange: Exchange) -> None:
        api, key, fields = self._api, exchange.key, asked.fields
        owner, priority = whose(key)
        n_texts = asked.n_texts // fields.n * fields.n_running
        if self._surface.is_in_parts:
            n_texts = min(n_texts, _most_together(key))
        with api.quotas.begun(owner, n_texts):
            if (grammar := fields.grammar) is not None:
                await api.schemas.check(grammar["schema"], owner, priority, grammar["param"])
            async with (
                api.models.using(fields.model) as model,
                api.queue(model.name).entered(owner, priority, n_texts),
            ):
                await self._surface.answer(asked, api, model, exchange)


async def _within(work: Coroutine[Any, Any, None], deadline_s: float) -> None:
    try:
        await asyncio.wait_for(work, deadline_s)
    except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
        raise ApiError(504, f"it was not finished within {deadline_s:g} s", "deadline") from None
