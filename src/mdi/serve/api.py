"""The API process: HTTP, JSON, text and slow clients, in another interpreter than the one that feeds the ring.

`mdi.serve.process` starts it as `python -m mdi.serve.api`, with inherited sockets: those that it listens on, and the one to
the engine process. Its settings come through stdin. It ends when the engine process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hmac
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mdi.control.web_pages import TYPE_WANTED, is_address, is_body_type, name_in
from mdi.serve import ollama_port, operate, page
from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.catalog import Catalog
from mdi.serve.chat import CHATS
from mdi.serve.completions import COMPLETIONS
from mdi.serve.embeddings import EMBEDDINGS
from mdi.serve.endpoint import Endpoint, Surface
from mdi.serve.engine_client import EngineClient
from mdi.serve.messages import MESSAGES, TOKEN_COUNTS
from mdi.serve.operate import is_from_here
from mdi.serve.process import DRAIN_S, ApiKey, ServeSettings, digest_of
from mdi.serve.responses import RESPONSES
from mdi.terminal import TIMED, VARIABLE, formatter

# Without a key: the page itself, which asks for one, and whether the server is alive, also as agents ask it.
HELLO = "/api/hello"
OPEN_PATHS = ("/", "/health", "/favicon.ico", "/static/", HELLO)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

Answer = Callable[[str, ApiError], Response]
Failed = Callable[[Request, HTTPException], Awaitable[Response]]


class Guard:
    """An ASGI application around another one. Puts the ApiKey of a request into its scope as "mdi.key".

    Args:
        answer: an error in the form of a path's API.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, answer: Answer) -> None:
        self._app = app
        self._answer = answer
        self._keys = settings.keys
        self._origins = settings.origins
        self._hosts = {name.lower() for name in (*LOCAL_NAMES, *settings.hosts)}
        self._is_any_host = "*" in settings.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if not is_body_type(headers.get("content-type", "")):
                raise ApiError(415, TYPE_WANTED, "content_type", headers={"connection": "close"})
            key = scope["mdi.key"] = self._key_of(scope["path"], headers)
            scope["mdi.is_operator"] = is_own_page(headers) and (
                key.role == "operator" if key is not None else not self._keys and is_from_here(scope)
            )
        except ApiError as e:
            await self._answer(scope["path"], e)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        name = name_in(headers.get("host", ""))
        if self._is_any_host or name in self._hosts or is_address(name):
            return
        raise ApiError(
            403, f"this server does not accept the host name {name[:80]!r} (--allow-host)", "host_not_allowed"
        )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        if not is_own_page(headers):
            raise ApiError(403, "other web pages may not use this server (--allow-origin)", "origin_not_allowed")

    def _key_of(self, path: str, headers: Headers) -> ApiKey | None:
        if not self._keys:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digests = [digest_of(headers.get("x-api-key", "").strip())]
        digests += [digest_of(given.strip())] if scheme.lower() == "bearer" else []
        found = None
        for key in self._keys:  # all of them, so that the time tells nothing
            if any([hmac.compare_digest(key.digest, digest) for digest in digests]):
                found = key
        if found is None and not _is_open(path):
            raise ApiError(
                401, "give your API key: Authorization: Bearer KEY, or x-api-key: KEY", "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return found


def _is_open(path: str) -> bool:
    return any(path == one or (one.endswith("/") and one != "/" and path.startswith(one)) for one in OPEN_PATHS)


def is_own_page(headers: Headers) -> bool:
    """Whether a program asks, or this server's own page."""
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False


SURFACES: dict[str, Surface] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHATS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": TOKEN_COUNTS,
    "/v1/embeddings": EMBEDDINGS,
}
# What programs ask for, with its method; the page and its questions are not among them.
PATHS = {"/v1/models": "GET", **dict.fromkeys(SURFACES, "POST"), "/health": "GET", "/metrics": "GET"}
# Of other servers' APIs: what has the same purpose here.
ALIKE = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/tags": "/v1/models",
}


def make_app(api: ApiState) -> Starlette:
    operator = operate.Operator(api)
    api.closing.append(operator.close)
    routes: list[BaseRoute] = [
        Route("/v1/models", _Models(api).list, methods=["GET"]),
        Route("/v1/models/{name:path}", _Models(api).one, methods=["GET"]),
        *(Route(path, Endpoint(api, surface), methods=["POST"]) for path, surface in SURFACES.items()),
        Route("/health", _Models(api).health, methods=["GET"]),
        Route(HELLO, lambda request: Response(), methods=["GET"]),
        *page.routes(api),
        *operate.routes(api, operator),
    ]
    return _guarded(api, routes, _answer, _http_error)


def make_ollama_app(api: ApiState) -> Starlette:
    """Of the port that is Ollama's."""

    async def failed(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return ollama_port.answer("", ApiError(error.status_code, message, headers=error.headers))

    return _guarded(api, ollama_port.routes(api), ollama_port.answer, failed)


def _guarded(api: ApiState, routes: Sequence[BaseRoute], answer: Answer, failed: Failed) -> Starlette:
    async def api_error(request: Request, error: ApiError) -> Response:
        return answer(request.url.path, error)

    cors = Middleware(
        CORSMiddleware, allow_origins=api.settings.origins, allow_methods=["GET", "POST"],
        allow_headers=["*"], expose_headers=["retry-after"],  # clients in pages tell much about themselves in headers
    )  # fmt: skip
    app = Starlette(
        routes=routes,
        middleware=[*([cors] if api.settings.origins else []), Middleware(Guard, settings=api.settings, answer=answer)],
        exception_handlers={HTTPException: failed, ApiError: api_error},  # type: ignore[dict-item]
    )
    app.router.redirect_slashes = False
    return app


class _Models:
    """/v1/models: the model of the start first, and 503 until it serves."""

    def __init__(self, api: ApiState) -> None:
        self._api = api

    async def list(self, request: Request) -> Response:
        self._check()
        # Codex reads a list of its own form, of which it has its own defaults, and reports an error without it.
        more: dict[str, Any] = {"models": []} if "client_version" in request.query_params else {}
        names = self._api.catalog.names()
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # as Anthropic's API has them
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in names], **pages, **more})

    async def one(self, request: Request) -> Response:
        name = self._api.catalog.meant(request.path_params["name"])
        if not name:
            raise HTTPException(404)
        self._check()
        if name not in self._api.catalog.names():
            raise ApiError(404, f"there is no model {name[:200]!r}", "model_not_found", "model")
        return JSONResponse(self._entry(name))

    async def health(self, request: Request) -> Response:
        api = self._api
        is_ok = not api.engine.is_gone and api.engine.status["state"] in ("serving", "idle")
        told = {"status": api.engine.status["state"], "waiting": api.counts["waiting"]}
        for name in ("texts", "n_reused"):
            told[name] = api.ring.get(name)
        return JSONResponse(told, 200 if is_ok else 503)

    def _check(self) -> None:
        """Raises ApiError while no model has been loaded yet."""
        if self._api.engine.is_gone or not self._api.engine.state.models:
            raise self._api.models.progress_error()

    def _entry(self, name: str) -> dict[str, Any]:
        api = self._api
        model = api.catalog.model_of(name)
        is_loaded = api.engine.state.is_serving(model)
        made = {"id": name, "object": "model", "created": int(api.begin), "owned_by": "mdi-llm"}
        made |= {"type": "model", "display_name": name, "created_at": api.begin_date}  # as Anthropic's API has them
        # As vLLM names it; only a loaded model's is known: it depends on --sequence-length.
        facts = api.engine.state.models[model] if is_loaded else None
        context = facts and facts["context"] - facts["n_virtual"].get(name, 0)
        if model != name:
            made["parent"] = model
        drawing = facts and facts["tokenizer"]["drawing"]  # what a request without these fields gets
        weights = facts and facts["weights"]
        return {**made, "is_loaded": is_loaded, "max_model_len": context, "weights": weights, "sampling": drawing}


def _answer(path: str, error: ApiError) -> Response:
    """An error in the form of the path's API."""
    surface = SURFACES.get(path)
    return JSONResponse(error.body if surface is None else surface.error(error), error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    asked = f"{request.method} {request.url.path[:200]}"
    if error.status_code != 404:
        own = ApiError(error.status_code, f"{asked}: {error.detail}", "invalid_request", headers=error.headers)
        return _answer(request.url.path, own)
    there = [f"{method} {path}" for path, method in PATHS.items()]
    near = nearest(request.url.path)
    hint = "" if near is None else f"did you mean {PATHS[near]} {near}? "
    message = f"{asked}: there is no such path; {hint}This server has: {', '.join(there)}"
    return JSONResponse(ApiError(404, message, "not_found", details={"paths": there}).body, 404, error.headers)


def nearest(path: str) -> str | None:
    """The path that was probably meant; None if none is alike."""
    asked = "/" + "/".join(filter(None, path[:200].lower().split("/")))
    return ALIKE.get(asked) or next(iter(difflib.get_close_matches(asked, PATHS, 1, 0.75)), None)


SILENCE_S = 60.0  # a connection on which no request has begun since is closed
STALL_S = 60.0  # a client that reads nothing of its answer for so long is gone
BACKLOG = 2048
LONGEST_HEAD = 64 << 10  # of a request
LIBRARIES = ("uvicorn.error", "asyncio")

logger = logging.getLogger("mdi")


class Connection(h11.Connection):
    """Writes parts of a stream at once: h11's checks of one more part take as long as all else that is done for a token."""

    _is_in_chunks = False  # what is being sent

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # overloads say the same
        if self._is_in_chunks and isinstance(event, h11.Data) and event.data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        data = super().send(event)
        if isinstance(event, h11.Response):
            self._is_in_chunks = data is not None and b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
        elif not isinstance(event, h11.Data):
            self._is_in_chunks = False
        return data


class Protocol(H11Protocol):
    """Closes connections that say nothing or take nothing: uvicorn waits for ever for a first request, for the rest of one
    that has begun, and for somebody who does not read.
    """

    def __init__(self, config: uvicorn.Config, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self.conn = Connection(h11.SERVER, LONGEST_HEAD)

    _stall: asyncio.TimerHandle | None = None
    _silence: asyncio.TimerHandle
    _before: Any = None  # the request that was there when the connection was looked at last

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._silence.cancel()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch(self) -> None:
        self._before = self.cycle
        self._silence = self.loop.call_later(SILENCE_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.cycle is not self._before:
            self._watch()
        else:
            self.transport.close()


def main() -> None:
    values = json.load(sys.stdin)
    set_up_logging(os.environ.get(VARIABLE, TIMED))
    allow_many_connections()
    settings = msgspec.convert(values["settings"], ServeSettings)
    catalog = Catalog(Path(values["home"]), Path(values["first"]), values["adapters"], settings.aliases)
    *listeners, engine = (socket.socket(fileno=number) for number in (*values["listeners"], values["engine"]))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings, catalog, listeners, engine))


def set_up_logging(form: str) -> None:
    """Lines of one form. Libraries say only what is no client's doing: what strangers can provoke would fill the log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    for one in (logger, *map(logging.getLogger, LIBRARIES)):
        one.handlers, one.propagate = [handler], False
        if one is not logger:
            one.setLevel(logging.ERROR)


async def serve(
    settings: ServeSettings, catalog: Catalog, listeners: Sequence[socket.socket], engine: socket.socket
) -> None:
    """Answer requests until the engine is gone, or says that it is time to end. A second listener is that of Ollama's API."""

    def drain() -> None:
        api.is_draining = True
        server.should_exit = True

    client = EngineClient(drain)
    api = ApiState(settings, client, catalog)
    app = by_port(listeners, (make_app(api), make_ollama_app(api)))
    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, backlog=BACKLOG, timeout_graceful_shutdown=int(DRAIN_S), timeout_keep_alive=75,
        ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key, h11_max_incomplete_event_size=LONGEST_HEAD,
    )  # fmt: skip
    server = uvicorn.Server(config)
    talking = asyncio.create_task(client.run(engine))
    talking.add_done_callback(lambda _: drain())
    idle = asyncio.create_task(api.models.give_up_unused(settings.keep_alive_s))
    try:
        await server.serve(sockets=[*listeners])
    finally:
        for task in (idle, talking):
            task.cancel()
        await asyncio.gather(idle, talking, return_exceptions=True)
        api.close()


def by_port(listeners: Sequence[socket.socket], apps: Sequence[ASGIApp]) -> ASGIApp:
    """An application for each listener."""
    of_ports = {one.getsockname()[1]: app for one, app in zip(listeners, apps, strict=False)}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await of_ports[scope["server"][1]](scope, receive, send)

    return answer


def allow_many_connections() -> None:
    """As many open files as this process may have at all."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
