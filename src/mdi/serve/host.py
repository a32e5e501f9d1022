"""The models of the engine process: loads them beside each other, unloads them, and reloads one whose ring is lost."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any

from mdi.engine.pace import PromptPace
from mdi.engine.requests import Constraint
from mdi.errors import EngineError, MdiError, NoMemoryError, UsageError
from mdi.node.starter import StarterNode
from mdi.node.starter_ports import StarterPorts
from mdi.serve.catalog import Catalog
from mdi.serve.grammar import GrammarSource
from mdi.serve.lines import Lines
from mdi.serve.outlet import Outlet
from mdi.session.node_source import NodeSource
from mdi.session.run_session import Session
from mdi.spec.options import StarterOptions

LOOK_S = 0.2
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0  # between two attempts to have a lost ring again
N_RECORDS = 1000  # log records that wait to be told; more are dropped
N_PLANNED = 16  # texts at the same time that a placement is made for
SHARE_BESIDE = 0.5  # share of the free memory for a model's caches, if others may be loaded beside it

logger = logging.getLogger("mdi")


@dataclass
class Loaded:
    """A model whose ring is closed."""

    name: str
    session: Session
    outlet: Outlet
    directory: Path
    n_vocabulary: int
    grammars: GrammarSource | None = None
    making_grammars: threading.Lock = field(default_factory=threading.Lock)

    @property
    def node(self) -> StarterNode:
        return self.session.starter


@dataclass
class _Lost:
    """A model whose ring was lost, and when the next attempt to have it again is due."""

    next_s: float
    wait_s: float = FIRST_RETRY_S


class ModelHost:
    """Belongs to the main thread, which is in `run`; methods for other threads say so.

    Args:
        nodes: the nodes of the rings; they change when some are lost.
        max_length: tokens that a text may have, if the model allows it.
        on_end: called when the run of a model has ended.
        on_ready: called with the name of a model that serves from now on.

    Attributes:
        loaded: by name, the one that was loaded first is the first.
    """

    def __init__(
        self, nodes: NodeSource, options: StarterOptions, catalog: Catalog, max_length: int, lines: Lines,
        on_end: Callable[[StarterNode], None] | None = None, on_ready: Callable[[str], None] = lambda name: None,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._options = options
        self._catalog = catalog
        self._max_length = max_length
        self._lines = lines
        self._on_end = on_end
        self._on_ready = on_ready
        self._wanted: queue.SimpleQueue[tuple[str, bool, Future[None]]] = queue.SimpleQueue()
        self._is_left = False
        self._n_loads = 0
        self._ports = StarterPorts()
        self._lost: dict[str, _Lost] = {}
        self.loaded: dict[str, Loaded] = {}

    # From any thread

    def want(self, name: str, is_wanted: bool = True) -> None:
        """Load a model beside the others, or unload it; returns when that is done.

        Raises:
            MdiError: it cannot be loaded; with the code "memory" or "busy", it cannot be loaded beside the others.
        """
        done: Future[None] = Future()
        self._wanted.put((name, is_wanted, done))
        if self._is_left:  # `close` may have looked already
            self._refuse_wanted()
        done.result()

    def leave(self) -> None:
        """Let `run` return."""
        self._is_left = True

    def submit(
        self, model: str, number: int, ids: Sequence[int], sampling: Mapping[str, Any], owner: str,
        constraint: Constraint | None,
    ) -> None:  # fmt: skip
        """Raises UsageError, or EngineError if the model is not loaded (any more)."""
        self._loaded_as(model).outlet.submit(number, ids, sampling, owner, constraint)

    def cancel(self, number: int) -> None:
        """Whichever model writes it."""
        any(loaded.outlet.cancel(number) for loaded in list(self.loaded.values()))

    def constraint(self, model: str, wanted: Mapping[str, Any]) -> Constraint:
        """Raises UsageError, EngineError."""
        loaded = self._loaded_as(model)
        with loaded.making_grammars:
            if loaded.grammars is None:
                loaded.grammars = GrammarSource(loaded.directory, loaded.node.codec.eos_ids, loaded.n_vocabulary)
        return loaded.grammars.constraint(wanted)

    def _loaded_as(self, model: str) -> Loaded:
        loaded = self.loaded.get(model)
        if loaded is None:
            raise EngineError(f"{model} is not loaded any more")
        return loaded

    # Of the main thread

    def run(self) -> None:
        """Load the first model, then handle requests until `leave`. Raises MdiError if the first model cannot be loaded."""
        self._load(self._catalog.first_name)
        while not self._is_left:
            try:
                wanted = self._wanted.get(timeout=LOOK_S)
            except queue.Empty:
                self._look_after()
                continue
            self._do(*wanted)

    def close(self) -> None:
        """Give all models and the nodes back."""
        self._is_left = True
        self._refuse_wanted()
        for name in list(self.loaded):
            self._give_up(name)
        self._ports.close()

    def _refuse_wanted(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._wanted.get_nowait()[2].set_exception(EngineError("the server is ending"))

    def _do(self, name: str, is_wanted: bool, done: Future[None]) -> None:
        try:
            if not is_wanted:
                self._lost.pop(name, None)
                self._give_up(name)
                self._tell("idle", name, "nobody has used it for a while; a request loads it again")
            elif name not in self.loaded:
                if name not in self._catalog.folders():
                    raise UsageError(f"there is no model {name} any more")
                self._load(name)
                self._lost.pop(name, None)
            done.set_result(None)
        except Exception as e:
            done.set_exception(self._failure(name, e))

    def _give_up(self, name: str, error: MdiError | None = None) -> None:
        """End a model's run; `error` is why, if it was one."""
        loaded = self.loaded.pop(name, None)
        if loaded is None:
            return
        try:
            loaded.session.close(error)
            if self._on_end is not None:
                self._on_end(loaded.node)
        finally:
            loaded.outlet.close()

    def _look_after(self) -> None:
        """Load a model again whose ring is lost; the other models continue meanwhile."""
        self._nodes.check()
        for name, loaded in list(self.loaded.items()):
            try:
                loaded.node.raise_failure()
            except MdiError as e:
                logger.warning("the ring of %s is lost: %s", name, e)
                self._tell("failed", name, str(e))
                self._give_up(name, e)
                self._lost[name] = _Lost(time.monotonic())
        for name, lost in list(self._lost.items()):
            if time.monotonic() >= lost.next_s and not self._is_left:
                self._try_again(name, lost)

    def _try_again(self, name: str, lost: _Lost) -> None:
        try:
            self._load(name)
            del self._lost[name]
        except Exception as e:
            failure = self._failure(name, e)
            logger.warning("%s; the next attempt follows in %.0f s", failure, lost.wait_s)
            self._lost[name] = _Lost(time.monotonic() + lost.wait_s, min(2 * lost.wait_s, LAST_RETRY_S))

    def _failure(self, name: str, error: Exception) -> MdiError:
        """Why a model could not be loaded. Whatever it was, the other models continue."""
        if not isinstance(error, MdiError):
            logger.error("%s cannot be loaded", name, exc_info=error)
            error = EngineError(f"{name} cannot be loaded: {type(error).__name__}: {error}")
        self._tell("failed", name, str(error))
        return error

    def _load(self, name: str) -> None:
        self._n_loads += 1
        session = Session(self._nodes, self._options_of(name), self._max_length, n_texts=N_PLANNED, ports=self._ports)
        records: queue.Queue[logging.LogRecord] = queue.Queue()
        listener = QueueListener(records, _Progress(lambda text: self._tell("loading", name, text)))
        progress = _Records(records)
        logger.addHandler(progress)
        listener.start()
        try:
            self._tell("loading", name, "getting the nodes ready")
            session.open()
        finally:
            logger.removeHandler(progress)
            listener.stop()
        node = session.starter
        if self.loaded and node.engine.memory is not None and node.engine.memory.n_sequences(node.max_length) == 0:
            session.close()
            raise NoMemoryError(f"the other models leave no memory for the caches of one text of {name}")
        node.engine.pace = PromptPace()
        directory, n_vocabulary = node.directory, int(node.config.padded_vocab_size)
        outlet = Outlet(name, node.engine, node.codec.eos_ids, self._lines)
        self.loaded[name] = Loaded(name, session, outlet, directory, n_vocabulary)
        facts = {"name": name, "context": node.max_length, "n_vocabulary": n_vocabulary}
        tokenizer = {**node.codec.facts(), "directory": str(directory.absolute())}
        self._lines.send({"is": "model", "model": {**facts, "tokenizer": tokenizer}})
        self._tell("serving", name, "ready", 1.0)
        self._on_ready(name)

    def _options_of(self, name: str) -> StarterOptions:
        """What the user chose, where it fits this model, too."""
        options, folders = self._options, self._catalog.folders()
        if len(folders) > 1:
            options = replace(options, cache_share=SHARE_BESIDE)
        if name != self._catalog.first_name:
            options = replace(options, ckpt=folders[name], chunk=None, layers=None)
        if self.loaded and options.layers is None and options.chunk is None:
            options = replace(options, placement="even")  # nodes that are at work cannot be measured
        return options

    def _tell(self, state: str, model: str, text: str, done: float = 0.0) -> None:
        status = {"state": state, "model": model, "text": text, "done": done, "load": self._n_loads}
        self._lines.send({"is": "status", "status": status})


class _Records(QueueHandler):
    """Takes what any thread logs; engines of other models must not wait until it has been sent."""

    def __init__(self, records: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(records)
        self._records = records
        self.setLevel(logging.INFO)

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._records.qsize() < N_RECORDS:
            super().enqueue(record)


class _Progress(logging.Handler):
    """What is logged while a model is loaded is how far it is."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())
