"""The models of the engine process: loads them beside each other, unloads them, and reloads one whose ring is lost.

The main thread loads and unloads what requests want, so that an interrupt ends a load. Another thread looks after the rings,
and each lost one is formed again in a thread of its own: none of them waits for a model that is being loaded.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any

from mdi.cancel import Cancel, CancelledError
from mdi.checkpoint.adapters import AdapterName
from mdi.checkpoint.pooling import pooling_of
from mdi.engine.cohort import Beams
from mdi.engine.scheduler import PromptPace
from mdi.engine.sequence import UNTRUE, Constraint, Event, Request, SamplingParams
from mdi.engine.starter import StarterEngine
from mdi.errors import CheckpointError, EngineError, MdiError, NoMemoryError, PlacementError, UsageError
from mdi.kernels.format_maps import shown
from mdi.run.nodes import Newcomers, NodeSource, StarterPorts
from mdi.run.run import Run
from mdi.serve.catalog import Catalog
from mdi.serve.grammar import GrammarSource
from mdi.serve.process import Lines
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import StarterOptions
from mdi.text.texts import TextCodec, stop_test

_MOST_TOLD = 4096  # events in one message, and what they tell of tokens
_END = Event(-1, (), "closed")
JOIN_S = 5.0


class Outlet:
    """Writes the events of an engine's texts to the API process, in a thread of its own, until `close`.

    Args:
        model: name of the one that the engine has.
    """

    def __init__(self, model: str, engine: StarterEngine, codec: TextCodec, lines: Lines) -> None:
        self._model = model
        self._engine = engine
        self._codec = codec
        self._lines = lines
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._texts: dict[int, _Text] = {}  # by seq_id
        self._by_number: dict[int, _Text] = {}  # as the API process knows them
        self._thread = threading.Thread(target=self._write, name="serve-write", daemon=True)
        self._thread.start()

    def submit(self, wanted: Mapping[str, Any], constraint: Constraint | None) -> None:
        """Have a text continued, or the best texts of a prompt searched. Raises UsageError, EngineError.

        Args:
            wanted: see mdi.serve.backend.
        """
        if (known := wanted.get("known")) is not None:
            with self._lock:
                self._add(wanted["numbers"][0], self._known(wanted, known))
            return
        sampling = wanted["sampling"]
        values = {**sampling, "logit_bias": tuple((int(t), float(b)) for t, b in sampling["logit_bias"])}
        ends = () if wanted.get("ignores_end") else (*self._codec.eos_ids, *wanted.get("ends", ()))
        params = SamplingParams(**values, eos_ids=frozenset(ends), suppressed=self._codec.suppressed)
        again: Callable[[Sequence[int]], Request] | None = None
        with self._lock:  # its first event must not come before its number is known
            if (beams := wanted.get("beams")) is not None:
                requests = self._engine.submit_beams(
                    wanted["ids"], params, Beams(**beams), self._events, constraint, wanted["owner"],
                    is_stopped=stop_test(self._codec, wanted["stop"]), adapter=wanted.get("adapter", ""),
                )  # fmt: skip
            else:
                again = partial(self._continued, wanted, params, constraint)
                requests = [again(())]
            for number, request in zip(wanted["numbers"], requests, strict=False):  # of the best of all beams
                self._add(number, request, again)

    def _add(self, number: int, request: Request, again: Callable[[Sequence[int]], Request] | None = None) -> None:
        self._texts[request.seq_id] = self._by_number[number] = _Text(number, request, again)

    def _known(self, wanted: Mapping[str, Any], known: Mapping[str, Any]) -> Request:
        """Have the rows of a text pooled, or its tokens scored."""
        if self._engine.verifier is not None:
            raise UsageError("with --verify a server neither embeds nor scores texts: only drawn tokens are verified")
        ids, adapter = wanted["ids"], wanted["adapter"]
        if (pooling := known.get("pooling")) is not None:
            return self._engine.submit_pooled(ids, pooling, self._events, adapter)
        return self._engine.submit_scores(ids, self._events, adapter, known["n_best"], wanted["owner"])

    def _continued(
        self, wanted: Mapping[str, Any], params: SamplingParams, constraint: Constraint | None, known: Sequence[int]
    ) -> Request:  # fmt: skip
        """Have a text continued behind tokens that it has already."""
        if constraint is not None and self._engine.verifier is not None:  # it may have to begin again
            constraint = constraint.copy()
            for token in known:
                constraint.take(token)
        return self._engine.submit(
            wanted["ids"], params, events=self._events, generated=known, constraint=constraint, owner=wanted["owner"],
            is_guessed=wanted.get("is_guessed", True), prediction=wanted.get("prediction", ()),
            adapter=wanted.get("adapter", ""),
        )  # fmt: skip

    def cancel(self, number: int) -> bool:
        """Whether there was such a text."""
        with self._lock:
            text = self._by_number.get(number)
            if text is not None:
                text.is_cancelled = True
                text.request.cancel()
        return text is not None

    def close(self) -> None:
        """Call it after the engine's end, when all events exist."""
        self._events.put(_END)
        self._thread.join(JOIN_S)

    def _write(self) -> None:
        while True:
            events = [self._events.get()]
            n_told = 1 + len(events[0].logprobs)
            while n_told < _MOST_TOLD and not self._events.empty():
                events.append(self._events.get())
                n_told += 1 + len(events[-1].logprobs)
            is_over = events[-1] is _END
            with self._lock:
                told = [message for event in events for message in self._messages(event)]
            if told:
                _, n_waiting, _ = self._engine.texts()
                self._lines.send({"is": "events", "model": self._model, "events": told, "waiting": n_waiting})
            if is_over:
                return

    def _messages(self, event: Event) -> list[list[Any]]:
        """The messages to the API process about an event. It is not told again of tokens that were drawn a second time."""
        text = self._texts.get(event.seq_id)
        if text is None:
            return []
        request, reason = text.request, event.finish_reason
        if reason is not None:
            del self._texts[event.seq_id]
        if reason == UNTRUE and not text.is_cancelled and self._begin_again(text, event.n_kept):
            return []
        if reason is not None:
            del self._by_number[text.number]
        n_kept, n_known = text.take(event.tokens, reason in ("eos", "stop", "length"))
        tokens, logprobs = event.tokens[n_known:], event.logprobs[n_known:]
        if event.tokens and not tokens and reason is None and n_kept is None:
            return []
        if request.pooled is not None and reason == "length":
            pooled = base64.b64encode(request.pooled.vector.tobytes()).decode()
            return [[text.number, tokens, reason, None, 0, 0, 0, None, pooled]]
        sequence = request.sequence
        told = None
        if logprobs:
            told = [(_finite(own), [(t, _finite(v)) for t, v in best]) for own, best in logprobs]
        # Counted once, with the end: the events of the last frame are all told of after it.
        is_counted = reason is not None and sequence.n_predicted > 0
        predicted = [sequence.n_accepted, sequence.n_predicted - sequence.n_accepted] if is_counted else [0, 0]
        more = [*predicted, n_kept] if n_kept is not None else predicted if is_counted else []
        return [[text.number, tokens, reason, told, request.n_reused, *more]]

    def _begin_again(self, text: _Text, n_kept: int) -> bool:
        """Have a text continued behind the tokens that count, as others were drawn from wrong rows; False if it cannot be."""
        text.n_drawn = min(n_kept, len(text.told))
        if text.again is None:
            return False
        try:
            text.request = text.again(text.told[: text.n_drawn])
        except MdiError as e:
            logger.warning("a text cannot be continued: %s", e)
            return False
        self._texts[text.request.seq_id] = text
        return True


@dataclass
class _Text:
    """A text of the API process.

    Attributes:
        number: that it has there.
        again: has it continued behind its first tokens; None: it cannot be.
        told: tokens that the API process knows; n_drawn: of the first of them, how many count.
    """

    number: int
    request: Request
    again: Callable[[Sequence[int]], Request] | None
    told: list[int] = field(default_factory=list)
    n_drawn: int = 0
    is_cancelled: bool = False

    def take(self, tokens: Sequence[int], is_end: bool) -> tuple[int | None, int]:
        """New tokens, that may have been told already.

        Returns:
            how many of the told ones stay, None if all do; how many of `tokens` are told.
        """
        before = self.told[self.n_drawn :]
        n_same = next((i for i, (new, old) in enumerate(zip(tokens, before, strict=False)) if new != old), None)
        n_same = min(len(tokens), len(before)) if n_same is None else n_same
        is_other = n_same < len(before) and (n_same < len(tokens) or is_end)
        n_kept = self.n_drawn + n_same if is_other else None
        if is_other:
            del self.told[self.n_drawn + n_same :]
        self.told += tokens[n_same:]
        self.n_drawn += len(tokens)
        return n_kept, n_same


def _finite(value: float) -> float | None:
    """JSON has no infinity, which is the logarithm of "never"."""
    return value if math.isfinite(value) else None


LOOK_S = 0.2
END_S = 10.0  # that a thread may need to notice the end
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0  # between two attempts to have a lost ring again
N_RECORDS = 1000  # log records that wait to be sent; more are dropped
N_PLANNED = 16  # texts at the same time that a placement is made for
NO_POOLING = (
    "its files do not say how it embeds texts (1_Pooling/config.json): `mdi serve --pooling` does for such models"
)
SHARE_BESIDE = 0.5  # share of the free memory for a model's caches, if others may be loaded beside it

logger = logging.getLogger("mdi")


@dataclass
class Loaded:
    """A model whose ring is closed."""

    name: str
    run: Run
    outlet: Outlet
    directory: Path
    n_vocabulary: int
    grammars: GrammarSource | None = None
    making_grammars: threading.Lock = field(default_factory=threading.Lock)


class HostNodes(NodeSource):
    """The nodes of all runs of a server: looked for by one run at a time, and for none that has been cancelled."""

    def __init__(self, nodes: NodeSource, turn: threading.Lock, cancel: Cancel) -> None:
        self._nodes = nodes
        self.swarm = nodes.swarm
        self._turn = turn
        self._cancel = cancel

    @property
    def newcomers(self) -> Newcomers:
        return self._nodes.newcomers

    def cluster(self) -> ClusterConfig:
        with self._turn:
            self._cancel.check()
            return self._nodes.cluster()


class ModelHost:
    """Belongs to the main thread, which is in `run`; methods for other threads say so.

    Args:
        nodes: the nodes of the rings; they change when some are lost.
        max_length: tokens that a text may have, if the model allows it.
        on_end: called when the run of a model has ended.
        on_ready: called with the name of a model that serves from now on.
        cancel: of the command.
        pooling: of models that do not say how texts are embedded.

    Attributes:
        loaded: by name, the one that was loaded first is the first.
    """

    def __init__(
        self, nodes: NodeSource, options: StarterOptions, catalog: Catalog, max_length: int, lines: Lines,
        on_end: Callable[[Run], None] | None = None, on_ready: Callable[[str], None] = lambda name: None,
        cancel: Cancel | None = None, pooling: str | None = None,
    ) -> None:  # fmt: skip
        self._source, self._looking = nodes, threading.Lock()
        self._cancel = Cancel(parent=cancel)
        self._options = options
        self._catalog = catalog
        self._max_length = max_length
        self._lines = lines
        self._on_end = on_end
        self._on_ready = on_ready
        self._pooling = pooling
        self._wanted: queue.SimpleQueue[tuple[str, bool, Future[None]]] = queue.SimpleQueue()
        self._n_loads = 0
        self._ports = StarterPorts()
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # one loads or unloads a model
        self._recoveries: dict[str, tuple[threading.Thread, Cancel]] = {}  # of lost rings, by model
        self._watching = threading.Thread(target=self._watch, name="serve-watch", daemon=True)
        self.loaded: dict[str, Loaded] = {}

    # From any thread

    def want(self, name: str, is_wanted: bool = True) -> None:
        """Load a model beside the others, or unload it; returns when that is done.

        Raises:
            MdiError: it cannot be loaded; with the code "memory" or "busy", it cannot be loaded beside the others.
        """
        done: Future[None] = Future()
        self._wanted.put((name, is_wanted, done))
        if self._cancel.is_cancelled:  # `close` may have looked already
            self._refuse_wanted()
        done.result()

    def adapt(self, name: str, folder: str | None) -> dict[str, Any]:
        """Have a further adapter of the first model, from a folder, or one less; returns when all nodes agree.

        Returns:
            its adapters, as the API process is told of them.

        Raises:
            MdiError: it cannot be; then all goes on as it was.
        """
        first = self._catalog.first_name
        with self._turns[first]:
            run = self._loaded_as(first).run
            if any("=" not in one for one in self._options.adapter):
                raise UsageError("this server has an adapter for all texts (--adapter DIR), which stands alone")
            flags = self._named_flags()
            if folder is None:
                run.unload_adapter(name)
                del flags[name]
            else:
                named = AdapterName.of(f"{name}={folder}")
                if name in self._catalog.names():
                    raise UsageError(f"there is a model {name}, or an adapter, already")
                try:
                    run.load_adapter(named)
                except CheckpointError as e:  # of the folder that the operator names
                    raise UsageError(str(e), code=e.code) from None
                flags[name] = folder
            self._options = replace(self._options, adapter=tuple(f"{one}={at}" for one, at in flags.items()))
            self._catalog.adapters = run.adapters
            logger.info("adapter %s: %s on all nodes", name, "unloaded" if folder is None else "loaded")
            return _adapters_of(run)

    def _named_flags(self) -> dict[str, str]:
        """Folders of adapters by their names."""
        return {name: at for name, _, at in (one.partition("=") for one in self._options.adapter)}

    def leave(self) -> None:
        """Let `run` return. What is being loaded is given up."""
        self._cancel.cancel(EngineError("the server is ending"))

    def submit(self, model: str, wanted: Mapping[str, Any], constraint: Constraint | None) -> None:
        """Raises UsageError, or EngineError if the model is not loaded (any more)."""
        self._loaded_as(model).outlet.submit(wanted, constraint)

    def cancel(self, number: int) -> None:
        """Whichever model writes it."""
        any(loaded.outlet.cancel(number) for loaded in list(self.loaded.values()))

    def constraint(self, model: str, wanted: Mapping[str, Any], request: int) -> Constraint:
        """Of one text of the request with this number. Raises UsageError, EngineError."""
        loaded = self._loaded_as(model)
        with loaded.making_grammars:
            if loaded.grammars is None:
                loaded.grammars = GrammarSource(loaded.directory, loaded.run.model.codec.eos_ids, loaded.n_vocabulary)
        return loaded.grammars.constraint(wanted, request)

    def _loaded_as(self, model: str) -> Loaded:
        loaded = self.loaded.get(model)
        if loaded is None:
            raise EngineError(f"{model} is not loaded any more")
        return loaded

    # Of the main thread

    def run(self) -> None:
        """Load the first model, then handle requests until `leave`. Raises MdiError if the first model cannot be loaded."""
        self._watching.start()
        try:
            self._load(self._catalog.first_name, self._cancel)
            while not self._cancel.is_cancelled:
                with contextlib.suppress(queue.Empty):
                    self._do(*self._wanted.get(timeout=LOOK_S))
        except MdiError as e:
            if e is not self._cancel.error:
                raise

    def close(self) -> None:
        """Give all models and the nodes back."""
        self.leave()
        self._refuse_wanted()
        if self._watching.ident is not None:
            self._watching.join(END_S)
        for thread, _ in list(self._recoveries.values()):  # none is added any more
            thread.join(END_S)
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
                self._end_recovery(name)
                with self._turns[name]:
                    self._give_up(name)
                self._report("idle", name, "nobody has used it for a while; a request loads it again")
            else:
                with self._turns[name]:
                    self._load_wanted(name)
            done.set_result(None)
        except Exception as e:
            done.set_exception(self._failure(name, e))

    def _load_wanted(self, name: str) -> None:
        if (loaded := self.loaded.get(name)) is not None:
            if not loaded.run.failed:
                return
            self._give_up(name)
        if name not in self._catalog.folders():
            raise UsageError(f"there is no model {name} any more")
        self._load(name, self._cancel)
        self._end_recovery(name)

    def _end_recovery(self, name: str) -> None:
        if (recovery := self._recoveries.get(name)) is not None:
            recovery[1].cancel()

    def _give_up(self, name: str, error: MdiError | None = None) -> None:
        """End a model's run; `error` is why, if it was one."""
        loaded = self.loaded.pop(name, None)
        if loaded is None:
            return
        try:
            loaded.run.close(error)
            if self._on_end is not None:
                self._on_end(loaded.run)
        finally:
            loaded.outlet.close()

    # Of the thread that looks after the rings, and of one for each lost ring

    def _watch(self) -> None:
        with contextlib.suppress(CancelledError, EngineError):
            while True:
                self._look_after()
                self._cancel.wait(LOOK_S)

    def _look_after(self) -> None:
        try:
            with self._looking:
                self._source.check()
        except Exception as e:
            logger.warning("the nodes cannot be looked after: %s", e)
        for name, loaded in list(self.loaded.items()):
            try:
                loaded.run.raise_failure()
            except MdiError as e:
                if name not in self._recoveries:
                    logger.warning("the ring of %s is lost: %s", name, e)
                    self._report("failed", name, str(e))
                    self._begin_recovery(loaded, e)

    def _begin_recovery(self, lost: Loaded, error: MdiError) -> None:
        cancel = self._cancel.child()
        thread = threading.Thread(
            target=self._recover, args=(lost, error, cancel), name=f"serve-recover-{lost.name}", daemon=True
        )
        self._recoveries[lost.name] = thread, cancel
        thread.start()

    def _recover(self, lost: Loaded, error: MdiError, cancel: Cancel) -> None:
        """Have a model again whose ring is lost, until it is loaded or not wanted any more."""
        name, wait_s = lost.name, FIRST_RETRY_S
        try:
            with self._turns[name]:
                if self.loaded.get(name) is lost:
                    self._give_up(name, error)
            while not self._has_again(name, cancel, wait_s):
                cancel.wait(wait_s)
                wait_s = min(2 * wait_s, LAST_RETRY_S)
        except MdiError as e:
            if e is not cancel.error:
                raise
        finally:
            del self._recoveries[name]
            cancel.close()

    def _has_again(self, name: str, cancel: Cancel, wait_s: float) -> bool:
        """Whether it is loaded, or has not to be."""
        with self._turns[name]:
            cancel.check()
            if name in self.loaded:
                return True
            try:
                self._load(name, cancel)
            except Exception as e:
                cancel.check()
                logger.warning("%s; the next attempt follows in %.0f s", self._failure(name, e), wait_s)
                return False
        return True

    # Of the thread that loads

    def _failure(self, name: str, error: Exception) -> MdiError:
        """Why a model could not be loaded. Whatever it was, the other models continue."""
        if not isinstance(error, MdiError):
            logger.error("%s cannot be loaded", name, exc_info=error)
            error = EngineError(f"{name} cannot be loaded: {type(error).__name__}: {error}")
        self._report("failed", name, str(error))
        return error

    def _load(self, name: str, cancel: Cancel) -> None:
        self._n_loads += 1
        records: queue.Queue[logging.LogRecord] = queue.Queue()
        listener = QueueListener(records, _Progress(lambda text: self._report("loading", name, text)))
        progress = _Records(records)
        logger.addHandler(progress)
        listener.start()
        try:
            self._report("loading", name, "getting the nodes ready")
            run = self._opened(name, cancel)
        finally:
            logger.removeHandler(progress)
            listener.stop()
        if self._cancel.is_cancelled:  # and `close` may not have waited
            run.close()
            self._cancel.check()
        if self.loaded and run.engine.memory is not None and run.engine.memory.n_sequences(run.max_length) == 0:
            run.close()
            raise NoMemoryError(f"the other models leave no memory for the caches of one text of {name}")
        run.engine.pace = PromptPace()
        directory, n_vocabulary = run.model.directory, run.model.spec.n_rows
        outlet = Outlet(name, run.engine, run.model.codec, self._lines)
        self.loaded[name] = Loaded(name, run, outlet, directory, n_vocabulary)
        facts = {"name": name, "context": run.max_length, "n_vocabulary": n_vocabulary, **_adapters_of(run)}
        facts["weights"] = shown(run.model.format)
        facts |= {"width": run.model.spec.width, **self._pooling_facts(directory)}
        tokenizer = {**run.model.codec.facts(), "directory": str(directory.absolute())}
        self._lines.send({"is": "model", "model": {**facts, "tokenizer": tokenizer}})
        self._report("serving", name, "ready", 1.0)
        self._on_ready(name)

    def _opened(self, name: str, cancel: Cancel) -> Run:
        """A run whose ring is closed.

        Where it does not fit into what other models leave, as it was planned, its blocks are shared out evenly: then caches
        are smaller than the plan's.
        """
        nodes, options = HostNodes(self._source, self._looking, cancel), self._options_of(name)
        beside = [one.run.neighbour for one in list(self.loaded.values())]
        while True:
            run = Run(
                nodes,
                options,
                self._max_length,
                n_texts=N_PLANNED,
                ports=self._ports,
                cancel=self._cancel,
                beside=beside,
            )
            try:
                run.open(cancel)
                return run
            except PlacementError as e:
                if not beside or options.placement == "even":
                    raise
                logger.info("%s: %s; its blocks are shared out evenly", name, e)
                options = replace(options, placement="even")

    def _pooling_facts(self, directory: Path) -> dict[str, Any]:
        """How a model's texts are embedded, or why they are not."""
        try:
            found = pooling_of(directory) or self._pooling
        except CheckpointError as e:
            return {"pooling": None, "no_pooling": str(e)}
        return {"pooling": found, "no_pooling": NO_POOLING}

    def _options_of(self, name: str) -> StarterOptions:
        """The user's options, as far as they fit this model."""
        options, folders = self._options, self._catalog.folders()
        if len(folders) > 1:
            options = replace(options, cache_share=SHARE_BESIDE)
        if name != self._catalog.first_name:
            options = replace(options, ckpt=folders[name], chunk=None, layers=None, adapter=())
        return options

    def _report(self, state: str, model: str, text: str, done: float = 0.0) -> None:
        status = {"state": state, "model": model, "text": text, "done": done, "load": self._n_loads}
        self._lines.send({"is": "status", "status": status})


def _adapters_of(run: Run) -> dict[str, Any]:
    """Names of all, and what each takes of the context, if it takes any."""
    return {"adapters": [*run.adapters], "n_virtual": {one.name: one.n_virtual for one in run.model.weights.adapters}}


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
    """Forwards log records as loading progress."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._on_text = on_text

    def emit(self, record: logging.LogRecord) -> None:
        self._on_text(record.getMessage())
