"""All paths of Ollama's API: its texts, what there is to know of models, and what this server does not do."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

import mdi
from mdi.checkpoint.folder import gguf_file
from mdi.errors import CheckpointError
from mdi.serve.api_errors import ApiError, checked_text, invalid
from mdi.serve.api_state import ApiState
from mdi.serve.endpoint import Endpoint
from mdi.serve.ollama import CHATS, GENERATIONS, LATEST, error_of
from mdi.serve.operate import body_of, size_of
from mdi.text.answers import harmony
from mdi.text.answers.forms import form_of
from mdi.text.templates import read_template

SPOKEN = "0.11.0"  # the version of Ollama whose paths these are: clients ask whether it is new enough
NEVER = "9999-12-31T23:59:59Z"
KIND = "mdi"  # in the place of an architecture, of which clients read how long texts may be
NO_EMBEDDING, NO_CHANGE = "this server cannot embed yet", "models are not changed through this API"
MISSING = {  # of each path, its methods and why it is not there
    "/api/embed": ("POST", NO_EMBEDDING),
    "/api/embeddings": ("POST", NO_EMBEDDING),
    "/api/pull": ("POST", "models are added by this server's operator, with `mdi pull`"),
    "/api/delete": ("DELETE", "models are removed by this server's operator, with `mdi rm`"),
    **dict.fromkeys(("/api/create", "/api/copy", "/api/push"), ("POST", NO_CHANGE)),
    "/api/blobs/{digest}": ("HEAD POST", NO_CHANGE),
}


def answer(path: str, error: ApiError) -> Response:
    """An error."""
    return JSONResponse(error_of(error), error.status, error.headers)


def routes(api: ApiState) -> list[BaseRoute]:
    async def root(request: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": SPOKEN, "mdi": mdi.__version__})

    def missing(reason: str) -> Callable[[Request], Awaitable[Response]]:
        async def refuse(request: Request) -> Response:
            raise ApiError(501, reason)

        return refuse

    models = _Models(api)
    return [
        Route("/", root),
        Route("/api/version", version),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/chat", Endpoint(api, CHATS), methods=["POST"]),
        Route("/api/generate", Endpoint(api, GENERATIONS), methods=["POST"]),
        *(Route(path, missing(reason), methods=methods.split()) for path, (methods, reason) in MISSING.items()),
    ]


class _Models:
    def __init__(self, api: ApiState) -> None:
        self._api = api

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": [await self._entry(name) for name in self._api.catalog.names()]})

    async def ps(self, request: Request) -> Response:
        api, found = self._api, []
        for name in filter(api.engine.state.is_serving, api.engine.state.models):
            limit_s, end = api.settings.keep_alive_s, NEVER
            if limit_s is not None:
                end = _date(datetime.now(timezone.utc) + timedelta(seconds=limit_s - api.models.idle_s(name)))
            more = {"size_vram": 0, "expires_at": end, "context_length": api.engine.state.models[name]["context"]}
            found.append({**await self._entry(name), **more})
        return JSONResponse({"models": found})

    async def show(self, request: Request) -> Response:
        catalog, state = self._api.catalog, self._api.engine.state
        body = await body_of(request)
        given = body.get("model") or body.get("name")
        if not isinstance(given, str):
            raise invalid("model", "expected the name of a model")
        name = catalog.meant(checked_text("model", given).removesuffix(LATEST))
        if name not in catalog.names():
            raise ApiError(404, f"there is no model {given[:100]!r}: /api/tags lists them")
        model = catalog.model_of(name)
        try:
            template = await asyncio.to_thread(read_template, catalog.folders()[model])
        except CheckpointError as e:
            raise ApiError(500, str(e)) from e
        form = form_of(
            template.source, harmony.MARKS, self._api.settings.tool_parser
        )  # only the tokenizer of a model that is loaded has been read
        can = ["completion", "tools", *(["thinking"] if form.thinks is not None or form.first is not None else [])]
        info: dict[str, Any] = {"general.architecture": KIND, "general.basename": name}
        if state.is_serving(model):
            facts = state.models[model]
            info[f"{KIND}.context_length"] = facts["context"] - facts["n_virtual"].get(name, 0)
        told = {"template": template.source or "", "capabilities": can, "model_info": info}
        entry = await self._entry(name)
        return JSONResponse({**told, "details": entry["details"], "modified_at": entry["modified_at"]})

    async def _entry(self, name: str) -> dict[str, Any]:
        api = self._api
        model = api.catalog.model_of(name)
        folder = api.catalog.folders()[model]
        size, changed, form = await asyncio.to_thread(_looked_at, folder)
        weights = api.engine.state.models[model]["weights"] if api.engine.state.is_serving(model) else ""
        details: dict[str, Any] = {
            "parent_model": "" if model == name else model + LATEST,
            "format": form,
            "family": KIND,
        }
        details |= {"families": [KIND], "parameter_size": "", "quantization_level": weights}
        digest = hashlib.sha256(f"{name} {size} {changed}".encode()).hexdigest()  # another one if the files change
        named = {"name": name + LATEST, "model": name + LATEST, "modified_at": changed}
        return {**named, "size": size, "digest": digest, "details": details}


def _looked_at(folder: Path) -> tuple[int, str, str]:
    """Bytes of a model's files, when its folder was changed, and their form."""
    try:
        changed = datetime.fromtimestamp(folder.stat().st_mtime, timezone.utc)
    except OSError:
        changed = datetime.fromtimestamp(0, timezone.utc)
    return size_of(folder), _date(changed), "safetensors" if gguf_file(folder) is None else "gguf"


def _date(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
