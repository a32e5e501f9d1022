"""The loop of a run: form a ring, generate, and choose another one when a node was lost, is about to leave, or came.

All that happens comes as an event in one queue, and one thread decides: `Policy` says what is next, `Former` does it. The
engine computes in a thread of its own; between two rings it waits. Before a ring is left of one's own will, the stages of the
next one are loaded; if that fails, the ring goes on.

A second thread, `Lookout`, sees changes without a loss, and puts them: a node that is about to leave, one that is back or new
and would make the ring faster, links and nodes that have become slower, and nodes whose memory others need.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from mdi.cancel import Cancel
from mdi.checkpoint.adapters import Adapter
from mdi.control.client import ControlClient, FanOut
from mdi.control.meeting import ASK_S
from mdi.control.messages import HAND_OVER_S
from mdi.engine.recorder import Recorder
from mdi.engine.starter import StarterEngine
from mdi.errors import Code, EngineError, MdiError, NodeLostError, RingError
from mdi.net.hello import Fault
from mdi.net.ring import TcpRing
from mdi.placement.profile import NodeProfile
from mdi.run.cut import INFINITE, MovingCut, better_with
from mdi.run.form import Former, Link, LoadAhead, Loaded, Ring
from mdi.run.nodes import CallRoll, Losses, Newcomers, RollCall
from mdi.run.policy import (
    BROUGHT_DOWN,
    Answer,
    Answered,
    Better,
    Decision,
    End,
    Event,
    Form,
    Lost,
    NotFormed,
    Policy,
    Stage,
    computing,
    present_holders,
)
from mdi.run.report import HOT_SPARE, MAY_DIFFER, REPLAY, TOKENS, Records, Recovery
from mdi.run.short_nodes import ShortNodes
from mdi.run.verify import Untrue
from mdi.spec.cluster import NodeConfig

NOTICE_S = 0.25  # how often it is asked whether a node is about to leave
LOOK_S = 5.0  # how often nodes are asked
SOUGHT_S = 1.0  # the same while there is no ring
MOVABLE = 2  # nodes of a ring whose order cannot change
SLOW_TIMES = 3.0  # times as long as measured, next to others: a node is slow then, and is not below a half of that
LEAST_FRAMES = 20  # between two looks, for a mean
REST_S = 60.0  # between two searches for a cut with the same slow nodes: their times are never twice the same
FORGET_S = 600.0  # how long it is remembered that a link was slow that the ring does not use any more

Measure = Callable[[ControlClient], NodeProfile]

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Leaving:
    """A node of a ring is about to end, and computes until its blocks are elsewhere."""

    node: str
    ring: int


@dataclass(frozen=True)
class Change:
    """All stages are to have these adapters in the place of those that they have.

    Attributes:
        done: ends when a ring has them, or with the MdiError that was in the way: then the ring goes on as it is.
    """

    adapters: Sequence[Adapter]
    done: Future[None] = field(default_factory=Future)

    def fail(self, error: MdiError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Nodes(Protocol):
    """The nodes of a run."""

    @property
    def clients(self) -> Mapping[str, ControlClient]:
        """Of all that may take part, by name."""

    def admit(self, node: NodeConfig) -> ControlClient:
        """A node that has come may take part from now on."""

    def may_use(self, name: str) -> bool:
        """Whether a node has waited long enough since it was lost."""

    def with_spare(self, ring: Sequence[Stage], free: Sequence[str]) -> Form | None:
        """See Policy."""


class Joins:
    """Nodes outside of a ring that it would be faster with. Not for several threads.

    Args:
        nodes: that may take part; new ones are added.
        cut: how the model is cut over nodes.
        spares: those that are not added to a ring: they wait for a loss.
        newcomers: nodes that were found besides.
        measure: asks a node that has come how fast it is, which takes seconds; None where no node was measured.
    """

    def __init__(
        self, nodes: Nodes, cut: MovingCut, spares: frozenset[str], newcomers: Newcomers,
        measure: Measure | None = None, ask: CallRoll | None = None,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._cut = cut
        self._spares = spares
        self._newcomers = newcomers
        self._measure = measure
        self._ask = ask or RollCall()
        self._measuring: dict[str, FanOut[NodeProfile]] = {}

    def best(self, ring: Sequence[Stage], processes: Mapping[str, str]) -> Form | None:
        """The ring with a hot spare that it lacks, else the best one with one more present node, if it gains enough.

        Args:
            processes: of the ring's secondaries.
        """
        used = {stage.name for stage in ring}
        outside = [client for name, client in self._nodes.clients.items() if name not in used]
        answers = self._ask(outside, frozenset(), ASK_S).answers if outside else {}
        answers |= self._admit({*processes.values(), *(answer.process for answer in answers.values())})
        free = [name for name, answer in answers.items() if answer.is_free and self._nodes.may_use(name)]
        if (found := self._nodes.with_spare(ring, free)) is not None:
            return replace(found, outside=frozenset(answers) - found.fresh)
        for name in free:
            is_wanted = name not in self._spares and self._is_known(name)
            if is_wanted and (found := better_with(computing(ring), name, self._cut)) is not None:
                return replace(found, outside=frozenset(answers) - {name})
        return None

    def while_sought(self) -> None:
        """Nothing: the loop asks the nodes itself."""

    def _admit(self, known: set[str]) -> dict[str, Answer]:
        """Admit new nodes; returns their answers."""
        clients = self._nodes.clients
        places = {(client.node.addr, client.node.port) for client in clients.values()}
        come = []
        for process, node in self._newcomers().items():
            if process in known or (node.addr, node.port) in places:
                continue
            number = next(n for n in range(len(clients) + 1) if f"secondary{n}" not in clients)
            client = self._nodes.admit(replace(node, name=f"secondary{number}"))
            logger.info("found %s at %s:%d: it is %s", node.name, node.addr, node.port, client.node.name)
            come.append(client)
            if self._measure is not None:
                self._measuring[client.node.name] = FanOut({client.node.name: partial(self._measure, client)})
        return dict(self._ask(come, frozenset(), ASK_S).answers) if come else {}

    def _is_known(self, name: str) -> bool:
        """Whether its times are known, if they are needed; without them it counts as a mean node."""
        asked = self._measuring.get(name)
        if asked is None:
            return True
        if asked.is_working:
            return False
        del self._measuring[name]
        if name in asked.results:
            self._cut.learn(asked.results[name])
        return True


class Looks(Protocol):
    """Looks for a better ring."""

    def best(self, ring: Sequence[Stage], processes: Mapping[str, str]) -> Form | None:
        """See Joins."""

    def while_sought(self) -> None:
        """Called again and again while there is no ring."""


class SlowLinks:
    """Links of a ring that have become slower, and the order of its nodes that is faster then.

    Args:
        run: its id, as the nodes know it.
        cut: knows the links as they were measured.
    """

    def __init__(self, run: str, cut: MovingCut, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._cut = cut
        self._clock = clock
        self._ways: dict[tuple[str, str], tuple[float, float]] = {}  # and when; also of earlier rings

    def best(self, ring: Ring) -> Form | None:
        """The ring in another order, if that gains enough."""
        names, now = [stage.name for stage in ring.stages], self._clock()
        asked = FanOut({client.node.name: partial(self._asked, client) for client in ring.clients})
        asked.join(ASK_S)
        found = {**asked.results, names[0]: None if ring.link is None else _way_s(ring.link)}
        for source, target in zip(names, [*names[1:], names[0]], strict=True):
            if (way_s := found.get(source)) is not None:
                self._ways[source, target] = way_s, now
        self._ways = {pair: one for pair, one in self._ways.items() if now - one[1] < FORGET_S}
        return self._cut.in_another_order(
            computing(ring.stages), {pair: way_s for pair, (way_s, _) in self._ways.items()}
        )

    def _asked(self, client: ControlClient) -> float | None:
        measured = client.status(self._run, ASK_S).get("measured")
        way_s = measured.get("next_way_s") if isinstance(measured, dict) else None
        return float(way_s) if isinstance(way_s, int | float) and 0 <= way_s < FORGET_S else None


class SlowNodes:
    """Nodes of a ring that other programs leave less time than when they were measured, and the cut that is faster then.

    A node is slow if it was twice, and no longer if it twice was not. All who plan with `cut` know that, so none of them moves
    the blocks back.

    Args:
        run: its id, as the nodes know it.
        cut: knows the nodes as they were measured.
    """

    def __init__(self, run: str, cut: MovingCut, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._cut = cut
        self._clock = clock
        self._ring = 0
        self._rests_until = 0.0
        self._last: dict[str, tuple[int, float]] = {}  # frames of the ring, and seconds of computing
        self._seen: dict[str, float] = {}  # how slow each was when it was looked at last
        self._slow: dict[str, float] = {}
        self._before: tuple[Stage, ...] | None = None  # the ring, before its first node was slow

    def best(self, ring: Ring) -> Form | None:
        """The ring with fewer blocks on slow nodes, or again as before, if that gains enough."""
        stages, names = computing(ring.stages), {stage.name for stage in ring.stages}
        if ring.number != self._ring:
            self._ring, self._last, self._seen, self._rests_until = ring.number, {}, {}, 0.0
        asked = FanOut({client.node.name: partial(self._asked, client) for client in ring.clients})
        asked.join(ASK_S)
        last, self._last = self._last, {name: one for name, one in dict(asked.results).items() if one is not None}
        spent = {name: (n - last[name][0], s - last[name][1]) for name, (n, s) in self._last.items() if name in last}
        times = self._cut.slower_nodes(
            ring.stages, {name: s / n for name, (n, s) in spent.items() if n >= LEAST_FRAMES}
        )
        slow = {name: pace for name, pace in self._slow.items() if name in names}
        for name in times.keys() & self._seen.keys():
            if (both := min(times[name], self._seen[name])) > SLOW_TIMES:
                slow[name] = both
            elif max(times[name], self._seen[name]) < SLOW_TIMES / 2:
                slow.pop(name, None)
        self._seen = times
        if slow.keys() != self._slow.keys():
            self._rests_until = 0.0
        if slow != self._slow:
            self._slow = slow
            self._cut.slow_down(slow)
        if slow and self._before is None:
            self._before = stages
        elif not slow and self._before == stages:
            self._before = None
        now = self._clock()
        if self._before is None or now < self._rests_until:
            return None
        self._rests_until = now + REST_S
        return self._cut.cut_again(stages, self._before)

    def _asked(self, client: ControlClient) -> tuple[int, float] | None:
        measured = client.status(self._run, ASK_S).get("measured")
        if not isinstance(measured, dict):
            return None
        n_frames, compute_s = measured.get("frames"), measured.get("compute_s")
        if not isinstance(n_frames, int) or not isinstance(compute_s, int | float) or not 0 <= compute_s < INFINITE:
            return None
        return n_frames, float(compute_s)


def _way_s(link: Link) -> float | None:
    return link.next_link.way_s if isinstance(link, TcpRing) else None


class Lookout:
    """Looks for changes of a ring without a loss, in the thread `ring-lookout`; changes nothing, and puts what it sees.

    Args:
        joins: None where nodes share blocks: then no node is added.
        slow: look for what has become slower in a ring of more than MOVABLE nodes; short: for nodes with too little memory.
        present: the ring that generates; None while there is none.
        put: gets each event.
    """

    def __init__(
        self, joins: Looks | None, present: Callable[[], Ring | None], put: Callable[[Leaving | Better], None], cancel: Cancel,
        slow: Sequence[SlowLinks | SlowNodes] = (), short: ShortNodes | None = None,
    ) -> None:  # fmt: skip
        self._joins, self._slow, self._short = joins, slow, short
        self._present = present
        self._put = put
        self._cancel = cancel
        self._seen: set[Leaving] = set()
        self._thread = threading.Thread(target=self._run, name="ring-lookout", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Once it is cancelled."""
        self._thread.join()

    def _run(self) -> None:
        next_look = time.monotonic() + LOOK_S
        while True:
            try:
                self._cancel.wait(NOTICE_S)
            except MdiError as e:  # whatever the run was ended with, as by a server that ends
                e.with_traceback(None)  # the run keeps the error, and it this frame
                return
            ring = self._present()
            if ring is None:
                if self._joins is not None and time.monotonic() > next_look:
                    next_look = time.monotonic() + SOUGHT_S
                    try:
                        self._joins.while_sought()
                    except Exception:  # a ring is sought all the same, and it asks again
                        logger.warning("warning: asking for nodes failed", exc_info=True)
                continue
            link = ring.link  # read once: another thread may close it meanwhile
            for node in getattr(link, "leaving", ()):
                if (leaving := Leaving(node, ring.number)) not in self._seen:
                    self._seen.add(leaving)
                    self._put(leaving)
            if self._joins is not None and time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_S
                try:
                    found = self._joins.best(ring.stages, ring.processes)
                    if self._short is not None:
                        found = found or self._short.best(ring)
                    for look in self._slow if len(ring.stages) > MOVABLE else ():
                        found = found or look.best(ring)
                    if found is not None:
                        self._put(Better(found, ring.stages))
                except Exception:  # texts continue in the present ring
                    logger.warning("warning: looking for a better ring failed", exc_info=True)


JOIN_S = 10.0
AHEAD_S = 0.8 * HAND_OVER_S  # for loading what a leaving node has, while it still computes


@dataclass(frozen=True)
class Ended:
    """The engine has returned from a ring; None if it was to leave it, or is closed."""

    error: MdiError | None


class EngineThread:
    """Computes over the rings that it gets, and says how each ended.

    Args:
        put: gets an event after each ring.
        recorder: records what happens to each frame.
    """

    def __init__(self, engine: StarterEngine, put: Callable[[Ended], None], recorder: Recorder | None) -> None:
        self._engine = engine
        self._put = put
        self._recorder = recorder
        self._rings: queue.SimpleQueue[Link | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def compute(self, ring: Link) -> None:
        self._rings.put(ring)

    def close(self) -> None:
        """Once the engine is closed."""
        self._rings.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (ring := self._rings.get()) is not None:
            error: MdiError | None = None
            try:
                self._engine.run(ring if self._recorder is None else self._recorder.over(ring), until_idle=False)
            except MdiError as e:
                # Whoever keeps it, a log say, would keep the frames, and they the ring's buffers.
                error = e.with_traceback(None)
            except BaseException as e:  # for example out of memory: the samples' texts so far must still be reported
                logger.debug("the engine failed", exc_info=True)
                error = EngineError(f"starter failed: {type(e).__name__}: {e}")
            del ring
            self._put(Ended(error))


class RingLoop:
    """Owns the ring of a run, and its engine, from the first ring to the last.

    Args:
        nodes: clients of all secondaries that may take part, spares best first.
        cancel: ends the run; `losses` end an attempt to form a ring.
        name: of the starter, in its rings.
        ask: the roll call; clock: that of the tokens.

    Attributes:
        engine: continues over the rings; None before the first one is closed.
        running: the ring that generates; None while there is none. `is_recovering` says that one is sought.
        on_search: called when other nodes may be needed for a ring.
        on_left: called when a ring was left of one's own will, before another one is formed.
        failure: what ended the loop, if that was not `close`; then all texts have ended.
        differs_from: how many ids each text had, prompt included, when the first ring came that may give it others than an
            undisturbed run.
    """

    def __init__(
        self, former: Former, policy: Policy, nodes: Sequence[ControlClient], cancel: Cancel, losses: Losses, name: str,
        ask: CallRoll | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._former = former
        self.policy = policy
        self.clients: dict[str, ControlClient] = {client.node.name: client for client in nodes}
        self._cancel = cancel
        self._losses = losses
        self._name = name
        self.ask = ask or RollCall()
        self._clock = clock
        self._is_untrue = False  # whether rows of the last ring may be wrong
        self.on_search: Callable[[], None] = lambda: None
        self.on_left: Callable[[], None] = lambda: None
        self._events: queue.SimpleQueue[Ended | Leaving | Better | Loaded | Untrue | Change] = queue.SimpleQueue()
        self._ahead: LoadAhead | None = None
        self._left_for: Lost | Form | None = None  # what the present ring will be left for, when `_ahead` has loaded
        self._change: Change | None = None  # that `_ahead` loads for
        self._changing: Change | None = None  # that the ring is formed for
        self.engine: StarterEngine | None = None
        self._computing: EngineThread | None = None
        self._thread: threading.Thread | None = None
        self._records = Records()
        self.running: Ring | None = None
        self.is_recovering = False
        self._is_over = False
        self.failure: MdiError | None = None
        self.differs_from: dict[int, int] = {}

    # From any thread

    def put(self, event: Leaving | Better | Untrue | Change) -> None:
        """Something was seen, or is wanted."""
        self._events.put(event)
        if self._is_over:  # the thread that takes events may have taken its last one
            self._refuse_changes()

    def admit(self, node: NodeConfig) -> ControlClient:
        """A node that has come may take part from now on."""
        client = self._former.admit(node)
        self.clients = {**self.clients, node.name: client}  # a new table: another thread may go through the old one
        return client

    def forget(self, name: str) -> None:
        """A node that no ring has, and that is gone."""
        self.clients = {known: client for known, client in self.clients.items() if known != name}
        self._former.forget(name)

    def may_use(self, name: str) -> bool:
        return self.policy.may_use(name, self._clock())

    def with_spare(self, ring: Sequence[Stage], free: Sequence[str]) -> Form | None:
        return self.policy.with_spare(ring, free)

    @property
    def recoveries(self) -> list[Recovery]:
        return self._records.so_far(None if self.engine is None else self.engine.first_token_s)

    # The run

    def start(self, engine: StarterEngine, ring: Ring, recorder: Recorder | None) -> None:
        """Generate from here on, in other threads."""
        self.engine = engine
        self._computing = EngineThread(engine, self._events.put, recorder)
        first = [ring]  # a thread keeps its arguments, and the ring's caches would stay as long as the run
        self._thread = threading.Thread(target=self._run, args=(first,), name="run", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the engine end after the frame that it is at; the run is cancelled."""
        if self.engine is not None and self._thread is not None and self._computing is not None:
            self.engine.close()
            self._thread.join(JOIN_S)
            self._computing.close()

    def _run(self, first: list[Ring]) -> None:
        engine, ring = self.engine, first.pop()
        assert engine is not None
        try:
            while not self._cancel.is_cancelled and (cause := self._generate(ring, engine)) is not None:
                self.is_recovering = True
                change = self._begin_change(cause)
                ring = self.next_ring(cause)
                self.is_recovering = False
                self._changing = None
                if change is not None:
                    change.done.set_result(None)
                self._end_ahead(is_used=self._ahead is not None and self._ahead.plan.stages == ring.stages)
        except MdiError as e:
            e.with_traceback(None)  # who keeps it would keep the frames
            self.failure = None if self._cancel.is_cancelled and not isinstance(e, RingError) else e
        except BaseException as e:
            logger.debug("the run failed", exc_info=True)
            self.failure = EngineError(f"starter failed: {type(e).__name__}: {e}")
        self.running = None
        self._end_ahead(is_used=False)
        self._is_over = True
        if self._changing is not None:
            self._changing.fail(self._over())
        self._refuse_changes()
        if self._cancel.is_cancelled:
            # Who closes rings may be through with it: forming one may take longer than it waits.
            self._former.close_links(is_awaited=False)
        link = None if self._former.ring is None else self._former.ring.link
        if link is not None and self.failure is not None and not isinstance(self.failure, RingError):
            # This process still sends PINGs, so the other nodes would wait for a computation that has ended.
            link.fail(Fault(self._name, f"it failed: {self.failure}", self._name, self.failure.code))
        engine.end_all()

    def _generate(self, ring: Ring, engine: StarterEngine) -> Event | Form | None:
        """Let the engine compute until another ring is needed, or is better; None at the end of the run."""
        assert self._computing is not None and ring.computed is not None
        wanted: Lost | Form | None = None
        self.running = ring
        self._computing.compute(ring.computed)
        while True:
            event = self._events.get()
            if isinstance(event, Ended):
                break
            if isinstance(event, Untrue):  # also if the ring is to be left already: such a node is in no other one
                wanted = self._without(event, ring) or wanted
            elif wanted is None:
                wanted = self._wanted(event, ring)
            elif isinstance(event, Change):
                event.fail(EngineError("the ring is becoming another one: try again"))
            if wanted is not None:
                engine.leave(ring.computed.epoch)
        self.running = None
        is_broken = isinstance(event.error, RingError) and not self._cancel.is_cancelled
        if is_broken or wanted is not None:
            if event.error is None:
                self.on_left()
            wanted = self._found_late(ring) or wanted
        if is_broken or wanted is None:
            self._end_ahead(is_used=False)
        if is_broken:
            assert isinstance(event.error, RingError)
            return Lost(event.error, engine.in_flight, engine.n_known)
        if event.error is not None:
            raise event.error
        return wanted

    def _found_late(self, ring: Ring) -> Lost | None:
        """As `_without`, by all that was found until now."""
        lost, others = None, []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Untrue):
                lost = self._without(event, ring) or lost
            else:
                others.append(event)
        for event in others:
            self._events.put(event)
        return lost

    def _begin_change(self, cause: Event | Form | None) -> Change | None:
        """Have all further rings made with the adapters that the present one is left for; None if it is left for no such."""
        change = self._change
        if change is None or cause is not self._left_for:
            return None
        self._former.basis.weights.put_adapters(change.adapters)
        self._change = None
        self._changing = change
        return change

    def _over(self) -> MdiError:
        """Why nothing can be changed any more."""
        return self.failure or EngineError("the run has ended")

    def _refuse_changes(self) -> None:
        """The run is over."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Change):
                    event.fail(self._over())

    def _wanted(self, event: Leaving | Better | Loaded | Change, ring: Ring) -> Lost | Form | None:
        """Why the present ring is to be left now; None if it is not."""
        if isinstance(event, Change):
            return self._begin_loading(event, ring)
        if isinstance(event, Loaded):
            return self._loaded(event.ahead) if event.ahead is self._ahead else None
        if isinstance(event, Better):
            decision = self.policy.next(event, self._clock()) if self._ahead is None else None
            if not isinstance(decision, Form):
                return None
            what = "a hot spare" if decision.fresh else "another ring"
            logger.info("blocks are loaded for %s, with %s", what, ", ".join(decision.names))
            return self._load_ahead(decision, decision)
        if event.ring != ring.number or event.node not in ring.processes:
            return None
        self._end_ahead(is_used=False)
        self.on_search()
        lost = Lost(NodeLostError(event.node, f"{event.node} was asked to end", Code.LEFT))
        roll = self.ask(list(self.clients.values()), frozenset(), ASK_S)
        plan = self.policy.without(event.node, roll, self._clock())
        return lost if plan is None else self._load_ahead(plan, lost, AHEAD_S)

    def _begin_loading(self, change: Change, ring: Ring) -> Lost | Form | None:
        """Load the stages with other adapters on all nodes."""
        if self._ahead is not None:
            change.fail(EngineError("the nodes load blocks for another ring: try again later"))
            return None
        plan = Form(ring.stages, is_moved=True)  # the caches belong to the stages, and the texts are computed again
        try:
            self._ahead = self._former.load_ahead(plan, self._cancel, self._events.put, adapters=change.adapters)
        except MdiError as e:
            change.fail(e)
            return None
        assert self._ahead is not None, "there is a ring"
        self._change, self._left_for = change, plan
        return None

    def _without(self, untrue: Untrue, ring: Ring) -> Lost | None:
        """The ring is left, and its rows count for nothing; None if they are right, or others have computed the wrong ones."""
        for name in untrue.nodes:
            self.policy.absences.exclude(name)
        names = " or ".join(untrue.nodes)
        logger.warning("warning: wrong rows: %s; %s takes no further part in this run", untrue.reason, names)
        if untrue.ring is None or not {stage.name for stage in ring.stages}.intersection(untrue.nodes):
            return None
        self._is_untrue = True
        self._end_ahead(is_used=False)
        return Lost(NodeLostError(untrue.nodes[0], f"{names} gave wrong rows", code=Code.UNTRUE))

    def _load_ahead(self, plan: Form, cause: Lost | Form, timeout_s: float | None = None) -> Lost | Form | None:
        """Load the next ring's stages while the present ring goes on; `cause` if it is to be left at once instead."""
        try:
            self._ahead = self._former.load_ahead(plan, self._cancel, self._events.put, timeout_s)
        except MdiError as e:  # the cut needs parts that are not here
            logger.debug("nothing can be loaded ahead: %s", e)
            if isinstance(cause, Form):
                self.policy.refuse(plan, e, None, self._clock())
                return None
        self._left_for = cause
        return cause if self._ahead is None else None

    def _loaded(self, ahead: LoadAhead) -> Lost | Form | None:
        """All stages of the next ring are there, or cannot be: then a ring that nobody leaves goes on."""
        cause, error = self._left_for, ahead.error
        if error is None or self._cancel.is_cancelled:
            return cause
        logger.debug("loading ahead failed: %s", error)
        if self._change is not None:
            self._change.fail(error)
            self._end_ahead(is_used=False)
            return None
        self._end_ahead(is_used=False)
        if isinstance(cause, Lost):
            return cause
        logger.info("the ring stays as it is: %s", error)
        self.policy.refuse(ahead.plan, error, ahead.failed, self._clock())
        return None

    def _end_ahead(self, is_used: bool) -> None:
        """Keep what was loaded ahead if a ring uses it, else free it."""
        ahead, self._ahead = self._ahead, None
        if (change := self._change) is not None:
            self._change = None
            change.fail(EngineError("the ring has become another one meanwhile: try again"))
        if ahead is not None:
            ahead.close() if is_used else ahead.give_up()

    def next_ring(self, cause: Event | Form | None) -> Ring:
        """Another ring in the place of one that broke or was left; None is the first one. Raises MdiError: there is none."""
        engine = self.engine
        if cause is not None:
            self.on_search()
        last_s = (engine.last_token_s if engine is not None else None) or self._clock()
        if engine is not None and engine.first_token_s is not None:
            self._records.end(engine.first_token_s)
        if isinstance(cause, Form):
            present = tuple(stage.name for stage in self.policy.ring)
            joining = set(cause.names).difference(present)
            if self._changing is not None:
                logger.info("the ring goes on with other adapters")
            elif hot := sorted(joining & cause.hot):
                logger.info("hot spare: %s computes beside the node after it", ", ".join(hot))
            elif joining:
                logger.info("%s joins the ring and makes it faster", ", ".join(sorted(joining)))
            elif cause.names == present:
                logger.info(
                    "nodes compute at another pace than before, or have other memory; they have %s blocks now",
                    "/".join(map(str, cause.counts)),
                )
            else:
                logger.info("a link has become slower; the ring is now %s", " -> ".join(cause.names))
            decision: Decision = cause
            self.policy.trouble, self.policy.last_loss = "blocks move to other nodes; the texts wait", ""
        else:
            decision = self.policy.next(cause, self._clock())
        while not isinstance(decision, End):
            try:
                with self._losses.attempt() as attempt:
                    if isinstance(decision, Form):
                        attempt.check()
                        ring = self._form(decision, attempt)
                        self._note(ring, last_s)
                        return ring
                    attempt.wait(decision.until - self._clock())
                    event: Event = Answered(self.ask(list(self.clients.values()), decision.suspected, ASK_S))
            except MdiError as e:
                if self._cancel.is_cancelled:
                    raise
                # Its frames have the stage that was made for this ring, and would keep each other until a collection.
                e.__context__ = e.__cause__ = e.__traceback__ = None
                event = NotFormed(e, decision if isinstance(decision, Form) else None, self._former.reached)
            decision = self.policy.next(event, self._clock())
        raise decision.error

    def _form(self, plan: Form, cancel: Cancel) -> Ring:
        engine = self.engine
        if engine is None:
            return self._former.form(plan, cancel)
        if plan.ended is not None:
            logger.warning("warning: a text is ended, because two nodes in a row were lost while they computed it")
            engine.cancel(plan.ended, BROUGHT_DOWN)
        if plan.isolated:
            engine.isolate(plan.isolated)
        is_from_tokens = engine.is_isolating or self._is_untrue
        # Where all nodes have their caches, texts whose rows are not kept go on as well.
        rows = engine.sent.counts if plan.fresh else {**dict.fromkeys(engine.n_known, 0), **engine.sent.counts}
        ring = self._former.form(plan, cancel, None if is_from_tokens else rows)
        self._is_untrue = False
        engine.stage, engine.memory = ring.stage.at_starter, ring.memory
        engine.kept = None if ring.replay is None else ring.replay.kept
        engine.fills_replays = ring.replay is not None and ring.replay.is_by_starter
        engine.has_fresh, engine.prefixes = ring.has_fresh, ring.prefixes
        engine.n_frames, engine.may_guess, engine.is_deep = ring.n_frames, ring.may_guess, ring.is_deep
        return ring

    def _note(self, ring: Ring, last_s: float) -> None:
        """Report what became of the lost nodes."""
        hot = {stage.name for stage in self.policy.ring if stage.is_hot}
        lost, seconds = self.policy.formed(ring.stages, ring.processes, self._clock())
        known: Mapping[int, int] = {} if self.engine is None or ring.is_exact else self.engine.n_known
        differs = dict(known)
        for seq_id, n_ids in differs.items():
            self.differs_from.setdefault(seq_id, n_ids)
        self._records.begin(list(lost), last_s)
        if differs:
            logger.warning("warning: %s", MAY_DIFFER)
        for name, stage in lost.items():
            by = present_holders(stage, ring.stages)
            is_by_hot = not ring.has_fresh and (name in hot or bool(by) and hot.issuperset(by))
            how = HOT_SPARE if is_by_hot else REPLAY
            self._records.replace(name, by, TOKENS if ring.replay is None else how, differs)
            logger.info("%s's blocks are now on %s", name, ", ".join(by))
        if seconds is not None:
            logger.info("ring restored after %.1f s", seconds)
