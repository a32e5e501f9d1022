"""The paths of the server."""

from __future__ import annotations

import difflib
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mdi.serve import page
from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.chat import Chat
from mdi.serve.completions import Completion
from mdi.serve.endpoint import Endpoint
from mdi.serve.guard import Guard

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
        is_well = not api.engine.is_gone and api.engine.status["state"] in ("serving", "idle")
        told = {"status": api.engine.status["state"], "waiting": api.counts["waiting"]}
        for name in ("texts", "n_reused"):
            told[name] = api.ring.get(name)
        return JSONResponse(told, 200 if is_well else 503)

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
