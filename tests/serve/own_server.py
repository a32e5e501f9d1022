"""A server's two halves in this process, joined as its two processes are: no HTTP, and the engine can be looked at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from mdi.checkpoint.adapters import adapter_names
from mdi.engine.starter import StarterEngine
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import NodeSource
from mdi.serve.api_state import ApiState
from mdi.serve.backend import Backend, handlers
from mdi.serve.catalog import Catalog
from mdi.serve.endpoint import Endpoint, Surface
from mdi.serve.engine_client import EngineClient
from mdi.serve.host import ModelHost
from mdi.serve.process import Lines, ServeSettings
from mdi.serve.snapshot import Snapshots
from mdi.spec.options import StarterOptions
from secondaries import cluster_of
from tiny_checkpoint import encode, reference

SEEDS = {"one": 4, "two": 5, "three": 6}  # models by name
TEXT = "The ring"
DEADLINE_S = 240.0


class OwnServer:
    """An engine process, in this one, and what the API process has of it."""

    def __init__(self, host: ModelHost, client: EngineClient, api: ApiState) -> None:
        self.host = host
        self.client = client
        self.api = api
        self.models = api.models

    @property
    def engine(self) -> StarterEngine:
        """Of the first model."""
        return self.host.loaded["one"].run.engine

    @property
    def serving(self) -> set[str]:
        return {name for name in SEEDS if self.client.state.is_serving(name)}

    async def write(self, name: str, n_tokens: int) -> list[int]:
        """A greedy text of a model."""
        async with self.models.using(name) as model:
            sampling = {"temperature": 0, "n_tokens": n_tokens, "seed": 1, "logit_bias": []}
            asked = {
                "model": model.name,
                "adapter": model.adapter,
                "ids": encode(TEXT),
                "sampling": sampling,
                "owner": "",
                "grammar": None,
            }
            found: list[int] = []
            with self.client.generate([asked]) as texts:
                async for _, event in texts:
                    if event.n_kept is not None:
                        del found[event.n_kept :]
                    found += event.tokens
            return found

    async def ask(self, surface: Surface, body: Any) -> tuple[int, Any]:
        """Status and JSON of an answer of an endpoint."""
        sent: list[Any] = []
        coming = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return coming.pop() if coming else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        await Endpoint(self.api, surface)({"type": "http"}, receive, send)
        return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent))

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(DEADLINE_S / 0.02)):
            if condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(self.client.state.statuses)


def right(name: str, n_tokens: int) -> list[int]:
    return list(reference(TEXT, n_tokens, SEEDS[name]))


@contextlib.asynccontextmanager
async def server(
    folder: Path,
    nodes: list[SecondaryNode],
    max_running: int = 256,
    group: str | None = None,
    pooling: str | None = None,
    **options: Any,
) -> AsyncIterator[OwnServer]:
    """One that was started with the first model.

    Args:
        group: of all nodes but the starter.
        pooling: as --pooling has it.
    """
    ours, theirs = socket.socketpair()
    adapters = [one.name for one in adapter_names(options.get("adapter", ()))]
    lines, catalog = Lines(ours), Catalog(folder, folder / "one", adapters)
    chosen = StarterOptions(ckpt=folder / "one", prompt_style="none", device="cpu", **{"placement": "even", **options})
    host = ModelHost(NodeSource(lambda: cluster_of(nodes, group=group)), chosen, catalog, 300, lines, pooling=pooling)
    snapshots = Snapshots(host)
    backend = Backend(lines, host, handlers(host, snapshots), snapshots.take)
    thread = threading.Thread(target=host.run, name="host")
    client = EngineClient(lambda: None)
    made = OwnServer(host, client, ApiState(ServeSettings(max_running=max_running), client, catalog))
    talking = asyncio.create_task(client.run(theirs))
    thread.start()
    try:
        await made.until(lambda: "one" in made.serving)
        yield made
    finally:
        host.leave()
        await asyncio.to_thread(thread.join, DEADLINE_S)
        await asyncio.to_thread(host.close)
        await asyncio.to_thread(backend.close)
        await talking
    assert not thread.is_alive()


def run(scenario: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario, DEADLINE_S)

    asyncio.run(limited())
