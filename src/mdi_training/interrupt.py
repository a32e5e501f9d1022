"""Ctrl-C and SIGTERM while training: the first ends the run after the present step, the second at once.

An interrupted step leaves weights half updated, from which training could not be resumed. A step may take minutes, so the
answer is written at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ANSWER = b"\nending: the present step is finished and saved first; again: end at once\n"


class StopRequest:
    """Use as a context around a run, in the main thread (elsewhere it does nothing).

    Args:
        is_telling: write to stderr that the signal came; of several processes one does.

    Attributes:
        number: the signal that came; None so far.
    """

    def __init__(self, is_telling: bool = True) -> None:
        self._is_telling = is_telling
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
        if self._is_telling:
            with contextlib.suppress(OSError):  # not through a stream, because the interrupted code may hold its lock
                os.write(2, ANSWER)

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
