"""Answers the API process's requests in the engine process, in a thread of its own.

Messages from the API process, by "do":
    generate   id, model, ids, sampling, owner, grammar: answered by "events", the last of which has a reason, or by "refused"
    cancel     id
    ask        id, what, args: answered by "answer" (`mdi.serve.questions`); loading a model is a question, too
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mdi.engine.sequence import Constraint
from mdi.errors import EngineError, MdiError, UsageError, WireError
from mdi.serve.host import ModelHost
from mdi.serve.process import Lines

STATE_S = 1.0  # between two looks at the ring
N_FORMS = 2  # schemas that are compiled at the same time
N_EVENTS = 200  # the page shows the last ones
LONGEST_EVENT = 500  # characters

Handler = Callable[[dict[str, Any]], dict[str, Any]]

logger = logging.getLogger("mdi")


class History(logging.Handler):
    """Events since the server began: the last lines of its log, as plain JSON."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._events: deque[dict[str, Any]] = deque(maxlen=N_EVENTS)
        self._is_new = False

    def emit(self, record: logging.LogRecord) -> None:
        level = "warning" if record.levelno >= logging.WARNING else "info"
        text = record.getMessage().removeprefix("warning: ")[:LONGEST_EVENT]
        self._events.append({"time_s": record.created, "level": level, "text": text})
        self._is_new = True

    def news(self) -> list[dict[str, Any]] | None:
        """All events, oldest first; None if there was none since this was asked last."""
        self.acquire()
        try:
            is_new, self._is_new = self._is_new, False
            return list(self._events) if is_new else None
        finally:
            self.release()


class Backend:
    """Serves one API process until it has gone.

    Args:
        snapshot: the ring's present state, see `mdi.serve.snapshot`.

    Attributes:
        handlers: what can be asked, see `mdi.serve.questions`.
    """

    def __init__(
        self, lines: Lines, host: ModelHost, handlers: dict[str, Handler], snapshot: Callable[[], dict[str, Any]]
    ) -> None:
        self._lines = lines
        self._host = host
        self.handlers = handlers
        self._snapshot = snapshot
        # A large schema takes long, and other requests must not wait for it; how long, the API process has tried.
        self._forms = ThreadPoolExecutor(N_FORMS, "serve-grammar")
        self._forming: set[int] = set()  # requests with a schema, until their texts are begun
        self._beginning = threading.Lock()  # a text is cancelled before it is begun or after, never in between
        self._over = threading.Event()
        self._history = History()
        logger.addHandler(self._history)
        self._threads = [
            threading.Thread(target=self._read, name="serve-read", daemon=True),
            threading.Thread(target=self._tell_state, name="serve-state", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        logger.removeHandler(self._history)
        self._over.set()
        self._lines.close()
        self._forms.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.join(5.0)

    def _read(self) -> None:
        try:
            for message in self._lines:
                self._take(message)
        except WireError as e:
            logger.error("the API process sent an invalid message: %s", e)
        finally:
            self._host.leave()

    def _take(self, message: dict[str, Any]) -> None:
        what = message.get("do")
        if what == "generate" and message["grammar"] is not None:
            self._forming.add(message["id"])
            self._forms.submit(self._form, message)
        elif what == "generate":
            self._generate(message)
        elif what == "cancel":
            with self._beginning:
                self._forming.discard(message["id"])
                self._host.cancel(message["id"])
        elif what == "ask":
            threading.Thread(target=self._answer, args=(message,), name="serve-ask", daemon=True).start()

    def _form(self, message: dict[str, Any]) -> None:
        """Begin a text that has a schema, unless it is cancelled meanwhile."""
        number = message["id"]
        try:
            if number not in self._forming:
                return
            with self._refusing(number):
                constraint = self._host.constraint(message["model"], message["grammar"])
                with self._beginning:
                    if number in self._forming:
                        self._submit(message, constraint)
        finally:
            self._forming.discard(number)

    def _generate(self, message: dict[str, Any]) -> None:
        with self._refusing(message["id"]):
            self._submit(message, None)

    def _submit(self, message: dict[str, Any], constraint: Constraint | None) -> None:
        self._host.submit(
            message["model"], message["id"], message["ids"], message["sampling"], message["owner"], constraint
        )

    @contextlib.contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """Tells the API process why a text could not be begun."""
        try:
            yield
        except UsageError as e:
            self._refuse(number, 400, str(e), "invalid_request")
        except EngineError as e:
            self._refuse(number, 503, str(e), "engine_ended")
        except Exception as e:
            logger.exception("a text could not be begun")
            self._refuse(number, 500, f"{type(e).__name__}: {e}", "internal")

    def _refuse(self, number: int, status: int, message: str, code: str) -> None:
        self._lines.send({"is": "refused", "id": number, "status": status, "message": message, "code": code})

    def _answer(self, message: dict[str, Any]) -> None:
        told: dict[str, Any] = {"is": "answer", "id": message["id"]}
        handler = self.handlers.get(message["what"])
        try:
            if handler is None:
                raise UsageError(f"unknown question {message['what']!r}")
            told["result"] = handler(message["args"])
        except MdiError as e:
            told["error"] = str(e)
        except Exception as e:
            logger.exception("a question could not be answered")
            told["error"] = f"{type(e).__name__}: {e}"
        self._lines.send(told)

    def _tell_state(self) -> None:
        while not self._over.wait(STATE_S):
            if (events := self._history.news()) is not None:
                self._lines.send({"is": "history", "history": events})
            try:
                told = self._snapshot()
            except Exception:
                logger.debug("no snapshot", exc_info=True)
                continue
            self._lines.send({"is": "rings", "rings": told})
