"""What the loop of a run does about losses, with nodes that only exist as what they answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mdi.control.messages import COMPILING
from mdi.errors import Code, EngineError, MdiError, NodeLostError, RingError, UsageError
from mdi.run.loop import RingLoop
from mdi.run.policy import BROUGHT_DOWN, Answer, Better, Form, Lost, Policy, Roll, Stage, Wait

NAMES = ("starter", "a", "b")


class World:
    """Nodes, a ring, texts, and a clock that only goes on when somebody waits: former, engine and cancel of the loop.

    Attributes:
        alive: process number of each node that answers; `silent` are those that do not, and are not known to be gone.
        states: what they answer, if that is not IDLE.
        refusals: what happens when a ring is formed, in order; None is that it can be.
    """

    ring = None
    sent: Any = SimpleNamespace(counts={})
    is_isolating = False

    def __init__(self, spares: Sequence[str] = (), processes: Sequence[str] = ("a", "b")) -> None:
        self.now = 1000.0
        self.alive = {name: f"{name}-1" for name in ("a", "b", *spares)}
        self.states: dict[str, str] = {}
        self.silent: set[str] = set()
        self.formed: list[tuple[str, ...]] = []
        self.troubles: list[str] = []  # what the policy said when each ring was formed
        self.counts: list[tuple[int, ...]] = []
        self.refusals: list[MdiError | None] = []
        self.at: dict[float, Callable[[], None]] = {}
        self.is_cancelled = False
        self.is_replayed = False
        self.is_exact = True
        self.told_of: list[RingError] = []  # losses that whoever started the nodes reports
        self.reached: dict[str, str] = {}
        # Texts
        self.last_token_s: float | None = 5.0
        self.first_token_s: float | None = None
        self.in_flight: dict[int, tuple[int, int]] = {}
        self.n_known: dict[int, int] = {}
        self.isolated: list[frozenset[int]] = []
        self.cancelled: list[tuple[int, str]] = []
        clients: Any = [SimpleNamespace(node=SimpleNamespace(name=name)) for name in (*spares, "a", "b")]
        stages = [Stage(name, 2 * k, 2 * k + 2) for k, name in enumerate(NAMES)]
        me: Any = self
        self.policy = Policy(stages, spares, self.cut, 6.0)
        self.policy.formed(stages, {name: f"{name}-1" for name in processes}, self.now)
        self.loop = RingLoop(me, self.policy, clients, me, me, "starter", self.roll, lambda: self.now)
        self.loop.engine = me

    @contextlib.contextmanager
    def attempt(self) -> Iterator[World]:
        yield self

    def wait(self, seconds: float) -> None:
        self.now += max(0.0, seconds)
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()
        self.check()

    def roll(self, clients: Any, awaited: frozenset[str], timeout_s: float) -> Roll:
        names = {client.node.name for client in clients}
        answers = {
            name: Answer(name, p, self.states.get(name, "IDLE"), 1 << 30, False)
            for name, p in self.alive.items()
            if name in names
        }
        return Roll(answers, frozenset(names - answers.keys() - self.silent))

    def cut(self, stages: Sequence[Stage], most: Mapping[str, int]) -> tuple[int, ...] | None:
        if len(stages) < 2:
            return None
        own = min(6 // len(stages), most.get(stages[0].name, 6))
        rest = 6 - own
        counts = [rest // (len(stages) - 1)] * (len(stages) - 1)
        return (own, *counts[:-1], rest - sum(counts[:-1]))

    def form(self, following: Form, cancel: Any, rows: Any = None) -> Any:
        self.formed.append(following.names)
        self.troubles.append(self.policy.trouble)
        self.counts.append(following.counts)
        error = self.refusals.pop(0) if self.refusals else None
        if error is not None:
            raise error
        return SimpleNamespace(
            stages=following.stages, processes={name: self.alive[name] for name in following.names[1:]}, memory=None,
            stage=SimpleNamespace(at_starter=None),
            replay=SimpleNamespace(kept={}, is_by_starter=False) if self.is_replayed else None,
            has_fresh=True, is_exact=self.is_exact, n_frames=1, may_guess=True, is_deep=True, prefixes=None,
        )  # fmt: skip

    def check(self) -> None:
        if self.is_cancelled:
            raise EngineError("ended")
        if self.told_of:
            raise self.told_of.pop()

    def isolate(self, seq_ids: frozenset[int]) -> None:
        self.isolated.append(seq_ids)

    def cancel(self, seq_id: int, reason: str) -> None:
        self.cancelled.append((seq_id, reason))

    def lose(self, name: str, code: str = "lost") -> RingError:
        """A node dies, and somebody says so."""
        self.alive.pop(name, None)
        return NodeLostError(name, f"{name} is lost", Code(code))

    def recover(self, error: RingError) -> None:
        """The ring broke: find another one."""
        self.loop.next_ring(Lost(error, dict(self.in_flight), dict(self.n_known)))

    def move(self, form: Form) -> None:
        """A ring that is better, after the present one was left."""
        assert self.policy.next(Better(form, self.policy.ring), self.now) == form
        self.loop.next_ring(form)

    def told(self) -> list[tuple[str, str]]:
        return [(one.node, ", ".join(one.replaced_by)) for one in self.loop.recoveries]


def test_a_spare_is_taken_at_once() -> None:
    world = World(["x"])
    world.recover(world.lose("a"))
    assert world.formed == [("starter", "x", "b")] and world.now == 1000.0
    assert world.told() == [("a", "x")]
    world.first_token_s = 6.5
    assert [one.seconds for one in world.loop.recoveries] == [1.5]


def test_why_the_texts_wait_is_said_until_they_go_on() -> None:
    world = World(["x", "y"])
    assert world.policy.trouble == ""
    world.refusals = [NodeLostError("x", "x is lost, too", Code.LOST)]
    world.recover(world.lose("a"))
    assert world.troubles == ["a was lost; its blocks move to x", "a was lost; its blocks move to x"], "x has lived on"
    assert world.policy.last_loss == "a was lost; its blocks move to x"
    assert world.policy.trouble == ""
    world.move(Form(world.policy.ring, is_moved=True))
    assert world.troubles[2:] == ["blocks move to other nodes; the texts wait"] and world.policy.trouble == ""


def test_a_node_that_was_started_anew_has_its_place_back() -> None:
    world = World()
    error = world.lose("a")
    world.at[1003.0] = lambda: world.alive.update(a="a-2")
    world.recover(error)
    assert world.formed == [NAMES] and 1003.0 <= world.now < 1004.0 and world.told() == [("a", "a")]


def test_before_the_first_token_a_recovery_begins_with_the_loss() -> None:
    world = World()
    world.last_token_s, lost_s = None, world.now
    error = world.lose("a")
    world.at[1003.0] = lambda: world.alive.update(a="a-2")
    world.recover(error)
    world.first_token_s = world.now + 1.0
    assert [one.seconds for one in world.loop.recoveries] == [world.now + 1.0 - lost_s]


def test_without_a_spare_the_others_take_the_blocks_when_it_is_not_back() -> None:
    world = World()
    world.recover(world.lose("a"))
    assert world.formed == [("starter", "b")] and world.counts == [(3, 3)]
    assert 1006.0 <= world.now < 1007.0 and world.told() == [("a", "starter, b")]


def test_a_node_that_was_told_to_end_is_not_waited_for() -> None:
    world = World()
    error = NodeLostError("a", "a was asked to end", Code.LEFT)  # it still answers
    world.recover(error)
    assert world.formed == [("starter", "b")] and world.now == 1000.0


def test_a_node_that_is_to_end_while_another_is_lost_has_no_ring_without_it() -> None:
    """The loss is dealt with when it is told of; the run goes on until then."""
    world = World()
    for has_ended in (True, False):
        answers = {"a": Answer("a", "a-1", "IDLE", 1 << 30, True)}
        gone = frozenset({"b"}) if has_ended else frozenset[str]()
        assert world.policy.without("a", Roll(answers, gone), world.now) is None
    assert not world.policy.is_searching


def test_two_nodes_at_once() -> None:
    world = World(["x", "y"])
    world.alive.pop("b")
    world.recover(world.lose("a"))
    assert world.formed == [("starter", "x", "y")] and world.told() == [("a", "x"), ("b", "y")]


def test_a_spare_that_dies_while_the_ring_is_formed() -> None:
    world = World(["x", "y"])
    lost = world.lose("a")
    form = world.form

    def die(*args: Any) -> Any:
        world.form = form  # type: ignore[method-assign]
        world.refusals = [world.lose("x")]
        return form(*args)

    world.form = die  # type: ignore[method-assign]
    world.recover(lost)
    assert world.formed == [("starter", "x", "b"), ("starter", "y", "b")] and world.told() == [("a", "y")]


def test_a_broken_connection_between_living_nodes_loses_nobody() -> None:
    world = World(["x"])
    world.recover(NodeLostError("b", "b is lost: the connection broke"))
    assert world.formed == [NAMES]


def test_who_is_silent_and_not_said_to_be_lost_gets_time() -> None:
    world = World(["x"])
    world.silent.add("b")
    process = world.alive.pop("b")
    world.at[1002.0] = lambda: world.alive.update(b=process)
    world.recover(world.lose("a"))
    assert world.formed == [("starter", "x", "b")] and 1002.0 <= world.now < 1003.0


def test_a_node_that_comes_and_goes_waits() -> None:
    world = World(["x"])
    for n in (2, 3):
        world.lose("a")
        world.alive["a"] = f"a-{n}"
        world.recover(NodeLostError("a", "a is lost"))
    assert world.formed == [NAMES, ("starter", "x", "b")], "the second time the spare is taken"


def test_a_node_with_too_little_memory_gets_fewer_blocks() -> None:
    world = World()
    world.refusals = [NodeLostError("starter", "it does not fit", Code.MEMORY)]
    world.recover(world.lose("a"))
    assert world.counts == [(3, 3), (2, 4)]


def test_a_spare_that_cannot_hold_the_blocks_is_passed_over() -> None:
    world = World(["x", "y"])
    world.refusals = [NodeLostError("x", "x has no such device", Code.USAGE)]
    world.recover(world.lose("a"))
    assert world.formed == [("starter", "x", "b"), ("starter", "y", "b")]


@pytest.mark.parametrize("error", [EngineError("no memory"), RingError("no connection"), UsageError("no disk")])
def test_a_move_that_fails_ends_no_run(error: MdiError) -> None:
    world = World()
    world.refusals = [error]
    moved = Form((Stage("starter", 0, 1), Stage("a", 1, 4), Stage("b", 4, 6)), is_moved=True)
    before = world.policy.ring
    world.move(moved)
    assert world.counts == [(1, 3, 2), (2, 2, 2)] and world.policy.ring == before and not world.policy.is_searching
    assert world.policy.next(Better(moved, before), world.now) == Wait(float("inf")), "it is not tried again"
    assert world.told() == [], "no node was lost"


def test_the_end_of_the_run_ends_a_move() -> None:
    world = World()
    world.is_cancelled = True
    with pytest.raises(EngineError):
        world.move(Form((Stage("starter", 0, 3), Stage("a", 3, 6)), is_moved=True))
    assert world.formed == []


def test_nothing_fits() -> None:
    world = World()
    world.alive.pop("b")
    with pytest.raises(NodeLostError) as caught:
        world.recover(world.lose("a"))
    assert caught.value.node == "a" and world.formed == [] and world.now < 1007.0


def test_the_end_of_the_run_ends_the_search() -> None:
    world = World()
    world.at[1001.0] = lambda: setattr(world, "is_cancelled", True)
    with pytest.raises(EngineError):
        world.recover(world.lose("a"))


def test_what_no_other_ring_can_mend_is_raised() -> None:
    world = World(["x"])
    world.refusals = [EngineError("the disk of the starter broke")]
    with pytest.raises(EngineError):
        world.recover(world.lose("a"))


def test_rings_that_never_come_about_are_not_tried_for_ever() -> None:
    world = World(["x"])
    world.refusals = [NodeLostError("starter", "nobody reaches the starter")] * 1000
    with pytest.raises(NodeLostError):
        world.recover(world.lose("a"))
    assert len(world.formed) < 100


def test_a_text_that_brings_down_two_nodes_is_ended_alone() -> None:
    world = World(["x", "y"])
    world.in_flight = {4: (10, 11), 5: (7, 8)}
    world.recover(world.lose("a"))
    assert not world.cancelled
    world.in_flight = {4: (0, 11)}
    world.recover(world.lose("x"))
    assert world.cancelled == [(4, BROUGHT_DOWN)] and not world.isolated
    world.in_flight = {5: (0, 64)}


def test_a_text_that_has_got_tokens_since_has_brought_no_node_down() -> None:
    """After a loss that nobody is suspected for it is a prompt again, and so is what was under way at the loss before."""
    world = World(["x", "y"])
    world.in_flight, world.n_known = {4: (10, 11)}, {4: 11}
    world.recover(world.lose("a"))
    world.in_flight, world.n_known = {4: (0, 16)}, {4: 16}
    world.recover(world.lose("x"))
    assert not world.cancelled and not world.isolated
    world.recover(world.lose("y"))
    assert world.cancelled == [(4, BROUGHT_DOWN)]


def test_a_halted_node_was_not_brought_down_by_a_text() -> None:
    world = World(["x", "y"])
    world.in_flight = {4: (10, 11)}
    world.recover(world.lose("a"))
    world.in_flight = {4: (0, 11)}
    world.silent.add("x")
    world.recover(world.lose("x"))
    assert not world.cancelled and not world.isolated
    world.in_flight = {4: (0, 11)}
    world.recover(world.lose("y"))
    assert world.cancelled == [(4, BROUGHT_DOWN)], "the one before counts still"


def test_several_tries_after_one_loss_are_one_loss() -> None:
    """A ring that cannot be formed at once has computed nothing: no text is suspected for that."""
    world = World(["x", "y"])
    world.in_flight = {4: (10, 11)}
    world.refusals = [NodeLostError("x", "x is lost", Code.LOST), None]
    world.recover(world.lose("a"))
    assert len(world.formed) == 2 and not world.cancelled and not world.isolated


def test_a_node_that_may_only_be_slow_keeps_its_place() -> None:
    """Nobody said that it was lost: it is asked for as long as it may be silent, though a spare could replace it."""
    world = World(["x", "y"])
    error = world.lose("a")
    world.alive.pop("b")
    world.silent.add("b")
    world.at[1003.0] = lambda: world.alive.update(b="b-1")
    world.recover(error)
    assert world.formed == [("starter", "x", "b")] and 1003.0 <= world.now < 1004.0


def test_a_stuck_node_is_not_used_again_and_no_text_is_suspected() -> None:
    """It answers all the time, and its process is the same."""
    world = World(["x", "y"])
    world.in_flight, world.n_known = {7: (0, 10)}, {7: 10}
    for name in ("a", "b"):
        world.recover(NodeLostError(name, "it stands still", Code.STUCK))
    assert world.formed == [("starter", "x", "b"), ("starter", "x", "y")] and world.now == 1000.0
    assert not world.cancelled and not world.isolated


def test_several_suspects_run_one_by_one() -> None:
    world = World(["x", "y"])
    world.in_flight = {4: (10, 11), 5: (7, 8)}
    world.recover(world.lose("a"))
    world.in_flight = {4: (0, 11), 5: (0, 8)}
    world.recover(world.lose("x"))
    assert world.isolated == [{4, 5}] and not world.cancelled


def test_what_is_told_of_another_loss_meanwhile_is_another_loss() -> None:
    """Whoever started the nodes sees that one has ended before anybody asks it."""
    world = World(["x", "y"])
    world.told_of = [world.lose("b")]
    world.recover(world.lose("a"))
    assert world.formed == [("starter", "x", "y")] and world.told() == [("a", "x"), ("b", "y")]


def start_again(world: World, name: str) -> RingError:
    """A node dies, and compiles its kernels after its start."""
    lost = world.lose(name)
    world.alive[name], world.states[name] = f"{name}-2", COMPILING
    return lost


def test_texts_do_not_wait_for_a_node_that_compiles_its_kernels_after_its_start() -> None:
    world = World(["x"])
    world.recover(start_again(world, "a"))
    assert world.formed == [("starter", "x", "b")]
    world.recover(start_again(world, "b"))
    assert world.formed[1:] == [("starter", "x")], "the rest can hold its blocks"


def test_the_only_nodes_are_awaited_while_they_compile() -> None:
    world = World()
    lost = [start_again(world, name) for name in ("a", "b")][0]
    world.at[1100.0] = world.states.clear
    world.recover(lost)
    assert world.formed == [("starter", "a", "b")] and world.now >= 1100.0


def test_a_node_that_compiles_before_its_first_ring_keeps_its_place() -> None:
    world = World(["x"], processes=["a"])
    world.states["b"] = COMPILING
    world.recover(world.lose("a"))
    assert world.formed == [("starter", "x", "b")]
