"""Keeps a run going when its ring breaks: finds the lost nodes and moves their blocks while the texts wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mdi.config import NodeConfig
from mdi.control.client import ControlClient
from mdi.control.messages import COMPILING
from mdi.errors import MdiError, NodeLostError, RingError
from mdi.net.link import STUCK
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.recovery.absences import Absences
from mdi.recovery.records import MAY_DIFFER, Records, Recovery
from mdi.recovery.replacement import Cut, Next, Stage, in_place, takers, with_the_rest
from mdi.recovery.roll_call import Roll, call_roll
from mdi.recovery.search import Search
from mdi.recovery.suspects import Suspects
from mdi.recovery.waiting_texts import NoTexts, Texts

ASK_S = 2.0  # a node that lives answers in this time: its control port waits for no computation
POLL_S = 0.1
N_FAILURES = 30  # rings that cannot be formed one after the other; a search ends sooner where nodes are lost for good
# Error codes of a node that lives but cannot hold its blocks.
UNFIT = ("memory", "disk", "usage", "version", "role", "weights", "key", "leaving", "control", STUCK)
NOT_YET = "others may take its place"
BROUGHT_DOWN = "brought down nodes"  # finish_reason of a text that did

logger = logging.getLogger("mdi")


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Former(Protocol):
    """Forms rings: the starter's node."""

    @property
    def stages(self) -> Sequence[Stage]:
        """Of the ring that was formed last, starter first."""

    @property
    def processes(self) -> Mapping[str, str]:
        """Of the secondaries of that ring, the numbers that their processes drew."""

    @property
    def restored_by(self) -> str:
        """How the caches of that ring are restored: records.TOKENS or REPLAY."""

    @property
    def is_exact(self) -> bool:
        """Whether that ring gives texts the tokens that the one before would have given them."""

    def form(self, following: Next) -> LoopbackRing | TcpRing:
        """Another ring of the same run.

        Raises:
            NodeLostError: of a node that could not take its place; MdiError: it cannot be done at all.
        """

    def check(self) -> None:
        """Raises what ends the run meanwhile."""

    def admit(self, node: NodeConfig) -> ControlClient:
        """From any thread: a node that may take part from now on."""


class RingKeeper:
    """See the module. All but `recoveries` belongs to the thread that forms the first ring, then to the engine's.

    Args:
        clients: of all nodes that may take part, those of the ring among them; spares best first.
        spares: names of nodes that get blocks only in the place of lost ones.
        cut: how the model is cut over nodes that are left.
        silence_s: a node that is silent for so long is lost.

    Attributes:
        texts: continue over the rings, once there are some.
        trouble: why the texts wait, in words; "" while a ring is closed.
        differs_from: how many ids each text had, prompt included, when the first ring came that may give it others than an
            undisturbed run.
        refused: the last ring that was planned without a loss and could not be formed.
    """

    def __init__(
        self, former: Former, clients: Sequence[ControlClient], spares: Sequence[str], cut: Cut, silence_s: float
    ) -> None:
        self._former = former
        self.texts: Texts = NoTexts()
        self._clients = list(clients)
        self._spares = tuple(spares)
        self._cut = cut
        self._silence_s = silence_s
        self._absences = Absences(silence_s)
        self._suspects = Suspects()
        self._records = Records()
        self._planned: Next | RingError | None = None
        self.refused: Next | None = None
        self._is_busy = False
        self.trouble = ""
        self.differs_from: dict[int, int] = {}

    @property
    def recoveries(self) -> list[Recovery]:
        return self._records.told(self.texts.first_token_s)

    @property
    def stages(self) -> Sequence[Stage]:
        """Of the ring as it is, starter first."""
        return self._former.stages

    @property
    def is_busy(self) -> bool:
        """Whether another ring is being formed, or will be."""
        return self._is_busy

    @property
    def processes(self) -> Mapping[str, str]:
        """Of the secondaries of that ring, the numbers that their processes drew."""
        return self._former.processes

    def admit(self, node: NodeConfig, name: str) -> ControlClient:
        """From any thread: a node that has come, under the name that this run knows it by, may take part from now on."""
        client = self._former.admit(replace(node, name=name))
        self._clients.append(client)
        return client

    def may_use(self, name: str) -> bool:
        """Whether a node has waited long enough since it was lost."""
        return self._absences.is_over(name, time.monotonic())

    def plan(self, following: Next) -> None:
        """From any thread: what `after_leave` is to form."""
        self._planned, self._is_busy = following, True

    def plan_without(self, name: str) -> None:
        """From any thread: `after_leave` is to form a ring without a node that is about to end."""
        self._planned, self._is_busy = NodeLostError(name, f"{name} was told to end", "left"), True

    def after_leave(self) -> LoopbackRing | TcpRing:
        """The ring that was planned, after the present one was left; as `after_loss` if it cannot be formed."""
        planned = self._planned
        assert planned is not None
        if isinstance(planned, RingError):
            return self.after_loss(planned)
        self.trouble = "blocks move to other nodes; the texts wait"
        try:
            ring = self._former.form(planned)
        except RingError as e:
            return self.after_loss(e)
        except MdiError as e:  # nobody had to move, so this is no reason to end the run
            self.refused = planned
            return self.after_loss(RingError(f"blocks were not moved: {e}"))
        self._note_differences()
        self._is_busy, self.trouble = False, ""
        return ring

    def after_loss(self, error: RingError) -> LoopbackRing | TcpRing:
        """Another ring for the texts.

        Raises:
            NodeLostError, RingError: the model does not fit the remaining nodes; the error names the lost node.
        """
        search = Search(error, time.monotonic())
        self._is_busy = True
        self._begin(search, error)
        at_once = self._at_once(search)
        while True:
            try:
                self._former.check()
            except NodeLostError as e:
                self._note_failure(search, e, Next(tuple(self._former.stages), is_moved=False))
            following, at_once = at_once or self._find(search), None
            if following is None:
                pause(POLL_S)
                continue
            self._suspect(search)
            try:
                beside = search.answering.difference(following.names)
                ring = self._former.form(replace(following, fresh=search.fresh(following), beside=beside))
            except MdiError as e:
                self._note_failure(search, e, following)
                continue
            self._end(search, following)
            self._is_busy, self.trouble = False, ""
            return ring

    def _begin(self, search: Search, error: RingError) -> None:
        if self.texts.first_token_s is not None:
            self._records.end(self.texts.first_token_s)
        search.last_s = self.texts.last_token_s or time.perf_counter()
        search.processes_before = dict(self._former.processes)
        search.processes = dict(self._former.processes)
        search.before = {stage.name: stage for stage in self._former.stages}
        self.trouble = f"{error}; {NOT_YET if isinstance(self.texts, NoTexts) else 'the texts wait'}"
        logger.warning("warning: %s", self.trouble)
        if isinstance(error, NodeLostError):
            self._lose(search, error)

    def _suspect(self, search: Search) -> None:
        """Once a search: which texts may have brought a node down. One that is silent was halted by something else."""
        ended = search.gone | search.failed - search.left
        if search.is_judged or not ended & search.suspected:
            return
        search.is_judged = True
        common = self._suspects.take(self.texts.in_flight, self.texts.n_known)
        if len(common) == 1:
            (seq_id,) = common
            logger.warning("warning: a text is ended, because two nodes in a row were lost while they computed it")
            self.texts.cancel(seq_id, BROUGHT_DOWN)
        elif common:
            self.texts.isolate(common)

    def _at_once(self, search: Search) -> Next | None:
        """The same ring again, without asking the nodes, if a node reported its failure: it lives, and so may all others."""
        error = search.error
        has_failed = isinstance(error, NodeLostError) and error.node in search.failed and error.code == MdiError.code
        if not has_failed or not all(self.may_use(name) for name in search.failed):
            return None
        return Next(tuple(self._former.stages), is_moved=False)

    def _lose(self, search: Search, error: NodeLostError) -> None:
        """A node was reported lost. It may still live, if only a connection broke."""
        search.error = error
        if error.node != self._former.stages[0].name:
            search.suspected.add(error.node)
            if error.code == STUCK:
                search.unfit.add(error.node)
            elif error.code != "lost":
                search.failed.add(error.node)
            if error.code == "left":
                search.left.add(error.node)
            self._absences.add(error.node, time.monotonic())

    def _note_failure(self, search: Search, error: MdiError, tried: Next) -> None:
        """A ring could not be formed: without the node that was in the way it may be. Raises `error` if that is no node."""
        logger.debug("the ring could not be formed: %s", error)
        search.n_failures += 1
        if not isinstance(error, NodeLostError) or search.n_failures > N_FAILURES:
            raise error
        self.trouble = f"{error}; the texts wait"
        logger.warning("warning: %s", error)
        blocks = next((stage for stage in tried.stages if stage.name == error.node), None)
        if error.code == "memory" and tried.is_moved and blocks is not None and blocks.stop - blocks.start > 1:
            search.most[error.node] = blocks.stop - blocks.start - 1
            return
        if error.code in UNFIT:
            search.unfit.add(error.node)
        self._lose(search, error)
        search.since = time.monotonic()

    def _find(self, search: Search) -> Next | None:
        """Which nodes replace the lost ones; None if this must wait.

        Raises:
            RingError: no node can, and there is no node to wait for.
        """
        ring = self._former.stages
        awaited = frozenset(stage.name for stage in ring[1:]) - search.suspected
        roll = call_roll(self._clients, awaited, ASK_S)
        now = time.monotonic()
        search.answering = frozenset(roll.answers)
        search.processes.update({name: answer.process for name, answer in roll.answers.items()})
        then = search.processes_before
        search.gone |= roll.gone | {
            name for name in roll.answers if name in then and search.processes[name] != then[name]
        }
        present = frozenset(stage.name for stage in ring if self._is_present(stage, roll, search, now))
        lost = [stage for stage in ring if stage.name not in present]
        if any(self._may_live(stage.name, roll, search, now) for stage in lost):
            return None
        spares = self._waiting(ring, roll, search, now)
        if (found := in_place(ring, present, spares)) is not None:
            return found
        if now < search.since + self._patience_s(lost, search):
            return None  # they may be back
        if (found := with_the_rest(ring, present, spares, search.most, self._cut)) is not None:
            return found
        if any(
            name not in search.unfit and (answer.state == COMPILING or not self._absences.is_over(name, now))
            for name, answer in roll.answers.items()
        ):
            return None  # a node is present that may be used again later
        raise self._refusal(search, [stage.name for stage in lost])

    def _is_present(self, stage: Stage, roll: Roll, search: Search, now: float) -> bool:
        """Whether a node of the ring can take its place again: it lives, or was started again."""
        if stage.name == self._former.stages[0].name:
            return True
        answer = roll.answers.get(stage.name)
        if answer is None or answer.is_leaving or stage.name in search.unfit:
            return False
        if stage.name in search.gone and answer.state == COMPILING:
            return False  # it was started again, and that may take minutes
        if stage.name in search.left and answer.process == self._former.processes.get(stage.name):
            return False
        return self._absences.is_over(stage.name, now)

    def _may_live(self, name: str, roll: Roll, search: Search, now: float) -> bool:
        """Whether a node that does not answer may only be slow, because no node reported it lost."""
        is_silent = name not in roll.answers and name not in roll.gone
        return is_silent and name not in search.suspected and now < search.since + self._silence_s

    def _waiting(self, ring: Sequence[Stage], roll: Roll, search: Search, now: float) -> list[str]:
        """Nodes outside of the ring that can take blocks, spares first."""
        used = {stage.name for stage in ring}
        free = [
            client.node.name
            for client in self._clients
            if client.node.name not in used | search.unfit
            and (answer := roll.answers.get(client.node.name)) is not None
            and answer.is_free
            and self._absences.is_over(client.node.name, now)
        ]
        return sorted(free, key=lambda name: name not in self._spares)

    def _patience_s(self, lost: Sequence[Stage], search: Search) -> float:
        """How long to wait for lost nodes to be back before their blocks go to others."""
        is_awaited = any(stage.name not in search.unfit and stage.name not in search.left for stage in lost)
        return self._silence_s if is_awaited else 0.0

    def _refusal(self, search: Search, lost: Sequence[str]) -> RingError:
        names = ", ".join(lost)
        words = f"{search.error}; no other nodes can hold the blocks of {names}"
        if isinstance(search.error, NodeLostError):
            return NodeLostError(search.error.node, words, search.error.code)
        return RingError(words)

    def _end(self, search: Search, following: Next) -> None:
        search.processes.update(self._former.processes)
        lost = self._replaced(search, following)
        self._records.begin(lost, search.last_s)
        differs = self._note_differences()
        for name in lost:
            by = takers(search.before[name], self._former.stages)
            self._records.replace(name, by, self._former.restored_by, differs)
            if name not in search.suspected:
                self._absences.add(name, time.monotonic())
            logger.info("%s's blocks are now on %s", name, ", ".join(by))
        logger.info("the ring goes on after %.1f s", time.monotonic() - search.began)

    def _note_differences(self) -> dict[int, int]:
        """Of the texts whose tokens may be others from here on, how many ids they have."""
        differs = {} if self._former.is_exact else dict(self.texts.n_known)
        for seq_id, n_ids in differs.items():
            self.differs_from.setdefault(seq_id, n_ids)
        if differs:
            logger.warning("warning: %s", MAY_DIFFER)
        return differs

    def _replaced(self, search: Search, following: Next) -> list[str]:
        """Nodes that were lost: said to be, not in the ring any more, or in it with another process."""
        then, now = search.processes_before, search.processes
        return [
            name
            for name in search.before
            if name in search.suspected or name not in following.names or now.get(name) != then.get(name, now.get(name))
        ]
