"""Checks who may use the server: the API key, the host name of the request, the web page that it comes from, its body's type.

See `mdi.control.web_pages` for what these headers show.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mdi.control.web_pages import TYPE_WANTED, is_address, is_body_type, name_in
from mdi.serve.api_errors import ApiError
from mdi.serve.serve_settings import ApiKey, ServeSettings, digest_of

# Without a key: the page itself, which asks for one, and whether the server is alive.
OPEN_PATHS = ("/", "/health", "/favicon.ico", "/static/")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Guard:
    """An ASGI application around another one. Puts the ApiKey of a request into its scope as "mdi.key"."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._keys = settings.keys
        self._origins = settings.origins
        self._hosts = {name.lower() for name in (*LOCAL_NAMES, *settings.hosts)}
        self._is_any_host = "*" in settings.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        allowed = origin if origin in self._origins or (origin and "*" in self._origins) else None
        if allowed and scope["method"] == "OPTIONS":
            await _answer(send, 204, b"", _cross_origin(allowed))
            return
        try:
            self._check_host(headers)
            self._check_origin(headers, allowed)
            if not is_body_type(headers.get("content-type", "")):
                raise ApiError(415, TYPE_WANTED, "content_type", headers={"connection": "close"})
            scope["mdi.key"] = self._key_of(scope["path"], headers)
        except ApiError as e:
            json_body = json.dumps(e.body).encode()
            await _answer(send, e.status, json_body, [(b"content-type", b"application/json"), *_bytes(e.headers)])
            return

        async def send_with_origin(message: Message) -> None:
            if allowed and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_cross_origin(allowed)]}
            await send(message)

        await self._app(scope, receive, send_with_origin)

    def _check_host(self, headers: dict[str, str]) -> None:
        name = name_in(headers.get("host", ""))
        if self._is_any_host or name in self._hosts or is_address(name):
            return
        raise ApiError(
            403, f"this server does not accept the host name {name[:80]!r} (--allow-host)", "host_not_allowed"
        )

    def _check_origin(self, headers: dict[str, str], allowed: str | None) -> None:
        origin = headers.get("origin")
        if origin is None or allowed:
            return
        if _place_in(origin) != headers.get("host", "").lower():
            raise ApiError(403, "other web pages may not use this server (--allow-origin)", "origin_not_allowed")

    def _key_of(self, path: str, headers: dict[str, str]) -> ApiKey | None:
        if not self._keys:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = digest_of(given.strip()) if scheme.lower() == "bearer" else ""
        found = None
        for key in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None and not _is_open(path):
            raise ApiError(
                401, "give your API key: Authorization: Bearer KEY", "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return found


def _is_open(path: str) -> bool:
    return any(path == one or (one.endswith("/") and one != "/" and path.startswith(one)) for one in OPEN_PATHS)


def _place_in(origin: str) -> str | None:
    """Name and port in an Origin header; None if it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _cross_origin(origin: str) -> list[tuple[bytes, bytes]]:
    return _bytes(
        {
            "access-control-allow-origin": origin,
            "access-control-allow-headers": "authorization, content-type",
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "vary": "origin",
        }
    )


def _bytes(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _answer(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
