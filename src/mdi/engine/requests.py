"""What passes between the engine's loop and those who want texts: commands one way, events the other.

Neither side waits for the other: commands lie in an `Inbox` until the loop looks between two frames, events in a queue of
each request until its reader takes them. What a reader does with them is never done in the loop's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from mdi.engine.scheduler import Event
from mdi.engine.sequence import Sequence

# Sees each new token in the loop's thread, before the next frame is made; True ends the sequence with the reason "stop".
# It must be short; what it raises ends the sequence with the reason FAILED.
Ends = Callable[[int], bool]
Events = queue.SimpleQueue[Event]

FAILED = "failed"  # finish_reason of a sequence that could not go on: the loop ended, or its `Ends` raised


class Request:
    """One sequence as its reader sees it: its events in order, the last of which has a finish_reason.

    Left as a context manager before that, it is cancelled: so a reader that raises ends its own sequence and no other.

    Attributes:
        seq_id: the same in all its events.
        events: at most one for each new token, and one for the end; several requests may share a queue and a reader.
    """

    def __init__(
        self, sequence: Sequence, events: Events | None, ends: Ends | None, cancel: Callable[[int, str], None]
    ) -> None:
        self.seq_id = sequence.seq_id
        self.events: Events = queue.SimpleQueue() if events is None else events
        self._sequence = sequence
        self._ends = ends
        self._cancel = cancel
        self._is_over = False

    def cancel(self, reason: str = "cancelled") -> None:
        """Have the sequence ended soon; its last event carries `reason`, unless it ends by itself before. Never waits."""
        self._cancel(self.seq_id, reason)

    def __iter__(self) -> Iterator[Event]:
        """The events, up to the last one. Not for requests that share a queue."""
        while not self._is_over:
            event = wait_for_event(self.events)
            self._is_over = event.finish_reason is not None
            yield event

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self.cancel()

    # Of the loop

    @property
    def sequence(self) -> Sequence:
        """What is generated; only the loop's thread may look at it."""
        return self._sequence

    def is_met_by(self, tokens: tuple[int, ...]) -> bool:
        """Whether the reader's own condition ends the sequence with these tokens."""
        return self._ends is not None and any([self._ends(token) for token in tokens])


def wait_for_event(events: Events) -> Event:
    """The next event, however long that takes; Ctrl-C gets through, which it does not everywhere without a timeout."""
    while True:
        try:
            return events.get(timeout=1.0)
        except queue.Empty:
            continue


class Inbox:
    """Commands that wait for the loop. The lock is held for an append only."""

    def __init__(self) -> None:
        self._commands: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._closed = False

    def put(self, command: Callable[[], None]) -> bool:
        """False if it came too late: it will not be done."""
        with self._lock:
            if not self._closed:
                self._commands.append(command)
            return not self._closed

    def take(self) -> list[Callable[[], None]]:
        """What has come since the last time, in order."""
        with self._lock:
            taken, self._commands = self._commands, []
            return taken

    def close(self) -> None:
        with self._lock:
            self._closed = True
