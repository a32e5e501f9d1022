"""Ctrl-C and SIGTERM while training: the first ends the run after the present step, the second at once.

An interrupted step leaves weights half updated, from which training could not be resumed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Use as a context around a run, in the main thread (elsewhere it does nothing).

    Attributes:
        number: the signal that came; None so far.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.number is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
