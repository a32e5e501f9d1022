"""One HTTP exchange: a body with a limit and a deadline, an answer at once or streamed, a client that may leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from mdi.serve import sse
from mdi.serve.api_errors import ApiError
from mdi.serve.serve_settings import ApiKey

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
        """Whose request it is; see `mdi.serve.guard`."""
        found: ApiKey | None = self.scope.get("mdi.key")
        return found

    async def parsed(self, parse: Callable[[Any], Parsed]) -> Parsed:
        """What the client sent: JSON, as `parse` understands it. A large body is read in a thread. Raises ApiError."""
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
        data = json.dumps(body, separators=(",", ":")).encode()
        all_headers = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        await self._start(status, all_headers)
        await self._send({"type": "http.response.body", "body": data})

    async def push(self, data: bytes) -> None:
        """The next part of a stream, which begins with the first."""
        if not self.is_streaming:
            self.is_streaming = True
            await self._start(200, sse.HEADERS)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The end of a stream."""
        await self._send({"type": "http.response.body", "body": sse.DONE})

    async def fail(self, error: ApiError) -> None:
        """Report an error to the client, in a form that fits the part of the answer that it has."""
        with contextlib.suppress(OSError):
            if self.is_streaming:
                await self.push(sse.event(error.body))
                await self.end()
            else:
                close = {"connection": "close"} if error.status in (408, 413) else {}
                await self.answer(error.body, error.status, {**error.headers, **close})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


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
