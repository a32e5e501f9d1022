"""Messages between the engine's loop and readers of texts: commands one way, events the other.

Neither side waits for the other: commands stay in an `Inbox` until the loop reads them between two frames, events in a queue of
each request until its reader takes them. The reader's code never runs in the loop's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from mdi.engine.planned import Event
from mdi.engine.sequence import Sequence

# Sees each new token in the loop's thread, before the next frame is made; True ends the sequence with the reason "stop".
# It must be short; its exceptions end the sequence with the reason FAILED.
Ends = Callable[[int], bool]
Events = queue.SimpleQueue[Event]

# Of one token: the logarithm of its probability, and those of the best tokens.
TokenLogprobs = tuple[float, list[tuple[int, float]]]

# finish_reason of a sequence that could not go on: the loop ended or its `Ends` raised; its `Constraint` raised
FAILED, UNMATCHED = "failed", "unmatched"


class Constraint(Protocol):
    """Which tokens may come next. Called in the loop's thread; it gets each token before the next question."""

    def allowed(self) -> Any:
        """bool array (vocabulary). What it raises, here and in `take`, ends the sequence as UNMATCHED."""

    def take(self, token: int) -> bool:
        """The next token; True if nothing may follow it."""


class Request:
    """One sequence as its reader sees it: its events in order, the last of which has a finish_reason.

    Left as a context manager before that, it is cancelled: so a reader that raises ends its own sequence and no other.

    Attributes:
        seq_id: the same in all its events.
        events: at most one for each new token, and one for the end; several requests may share a queue and a reader.
    """

    def __init__(
        self, sequence: Sequence, events: Events | None, ends: Ends | None, cancel: Callable[[int, str], None],
        constraint: Constraint | None = None,
    ) -> None:  # fmt: skip
        self.seq_id = sequence.seq_id
        self.events: Events = queue.SimpleQueue() if events is None else events
        self._sequence = sequence
        self._ends = ends
        self._cancel = cancel
        self._is_over = False
        self.constraint = constraint
        self._logprobs: dict[int, TokenLogprobs] = {}  # of tokens that were drawn and not given out, by their number
        self._n_given = 0

    def cancel(self, reason: str = "cancelled") -> None:
        """End the sequence soon; its last event has `reason`, unless it ends by itself before. Never waits."""
        self._cancel(self.seq_id, reason)

    @property
    def n_reused(self) -> int:
        """Tokens of its prompt that did not have to be computed; from its first event on."""
        return self._sequence.n_reused

    def __iter__(self) -> Iterator[Event]:
        """The events, up to the last one. Not for requests that share a queue."""
        while not self._is_over:
            event = wait_for_event(self.events)
            self._is_over = event.finish_reason is not None
            yield event

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        is_full = self.constraint is not None and any([self.constraint.take(token) for token in tokens])
        return is_full or (self._ends is not None and any([self._ends(token) for token in tokens]))

    def keep_logprobs(self, number: int, logprobs: TokenLogprobs) -> None:
        """Called for the sequence's new token `number`, from 0 on; a lost token is drawn again."""
        self._logprobs[number] = logprobs

    def logprobs_of_next(self, n: int) -> tuple[TokenLogprobs, ...]:
        """Of the next `n` tokens that are given out."""
        numbers = range(self._n_given, self._n_given + n)
        self._n_given += n
        return tuple(self._logprobs.pop(number) for number in numbers)


def wait_for_event(events: Events) -> Event:
    """The next event, however long that takes. Uses a timeout inside, so that Ctrl-C works on every system."""
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
