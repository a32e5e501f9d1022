"""Answers to the API process's requests, in a thread of the engine process.

Messages from the API process, by "do":
    generate   id, model, adapter, ids, sampling, owner, grammar, is_guessed, prediction, ends (ids that end it, too; with
               ignores_end none does): answered
               by "events", the last of which has a reason, or by "refused". With known in the place of sampling, no token is
               wanted: {"pooling": one of spec.options.POOLINGS} asks for one row, which the last event has, {"n_best": n} for
               the logprobs of all ids but the first. With beams and stop, the best texts have the `numbers`, of which the first
               is the id. Texts of the same request have its number, `request`
    cancel     id
    ask        id, what, args: answered by "answer", see `handlers`; loading a model is a question, too
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.control.reach import Reach, Route
from mdi.engine.recorder import Activity
from mdi.engine.sequence import Constraint
from mdi.errors import Code, EngineError, MdiError, PlacementError, UsageError, WireError
from mdi.host.diagnosis import NodeFinding, Report
from mdi.host.doctor import reach_nodes, starter_finding
from mdi.placement.model import ModelShape, Workload, model_shape
from mdi.placement.plan import format_plan, plan
from mdi.placement.profile import ClusterProfile, LinkProfile, NodeProfile
from mdi.run.choice import table_type
from mdi.serve.host import ModelHost
from mdi.serve.machines import Machines
from mdi.serve.process import Lines
from mdi.serve.snapshot import node_state
from mdi.units import counted

if TYPE_CHECKING:
    from mdi.run.run import Run
    from mdi.serve.snapshot import Snapshots


Handler = Callable[[dict[str, Any]], dict[str, Any]]
DOCTOR_S = 3.0
WORTH = 1.05  # a smaller gain is within the error of the measurement
FAST_BYTES_S = 125e6  # a link that is not full does not show its speed: assume a gigabit


def handlers(host: ModelHost, snapshots: Snapshots, machines: Machines | None = None) -> dict[str, Handler]:
    """Handlers by name; each runs in a thread of its own, and returns plain JSON or raises MdiError."""

    invited = machines or Machines()

    def node(args: dict[str, Any]) -> Run | None:
        loaded = host.loaded.get(args["model"])
        return None if loaded is None else loaded.run

    return {
        "load": lambda args: {"code": _want(host, args["model"], True)},
        "unload": lambda args: {"code": _want(host, args["model"], False)},
        "adapt": lambda args: host.adapt(args["adapter"], args["folder"]),
        "doctor": lambda args: doctor(node(args)),
        "plan": lambda args: plan_now(node(args), snapshots.latest.get(args["model"], {})),
        "invite": lambda args: invited.invite(args["who"]),
        "revoke": lambda args: invited.revoke(args["who"]),
        "invitation": lambda args: invited.state(),
    }


def _want(host: ModelHost, model: str, is_wanted: bool) -> Code | None:
    """Why it could not be done; None if it is done."""
    try:
        host.want(model, is_wanted)
    except MdiError as e:
        return e.code
    return None


def doctor(node: Run | None) -> dict[str, Any]:
    """Problems of a running ring's nodes: whether each answers, its version, clock, memory, disk."""
    if node is None:
        return {"problems": [], "text": "No ring is running."}
    own = starter_finding(node.cluster.starter, {}, None)
    starter = replace(own, status={**own.status, "state": "RUNNING"})
    findings = (starter, *reach_nodes(node.cluster, DOCTOR_S, {}, Cancel()))
    report = Report(tuple(_in_this_ring(finding, node.trouble) for finding in findings), ())
    return {**report.to_json(), "text": str(report)}


def _in_this_ring(finding: NodeFinding, trouble: str) -> NodeFinding:
    """A node that is busy with the very ring that asks is as it should be, and says nothing at its ring port."""
    if not finding.status:
        return finding
    state = node_state(str(finding.status.get("state")), trouble)
    if finding.status.get("state") != "RUNNING":
        return replace(finding, status={**finding.status, "state": state})
    route = finding.route if finding.route.ring.is_ok else Route(finding.route.control, Reach())
    return replace(finding, status={**finding.status, "state": state}, route=route)


def plan_now(node: Run | None, ring: dict[str, Any]) -> dict[str, Any]:
    """The best placement of the blocks, if nodes and links stay as fast as they are now.

    The times of a frame on each node are those of the run so far, so a ring that has done nothing yet cannot be planned.
    """
    if node is None or not ring:
        return {"error": "No ring is running."}
    if any(not one["frames"] or not one["memory"] for one in ring["nodes"]):
        return {"error": "The nodes have not computed enough yet: ask for a text first."}
    if node.is_shared:
        return {
            "error": "Nodes of this ring compute blocks together: only where each has blocks of its own is another cut planned."
        }
    running = max(1, ring["texts"]["running"])
    tied_type = table_type(node.model.weights, node.model.computing)
    shape = model_shape(node.model.weights.config, node.model.format, node.model.cache_type, tied_type)
    profile = profile_now(node, ring, shape)
    work = Workload(running, node.max_length, replay_bytes=node.replay_bytes)
    try:
        report = plan(profile, shape, work, measured=shape)
        as_it_is = plan(profile, shape, work, layers=[one["blocks"][1] - one["blocks"][0] for one in ring["nodes"]])
    except PlacementError as e:
        return {"error": f"{e}"}
    except MdiError as e:
        return {"error": f"this ring cannot be planned: {e}"}
    report = replace(report, model=node.model.weights.model.name)
    gain, texts = report.tokens_s / as_it_is.tokens_s, counted(running, "text")
    words = f"For {texts} at once the blocks lie as they should."
    if gain >= WORTH:
        words = f"For {texts} at once another cut would be {gain:.2f} times as fast, by what the nodes measure now:"
    return {"words": words, "text": format_plan(report), "plan": report.to_json()}


def profile_now(node: Run, ring: dict[str, Any], shape: ModelShape) -> ClusterProfile:
    """The cluster as the running ring shows it; rows are those of the frames that were running."""
    rows = max(1, ring["texts"]["running"] // len(ring["nodes"]))
    machines = Counter(one["addr"] for one in ring["nodes"])
    head_s = _head_s(node)
    nodes = tuple(
        _profile_of(one, rows, 0.0 if i else head_s, machines[one["addr"]]) for i, one in enumerate(ring["nodes"])
    )
    links = tuple(
        LinkProfile(one["source"], one["target"], 2 * one["delay_s"], max(one["bytes_s"] or 0.0, FAST_BYTES_S))
        for one in ring["links"]
        if one["delay_s"] is not None
    )
    return ClusterProfile(
        nodes=nodes,
        links=links,
        model=node.model.weights.model.name,
        config_hash=shape.config_hash,
        format=node.model.format,
    )


def _head_s(node: Run) -> float:
    """Recent seconds per frame of the starter's head; 0 if unknown."""
    spans = [] if node.run_trace is None else node.run_trace.recorder.buffer.last()
    heads = [span.duration_ns / 1e9 for span in spans if span.activity == Activity.HEAD]
    return median(heads) if heads else 0.0


def _profile_of(one: dict[str, Any], rows: int, head_s: float, n_sharing: int) -> NodeProfile:
    """A profile whose blocks take the time of the node's frames, without the head."""
    n_blocks = one["blocks"][1] - one["blocks"][0]
    frame_s = one["compute_s"] / one["frames"]
    block_s = max(frame_s - head_s, 0.05 * frame_s) / max(1, n_blocks)
    memory = one["memory"]
    return NodeProfile(
        name=one["name"],
        device=one["device"] or "cpu",
        n_cores=1.0,
        memory_bytes=int(memory["available_bytes"]) // n_sharing + int(memory["rss_bytes"]),
        disk_bytes=0,
        disk_read_bytes_s=0.0,
        read_bytes_s=0.0,
        block_s=((rows, block_s),),
        head_s=((rows, head_s),) if head_s else (),
        process_bytes=0,
    )


STATE_S = 1.0  # between two looks at the ring
N_FORMS = 2  # schemas that are compiled at the same time
N_EVENTS = 200  # the page shows the last ones
LONGEST_EVENT = 500  # characters

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
        handlers: what can be asked, see `mdi.serve.backend`.
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
                constraint = self._host.constraint(message["model"], message["grammar"], message["request"])
                with self._beginning:
                    if number in self._forming:
                        self._submit(message, constraint)
        finally:
            self._forming.discard(number)

    def _generate(self, message: dict[str, Any]) -> None:
        with self._refusing(message["id"]):
            self._submit(message, None)

    def _submit(self, message: dict[str, Any], constraint: Constraint | None) -> None:
        self._host.submit(message["model"], message, constraint)

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
            told["error"], told["status"] = str(e), 400 if isinstance(e, UsageError) else 500
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
