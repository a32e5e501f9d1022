"""What the keeper of a ring does about losses, with nodes that only exist as what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.recovery.keeper
from mdi.control.messages import COMPILING
from mdi.errors import EngineError, MdiError, NodeLostError, RingError
from mdi.net.link import STUCK
from mdi.recovery.keeper import BROUGHT_DOWN, RingKeeper
from mdi.recovery.replacement import Next, Stage
from mdi.recovery.roll_call import Answer, Roll

NAMES = ("starter", "a", "b")


class World:
    """Nodes, a ring, and a clock that only goes on when somebody waits.

    Attributes:
        alive: process number of each node that answers; `silent` are those that do not, and are not known to be gone.
        states: what they answer, if that is not IDLE.
        refusals: what happens when a ring is formed, in order; None is that it can be.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spares: Sequence[str] = ()) -> None:
        self.now = 1000.0
        self.alive = {name: f"{name}-1" for name in ("a", "b", *spares)}
        self.states: dict[str, str] = {}
        self.silent: set[str] = set()
        self.formed: list[tuple[str, ...]] = []
        self.troubles: list[str] = []  # what the keeper said when each ring was formed
        self.counts: list[tuple[int, ...]] = []
        self.refusals: list[MdiError | None] = []
        self.at: dict[float, Callable[[], None]] = {}
        self.stages: list[Stage] = [Stage(name, 2 * k, 2 * k + 2) for k, name in enumerate(NAMES)]
        self.processes: dict[str, str] = {"a": "a-1", "b": "b-1"}
        self.is_ended = False
        self.restored_by = "tokens"
        self.is_exact = True
        # Texts
        self.last_token_s: float | None = 5.0
        self.first_token_s: float | None = None
        self.in_flight: dict[int, tuple[int, int]] = {}
        self.n_known: dict[int, int] = {}
        self.isolated: list[frozenset[int]] = []
        self.cancelled: list[tuple[int, str]] = []
        monkeypatch.setattr(mdi.recovery.keeper, "call_roll", self.roll)
        monkeypatch.setattr(
            mdi.recovery.keeper, "time", SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        )
        monkeypatch.setattr(mdi.recovery.keeper, "pause", self.wait)
        clients: Any = [SimpleNamespace(node=SimpleNamespace(name=name)) for name in (*spares, "a", "b")]
        self.keeper = RingKeeper(self, clients, spares, self.cut, 6.0)
        self.keeper.texts = self

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()

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

    def form(self, following: Next) -> Any:
        self.formed.append(following.names)
        self.troubles.append(self.keeper.trouble)
        self.counts.append(following.counts)
        error = self.refusals.pop(0) if self.refusals else None
        if error is not None:
            raise error
        self.stages = list(following.stages)
        self.processes = {name: self.alive[name] for name in following.names[1:]}
        return "ring"

    def check(self) -> None:
        if self.is_ended:
            raise EngineError("ended")

    def isolate(self, seq_ids: frozenset[int]) -> None:
        self.isolated.append(seq_ids)

    def cancel(self, seq_id: int, reason: str) -> None:
        self.cancelled.append((seq_id, reason))

    def lose(self, name: str, code: str = "lost") -> RingError:
        """A node dies, and somebody says so."""
        self.alive.pop(name, None)
        return NodeLostError(name, f"{name} is lost", code)

    def told(self) -> list[tuple[str, str]]:
        return [(one.node, ", ".join(one.replaced_by)) for one in self.keeper.recoveries]


def test_a_spare_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x"])
    assert world.keeper.after_loss(world.lose("a")) == "ring"
    assert world.formed == [("starter", "x", "b")] and world.now == 1000.0
    assert world.told() == [("a", "x")]
    world.first_token_s = 6.5
    assert [one.seconds for one in world.keeper.recoveries] == [1.5]


def test_why_the_texts_wait_is_said_until_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x", "y"])
    assert world.keeper.trouble == ""
    world.refusals = [NodeLostError("x", "x is lost, too", "lost")]
    world.keeper.after_loss(world.lose("a"))
    assert world.troubles == ["a is lost; the texts wait", "x is lost, too; the texts wait"]
    assert world.keeper.trouble == ""
    world.keeper.plan(Next(tuple(world.stages), is_moved=True))
    assert world.keeper.trouble == "", "they go on until the ring is left"
    world.keeper.after_leave()
    assert world.troubles[2:] == ["blocks move to other nodes; the texts wait"] and world.keeper.trouble == ""


def test_a_node_that_was_started_anew_has_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    error = world.lose("a")
    world.at[1003.0] = lambda: world.alive.update(a="a-2")
    world.keeper.after_loss(error)
    assert world.formed == [NAMES] and 1003.0 <= world.now < 1004.0 and world.told() == [("a", "a")]


def test_before_the_first_token_a_recovery_begins_with_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.last_token_s, lost_s = None, world.now
    error = world.lose("a")
    world.at[1003.0] = lambda: world.alive.update(a="a-2")
    world.keeper.after_loss(error)
    world.first_token_s = world.now + 1.0
    assert [one.seconds for one in world.keeper.recoveries] == [world.now + 1.0 - lost_s]


def test_without_a_spare_the_others_take_the_blocks_when_it_is_not_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.keeper.after_loss(world.lose("a"))
    assert world.formed == [("starter", "b")] and world.counts == [(3, 3)]
    assert 1006.0 <= world.now < 1007.0 and world.told() == [("a", "starter, b")]


def test_a_node_that_was_told_to_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    error = NodeLostError("a", "a was told to end", "left")  # it still answers
    world.keeper.after_loss(error)
    assert world.formed == [("starter", "b")] and world.now == 1000.0


def test_two_nodes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x", "y"])
    world.alive.pop("b")
    world.keeper.after_loss(world.lose("a"))
    assert world.formed == [("starter", "x", "y")] and world.told() == [("a", "x"), ("b", "y")]


def test_a_spare_that_dies_while_the_ring_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x", "y"])
    form = world.form

    def die(following: Next) -> Any:
        monkeypatch.setattr(world, "form", form)
        world.refusals = [world.lose("x")]
        return form(following)

    monkeypatch.setattr(world, "form", die)
    world.keeper.after_loss(world.lose("a"))
    assert world.formed == [("starter", "x", "b"), ("starter", "y", "b")] and world.told() == [("a", "y")]


def test_a_broken_connection_between_living_nodes_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x"])
    world.keeper.after_loss(NodeLostError("b", "b is lost: the connection broke"))
    assert world.formed == [NAMES]


def test_who_is_silent_and_not_said_to_be_lost_gets_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x"])
    world.silent.add("b")
    process = world.alive.pop("b")
    world.at[1002.0] = lambda: world.alive.update(b=process)
    world.keeper.after_loss(world.lose("a"))
    assert world.formed == [("starter", "x", "b")] and 1002.0 <= world.now < 1003.0


def test_a_node_that_comes_and_goes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x"])
    for n in (2, 3):
        world.lose("a")
        world.alive["a"] = f"a-{n}"
        world.keeper.after_loss(NodeLostError("a", "a is lost"))
    assert world.formed == [NAMES, ("starter", "x", "b")], "the second time the spare is taken"


def test_a_node_with_too_little_memory_gets_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.refusals = [NodeLostError("starter", "it does not fit", "memory")]
    world.keeper.after_loss(world.lose("a"))
    assert world.counts == [(3, 3), (2, 4)]


def test_a_spare_that_cannot_hold_the_blocks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x", "y"])
    world.refusals = [NodeLostError("x", "x has no such device", "usage")]
    world.keeper.after_loss(world.lose("a"))
    assert world.formed == [("starter", "x", "b"), ("starter", "y", "b")]


@pytest.mark.parametrize("error", [EngineError("no memory"), RingError("no connection")])
def test_a_move_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch, error: MdiError) -> None:
    world = World(monkeypatch)
    world.refusals = [error]
    moved = Next((Stage("starter", 0, 1), Stage("a", 1, 4), Stage("b", 4, 6)), is_moved=True)
    world.keeper.plan(moved)
    assert world.keeper.is_busy
    assert world.keeper.after_leave() == "ring"
    assert world.counts == [(1, 3, 2), (2, 2, 2)] and not world.keeper.is_busy
    assert world.keeper.refused == (moved if isinstance(error, EngineError) else None)
    assert world.told() == [], "no node was lost"


def test_the_end_of_the_run_ends_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.refusals, world.is_ended = [EngineError("ended")], True
    world.keeper.plan(Next((Stage("starter", 0, 3), Stage("a", 3, 6)), is_moved=True))
    with pytest.raises(EngineError):
        world.keeper.after_leave()


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.alive.pop("b")
    with pytest.raises(NodeLostError) as caught:
        world.keeper.after_loss(world.lose("a"))
    assert caught.value.node == "a" and world.formed == [] and world.now < 1007.0


def test_the_end_of_the_run_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.at[1001.0] = lambda: setattr(world, "is_ended", True)
    with pytest.raises(EngineError):
        world.keeper.after_loss(world.lose("a"))


def test_what_no_other_ring_can_mend_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x"])
    world.refusals = [EngineError("the disk of the starter broke")]
    with pytest.raises(EngineError):
        world.keeper.after_loss(world.lose("a"))


def test_rings_that_never_come_about_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x"])
    world.refusals = [NodeLostError("starter", "nobody reaches the starter")] * 1000
    with pytest.raises(NodeLostError):
        world.keeper.after_loss(world.lose("a"))
    assert len(world.formed) < 100


def test_a_text_that_brings_down_two_nodes_is_ended_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x", "y"])
    world.in_flight = {4: (10, 11), 5: (7, 8)}
    world.keeper.after_loss(world.lose("a"))
    assert not world.cancelled
    world.in_flight = {4: (0, 11)}
    world.keeper.after_loss(world.lose("x"))
    assert world.cancelled == [(4, BROUGHT_DOWN)] and not world.isolated
    world.in_flight = {5: (0, 64)}


def test_a_text_that_has_got_tokens_since_has_brought_no_node_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss that nobody is suspected for it is a prompt again, and so is what was under way at the loss before."""
    world = World(monkeypatch, ["x", "y"])
    world.in_flight, world.n_known = {4: (10, 11)}, {4: 11}
    world.keeper.after_loss(world.lose("a"))
    world.in_flight, world.n_known = {4: (0, 16)}, {4: 16}
    world.keeper.after_loss(world.lose("x"))
    assert not world.cancelled and not world.isolated
    world.keeper.after_loss(world.lose("y"))
    assert world.cancelled == [(4, BROUGHT_DOWN)]


def test_a_halted_node_was_not_brought_down_by_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x", "y"])
    world.in_flight = {4: (10, 11)}
    world.keeper.after_loss(world.lose("a"))
    world.in_flight = {4: (0, 11)}
    world.silent.add("x")
    world.keeper.after_loss(world.lose("x"))
    assert not world.cancelled and not world.isolated
    world.in_flight = {4: (0, 11)}
    world.keeper.after_loss(world.lose("y"))
    assert world.cancelled == [(4, BROUGHT_DOWN)], "the one before counts still"


def test_several_tries_after_one_loss_are_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that cannot be formed at once has computed nothing: no text is suspected for that."""
    world = World(monkeypatch, ["x", "y"])
    world.in_flight = {4: (10, 11)}
    world.refusals = [NodeLostError("x", "x is lost", "lost"), None]
    world.keeper.after_loss(world.lose("a"))
    assert len(world.formed) == 2 and not world.cancelled and not world.isolated


def test_a_node_that_may_only_be_slow_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody said that it was lost: it is asked for as long as it may be silent, though a spare could replace it."""
    world = World(monkeypatch, ["x", "y"])
    error = world.lose("a")
    world.alive.pop("b")
    world.silent.add("b")
    world.at[1003.0] = lambda: world.alive.update(b="b-1")
    world.keeper.after_loss(error)
    assert world.formed == [("starter", "x", "b")] and 1003.0 <= world.now < 1004.0


def test_a_stuck_node_is_not_used_again_and_no_text_is_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers all the time, and its process is the same."""
    world = World(monkeypatch, ["x", "y"])
    world.in_flight, world.n_known = {7: (0, 10)}, {7: 10}
    for name in ("a", "b"):
        assert world.keeper.after_loss(NodeLostError(name, "it stands still", STUCK)) == "ring"
    assert world.formed == [("starter", "x", "b"), ("starter", "x", "y")] and world.now == 1000.0
    assert not world.cancelled and not world.isolated


def test_several_suspects_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x", "y"])
    world.in_flight = {4: (10, 11), 5: (7, 8)}
    world.keeper.after_loss(world.lose("a"))
    world.in_flight = {4: (0, 11), 5: (0, 8)}
    world.keeper.after_loss(world.lose("x"))
    assert world.isolated == [{4, 5}] and not world.cancelled


def test_what_is_told_of_another_loss_meanwhile_is_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started the nodes sees that one has ended before anybody asks it."""
    world = World(monkeypatch, ["x", "y"])
    told = [world.lose("b")]
    monkeypatch.setattr(world, "check", lambda: told and (_ for _ in ()).throw(told.pop()))
    world.keeper.after_loss(world.lose("a"))
    assert world.formed == [("starter", "x", "y")] and world.told() == [("a", "x"), ("b", "y")]


def start_again(world: World, name: str) -> RingError:
    """A node dies, and compiles its kernels after its start."""
    lost = world.lose(name)
    world.alive[name], world.states[name] = f"{name}-2", COMPILING
    return lost


def test_texts_do_not_wait_for_a_node_that_compiles_its_kernels_after_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, ["x"])
    world.keeper.after_loss(start_again(world, "a"))
    assert world.formed == [("starter", "x", "b")]
    world.keeper.after_loss(start_again(world, "b"))
    assert world.formed[1:] == [("starter", "x")], "the rest can hold its blocks"


def test_the_only_nodes_are_awaited_while_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    lost = [start_again(world, name) for name in ("a", "b")][0]
    world.at[1100.0] = world.states.clear
    world.keeper.after_loss(lost)
    assert world.formed == [("starter", "a", "b")] and world.now >= 1100.0


def test_a_node_that_compiles_before_its_first_ring_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ["x"])
    world.states["b"] = COMPILING
    del world.processes["b"]
    world.keeper.after_loss(world.lose("a"))
    assert world.formed == [("starter", "x", "b")]
