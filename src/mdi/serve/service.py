"""What all requests of the API process share: the engine, the queue, the models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mdi.serve.admission import Admission
from mdi.serve.api_errors import ApiError
from mdi.serve.catalog import Catalog
from mdi.serve.client import EngineClient
from mdi.serve.settings import ServeSettings
from mdi.serve.templates import ChatTemplate, read_template
from mdi.serve.tokenizer import ServedTokenizer
from mdi.text import TextCodec

LOAD_WAIT_S = 60.0  # that a request waits for its model, before it is told to come again
RETRY_S = "2"


class Observer(Protocol):
    """Who counts. Called in the event loop, so it must be quick."""

    def began(self, owner: str, model: str, n_prompt: int) -> None: ...
    def first_token(self, wait_s: float) -> None: ...
    def tokens(self, n: int, since_s: float) -> None:
        """`n` new ones of a text, so long after those before; 0 for the first."""

    def ended(self, reason: str) -> None: ...


@dataclass(frozen=True)
class LoadedModel:
    """Attributes:
    context: tokens that a text may have, prompt included.
    n_vocabulary: ids that the model knows.
    """

    name: str
    tokenizer: ServedTokenizer
    codec: TextCodec
    template: ChatTemplate
    context: int
    n_vocabulary: int


class Service:
    """Belongs to one event loop."""

    def __init__(self, settings: ServeSettings, engine: EngineClient, catalog: Catalog) -> None:
        self.settings = settings
        self.engine = engine
        self.catalog = catalog
        self.admission = Admission(settings.max_running, settings.max_waiting, lambda: not engine.state.n_waiting)
        engine.on_memory = self.admission.admit
        self.observe: list[Observer] = []
        self.begin = time.time()
        self.is_draining = False
        self._loaded: LoadedModel | None = None
        self._n_using = 0
        self._switch: asyncio.Task[None] | None = None
        self._switch_to = ""
        self._last_use = time.monotonic()

    @property
    def idle_s(self) -> float:
        """How long nobody has used the loaded model."""
        return 0.0 if self._n_using else time.monotonic() - self._last_use

    def progress_error(self) -> ApiError:
        """Why there is no answer yet, and how far it is."""
        status = self.engine.status
        return ApiError(
            503, f"{status['model'] or 'the model'}: {status['text']}", "model_" + status["state"],
            headers={"retry-after": RETRY_S}, details={"progress": status},
        )  # fmt: skip

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[LoadedModel]:
        """The model of a request, which stays loaded meanwhile; "" is the one that is loaded.

        Raises:
            ApiError: there is none of that name, or it is not loaded in time.
        """
        deadline, was_tried = time.monotonic() + LOAD_WAIT_S, False
        while (loaded := self._serving(name)) is None:
            self._check(name)
            if self._switch is None:
                if was_tried:
                    raise self.progress_error()
                was_tried = True
                self._switch_to = name or self.engine.state.model["name"]
                self._switch = asyncio.create_task(self._load(self._switch_to))
            if time.monotonic() > deadline:
                raise self.progress_error()
            await self._wait(1.0)
        self._n_using += 1
        try:
            yield loaded
        finally:
            self._n_using -= 1
            self._last_use = time.monotonic()

    def _serving(self, name: str) -> LoadedModel | None:
        """The model, if it is loaded and no other one is to take its place."""
        engine = self.engine
        if engine.is_gone or engine.status["state"] != "serving":
            return None
        facts = engine.state.model
        if (self._switch is not None and self._switch_to != facts["name"]) or name not in ("", facts["name"]):
            return None
        if self._loaded is None or self._loaded.name != facts["name"]:
            self._loaded = _loaded_model(facts)
        return self._loaded

    def _check(self, name: str) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is ending", "shutting_down")
        if self.engine.is_gone:
            raise ApiError(503, "the engine has ended", "engine_ended")
        if name and name not in self.catalog.names():
            raise ApiError(404, f"there is no model {name!r}: /v1/models lists them", "model_not_found", "model")
        if self._switch is None and (self.engine.status["state"] == "loading" or not self.engine.state.model):
            raise self.progress_error()

    async def _load(self, name: str) -> None:
        """Put a model in the place of the one that is loaded, once nobody uses that any more."""
        try:
            while self._n_using:
                await self._wait(0.1)
            number = self.engine.status["load"]
            self.engine.tell({"do": "load", "model": name})
            while self.engine.status["load"] == number or self.engine.status["state"] == "loading":
                if self.engine.is_gone:
                    return
                await self._wait(1.0)
        finally:
            self._switch = None

    async def _wait(self, timeout_s: float) -> None:
        await asyncio.wait([waiting := asyncio.ensure_future(self.engine.wait_for_change())], timeout=timeout_s)
        waiting.cancel()

    async def unload_when_idle(self) -> None:
        """Give the memory of a model back that nobody has used for --keep-alive."""
        limit = self.settings.keep_alive_s
        while limit is not None:
            await asyncio.sleep(min(1.0, limit))
            if self.engine.status["state"] == "serving" and self.idle_s > limit and self._switch is None:
                self.engine.tell({"do": "unload"})


def _loaded_model(facts: dict[str, Any]) -> LoadedModel:
    tokenizer = ServedTokenizer(facts["tokenizer"])
    codec = TextCodec(tokenizer, facts["tokenizer"]["eos_ids"])
    template = read_template(Path(facts["tokenizer"]["directory"]))
    return LoadedModel(facts["name"], tokenizer, codec, template, facts["context"], facts["n_vocabulary"])
