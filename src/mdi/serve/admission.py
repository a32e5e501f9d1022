"""A queue of texts.

It has a limit, goes by priority and is fair among clients: among texts of the same priority, the one whose key has the
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

from mdi.serve.api_errors import ApiError

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
