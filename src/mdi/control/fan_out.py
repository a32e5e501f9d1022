"""Asks several nodes at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from mdi.cancel import Cancel
from mdi.errors import ControlError
from mdi.units import duration

T = TypeVar("T")


class FanOut(Generic[T]):
    """Begins all calls at once.

    Args:
        calls: by the name of the node that each asks, or of a group of nodes.

    Attributes:
        results: of the calls that are done.
    """

    def __init__(self, calls: Mapping[str, Callable[[], T]]) -> None:
        self.results: dict[str, T] = {}
        self._errors: list[Exception] = []
        self._threads = {
            name: threading.Thread(target=self._call, args=(name, call), name=f"ask-{name}", daemon=True)
            for name, call in calls.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _call(self, name: str, call: Callable[[], T]) -> None:
        try:
            self.results[name] = call()
        except Exception as e:
            self._errors.append(e)

    @property
    def is_working(self) -> bool:
        """Whether some are not done."""
        return any(thread.is_alive() for thread in self._threads.values())

    def raise_error(self) -> None:
        """Raise the first error that a call has raised so far, if one has."""
        if self._errors:
            raise self._errors[0]

    def join(self, timeout_s: float) -> None:
        """Wait for all, but no longer than this; errors stay untold."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def wait(self, cancel: Cancel | None = None, timeout_s: float = float("inf")) -> list[T]:
        """The results of all calls, in order.

        Args:
            cancel: its end ends the waiting, with its error.

        Raises:
            Exception: the first that a call raised, without waiting for the other calls.
            ControlError: some were not done in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if cancel is not None:
                cancel.check()
            late = [name for name, thread in self._threads.items() if thread.is_alive()]
            self.raise_error()
            if not late:
                return [self.results[name] for name in self._threads]
            if time.monotonic() >= deadline:
                raise ControlError(f"{', '.join(late)} did not answer within {duration(timeout_s)}")
            self._threads[late[0]].join(min(0.1, max(0.0, deadline - time.monotonic())))
