"""Nodes whose machines get other work while a run goes on: they are noticed, and get fewer blocks until it is over."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.run.loop
import mdi.run.run
from clusters import block, cluster, model, node
from mdi.engine.sequence import SamplingParams
from mdi.engine.worker import TappedStage
from mdi.placement.model import ModelShape, Workload
from mdi.run.choice import Neighbour
from mdi.run.cut import MovingCut
from mdi.run.loop import REST_S, SlowNodes
from mdi.run.nodes import GivenNodes
from mdi.run.policy import Form, Stage
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode
from waiting import until

NAMES = ("starter", "secondary0", "secondary1", "secondary2")
RING = tuple(Stage(name, 3 * k, 3 * k + 3) for k, name in enumerate(NAMES))
BLOCK_S = 1e-3  # of a node of `clusters`


def moving(n_rounds: int = 10**6, shape: ModelShape | None = None, **changes: Any) -> MovingCut:
    profile = cluster(*(replace(node(name), **changes.get(name, {})) for name in NAMES))
    return MovingCut(shape or model(12, head_bytes=0), profile, Workload(4, 100), 1 << 26, lambda: n_rounds)


class Ring:
    """A ring whose nodes say what they have computed so far."""

    number = 1
    stages = RING

    def __init__(self) -> None:
        self.told: dict[str, dict[str, Any]] = {}
        self.clients = [
            SimpleNamespace(
                node=SimpleNamespace(name=name), status=lambda run, s, name=name: {"measured": self.told.get(name)}
            )
            for name in NAMES[1:]
        ]

    def tell(self, told: dict[str, Any]) -> Ring:
        self.told.update(told)
        return self

    def compute(self, n_frames: int = 100, **times: float) -> Ring:
        """More frames; blocks of some nodes take so many times as long."""
        for name, start, stop in ((one.name, one.start, one.stop) for one in self.stages[1:]):
            before = self.told.get(name, {"frames": 0, "compute_s": 0.0})
            spent_s = n_frames * (stop - start) * BLOCK_S * times.get(name, 1.0)
            self.told[name] = {"frames": before["frames"] + n_frames, "compute_s": before["compute_s"] + spent_s}
        return self


def looks(nodes: SlowNodes, ring: Ring, *times: dict[str, float], n_frames: int = 100) -> Form | None:
    found: Any = None
    for one in ({}, *times):
        found = nodes.best(ring.compute(n_frames, **one)) or found  # type: ignore[arg-type]
    return found


def stages(*counts: int) -> tuple[Stage, ...]:
    edges = [0, *accumulate(counts)]
    return tuple(Stage(name, *span) for name, span in zip(NAMES, pairwise(edges), strict=True))


SLOW = {"secondary1": 6.0}
SWAPPED = ("starter", "secondary1", "secondary0", "secondary2")


def test_a_node_that_was_slow_twice_gets_fewer_blocks_and_gets_them_back() -> None:
    nodes, ring = SlowNodes("run", moving()), Ring()
    assert looks(nodes, ring, SLOW) is None, "once may be chance"
    found = nodes.best(ring.compute(**SLOW))  # type: ignore[arg-type]
    assert found is not None and found.is_moved and found.names == NAMES
    assert found.counts[2] == 1 and sum(found.counts) == 12
    ring.number, ring.stages = 2, found.stages
    assert looks(nodes, ring, SLOW, SLOW) is None, "it has as few as it may"
    again = looks(nodes, ring, {}, {})
    assert again is not None and again.counts[2] == 3, "the other work is over"


@pytest.mark.parametrize(
    "what, cut, times, n_frames",
    [
        ("all are slower: the frames have more rows", moving(), dict.fromkeys(NAMES, 6.0), 100),
        ("not by much", moving(), {"secondary1": 2.5}, 100),
        ("too few frames for a mean", moving(), SLOW, 5),
        ("the texts end soon", moving(n_rounds=1), SLOW, 100),
        (
            "another kind of node may take other times for other frames",
            moving(secondary1={"device": "cuda"}),
            SLOW,
            100,
        ),
        ("blocks of several kinds", moving(shape=model(blocks=(*(block(),) * 11, block(25)))), SLOW, 100),
        ("the last stages skip rows of prompts", moving(shape=model(12, skipped_from=6)), SLOW, 100),
    ],
)
def test_the_cut_stays_where_another_one_gains_nothing(what: str, cut: MovingCut, times: Any, n_frames: int) -> None:
    assert looks(SlowNodes("run", cut), Ring(), times, times, times, n_frames=n_frames) is None


def test_the_very_ring_from_before_comes_back() -> None:
    """And not another one that is as fast and moves less."""
    nodes, ring = SlowNodes("run", moving(shape=model(11, head_bytes=0))), Ring()
    ring.stages = before = stages(2, 3, 3, 3)
    assert looks(nodes, ring, SLOW, SLOW) is not None
    ring.number, ring.stages = 2, stages(3, 3, 1, 4)
    again = looks(nodes, ring, {}, {})
    assert again is not None and again.stages == before
    ring.number, ring.stages = 3, before
    assert looks(nodes, ring, {}, {}) is None


def test_a_ring_that_has_changed_otherwise_is_cut_anew_when_no_node_is_slow() -> None:
    nodes, ring = SlowNodes("run", moving()), Ring()
    assert looks(nodes, ring, SLOW, SLOW) is not None
    ring.number, ring.stages = 2, tuple(replace(one, name=name) for one, name in zip(RING, SWAPPED, strict=True))
    ring.stages = (*ring.stages[:2], replace(ring.stages[2], stop=7), replace(ring.stages[3], start=7))
    again = looks(nodes, ring, {}, {}, {})
    assert again is not None and again.names == SWAPPED and again.counts == (3, 3, 3, 3)


def test_all_who_plan_know_that_a_node_is_slow() -> None:
    cut, ring = moving(), Ring()
    nodes = SlowNodes("run", cut)
    assert cut(RING, {}) == (3, 3, 3, 3)
    assert looks(nodes, ring, SLOW, SLOW) is not None
    lost = cut(RING[:3], {})
    assert lost is not None and lost[2] <= 2, "after a loss"
    cut.learn(node("secondary9"))
    joined = cut((*RING, Stage("secondary9", 0, 0)), {})
    assert joined is not None and joined[2] == 1, "with one more"
    assert looks(nodes, ring, {}, {}) is None and cut(RING, {}) == (3, 3, 3, 3)


def test_a_cut_that_was_not_taken_rests_for_a_while() -> None:
    now = [0.0]
    nodes, ring = SlowNodes("run", moving(), lambda: now[0]), Ring()
    assert looks(nodes, ring, SLOW, SLOW) is not None
    for k in range(5):
        now[0] += 5.0
        assert looks(nodes, ring, {"secondary1": 6.0 + 3 * k}) is None
    now[0] = REST_S
    assert nodes.best(ring.compute(secondary1=6.0)) is not None  # type: ignore[arg-type]


class Late(dict[str, Any]):
    def items(self) -> Any:
        for one in super().items():
            self["late"] = None
            yield one


def test_a_node_that_answers_late_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fan_out(calls: Any) -> Any:
        return SimpleNamespace(join=lambda s: None, results=Late({name: call() for name, call in calls.items()}))

    monkeypatch.setattr(mdi.run.loop, "FanOut", fan_out)
    assert looks(SlowNodes("run", moving()), Ring(), SLOW, SLOW) is not None


def test_without_measurements_the_cut_stays() -> None:
    unknown = MovingCut(model(12), None, Workload(4, 100), 1 << 20, lambda: 10**6)
    assert looks(SlowNodes("run", unknown), Ring(), SLOW, SLOW) is None


@pytest.mark.parametrize(
    "nonsense", [None, {}, {"frames": "x"}, {"compute_s": "x"}, {"compute_s": -1.0}, {"compute_s": float("inf")}]
)
def test_a_node_that_tells_nonsense_does_not_count(nonsense: dict[str, Any] | None) -> None:
    nodes, ring = SlowNodes("run", moving()), Ring()
    found = None
    for k, times in enumerate(({}, SLOW, SLOW)):
        ring.compute(**times)  # type: ignore[arg-type]
        right = {"frames": 100 * k, "compute_s": 0.3 * k}
        wrong = {**right, **nonsense} if nonsense else nonsense
        told = {**ring.told, "secondary0": wrong}
        found = nodes.best(Ring().tell(told))  # type: ignore[arg-type]
    assert found is not None and found.counts[2] == 1


def test_who_watches_slow_nodes(endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other placements are not for the shortest round, and beside other models times of a plan are not those of computing."""
    made: list[str] = []
    monkeypatch.setattr(mdi.run.run, "SlowNodes", lambda run, cut: made.append(run) or SlowNodes(run, cut))
    options = StarterOptions(ckpt=endless, prompt_style="none", device="cpu", layers="2,3")
    beside = [Neighbour(("starter",), None)]
    with secondaries(1, tmp_path) as nodes:
        cluster = cluster_of(nodes)
        for wanted, others in ((replace(options, layers=None, placement="even"), ()), (options, beside), (options, ())):
            with Run(GivenNodes(cluster), wanted, 20, n_texts=1, beside=others) as run:
                assert made == ([run.run_id] if wanted is options and not others else [])


@pytest.mark.slow
def test_texts_go_on_while_a_busy_node_gets_fewer_blocks(
    endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mdi.run.loop, "LOOK_S", 0.5)
    monkeypatch.setattr(mdi.run.loop, "LEAST_FRAMES", 5)
    profile = cluster(*(node(name) for name in NAMES[:3]))
    monkeypatch.setattr(mdi.run.run, "MovingCut", lambda shape, _, *rest: MovingCut(shape, profile, *rest))
    options = StarterOptions(ckpt=endless, prompt_style="none", device="cpu", layers="1,2,2")
    is_slow, compute = threading.Event(), TappedStage.__call__

    def slowly(self: TappedStage, frame: Any, x: Any, is_last: bool, wire: str) -> Any:
        if is_last and is_slow.is_set():
            time.sleep(0.01)
        return compute(self, frame, x, is_last, wire)

    monkeypatch.setattr(TappedStage, "__call__", slowly)
    with secondaries(2, tmp_path) as nodes, Run(GivenNodes(cluster_of(nodes)), options, 20_000, n_texts=1) as run:
        sample = run.submit("The ring", encode("The ring"), SamplingParams(20_000, temperature=0))
        before = run.loop.policy.ring
        is_slow.set()

        def has_fewer() -> bool:
            last = run.loop.policy.ring[-1]
            return last.stop - last.start < before[-1].stop - before[-1].start

        until(has_fewer)
        n_then = run.engine.n_tokens
        until(lambda: run.engine.n_tokens > n_then + 20)
        is_slow.clear()
        sample.cancel()
        run.read()
        found = list(sample.token_ids)
    with Run(GivenNodes(standalone()), replace(options, layers=None), len(found) + 20, n_texts=1) as run:
        sample = run.submit("The ring", encode("The ring"), SamplingParams(len(found), temperature=0))
        run.read()
    assert found == list(sample.token_ids)
