"""Clients that begin and do not go on, and clients that do not read: their connections are closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from mdi.serve import api

DEADLINE_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
Address = tuple[str, int]


def serve(monkeypatch: pytest.MonkeyPatch, app: Any, scenario: Callable[[Address], Awaitable[None]]) -> None:
    """A scenario beside the server's own connections, which wait for little."""
    monkeypatch.setattr(api, "SILENCE_S", 0.1)
    monkeypatch.setattr(api, "STALL_S", 0.1)

    async def run() -> None:
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        connections: list[api.Protocol] = []

        def protocol() -> api.Protocol:
            connections.append(api.Protocol(config, ServerState(), {}))
            return connections[-1]

        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        async with server:
            await asyncio.wait_for(scenario(server.sockets[0].getsockname()), DEADLINE_S)
        tasks = [task for one in connections for task in one.tasks]
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)

    asyncio.run(run())


async def say_hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST, REQUEST + b"GET / HT"])
def test_a_connection_on_which_no_request_comes_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async def scenario(address: Address) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        answer = await reader.read()  # up to its end
        assert answer.endswith(b"hello") == (REQUEST in sent)
        writer.close()

    serve(monkeypatch, say_hello, scenario)


def test_who_does_not_read_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    is_gone = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            while not is_gone.is_set():
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone.set()
        await writing

    async def scenario(address: Address) -> None:
        with socket.create_connection(address) as sock:
            sock.sendall(REQUEST)
            await is_gone.wait()

    serve(monkeypatch, stream, scenario)
