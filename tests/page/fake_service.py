"""A server whose engine is the test: the page's true routes, and answers that come when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mdi.serve.api_errors import ApiError
from mdi.serve.operate import Operator, Pull
from mdi.serve.operate import routes as operator_routes
from mdi.serve.page import routes
from mdi.serve.process import ApiKey
from mdi.serve.quotas import Quotas
from mdi.serve.snapshot import ring_words

DEADLINE_S = 30.0
CODE = "ABCD-EFGH-IJKL-MNOP"


def node(name: str, **others: Any) -> dict[str, Any]:
    """A node of a snapshot."""
    memory = {"rss_bytes": 400_000_000, "available_bytes": 3_200_000_000}
    found = {
        "name": name, "addr": "192.168.1.10", "blocks": [0, 2], "blocks_text": "blocks 0-1", "is_here": True,
        "state": "SERVING", "device": "cpu", "memory": memory, "cache": {"used": 12_000_000, "limit": 900_000_000},
        "compute_s": 12.5, "wait_s": 3.0, "send_s": 0.5, "frames": 1000, "bytes_sent": 4_000_000, "busy": 0.4,
        "waiting": 0.5, "sending": 0.02, "bytes_s": 41_000.0,
    }  # fmt: skip
    return {**found, **others}


def snapshot(*nodes: dict[str, Any], trouble: str = "", trouble_s: float = 0.0) -> dict[str, Any]:
    through = {one["name"]: [38.0, None, 0.0, 38.2] for one in nodes}
    history = {"step_s": 5.0, "n_steps": 120, "total": [38.0, 41.5, 0.0, 38.2], "nodes": through}
    names = [one["name"] for one in nodes]
    pairs = zip(names, names[1:] + names[:1], strict=True)
    links = [
        {"source": a, "target": b, "delay_s": 0.0021, "error_s": 0.0004, "bytes_s": 41_000.0, "bytes": 4_000_000}
        for a, b in pairs
    ]
    found = {
        "nodes": list(nodes), "links": links, "texts": {"running": 8, "waiting": 1, "put_out": 0}, "n_tokens": 12345,
        "tokens_s": 38.2, "waits_for": names[1] if len(names) > 1 else None, "trouble": trouble, "trouble_s": trouble_s,
        "history": history,
    }  # fmt: skip
    state, words = ring_words(found, trouble)
    return {**found, "state": state, "words": words}


class FakeOperator(Operator):
    """Pulls nothing, and is half done with it."""

    def pull(self, name: str) -> None:
        self.pulls[name] = Pull(name, text="12 MB of 24 MB", done=0.5)


class FakeService:
    """What `routes` needs of a service, and what the test says that comes.

    Attributes:
        pieces: of the next answer, one after the other as the test puts them; None ends it.
        asked: bodies of the requests for answers.
        gone: set when a client has gone in the middle of an answer.
        is_operator: whether the page belongs to one.
        done: what was begun with models, as pairs.
        invitation: what the engine says of it.
    """

    def __init__(self) -> None:
        self.engine = SimpleNamespace(
            status={"state": "serving", "model": "nano-llama", "text": "ready", "done": 1.0, "load": 1}
        )
        self.ring = snapshot(node("starter"), node("secondary0", busy=0.93), node("secondary1"))
        self.other_rings: dict[str, dict[str, Any]] = {}
        self.engine.ask = self._ask
        self.is_operator = False
        self.done: list[tuple[str, str]] = []
        self.invitation: dict[str, Any] = {"is_open": False, "seconds_left": 0, "last": ""}
        self.engine.state = SimpleNamespace(
            statuses={"nano-llama": self.engine.status}, is_serving=lambda name: name == "nano-llama"
        )
        folders = {"nano-llama": Path("nowhere"), "org/other": Path("nowhere")}
        self.catalog = SimpleNamespace(home=Path("nowhere"), folders=lambda: folders)
        self.counts = {"running": 8, "waiting": 2, "limit": 512}
        self.models = SimpleNamespace(
            latest="nano-llama", leaving=set(), load=lambda name: self.done.append(("load", name)),
            unload=lambda name: self.done.append(("unload", name)),
        )  # fmt: skip
        self.quotas = Quotas((ApiKey("", "alpha"),))
        self.observe: list[Any] = []
        self.events: list[dict[str, Any]] = [{"time_s": 1.7e9, "level": "info", "text": "the ring is closed"}]
        self.asked: list[dict[str, Any]] = []
        self.gone = threading.Event()
        self._pieces: asyncio.Queue[str | dict[str, Any] | None]
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()

    @property
    def rings(self) -> dict[str, dict[str, Any]]:
        return {"nano-llama": self.ring, **self.other_rings} if self.ring else {}

    def put(self, *pieces: str | dict[str, Any] | None) -> None:
        """From the test's thread: what comes next of the answer, text or a delta."""
        for piece in pieces:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _ask(self, what: str, args: dict[str, Any], timeout_s: float = 0) -> dict[str, Any]:
        if what == "invite":
            self.invitation = {"is_open": True, "seconds_left": 899, "last": ""}
            return {"line": f"mdi join 192.168.1.10:8088 {CODE}", "qr": ["101", "010", "111"], "seconds_left": 899}
        if what in ("revoke", "invitation"):
            if what == "revoke":
                self.invitation = {"is_open": False, "seconds_left": 0, "last": "revoked"}
            return self.invitation
        if what == "plan":
            return {"words": f"Another cut of {args['model']} would be better.", "text": "starter  blocks 0-1"}
        problem = {"node": "secondary1", "what": "<b>its clock is 9 s ahead</b>", "advice": "Set it"}
        return {"problems": [problem], "text": "node  state"}

    async def _models(self, request: Request) -> Response:
        sampling = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.0}
        return JSONResponse(
            {"data": [{"id": "nano-llama", "sampling": sampling}, {"id": "org/other", "sampling": None}]}
        )

    async def _complete(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self._pieces = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        return StreamingResponse(self._stream(request), media_type="text/event-stream")

    async def _stream(self, request: Request) -> AsyncIterator[str]:
        n = 0
        try:
            while (piece := await self._pieces.get()) is not None:
                n += 1
                delta = piece if isinstance(piece, dict) else {"content": piece}
                yield f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None}]})}\n\n"
            yield f"data: {json.dumps({'choices': [{'delta': {}, 'finish_reason': 'stop'}]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': n}})}\n\ndata: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone.set()
            raise

    def wait_asked(self) -> None:
        """Until there is a new request for an answer."""
        assert self._ready.wait(DEADLINE_S)
        self._ready.clear()

    def app(self) -> Any:
        own = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]
        operator = FakeOperator(self)  # type: ignore[arg-type]
        found = Starlette(
            routes=[*own, *routes(self), *operator_routes(self, operator)],  # type: ignore[arg-type]
            exception_handlers={ApiError: lambda _, e: JSONResponse(e.body, e.status)},
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["mdi.is_operator"] = self.is_operator
            await found(scope, receive, send)

        return app


@contextlib.contextmanager
def running(service: FakeService) -> Any:
    """The address of a server, in a thread of its own until the end."""
    config = uvicorn.Config(
        service.app(), port=0, ws="none", lifespan="off", log_level="warning", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="fake-server", daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
