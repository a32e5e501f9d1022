"""State that all requests of the API process share: the engine, the models, and the queues of texts.

A queue has a limit, goes by priority and is fair among clients: among texts of the same priority, the one whose key has the
fewest running texts goes first, then the oldest.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mdi.serve.api_errors import ApiError
from mdi.serve.catalog import Catalog
from mdi.serve.engine_client import EngineClient
from mdi.serve.models import Models
from mdi.serve.process import ServeSettings
from mdi.serve.schemas import MOST_CHECKS, SchemaChecks

LEAST_RETRY_S, MOST_RETRY_S = 1, 60


@dataclass(eq=False)
class _Waiter:
    owner: str
    priority: int
    n: int
    number: int
    entered: asyncio.Future[None] = field(repr=False)


class Admission:
    """Counts running texts, and admits others as they end. Belongs to one event loop.

    Args:
        max_running: texts at the same time. One request for more than that is let in when it is alone.
        max_waiting: texts that wait.
        is_open: asked before anybody is let in: false while the engine has texts waiting for memory.
        what: the word for texts in errors, if others than texts wait here.
    """

    def __init__(
        self, max_running: int, max_waiting: int, is_open: Callable[[], bool] = lambda: True,
        what: str = "texts",
    ) -> None:  # fmt: skip
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._is_open = is_open
        self._what = what
        self._waiters: list[_Waiter] = []
        self._running: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._mean_s = 1.0  # that a request takes, lately

    @property
    def n_running(self) -> int:
        return self._running.total()

    @property
    def n_waiting(self) -> int:
        return sum(waiter.n for waiter in self._waiters)

    @asynccontextmanager
    async def entered(self, owner: str, priority: int, n: int) -> AsyncIterator[None]:
        """Wait for one's turn to generate `n` texts. Raises ApiError if too many wait."""
        await self._enter(owner, priority, n)
        begin = time.monotonic()
        try:
            yield
        finally:
            self._mean_s += 0.1 * (time.monotonic() - begin - self._mean_s)
            self._leave(owner, n)

    async def _enter(self, owner: str, priority: int, n: int) -> None:
        if not self._waiters and self._fits(n):
            self._running[owner] += n
            return
        if self.n_waiting + n > self.max_waiting:
            raise ApiError(
                429, f"{self.n_running} {self._what} run and {self.n_waiting} wait: try again later", "queue_full",
                headers={"retry-after": str(self.retry_s)},
            )  # fmt: skip
        waiter = _Waiter(owner, priority, n, next(self._numbers), asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.entered
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            else:  # let in and gone at the same moment
                self._leave(owner, n)
            raise

    @property
    def retry_s(self) -> int:
        """Seconds after which a client should try again."""
        expected = self._mean_s * (1 + self.n_waiting / max(1, self.max_running))
        return max(LEAST_RETRY_S, min(MOST_RETRY_S, round(expected)))

    def admit(self) -> None:
        """Admit the texts that may run now."""
        while self._waiters:
            best = min(self._waiters, key=lambda w: (-w.priority, self._running[w.owner], w.number))
            if not self._fits(best.n):
                return  # no overtaking, or a request for many texts would wait for ever
            self._waiters.remove(best)
            self._running[best.owner] += best.n
            if not best.entered.done():
                best.entered.set_result(None)

    def _fits(self, n: int) -> bool:
        return self._is_open() and (self.n_running + n <= self.max_running or self.n_running == 0)

    def _leave(self, owner: str, n: int) -> None:
        self._running[owner] -= n
        if not self._running[owner]:
            del self._running[owner]
        self.admit()


class RequestObserver(Protocol):
    """Counts for the metrics. Called in the event loop, so it must be quick."""

    def began(self, owner: str, model: str, n_prompt: int) -> None: ...
    def first_token(self, wait_s: float) -> None: ...
    def tokens(self, n: int, since_s: float) -> None:
        """`n` new ones of a text, so long after those before; 0 for the first."""

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
        self.models = Models(engine, catalog, self._refuse)
        self.queues: dict[str, Admission] = {}
        engine.on_memory = self._admit
        self.schemas = SchemaChecks(Admission(MOST_CHECKS, settings.max_waiting, what="schemas"))
        self.observe: list[RequestObserver] = []
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
