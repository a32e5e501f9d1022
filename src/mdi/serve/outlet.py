"""Carries texts from the API process to one engine, and their tokens back."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mdi.engine.sequence import Constraint, Event, Request, SamplingParams
from mdi.engine.starter import StarterEngine
from mdi.serve.lines import Lines

_MOST_EVENTS = 4096  # in one message
_END = Event(-1, (), "closed")
JOIN_S = 5.0


class Outlet:
    """Writes the events of an engine's texts to the API process, in a thread of its own, until `close`.

    Args:
        model: name of the one that the engine has.
    """

    def __init__(self, model: str, engine: StarterEngine, eos_ids: frozenset[int], lines: Lines) -> None:
        self._model = model
        self._engine = engine
        self._eos_ids = eos_ids
        self._lines = lines
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}  # seq_id -> number that the API process knows
        self._requests: dict[int, Request] = {}  # by that number
        self._thread = threading.Thread(target=self._write, name="serve-write", daemon=True)
        self._thread.start()

    def submit(
        self, number: int, ids: Sequence[int], sampling: Mapping[str, Any], owner: str, constraint: Constraint | None
    ) -> None:
        """Have a text continued. Raises UsageError, EngineError."""
        values = {**sampling, "logit_bias": tuple((int(t), float(b)) for t, b in sampling["logit_bias"])}
        params = SamplingParams(**values, eos_ids=self._eos_ids)
        with self._lock:  # its first event must not come before its number is known
            request = self._engine.submit(ids, params, events=self._events, constraint=constraint, owner=owner)
            self._numbers[request.seq_id] = number
            self._requests[number] = request

    def cancel(self, number: int) -> bool:
        """Whether there was such a text."""
        with self._lock:
            request = self._requests.get(number)
        if request is not None:
            request.cancel()
        return request is not None

    def close(self) -> None:
        """Call it after the engine's end, when all events exist."""
        self._events.put(_END)
        self._thread.join(JOIN_S)

    def _write(self) -> None:
        while True:
            events = [self._events.get()]
            while len(events) < _MOST_EVENTS and not self._events.empty():
                events.append(self._events.get())
            is_over = events[-1] is _END
            with self._lock:
                told = [self._told(event) for event in events if event is not _END]
            if told:
                _, n_waiting, _ = self._engine.texts()
                self._lines.send({"is": "events", "model": self._model, "events": told, "waiting": n_waiting})
            if is_over:
                return

    def _told(self, event: Event) -> list[Any]:
        number = self._numbers[event.seq_id]
        n_cached = self._requests[number].n_reused
        if event.finish_reason is not None:
            del self._numbers[event.seq_id], self._requests[number]
        logprobs = None
        if event.logprobs:
            logprobs = [(_finite(own), [(t, _finite(v)) for t, v in best]) for own, best in event.logprobs]
        return [number, event.tokens, event.finish_reason, logprobs, n_cached]


def _finite(value: float) -> float | None:
    """JSON has no infinity, which is the logarithm of "never"."""
    return value if math.isfinite(value) else None
