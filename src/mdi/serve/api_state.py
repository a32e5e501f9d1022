"""State that all requests of the API process share: the engine, the models, and the queues of texts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from mdi.serve.admission import Admission
from mdi.serve.api_errors import ApiError
from mdi.serve.catalog import Catalog
from mdi.serve.engine_client import EngineClient
from mdi.serve.models import Models
from mdi.serve.process import ServeSettings
from mdi.serve.quotas import Quotas
from mdi.serve.schemas import MOST_CHECKS, SchemaChecks


class RequestObserver(Protocol):
    """Counts for the metrics. Called in the event loop, so it must be quick."""

    def began(self, owner: str, model: str, n_prompt: int) -> None: ...
    def first_token(self, wait_s: float) -> None: ...
    def tokens(self, owner: str, n: int, since_s: float) -> None:
        """`n` new ones of a text of this key, so long after those before; 0 for the first."""

    def ended(self, reason: str) -> None: ...


class ApiState:
    """Belongs to one event loop.

    Attributes:
        queues: of each model that was asked for.
        closing: called when the server ends.
    """

    def __init__(self, settings: ServeSettings, engine: EngineClient, catalog: Catalog) -> None:
        self.settings = settings
        self.engine = engine
        self.catalog = catalog
        self.models = Models(engine, catalog, self._refuse, settings.tool_parser)
        self.queues: dict[str, Admission] = {}
        engine.on_memory = self._admit
        self.schemas = SchemaChecks(Admission(MOST_CHECKS, settings.max_waiting, what="schemas"))
        self.quotas = Quotas(settings.keys)
        self.observe: list[RequestObserver] = [self.quotas]
        self.closing: list[Callable[[], None]] = []
        self.begin = time.time()
        self.is_draining = False

    @property
    def begin_date(self) -> str:
        """When the server began, in UTC."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.begin))

    def queue(self, model: str) -> Admission:
        """Where texts of a model wait for their turn: a model that has no memory left holds no other one up."""
        if model not in self.queues:
            waiting = self.engine.state.n_waiting
            settings = self.settings
            self.queues[model] = Admission(settings.max_running, settings.max_waiting, lambda: not waiting.get(model))
        return self.queues[model]

    @property
    def counts(self) -> dict[str, int]:
        """Of all queues: texts that are under way, texts that wait, and how many may."""
        queues = self.queues.values()
        running, waiting = sum(one.n_running for one in queues), sum(one.n_waiting for one in queues)
        return {"running": running, "waiting": waiting, "limit": self.settings.max_waiting}

    @property
    def rings(self) -> dict[str, dict[str, Any]]:
        """The latest snapshot of each ring, by its model's name."""
        return self.engine.state.rings

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events since the server began, oldest first."""
        return self.engine.state.events

    @property
    def ring(self) -> dict[str, Any]:
        """The snapshot of the ring whose model was used last; {} without one."""
        return self.rings.get(self.models.latest, {})

    def close(self) -> None:
        """End the processes that were started for requests."""
        for close in (*self.closing, self.schemas.close):
            close()
        self.models.close()

    def _admit(self) -> None:
        for queue in self.queues.values():
            queue.admit()

    def _refuse(self) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is ending", "shutting_down")
        if self.engine.is_gone:
            raise ApiError(503, "the engine has ended", "engine_ended")
