"""Nodes that become slow, with a clock of the test's own: who is slow for a minute loses blocks, once, and has them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.recovery.moving
from clusters import cluster, model, node
from mdi.partition.cost import CostModel
from mdi.partition.model import Workload
from mdi.recovery.moving import MovingCut
from mdi.recovery.replacement import Stage
from mdi.recovery.slow_nodes import Computed, SlowNodes, ask_all

NAMES = ("starter", "a", "b")
LOOK_S = 5.0


class World:
    """A ring of three nodes with four blocks each, that computes all the time.

    Attributes:
        slower: how many times as long a node takes as at the beginning; texts: as much for all.
        moved: when blocks moved, and how many each node has had since.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ring: Sequence[Stage] = tuple(Stage(name, 4 * k, 4 * k + 4) for k, name in enumerate(NAMES))
        self.slower = dict.fromkeys(NAMES, 1.0)
        self.texts = 1.0
        self.computed = dict.fromkeys(NAMES, (0.0, 0))
        self.moved: list[tuple[float, list[int]]] = []
        self.silent: set[str] = set()
        self.cut = MovingCut(model(12, head_bytes=0), None, Workload(1, 100), 1 << 20, lambda: 10**6)
        self.slow = SlowNodes(self.cut, self.ask)

    def ask(self, names: Sequence[str]) -> dict[str, Computed]:
        return {name: self.computed[name] for name in names if name not in self.silent}

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            for stage in self.ring:
                compute_s, n = self.computed[stage.name]
                frame_s = 1e-3 * (stage.stop - stage.start) * self.slower[stage.name] * self.texts
                self.computed[stage.name] = (compute_s + 100 * frame_s, n + 100)
            if (found := self.slow.best(self.ring, self.now)) is not None:
                self.ring = found.stages
                self.computed = {name: self.computed[name] if name == "starter" else (0.0, 0) for name in self.computed}
                self.moved.append((self.now, list(found.counts)))


@pytest.fixture
def world() -> World:
    """After two minutes in which all nodes were as fast as ever."""
    found = World()
    found.run(120)
    return found


def test_a_node_that_is_slow_for_a_minute_loses_blocks_and_nothing_else_moves(world: World) -> None:
    assert not world.moved
    world.slower["b"] = 4.0
    world.run(600)
    ((when, counts),) = world.moved
    assert 60 <= when - 120 <= 90 and counts[2] < 3 and sum(counts) == 12


def test_who_is_slow_from_the_beginning_is_planned_for_as_it_was_measured() -> None:
    """What nodes are compared with is their own best."""
    world = World()
    world.slower["b"] = 4.0
    world.run(600)
    assert not world.moved


def test_a_node_that_is_fast_again_has_its_blocks_back_once(world: World) -> None:
    world.slower["b"] = 4.0
    world.run(300)
    world.slower["b"] = 1.0
    world.run(900)
    assert [counts for _, counts in world.moved][1:] == [[4, 4, 4]]


def test_moments_more_texts_and_small_gains_move_nothing(world: World) -> None:
    for _ in range(5):
        world.slower["b"] = 4.0
        world.run(30)
        world.slower["b"] = 1.0
        world.run(30)
    world.texts = 6.0
    world.run(300)
    world.slower["b"] = 1.3  # 4 blocks take as long as 5.2: with 3 there, somebody else has 5
    world.run(300)
    world.slower = dict.fromkeys(NAMES, 5.0)
    world.run(300)
    assert not world.moved


def test_what_is_known_of_a_slow_node_outlives_its_ring_and_its_silence(world: World) -> None:
    world.slower["b"] = 4.0
    world.run(120)
    world.silent.add("b")
    world.run(300)
    assert len(world.moved) == 1
    counts = world.cut([Stage("starter", 0, 6), Stage("b", 6, 12)], {})
    assert counts is not None and counts[1] < 4, "the next cut reckons with it"


def test_a_node_that_comes_under_load_makes_no_other_one_slow(world: World) -> None:
    """What the others have lost since they had less to do is no slowness; who was slow still is."""
    world.texts, world.slower["b"] = 6.0, 4.0
    world.run(180)
    assert len(world.moved) == 1
    world.slower["c"], world.computed["c"] = 1.0, (0.0, 0)
    starter, a, b = world.ring
    world.ring = (starter, a, Stage("b", b.start, b.stop - 1), Stage("c", b.stop - 1, 12))
    world.run(200)
    for _, counts in world.moved[1:]:
        assert counts[2] < 3 and min(counts[0], counts[1], counts[3]) > counts[2], "only to c, which has one block"
    world.slower["b"] = 1.0
    world.run(400)
    assert world.moved[-1][1] == [3, 3, 3, 3]


def test_a_node_is_learnt_while_another_thread_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread forms a ring at the very moment that a node which has come is measured."""
    shape, workload, profile = model(12, head_bytes=0), Workload(1, 100), cluster(*map(node, NAMES))
    *before, new = profile.nodes
    cut = MovingCut(shape, replace(profile, nodes=tuple(before)), workload, 1 << 20, lambda: 10**6)
    ring = [Stage(node.name, 4 * k, 4 * k + 4) for k, node in enumerate(profile.nodes)]
    planned: list[dict[str, float]] = []
    made = mdi.recovery.moving.CostModel

    def slowly(*args: Any) -> CostModel:
        planned.append(cut.expected_s(ring))
        return made(*args)

    monkeypatch.setattr(mdi.recovery.moving, "CostModel", slowly)
    cut.learn(new)
    assert [set(one) for one in planned] == [{stage.name for stage in ring}]


def test_nodes_are_asked_in_the_name_of_the_run() -> None:
    """Strangers are not told what a node has computed."""

    def status(run: str) -> Any:
        return {"measured": {"compute_s": 2.5, "frames": 7} if run == "r" else None}

    clients: Any = {name: SimpleNamespace(status=status) for name in ("a", "b")}
    for run, told in (("r", (2.5, 7)), ("x", None)):
        found = ask_all(clients, run, lambda: ("starter", (1.0, 3)))(NAMES)
        assert found == ({"starter": (1.0, 3), "a": told, "b": told} if told else {"starter": (1.0, 3)})
