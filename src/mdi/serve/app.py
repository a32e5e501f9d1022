"""The paths of the server, and who may use them: API keys, host names, web pages, types of bodies.

See `mdi.control.web_pages` for what the headers show.
"""

from __future__ import annotations

import difflib
import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mdi.control.web_pages import TYPE_WANTED, is_address, is_body_type, name_in
from mdi.serve import page
from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.chat import Chat
from mdi.serve.completions import Completion
from mdi.serve.endpoint import Endpoint
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
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin if origin in self._origins or (origin and "*" in self._origins) else None
        if allowed and scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_cross_origin(allowed))(scope, receive, send)
            return
        try:
            self._check_host(headers)
            self._check_origin(headers, allowed)
            if not is_body_type(headers.get("content-type", "")):
                raise ApiError(415, TYPE_WANTED, "content_type", headers={"connection": "close"})
            scope["mdi.key"] = self._key_of(scope["path"], headers)
        except ApiError as e:
            await JSONResponse(e.body, e.status, e.headers)(scope, receive, send)
            return

        async def send_with_origin(message: Message) -> None:
            if allowed and message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_cross_origin(allowed))
            await send(message)

        await self._app(scope, receive, send_with_origin)

    def _check_host(self, headers: Headers) -> None:
        name = name_in(headers.get("host", ""))
        if self._is_any_host or name in self._hosts or is_address(name):
            return
        raise ApiError(
            403, f"this server does not accept the host name {name[:80]!r} (--allow-host)", "host_not_allowed"
        )

    def _check_origin(self, headers: Headers, allowed: str | None) -> None:
        origin = headers.get("origin")
        if origin is None or allowed:
            return
        if _place_in(origin) != headers.get("host", "").lower():
            raise ApiError(403, "other web pages may not use this server (--allow-origin)", "origin_not_allowed")

    def _key_of(self, path: str, headers: Headers) -> ApiKey | None:
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


def _cross_origin(origin: str) -> dict[str, str]:
    return {
        "access-control-allow-origin": origin,
        "access-control-allow-headers": "authorization, content-type",
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "vary": "origin",
    }


# What programs ask for, with its method; the page and its questions are not among them.
PATHS = {
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/health": "GET",
    "/metrics": "GET",
}
# Of other servers' APIs: what has the same purpose here.
ALIKE = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/v1/messages": "/v1/chat/completions",
    "/v1/responses": "/v1/chat/completions",
}


def make_app(api: ApiState) -> Starlette:
    routes: list[BaseRoute] = [
        Route("/v1/models", _Models(api).list, methods=["GET"]),
        Route("/v1/models/{name:path}", _Models(api).one, methods=["GET"]),
        Route("/v1/completions", Endpoint(api, Completion), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(api, Chat), methods=["POST"]),
        Route("/health", _Models(api).health, methods=["GET"]),
        *page.routes(api),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, settings=api.settings)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},  # type: ignore[dict-item]
    )
    app.router.redirect_slashes = False
    return app


class _Models:
    """/v1/models: the model of the start first, and 503 until it serves."""

    def __init__(self, api: ApiState) -> None:
        self._api = api

    async def list(self, request: Request) -> Response:
        self._check()
        return JSONResponse({"object": "list", "data": [self._entry(n) for n in self._api.catalog.names()]})

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
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
        is_loaded = api.engine.state.is_serving(name)
        made = {"id": name, "object": "model", "created": int(api.begin), "owned_by": "mdi-llm"}
        # As vLLM names it; only a loaded model's is known: it depends on --sequence-length.
        context = api.engine.state.models[name]["context"] if is_loaded else None
        return {**made, "is_loaded": is_loaded, "max_model_len": context}


async def _api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    asked = f"{request.method} {request.url.path[:200]}"
    if error.status_code != 404:
        own = ApiError(error.status_code, f"{asked}: {error.detail}", "invalid_request")
        return JSONResponse(own.body, own.status, error.headers)
    there = [f"{method} {path}" for path, method in PATHS.items()]
    near = nearest(request.url.path)
    hint = "" if near is None else f"did you mean {PATHS[near]} {near}? "
    message = f"{asked}: there is no such path; {hint}This server has OpenAI's API: {', '.join(there)}"
    return JSONResponse(ApiError(404, message, "not_found", details={"paths": there}).body, 404, error.headers)


def nearest(path: str) -> str | None:
    """The path that was probably meant; None if none is alike."""
    asked = "/" + "/".join(filter(None, path[:200].lower().split("/")))
    return ALIKE.get(asked) or next(iter(difflib.get_close_matches(asked, PATHS, 1, 0.75)), None)
