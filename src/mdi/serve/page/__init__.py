"""The page in the browser: files that are sent as they are, and the questions that only the page asks.

Nothing comes from another server, and no script but the page's own runs: the Content-Security-Policy says so to the browser. It
also forbids HTML made of text (Trusted Types), so that what a model writes stays text even if the page had a mistake.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mdi.serve.prometheus import ApiMetrics

if TYPE_CHECKING:
    from mdi.serve.api_state import ApiState

FILES = Path(__file__).resolve().parent / "files"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
QUESTIONS = "/api/"
QUESTION_S = {"doctor": 60.0, "plan": 60.0}  # how long the engine process may take


def routes(api: ApiState) -> list[Route]:
    """`/`, its files, its API, and `/metrics`."""
    metrics = ApiMetrics(api)
    api.observe.append(metrics)
    questions = _Questions(api)
    files = {path.name: _File(path) for path in sorted(FILES.iterdir()) if path.suffix in TYPES}

    async def page(request: Request) -> Response:
        return files["index.html"].answer(request)

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    async def ring(request: Request) -> Response:
        told = {"status": api.engine.status, "queue": api.counts, "model": api.models.latest}
        is_operator = bool(request.scope.get("mdi.is_operator"))
        return _json({**told, "rings": api.rings, "events": api.events, "is_operator": is_operator})

    async def ask(request: Request) -> Response:
        what, model = request.url.path.removeprefix(QUESTIONS), request.query_params.get("model")
        return _json(await questions.answer(what, model if model in api.rings else api.models.latest))

    async def exposition(request: Request) -> Response:
        body, content_type = metrics.exposition()
        return Response(body, headers={"content-type": content_type})

    return [
        Route("/", page, methods=["GET"]),
        Route("/favicon.ico", lambda request: files["icon.svg"].answer(request), methods=["GET"]),
        Route("/static/{name}", file, methods=["GET"]),
        Route("/api/ring", ring, methods=["GET"]),
        *(Route(QUESTIONS + what, ask, methods=["POST"]) for what in QUESTION_S),
        Route("/metrics", exposition, methods=["GET"]),
    ]


class _Questions:
    """Questions to the engine process. Each takes a thread and asks all nodes, so equal ones share an answer."""

    def __init__(self, api: ApiState) -> None:
        self._api = api
        self._asked: dict[tuple[str, str], asyncio.Task[dict[str, Any]]] = {}

    async def answer(self, what: str, model: str) -> dict[str, Any]:
        """Raises ApiError."""
        key = what, model
        if key not in self._asked:
            asked = asyncio.create_task(self._api.engine.ask(what, {"model": model}, QUESTION_S[what]))
            asked.add_done_callback(lambda _: self._asked.pop(key))
            self._asked[key] = asked
        return await asyncio.shield(self._asked[key])


class _File:
    """One file of the page, in memory; a browser that has it gets 304."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:16]}"'
        self._type = f"{TYPES[path.suffix]}; charset=utf-8"

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers={**headers, "content-type": self._type})


def _json(content: object) -> Response:
    return JSONResponse(content, headers={"cache-control": "no-store", "x-content-type-options": "nosniff"})
