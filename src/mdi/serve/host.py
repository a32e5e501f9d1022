"""The models of the engine process: loads one, gives it up for another, begins anew when its ring is lost."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mdi.engine.pace import PromptPace
from mdi.engine.requests import Constraint
from mdi.errors import EngineError, MdiError
from mdi.node.options import StarterOptions
from mdi.node.starter import StarterNode
from mdi.serve.catalog import Catalog
from mdi.serve.grammar import GrammarSource
from mdi.serve.lines import Lines
from mdi.serve.outlet import Outlet
from mdi.session.node_source import NodeSource
from mdi.session.run_session import Session

LOOK_S = 0.2
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0  # between two attempts to have a lost ring again
N_PLANNED = 16  # texts at the same time that a placement is made for

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

    @property
    def node(self) -> StarterNode:
        return self.session.starter


class ModelHost:
    """Belongs to the main thread, which is in `run`; what others may call says so.

    Args:
        nodes: who takes part; they may be others when some were lost.
        max_length: tokens that a text may have, if the model allows it.
        on_end: called when the run of a model has ended.
    """

    def __init__(
        self, nodes: NodeSource, options: StarterOptions, catalog: Catalog, max_length: int, lines: Lines,
        on_end: Callable[[StarterNode], None] | None = None,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._options = options
        self._catalog = catalog
        self._max_length = max_length
        self._lines = lines
        self._on_end = on_end
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_left = False
        self._n_loads = 0
        self._status: dict[str, Any] = {}
        self.loaded: Loaded | None = None

    # From any thread

    def ask_for(self, name: str | None) -> None:
        """Have another model loaded, in the place of the one that is; None: none."""
        self._wanted.put(name)

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
        if (loaded := self.loaded) is not None:
            loaded.outlet.cancel(number)

    def constraint(self, model: str, wanted: Mapping[str, Any]) -> Constraint:
        """Raises UsageError, EngineError."""
        loaded = self._loaded_as(model)
        if loaded.grammars is None:
            loaded.grammars = GrammarSource(loaded.directory, loaded.node.codec.eos_ids, loaded.n_vocabulary)
        return loaded.grammars.constraint(wanted)

    def _loaded_as(self, model: str) -> Loaded:
        loaded = self.loaded
        if loaded is None or loaded.name != model:
            raise EngineError(f"{model} is not loaded any more")
        return loaded

    # Of the main thread

    def run(self) -> None:
        """Load the first model, and then do what is asked for until `leave`. Raises MdiError if the first cannot be loaded."""
        self._load(self._catalog.first_name)
        while not self._is_left:
            try:
                wanted = self._wanted.get(timeout=LOOK_S)
            except queue.Empty:
                self._look_after()
                continue
            self._change(wanted)

    def close(self, error: MdiError | None = None) -> None:
        """Give the model and the nodes back; `error` is why, if it was one."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        try:
            loaded.session.close(error)
            if self._on_end is not None:
                self._on_end(loaded.node)
        finally:
            loaded.outlet.close()

    def _change(self, wanted: str | None) -> None:
        if wanted is None:
            name = self.loaded.name if self.loaded is not None else str(self._status.get("model", ""))
            self.close()
            self._tell("idle", name, "nobody has used it for a while; a request loads it again")
        elif wanted not in self._catalog.folders():
            self._tell("failed", wanted, "there is no such model any more")
        else:
            self.close()
            try:
                self._load(wanted)
            except MdiError as e:
                self._tell("failed", wanted, str(e))

    def _look_after(self) -> None:
        """Where the ring is lost, have it again."""
        loaded = self.loaded
        if loaded is None:
            return
        failure: MdiError | None = None
        try:
            if self._options.fixed:  # else the ring goes on without a lost node, and its texts with it
                self._nodes.check()
            loaded.node.raise_failure()
        except MdiError as e:
            failure = e
        if failure is not None:
            logger.warning("the ring is lost: %s", failure)
            self._begin_anew(loaded.name, failure)

    def _begin_anew(self, name: str, failure: MdiError) -> None:
        wait_s = FIRST_RETRY_S
        self._tell("failed", name, str(failure))
        self.close(failure)
        while not self._is_left:
            try:
                self._load(name)
                return
            except MdiError as e:
                self._tell("failed", name, str(e))
                logger.warning("%s; the next attempt follows in %.0f s", e, wait_s)
                deadline = time.monotonic() + wait_s
                while time.monotonic() < deadline and not self._is_left:
                    time.sleep(LOOK_S)
                wait_s = min(2 * wait_s, LAST_RETRY_S)

    def _load(self, name: str) -> None:
        folder = self._catalog.folders()[name]
        self._n_loads += 1
        is_first = name == self._catalog.first_name
        progress = _Progress(lambda text: self._tell("loading", name, text))
        logger.addHandler(progress)
        options = self._options if is_first else replace(self._options, ckpt=folder, chunk=None, layers=None)
        session = Session(self._nodes, options, self._max_length, n_texts=N_PLANNED)
        try:
            self._tell("loading", name, "getting the nodes ready")
            session.open()
        finally:
            logger.removeHandler(progress)
        node = session.starter
        node.engine.pace = PromptPace()
        directory, n_vocabulary = node.directory, int(node.config.padded_vocab_size)
        self.loaded = Loaded(
            name, session, Outlet(node.engine, node.codec.eos_ids, self._lines), directory, n_vocabulary
        )
        facts = {"name": name, "context": node.max_length, "n_vocabulary": n_vocabulary}
        tokenizer = {**node.codec.facts(), "directory": str(directory.absolute())}
        self._lines.send({"is": "model", "model": {**facts, "tokenizer": tokenizer}})
        self._tell("serving", name, "it serves", 1.0)

    def _tell(self, state: str, model: str, text: str, done: float = 0.0) -> None:
        self._status = {"state": state, "model": model, "text": text, "done": done, "load": self._n_loads}
        self._lines.send({"is": "status", "status": self._status})

    @property
    def status(self) -> dict[str, Any]:
        """From any thread: what the API process was told last."""
        return self._status


class _Progress(logging.Handler):
    """What is logged while a model is loaded is how far it is."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())
