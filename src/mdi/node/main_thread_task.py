"""Work of an HTTP request that must run on a node's main thread, which has the computing threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mdi.cancel import Cancel
from mdi.errors import ControlError, MdiError


class MainThreadTask:
    """One piece of work: `run` does it on one thread, while another waits in `result`.

    Args:
        work: gives the answer as a JSON object; its argument ends when nobody waits any more.
    """

    def __init__(self, work: Callable[[Cancel], dict[str, Any]]) -> None:
        self._work = work
        self._cancel = Cancel()
        self._done = threading.Event()
        self._answer: dict[str, Any] = {}
        self._error: MdiError | None = None

    def run(self) -> None:
        """Do the work; its errors go to the thread that waits."""
        try:
            self._answer = self._work(self._cancel)
        except MdiError as e:
            self._error = e
        except Exception as e:  # for example out of memory, or a missing kernel: this node continues
            self._error = ControlError(f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}", 500)
        finally:
            self._done.set()

    def drop(self, error: MdiError) -> None:
        """It will not be done."""
        self._error = self._error or error
        self._cancel.cancel(self._error)
        self._done.set()

    def result(self, timeout_s: float) -> dict[str, Any]:
        """The answer; raises what went wrong, or ControlError (504) after `timeout_s`."""
        if not self._done.wait(timeout_s):
            self.drop(ControlError(f"not done within {timeout_s:.0f} s", 504))
        if self._error is not None:
            raise self._error
        return self._answer
