"""Choose the ring that a run forms next. Pure: from what is known and what has happened to a decision; it has no clock.

The first ring is a recovery from nothing: it is formed from a plan, and if a node is in the way, others replace it as in any
later ring. Every time comes as `now`, of any clock that only goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mdi.control.messages import COMPILING
from mdi.errors import Code, MdiError, NodeLostError, RingError

POLL_S = 0.1
N_FAILURES = 30  # rings that cannot be formed one after the other; a search ends sooner where nodes are lost for good
LONGEST_ABSENCE_S = 600.0
HOLDERS_S = 120.0  # for nodes of a swarm to take over blocks that nobody holds any more
BROUGHT_DOWN = "brought down nodes"  # finish_reason of a text that did

logger = logging.getLogger("mdi")


# Rings


@dataclass(frozen=True)
class Stage:
    """A node of a ring with its blocks, half-open; (0, 0) for one that has none yet.

    Attributes:
        is_hot: whether it is a hot spare: the next node has the same blocks, and gets the frames as they come to this one,
            which computes them as well.
    """

    name: str
    start: int
    stop: int
    is_hot: bool = field(default=False, compare=False)  # the order says it, too


# A cut over these nodes, given what each of them has in memory, and how many blocks some of them can hold at most; None if the
# model does not fit them.
Cut = Callable[[Sequence[Stage], Mapping[str, int]], "tuple[int, ...] | None"]

# A ring in the place of one that broke, of nodes that hold their blocks already: given that ring, its nodes that are present,
# and others that may be used; None if there is none.
Held = Callable[[Sequence[Stage], frozenset[str], Sequence[str]], "Form | None"]

# A text's positions that were under way, half-open.
Span = tuple[int, int]


# Decisions


@dataclass(frozen=True)
class Form:
    """Form this ring.

    Attributes:
        stages: starter first.
        is_moved: whether nodes of the old ring get other blocks.
        fresh: nodes that were not in the old ring, or were started again: they have no caches.
        outside: present nodes that are not in the ring; they may have weights that others need.
        ended: a text to be ended first, because it has brought down two nodes.
        isolated: texts of which one may have, so that they must run one by one.
    """

    stages: tuple[Stage, ...]
    is_moved: bool
    fresh: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    ended: int | None = field(default=None, compare=False)
    isolated: frozenset[int] = field(default=frozenset(), compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stage.stop - stage.start for stage in computing(self.stages))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The blocks of each node."""
        return [(stage.start, stage.stop) for stage in self.stages]

    @property
    def hot(self) -> frozenset[str]:
        """Names of the hot spares."""
        return frozenset(stage.name for stage in self.stages if stage.is_hot)


@dataclass(frozen=True)
class Wait:
    """Until a time, then ask all nodes and say `Answered`; those `suspected` to be lost get less time to answer."""

    until: float
    suspected: frozenset[str] = frozenset()


@dataclass(frozen=True)
class End:
    """End the run, with an error."""

    error: MdiError


Decision = Form | Wait | End


# Events


@dataclass(frozen=True)
class Answer:
    """A node's own report.

    Attributes:
        process: a number that its process drew: another one than before means that it was started again.
        available_bytes: memory for weights and caches.
        is_leaving: whether it is to end, and waits until other nodes have its blocks.
    """

    name: str
    process: str
    state: str
    available_bytes: int
    is_leaving: bool

    @property
    def is_free(self) -> bool:
        """Whether a run can be begun with it."""
        return self.state in ("IDLE", "READY") and not self.is_leaving

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> Answer:
        memory = data.get("memory")
        free = memory.get("available_bytes") if isinstance(memory, dict) else None
        n_free = free if isinstance(free, int) and not isinstance(free, bool) else 0
        is_leaving = data.get("leaving") is True
        return cls(name, str(data.get("process", "")), str(data.get("state", "")), n_free, is_leaving)


@dataclass(frozen=True)
class Roll:
    """The nodes that answered, by name, and those whose process is certainly gone; all others are silent."""

    answers: dict[str, Answer]
    gone: frozenset[str]


@dataclass(frozen=True)
class Lost:
    """The present ring broke, or a node is about to leave it.

    Attributes:
        in_flight: positions of each text in the frames that were lost.
        n_known: tokens that each text has.
    """

    error: RingError
    in_flight: Mapping[int, Span] = field(default_factory=dict)
    n_known: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NotFormed:
    """A ring could not be formed; None was `tried` if a node was lost before.

    Attributes:
        reached: of the secondaries that were reached, the numbers that their processes drew.
    """

    error: MdiError
    tried: Form | None = None
    reached: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """All nodes were asked."""

    roll: Roll


@dataclass(frozen=True)
class Better:
    """A ring that would be faster than `ring`, which is the present one or was it."""

    form: Form
    ring: tuple[Stage, ...]


Event = Lost | NotFormed | Answered | Better


# Cuts


def in_place(ring: Sequence[Stage], present: frozenset[str], spares: Sequence[str]) -> Form | None:
    """The same cut, where spares take the places of nodes that are not present; None if there are too few of them.

    Args:
        present: nodes of the ring that live, with their memory or started again.
        spares: best first.
    """
    free = [name for name in spares if name not in {stage.name for stage in ring}]
    stages = []
    for stage in ring:
        if stage.name not in present:
            if not free:
                return None
            stage = Stage(free.pop(0), stage.start, stage.stop)
        stages.append(stage)
    return Form(tuple(stages), is_moved=False)


def computing(ring: Sequence[Stage]) -> tuple[Stage, ...]:
    """The nodes whose rows go round: all but the hot spares."""
    return tuple(stage for stage in ring if not stage.is_hot)


def taken_over(ring: Sequence[Stage], lost: Callable[[str], bool]) -> tuple[Stage, ...]:
    """The nodes that compute, where hot spares take the places of those that they stand before.

    Args:
        lost: whether a node, by its name, is not there, or has no caches.
    """
    found, spare = [], None
    for stage in ring:
        if stage.is_hot:
            spare = None if lost(stage.name) else stage
            continue
        found.append(replace(spare, is_hot=False) if spare is not None and lost(stage.name) else stage)
        spare = None
    return tuple(found)


def with_hot_spares(
    stages: Sequence[Stage], wanted: Sequence[str], spares: Sequence[str], before: Sequence[Stage] = (), may_load: bool = True
) -> tuple[Stage, ...]:  # fmt: skip
    """A ring with a hot spare before each node that is to have one, as far as there are spares.

    Args:
        stages: without hot spares, starter first.
        wanted: nodes that are to have one. In the place of a name that is not in the ring, as "auto" or that of a lost node,
            one of the others is taken, those with the most blocks first: they take the longest to be restored.
        spares: nodes that may be hot spares, best first.
        before: stages of the ring before.
        may_load: whether a spare may get other blocks than it had there.
    """
    names = {stage.name for stage in stages}
    free = [name for name in spares if name not in names]
    had = {stage.name: stage for stage in before}
    guarded: dict[str, str] = {}
    for target in _targets(stages, wanted):
        ready = [
            name for name in free if (one := had.get(name)) and (one.start, one.stop) == (target.start, target.stop)
        ]
        if found := ready or (free if may_load else []):
            guarded[target.name] = found[0]
            free.remove(found[0])
    ring: list[Stage] = []
    for stage in stages:
        if (name := guarded.get(stage.name)) is not None:
            ring.append(Stage(name, stage.start, stage.stop, is_hot=True))
        ring.append(stage)
    return tuple(ring)


def _targets(stages: Sequence[Stage], wanted: Sequence[str]) -> list[Stage]:
    """As many secondaries as are wanted: those that are named, and then the largest."""
    secondaries = stages[1:]
    named = [stage for stage in secondaries if stage.name in wanted]
    others = sorted((stage for stage in secondaries if stage not in named), key=lambda stage: stage.start - stage.stop)
    return [*named, *others][: len(wanted)]


def with_the_rest(
    ring: Sequence[Stage], present: frozenset[str], spares: Sequence[str], most: Mapping[str, int], cut: Cut
) -> Form | None:
    """A new cut over the nodes that are present, and all spares in the places of lost ones; None if nothing fits."""
    free = [name for name in spares if name not in {stage.name for stage in ring}]
    holders = []
    for stage in ring:
        if stage.name in present:
            holders.append(stage)
        elif free:
            holders.append(Stage(free.pop(0), stage.start, stage.stop))
    return with_new_cut(holders, most, cut)


def with_new_cut(holders: Sequence[Stage], most: Mapping[str, int], cut: Cut) -> Form | None:
    """These nodes with another cut."""
    counts = cut(holders, most)
    if counts is None:
        return None
    stages, start = [], 0
    for holder, count in zip(holders, counts, strict=True):
        stages.append(Stage(holder.name, start, start + count))
        start += count
    return Form(tuple(stages), is_moved=True)


def present_holders(lost: Stage, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Names of the nodes that have the blocks of a lost one now."""
    if lost.start == lost.stop:
        return ()
    return tuple(s.name for s in computing(stages) if max(s.start, lost.start) < min(s.stop, lost.stop))


# Memory of losses


class Absences:
    """Lost nodes, and how long each must wait before it is used again: longer after each loss.

    Args:
        step_s: wait of a node after its second loss; after the first it may come back at once, and every further one
            doubles the time.

    Attributes:
        excluded: nodes that are not used again.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.excluded: frozenset[str] = frozenset()
        self._losses: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, name: str, now: float) -> None:
        """Node `name` was lost."""
        n = self._losses[name] = self._losses.get(name, 0) + 1
        self._until[name] = now + self.wait_s(n)

    def wait_s(self, n_losses: int) -> float:
        if n_losses < 2:
            return 0.0
        return float(min(LONGEST_ABSENCE_S, self.step_s * 2 ** min(n_losses - 2, 30)))

    def exclude(self, name: str) -> None:
        """The node is not used again."""
        self.excluded |= {name}

    def has_ended(self, name: str, now: float) -> bool:
        """Whether the node may be used again."""
        return name not in self.excluded and now >= self._until.get(name, now)


class Suspects:
    """Texts that may have brought a node down, by a fault of the kernels or by their memory: one node after the other.

    A text is suspected if the same positions of it were under way at two losses.
    """

    def __init__(self) -> None:
        self._before: dict[int, Span] = {}
        self._n_before: dict[int, int] = {}
        self._found: frozenset[int] = frozenset()

    def add(self, in_flight: Mapping[int, Span], n_known: Mapping[int, int]) -> frozenset[int]:
        """Texts that were under way with the same positions at this loss and at the one before, and got no token meanwhile.

        A single one has brought two nodes down. Of several, it is unknown which one did: they must run one by one, and the
        next loss tells more.

        Args:
            in_flight: positions of each text in the frames that were lost; empty where the ring had not begun.
            n_known: tokens that each text has. One that has got some since has had its positions computed without harm.
        """
        if not in_flight:
            return frozenset()  # nothing was computed
        common = {
            seq_id
            for seq_id, span in in_flight.items()
            if _overlap(span, self._before.get(seq_id, (0, 0))) and self._n_before.get(seq_id) == n_known.get(seq_id)
        }
        self._before, self._n_before = dict(in_flight), dict(n_known)
        self._found = frozenset(common & self._found or common)
        return self._found


def _overlap(a: Span, b: Span) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


@dataclass
class Search:
    """A search for another ring in the place of one that broke.

    Attributes:
        error: the last that was said of a loss.
        began, since: times of the first loss, and of the last one.
        before, processes_before: the stages of the ring that broke, and the processes of its secondaries.
        loss: with it; None where no ring had been formed.
        processes: of nodes that have answered since.
        answering: nodes that answered when they were asked last.
        suspected: nodes that were reported lost.
        unfit: nodes that said they cannot take part.
        gone: nodes whose processes have ended; absent: nodes of the ring that cannot take part, when they were asked last.
        is_judged: whether texts were suspected for it.
        failed, left: nodes that reported their failure, and those of them that are to end.
        most: blocks that nodes have said they can hold at most.
        n_failures: rings that could not be formed.
        is_unknown: whether the node has never answered, so that it may have another address.
    """

    error: RingError
    began: float
    since: float
    before: dict[str, Stage]
    processes_before: dict[str, str]
    loss: Lost | None = None
    is_unknown: bool = False
    processes: dict[str, str] = field(default_factory=dict)
    answering: frozenset[str] = frozenset()
    suspected: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    absent: frozenset[str] = frozenset()
    is_judged: bool = False
    failed: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    most: dict[str, int] = field(default_factory=dict)
    n_failures: int = 0

    def is_fresh(self, name: str) -> bool:
        """Whether a node is not in the ring before, has another process now, or failed by itself."""
        return (
            name not in self.before
            or name in self.failed
            or self.processes.get(name) != self.processes_before.get(name)
        )


class Policy:
    """Belongs to one thread at a time; `may_use` and `refused` may be read from any.

    Args:
        ring: the first, as it is planned.
        spares: names of nodes that get blocks only in the place of lost ones.
        cut: cuts the model over nodes that are left.
        silence_s: a node that is silent for so long is lost.
        is_fixed: no ring replaces another one.
        is_measured: whether all nodes have measured themselves, and were there then.
        held: finds rings of nodes that hold their blocks for all runs; None: nodes get their blocks from this run.
        hot: nodes that are to have a hot spare, see `with_hot_spares`; `ring` has these already.

    Attributes:
        ring: the stages of the ring that was formed last.
        processes: of its secondaries, the numbers that their processes drew.
        trouble: why the texts wait, in words; "" while a ring is closed.
        last_loss: nodes of the last loss and who has their blocks, in words; "" if they came back.
        refused: the last ring that was to replace a closed one without a loss and could not be formed.
    """

    def __init__(
        self, ring: Sequence[Stage], spares: Sequence[str], cut: Cut, silence_s: float, is_fixed: bool = False,
        is_measured: bool = False, held: Held | None = None, hot: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.ring = tuple(ring)
        self._hot = tuple(hot)
        self._first = frozenset(stage.name for stage in ring)
        self.processes: dict[str, str] = {}
        self.trouble = self.last_loss = self._told = ""
        self.refused: Form | None = None
        self._spares = frozenset(spares)
        self._cut = cut
        self._silence_s = silence_s
        self._is_fixed = is_fixed
        self._is_measured = is_measured
        self._held = held
        self._has_begun = False  # whether a ring was closed
        self._search: Search | None = None
        self.absences = Absences(silence_s)
        self._suspects = Suspects()

    def next(self, event: Event | None, now: float) -> Decision:
        """The next step; the first event is None."""
        if event is None:
            return Form(self.ring, is_moved=False)
        if isinstance(event, Better):
            form = event.form
            if not form.hot:
                present = [stage.name for stage in self.ring if stage.is_hot]
                form = replace(form, stages=with_hot_spares(form.stages, self._hot, present, self.ring))
            is_wanted = self._search is None and event.ring == self.ring and form != self.refused
            return form if is_wanted else Wait(float("inf"))
        if isinstance(event, Answered):
            return self._find(event.roll, now)
        if self._is_fixed:
            return End(event.error)
        if isinstance(event, Lost):
            search = self._begin(event.error, now, event)
            return self._at_once() or self._ask(search, now)
        return self._after_failure(event, now)

    def formed(
        self, ring: Sequence[Stage], processes: Mapping[str, str], now: float
    ) -> tuple[dict[str, Stage], float | None]:
        """A ring is closed: the nodes that were lost before, with the blocks that they had, and how long it was sought."""
        search, self._search = self._search, None
        lost: dict[str, Stage] = {}
        if search is not None:
            search.processes.update(processes)
            then, latest, names = search.processes_before, search.processes, {stage.name for stage in ring}
            for name, stage in search.before.items():
                if stage.is_hot and name not in search.suspected:
                    continue  # a hot spare may be left out: its node has other blocks now
                is_new = latest.get(name) != then.get(name, latest.get(name))
                if name in search.suspected or name not in names or is_new:
                    lost[name] = stage
                    if name not in search.suspected:
                        self.absences.add(name, now)
        self.ring, self.processes, self.trouble = tuple(ring), dict(processes), ""
        self._has_begun = True
        return lost, None if search is None else now - search.began

    def may_use(self, name: str, now: float) -> bool:
        """Whether a node has waited long enough since it was lost."""
        return self.absences.has_ended(name, now)

    # The next ring, while the present one goes on

    def with_spare(self, ring: Sequence[Stage], free: Sequence[str]) -> Form | None:
        """The ring with the hot spares that it lacks; None if it lacks none, or no node can be one. From any thread.

        Args:
            free: nodes that are present and have no blocks.
        """
        able = sorted((n for n in free if n in self._spares | self._first), key=lambda name: name not in self._spares)
        present = [stage.name for stage in ring if stage.is_hot]
        stages = with_hot_spares(computing(ring), self._hot, [*present, *able], ring)
        fresh = frozenset(stage.name for stage in stages) - {stage.name for stage in ring}
        return Form(stages, is_moved=False, fresh=fresh) if fresh and len(stages) > len(ring) else None

    def without(self, name: str, roll: Roll, now: float) -> Form | None:
        """The ring that will follow when node `name` has left, as far as that can be seen; None if it cannot."""
        processes = {**self.processes, **{one: answer.process for one, answer in roll.answers.items()}}
        search = Search(
            NodeLostError(name, "", Code.LEFT), now, now, {stage.name: stage for stage in self.ring}, dict(self.processes),
            processes=processes, answering=frozenset(roll.answers), suspected={name}, failed={name}, left={name},
        )  # fmt: skip
        found = self._ring_of(search, roll, now)
        return self._completed(search, found) if isinstance(found, Form) else None

    def refuse(self, form: Form, error: MdiError, failed: str | None, now: float) -> None:
        """A better ring could not be prepared; the present one goes on.

        Args:
            failed: the node that was in the way, if one was. If it was lost, it waits, as after any loss; else this ring is
                not tried again.
        """
        is_lost = isinstance(error, NodeLostError) or error.code.leaves
        if is_lost and failed is not None and failed not in {stage.name for stage in self.ring}:
            self.absences.add(failed, now)
        else:
            self.refused = form

    @property
    def is_searching(self) -> bool:
        return self._search is not None

    # Losses

    def _begin(self, error: RingError, now: float, loss: Lost | None) -> Search:
        self._search = search = Search(
            error, now, now, {stage.name: stage for stage in self.ring}, dict(self.processes), loss,
            processes=dict(self.processes),
        )  # fmt: skip
        search.unfit |= self.absences.excluded
        if isinstance(error, NodeLostError):
            self._lose(search, error, now)
            search.is_unknown = not (self._has_begun or self._is_measured or error.node in self.processes)
        self._note_loss(error, "the texts wait" if self._has_begun else "others may take its place")
        if not search.is_unknown:
            logger.warning("warning: %s", self._told)
        return search

    def _note_loss(self, error: RingError, then: str) -> None:
        """A few words for people who wait; the reason is in the log."""
        self._told, self.last_loss = f"{error}; {then}", ""
        self.trouble = f"{error.node} was lost; {then}" if isinstance(error, NodeLostError) else self._told

    def _lose(self, search: Search, error: NodeLostError, now: float) -> None:
        """A node was reported lost. It may still live, if only a connection broke."""
        search.error = error
        if error.node != self.ring[0].name:
            search.suspected.add(error.node)
            if error.code is Code.STUCK:
                search.unfit.add(error.node)
            elif error.code is not Code.LOST:
                search.failed.add(error.node)
            if error.code is Code.LEFT:
                search.left.add(error.node)
            self.absences.add(error.node, now)

    def _by_hot_spare(self, search: Search) -> Form | None:
        """The ring without the lost nodes, without asking the others, if hot spares have what they had or are what was lost."""
        lost = search.suspected | search.unfit
        stages = taken_over(self.ring, lost.__contains__)
        if not search.suspected or len(stages) == len(self.ring) or any(stage.name in lost for stage in stages):
            return None
        return self._completed(search, Form(stages, is_moved=False))

    def _at_once(self) -> Form | None:
        """A ring that needs no question: see `_by_hot_spare`; and the same one again, if a node reported its failure: it lives,
        and so may all others."""
        search = self._search
        assert search is not None
        error = search.error
        if (found := self._by_hot_spare(search)) is not None:
            return found
        has_failed = isinstance(error, NodeLostError) and error.node in search.failed and error.code is Code.FAILED
        if not has_failed or any(stage.name in search.unfit for stage in self.ring):
            return None
        if not all(self.absences.has_ended(name, search.began) for name in search.failed):
            return None
        return self._completed(search, Form(self.ring, is_moved=False))

    def _after_failure(self, event: NotFormed, now: float) -> Decision:
        """Without the node that was in the way the ring may be formed; an error that names none ends the run.

        A ring that was to replace a closed one without a loss ends nothing: the old one is formed again.
        """
        error, search = event.error, self._search
        if search is None and self._has_begun:
            if not isinstance(error, NodeLostError):  # a node that was lost waits, as after any loss
                self.refused = event.tried
            loss = error if isinstance(error, NodeLostError) else RingError(f"blocks were not moved: {error}")
            return self._ask(self._begin(loss, now, None), now)
        if not isinstance(error, RingError) or not (isinstance(error, NodeLostError) or self._held is not None):
            return End(error)
        if search is None:
            self.processes = dict(event.reached)
            search = self._begin(error, now, None)
            found = self._by_hot_spare(search)
            if found is not None and search.is_unknown:
                search.is_unknown = False
                logger.warning("warning: %s", self._told)
            return found or self._ask(search, now)
        logger.debug("the ring could not be formed: %s", error)
        search.n_failures += 1
        if search.n_failures > N_FAILURES:
            return End(error)
        self._note_loss(error, "the texts wait")
        logger.warning("warning: %s", error)
        tried = event.tried
        name = getattr(error, "node", "")
        blocks = None if tried is None else next((stage for stage in tried.stages if stage.name == name), None)
        is_moved = tried is not None and tried.is_moved
        can_have_less = blocks is not None and not blocks.is_hot and blocks.stop - blocks.start > 1
        if error.code.less_fits and is_moved and blocks is not None and can_have_less:
            search.most[name] = blocks.stop - blocks.start - 1
            return self._ask(search, now)
        if isinstance(error, NodeLostError):  # else a node of a swarm left, and which one is seen when all are asked
            if error.code.unfit:
                search.unfit.add(error.node)
            self._lose(search, error, now)
        search.since = now
        return self._ask(search, now)

    def _ask(self, search: Search, at: float) -> Wait:
        return Wait(at, frozenset(search.suspected))

    # Finding nodes

    def _find(self, roll: Roll, now: float) -> Decision:
        """Nodes that replace the lost ones, or a wait for them; the end if no node can, and there is none to wait for."""
        search = self._search
        assert search is not None
        search.answering = frozenset(roll.answers)
        search.processes.update({name: answer.process for name, answer in roll.answers.items()})
        then = search.processes_before
        search.gone |= roll.gone | {
            name for name in roll.answers if name in then and search.processes[name] != then[name]
        }
        if search.is_unknown:  # it was not started, or has another address: only a spare can replace it
            if not any(answer.is_free and name in self._spares for name, answer in roll.answers.items()):
                return End(search.error)
            search.is_unknown = False
            logger.warning("warning: %s", self._told)
        found = self._ring_of(search, roll, now)
        if not isinstance(found, Form):
            return found
        lost = [stage for stage in computing(tuple(search.before.values())) if stage.name not in found.names]
        moves = [(stage.name, ", ".join(by)) for stage in lost if (by := present_holders(stage, found.stages))]
        if moves:
            self.trouble = self.last_loss = "; ".join(f"{name} was lost; its blocks move to {by}" for name, by in moves)
            logger.info("%s", self.trouble)
        return self._completed(search, found)

    def _ring_of(self, search: Search, roll: Roll, now: float) -> Decision:
        present = frozenset(stage.name for stage in self.ring if self._is_present(stage, roll, search, now))
        ring = taken_over(self.ring, lambda name: name not in present or search.is_fresh(name))
        lost = [stage for stage in ring if stage.name not in present]
        search.absent = frozenset(stage.name for stage in self.ring) - present
        if any(self._may_live(stage.name, roll, search, now) for stage in lost):
            return self._ask(search, now + POLL_S)
        if self._held is not None:
            return self._ring_of_holders(self._held, search, present, roll, now)
        spares = [*self._waiting(roll, search, now), *(s.name for s in self.ring if s.is_hot and s.name in present)]
        if (found := in_place(ring, present, spares)) is not None:
            return found
        if now < search.since + self._patience_s(lost, search):
            return self._ask(search, now + POLL_S)  # they may be back
        if (found := with_the_rest(ring, present, spares, search.most, self._cut)) is not None:
            return found
        if any(
            name not in search.unfit and (answer.state == COMPILING or not self.absences.has_ended(name, now))
            for name, answer in roll.answers.items()
        ):
            return self._ask(search, now + POLL_S)  # a node is present that may be used again later
        return End(self._refusal(search, [stage.name for stage in lost]))

    def _ring_of_holders(self, held: Held, search: Search, present: frozenset[str], roll: Roll, now: float) -> Decision:
        """A ring over nodes that hold their blocks, also for other runs; others may come for HOLDERS_S."""
        used = {stage.name for stage in self.ring} | search.unfit
        others = [
            name
            for name, answer in roll.answers.items()
            if name not in used and not answer.is_leaving and self.absences.has_ended(name, now)
        ]
        if (found := held(self.ring, present, others)) is not None:
            return found
        if now < search.began + HOLDERS_S:
            return self._ask(search, now + POLL_S)
        return End(self._refusal(search, [stage.name for stage in self.ring if stage.name not in present]))

    def _completed(self, search: Search, form: Form) -> Form:
        """With all that must be known to form it, and the texts that may have brought a node down, once a search."""
        stages = with_hot_spares(
            computing(form.stages), self._hot, self._hot_spares(search), self.ring, may_load=not self._has_begun
        )  # fmt: skip
        form = replace(form, stages=stages)
        spans = {name: (stage.start, stage.stop) for name, stage in search.before.items()}
        fresh = frozenset(
            stage.name
            for stage in stages
            if search.is_fresh(stage.name) or (not form.is_moved and spans[stage.name] != (stage.start, stage.stop))
        )
        common: frozenset[int] = frozenset()
        ended_nodes = search.gone | search.failed - search.left  # one that is silent was halted by something else
        if not search.is_judged and ended_nodes & search.suspected:
            search.is_judged = True
            if search.loss is not None:
                common = self._suspects.add(search.loss.in_flight, search.loss.n_known)
        ended = next(iter(common)) if len(common) == 1 else None
        outside = search.answering.difference(form.names)
        return Form(stages, form.is_moved, fresh, outside, ended, common if len(common) > 1 else frozenset())

    def _hot_spares(self, search: Search) -> list[str]:
        """Nodes of the ring that can be hot spares of the next one; once a ring has begun, without computing anything again."""
        lost = search.suspected | search.unfit | search.absent
        found = [stage.name for stage in self.ring if stage.is_hot and stage.name not in lost]
        return [name for name in found if not (self._has_begun and search.is_fresh(name))]

    def _is_present(self, stage: Stage, roll: Roll, search: Search, now: float) -> bool:
        """Whether a node of the ring can take its place again: it lives, or was started again."""
        if stage.name == self.ring[0].name:
            return True
        answer = roll.answers.get(stage.name)
        if answer is None or answer.is_leaving or stage.name in search.unfit:
            return False
        if stage.name in search.gone and answer.state == COMPILING:
            return False  # it was started again, and that may take minutes
        if stage.name in search.left and answer.process == search.processes_before.get(stage.name):
            return False
        return self.absences.has_ended(stage.name, now)

    def _may_live(self, name: str, roll: Roll, search: Search, now: float) -> bool:
        """Whether a node that does not answer may only be slow, because no node reported it lost."""
        is_silent = name not in roll.answers and name not in roll.gone
        return is_silent and name not in search.suspected and now < search.since + self._silence_s

    def _waiting(self, roll: Roll, search: Search, now: float) -> list[str]:
        """Nodes outside of the ring that can take blocks, spares first."""
        used = {stage.name for stage in self.ring} | search.unfit
        free = [
            name
            for name, answer in roll.answers.items()
            if name not in used and answer.is_free and self.absences.has_ended(name, now)
        ]
        return sorted(free, key=lambda name: name not in self._spares)

    def _patience_s(self, lost: Sequence[Stage], search: Search) -> float:
        """How long to wait for lost nodes to be back before their blocks go to others."""
        is_awaited = any(stage.name not in search.unfit and stage.name not in search.left for stage in lost)
        return self._silence_s if is_awaited else 0.0

    def _refusal(self, search: Search, lost: Sequence[str]) -> RingError:
        words = f"{search.error}; no other nodes can hold the blocks of {', '.join(lost)}"
        if isinstance(search.error, NodeLostError):
            return NodeLostError(search.error.node, words, search.error.code)
        return RingError(words)
