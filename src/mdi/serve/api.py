"""The API process: HTTP, JSON, text and slow clients, in another interpreter than the one that feeds the ring.

`mdi.serve.process` starts it as `python -m mdi.serve.api`, with two inherited sockets: the one that it listens on, and the
one to the engine process. Its settings come through stdin. It ends when the engine process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mdi.serve.api_state import ApiState
from mdi.serve.app import make_app
from mdi.serve.catalog import Catalog
from mdi.serve.engine_client import EngineClient
from mdi.serve.serve_settings import DRAIN_S, ServeSettings
from mdi.terminal import TIMED, VARIABLE, formatter

SILENCE_S = 60.0  # a connection on which no request has begun since is closed
STALL_S = 60.0  # a client that reads nothing of its answer for so long is gone
BACKLOG = 2048
LIBRARIES = ("uvicorn.error", "asyncio")

logger = logging.getLogger("mdi")


class Protocol(H11Protocol):
    """Closes connections that say nothing or take nothing: uvicorn waits for ever for a first request, for the rest of one
    that has begun, and for somebody who does not read.
    """

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
    settings = ServeSettings.from_json(values["settings"])
    catalog = Catalog(Path(values["home"]), Path(values["first"]))
    listener, engine = (socket.socket(fileno=number) for number in (values["listener"], values["engine"]))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings, catalog, listener, engine))


def set_up_logging(form: str) -> None:
    """Lines of one form. Libraries say only what is no client's doing: what strangers can provoke would fill the log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    for one in (logger, *map(logging.getLogger, LIBRARIES)):
        one.handlers, one.propagate = [handler], False
        if one is not logger:
            one.setLevel(logging.ERROR)


async def serve(settings: ServeSettings, catalog: Catalog, listener: socket.socket, engine: socket.socket) -> None:
    """Answer requests until the engine is gone, or says that it is time to end."""

    def drain() -> None:
        api.is_draining = True
        server.should_exit = True

    client = EngineClient(drain)
    api = ApiState(settings, client, catalog)
    config = uvicorn.Config(
        make_app(api), http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, backlog=BACKLOG, timeout_graceful_shutdown=int(DRAIN_S), timeout_keep_alive=75,
        ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    server = uvicorn.Server(config)
    talking = asyncio.create_task(client.run(engine))
    talking.add_done_callback(lambda _: drain())
    idle = asyncio.create_task(api.models.give_up_unused(settings.keep_alive_s))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in (idle, talking):
            task.cancel()
        await asyncio.gather(idle, talking, return_exceptions=True)
        api.close()


def allow_many_connections() -> None:
    """As many open files as this process may have at all."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
