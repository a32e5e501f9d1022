"""Nodes whose machines need their memory for others while a run goes on: they have fewer blocks until it is free again."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.run.loop
import mdi.run.short_nodes
from clusters import MB, cluster, model, node
from mdi.engine.sequence import SamplingParams
from mdi.placement.model import Workload
from mdi.run.cut import MovingCut
from mdi.run.nodes import GivenNodes
from mdi.run.policy import Form, Stage
from mdi.run.run import Run
from mdi.run.short_nodes import REST_S, ROOM_S, ShortNodes
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondary
from tiny_checkpoint import encode
from waiting import until

NAMES = ("starter", "secondary0", "secondary1", "secondary2")
BLOCK, SPARE = 10 * MB, 100 * MB  # of a node of `clusters`, whose blocks have so many bytes


def stages(*counts: int, names: tuple[str, ...] = NAMES) -> tuple[Stage, ...]:
    edges = [0, *accumulate(counts)]
    return tuple(Stage(name, *span) for name, span in zip(names, pairwise(edges), strict=False))


def moving(n_rounds: int = 10**6, **changes: Any) -> MovingCut:
    """Of twelve equal blocks, over nodes with room for all of them but where `changes` say something else."""
    profile = cluster(*(replace(node(name), **changes.get(name, {})) for name in NAMES))
    return MovingCut(model(12, head_bytes=0), profile, Workload(4, 100), 1 << 26, lambda: n_rounds)


class Nodes:
    """A ring whose secondaries say what they have free; `look` is five seconds after the one before."""

    def __init__(self, *counts: int, cut: MovingCut | None = None, spare: Any = SPARE) -> None:
        self.cut = cut or moving()
        self.now, self.number, self.stages = 0.0, 1, stages(*(counts or (3, 3, 3, 3)))
        names = [stage.name for stage in self.stages[1:]]
        self.memory: dict[str, Any] = {name: {"free_bytes": 50 * SPARE, "spare_bytes": spare} for name in names}
        self.n_asked = 0
        self.clients = [
            SimpleNamespace(node=SimpleNamespace(name=name), status=lambda run, s, name=name: self._status(name))
            for name in names
        ]
        self.watch = ShortNodes("run", self.cut, lambda: self.now)

    def _status(self, name: str) -> dict[str, Any]:
        self.n_asked += 1
        return {"memory": self.memory[name]}

    def look(self, **free: int) -> Form | None:
        self.now += 5.0
        for name, n_bytes in free.items():
            self.memory[name] = {**self.memory[name], "free_bytes": n_bytes}
        ring: Any = self
        return self.watch.best(ring)

    def take(self, form: Form | None) -> Form:
        """The next ring."""
        assert form is not None and form.is_moved
        self.number, self.stages = self.number + 1, form.stages
        return form

    def looks_until(self, end_s: float) -> Form | None:
        """The first that is found until a time."""
        while self.now < end_s:
            if (found := self.look()) is not None:
                return found
        return None


def test_a_node_that_was_short_twice_has_as_many_blocks_less_as_its_memory_needs() -> None:
    nodes = Nodes()
    assert nodes.look(secondary1=SPARE - 15 * MB) is None, "once may be chance"
    form = nodes.take(nodes.look())
    assert form.names == NAMES and form.counts[2] == 1 and sum(form.counts) == 12
    assert nodes.look(secondary1=SPARE + 5 * MB) is None and nodes.look() is None
    other = Nodes()
    other.look(secondary1=SPARE - 1)
    assert other.take(other.look()).counts[2] == 2, "one block is enough"


def test_with_just_the_spare_memory_free_nothing_moves() -> None:
    nodes = Nodes()
    assert nodes.look(secondary1=SPARE) is None and nodes.look() is None
    assert nodes.cut((Stage("starter", 0, 0), Stage("secondary1", 0, 12)), {}) == (6, 6), "nor is it to have no more"


def test_no_blocks_go_to_a_node_that_was_short_before_it_has_had_room_for_long_enough() -> None:
    nodes = Nodes()
    nodes.look(secondary1=0)
    nodes.take(nodes.look())
    nodes.look(secondary1=9 * SPARE, secondary2=0)
    form = nodes.take(nodes.look())
    assert form.counts[2:] == (1, 1) and sum(form.counts) == 12


def test_a_node_keeps_a_block_and_others_take_no_more_than_they_have_room_for() -> None:
    nodes = Nodes()
    nodes.look(secondary1=0, secondary0=SPARE + 9 * MB, secondary2=SPARE + 10 * MB)
    form = nodes.take(nodes.look())
    assert form.counts == (4, 3, 1, 4), "secondary0 has no room for a block, and secondary2 for one"
    assert nodes.look() is None and nodes.look() is None, "it has as few as it may"


def test_where_others_cannot_hold_so_many_it_keeps_more() -> None:
    """The starter has memory for some of them, or for none."""
    nodes = Nodes(2, 10, cut=moving(starter={"memory_bytes": 190 * MB}))
    nodes.look(secondary0=0)
    form = nodes.look()
    assert form is not None and 2 < form.counts[0] < 11 and form.counts[1] > 1
    full = Nodes(2, 10, cut=moving(starter={"memory_bytes": 100 * MB}))
    full.look(secondary0=0)
    assert full.look() is None, "nothing fits anywhere else"


def test_a_ring_of_two_gives_blocks_to_the_starter() -> None:
    nodes = Nodes(6, 6)
    nodes.look(secondary0=SPARE - 25 * MB)
    assert nodes.take(nodes.look()).counts == (9, 3)


def test_it_has_its_blocks_back_when_there_was_room_for_them_for_long_enough() -> None:
    nodes = Nodes()
    nodes.look(secondary1=SPARE - 15 * MB)
    nodes.take(nodes.look())
    nodes.look(secondary1=2 * SPARE + 2 * BLOCK)  # to the byte what is not enough
    assert nodes.looks_until(nodes.now + 3 * ROOM_S) is None
    begin = nodes.now
    nodes.look(secondary1=2 * SPARE + 2 * BLOCK + 1)
    assert nodes.looks_until(begin + ROOM_S) is None
    assert nodes.look(secondary1=SPARE + 1) is None, "others take it again, at the last moment"
    begin = nodes.now
    nodes.look(secondary1=9 * SPARE)
    assert nodes.looks_until(begin + ROOM_S) is None
    assert nodes.take(nodes.looks_until(begin + ROOM_S + 10)).stages == stages(3, 3, 3, 3)
    assert nodes.looks_until(nodes.now + 3 * REST_S) is None
    nodes.number, nodes.stages = nodes.number + 1, stages(1, 9, 1, 1)
    assert nodes.looks_until(nodes.now + 3 * REST_S) is None, "what others have done since is not undone"


def test_a_node_that_does_not_answer_has_no_room() -> None:
    nodes = Nodes()
    nodes.look(secondary1=SPARE - 15 * MB)
    nodes.take(nodes.look())
    nodes.look(secondary1=9 * SPARE)
    known = nodes.memory.pop("secondary1")
    assert nodes.looks_until(nodes.now + 2 * ROOM_S) is None
    nodes.memory["secondary1"] = known
    begin = nodes.now
    assert nodes.looks_until(begin + ROOM_S) is None and nodes.looks_until(begin + 2 * ROOM_S) is not None


def test_all_who_plan_know_how_many_blocks_it_may_have() -> None:
    nodes = Nodes()
    nodes.look(secondary1=0)
    form = nodes.take(nodes.look())
    assert form.counts[2] == 1
    joined = nodes.cut((*form.stages[:3], Stage("secondary9", 0, 0)), {})
    assert joined is not None and joined[2] == 1, "with another one, or after a loss"
    alone = nodes.cut((Stage("starter", 0, 0), form.stages[2]), {"starter": 0})
    assert alone == (0, 12), "the text goes on whatever others need"
    nodes.cut.slow_down({"secondary0": 1.1})
    nodes.cut.slow_down({})
    assert nodes.cut.cut_again(form.stages, stages(3, 3, 3, 3)) is None, (
        "nor does a node that is slow no more bring it back"
    )


def test_a_cut_that_was_not_taken_rests_for_a_while() -> None:
    nodes = Nodes()
    nodes.look(secondary1=0)
    assert nodes.look() is not None
    begin = nodes.now
    assert nodes.looks_until(begin + REST_S - 5) is None
    assert nodes.looks_until(begin + REST_S) is not None


def test_two_looks_at_two_rings_are_not_two() -> None:
    nodes = Nodes()
    nodes.look(secondary1=0)
    nodes.number = 2
    assert nodes.look() is None and nodes.look() is not None


@pytest.mark.parametrize(
    "told",
    [
        {"free_bytes": 0},
        {"free_bytes": 0, "spare_bytes": 0},
        {"free_bytes": 0, "spare_bytes": "1"},
        {"spare_bytes": 9},
        [],
        None,
    ],
)
def test_nodes_without_spare_memory_have_nothing_moved_and_are_asked_once_for_each_ring(told: Any) -> None:
    nodes = Nodes()
    nodes.memory = dict.fromkeys(NAMES, told)
    assert nodes.looks_until(300.0) is None
    assert nodes.n_asked == 3
    nodes.number = 2
    assert nodes.looks_until(600.0) is None
    assert nodes.n_asked == 6


@pytest.mark.slow
def test_texts_go_on_while_a_node_without_memory_has_fewer_blocks(
    endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has them back when others have freed it; a node drops what it has given."""
    monkeypatch.setattr(mdi.run.loop, "LOOK_S", 0.2)
    monkeypatch.setattr(mdi.run.short_nodes, "ROOM_S", 1.0)
    monkeypatch.setattr(mdi.run.short_nodes, "REST_S", 1.0)
    options = StarterOptions(ckpt=endless, prompt_style="none", device="cpu", layers="1,2,2")
    free = [1 << 40]
    with (
        secondary(0, tmp_path / "0") as first,
        secondary(1, tmp_path / "1", spare_bytes=1 << 20, free_bytes=lambda device: free[0]) as second,
        Run(GivenNodes(cluster_of([first, second])), options, 60_000, n_texts=1) as run,
    ):
        sample = run.submit("The ring", encode("The ring"), SamplingParams(60_000, temperature=0))

        def goes_on_with(n_blocks: int) -> None:
            def has_them() -> bool:
                last = run.loop.policy.ring[-1]
                return last.stop - last.start == n_blocks

            until(has_them)
            n_then = run.engine.n_tokens
            until(lambda: run.engine.n_tokens > n_then + 20)

        goes_on_with(2)
        free[0] = 0
        goes_on_with(1)
        until(lambda: [held.spec.blocks for held in second.stages.listed] == [(4, 5)])
        free[0] = 1 << 40
        goes_on_with(2)
        sample.cancel()
        run.read()
        found = list(sample.token_ids)
    with Run(GivenNodes(standalone()), replace(options, layers=None), len(found) + 20, n_texts=1) as run:
        sample = run.submit("The ring", encode("The ring"), SamplingParams(len(found), temperature=0))
        run.read()
    assert found == list(sample.token_ids)
