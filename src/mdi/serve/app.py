"""The paths of the server."""

from __future__ import annotations

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
        self._check()
        name = request.path_params["name"]
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
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    own = ApiError(error.status_code, message, "not_found" if error.status_code == 404 else "invalid_request")
    return JSONResponse(own.body, own.status, error.headers)
