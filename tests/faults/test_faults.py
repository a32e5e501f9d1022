"""Rings of real processes in which things break: every text has the ids of an undisturbed ring, or a beginning of them and a
reason; nobody hangs, and every node waits for the next run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_links import Pace

from mdi.errors import NodeLostError
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from tiny_checkpoint import write_checkpoint

if sys.platform != "linux":
    pytest.skip("127.0.0.2, SIGSTOP and prlimit are used freely", allow_module_level=True)

from fault_ring import FaultRing, Outcome, Running, Wanted, fault_ring, run, texts
from fault_schedule import Fault, Saboteur, complaint, schedule

N_TOKENS = 60
SILENCE_S = 3.0
SHORT_SILENCE_S = 0.6  # where it does no harm that a slow machine is taken for a lost one
FORMATS = ("float32", "int8", "int4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ckpt") / "tiny", with_end=False)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRing]:
    with fault_ring(tmp_path_factory.mktemp("ring"), 4) as one:
        yield one


@pytest.fixture
def nodes(ring: FaultRing) -> FaultRing:
    """All of them alive, and waiting."""
    ring.start_all()
    return ring


def options(checkpoint: Path, form: str = "float32", **changes: object) -> StarterOptions:
    fields = {"ckpt": checkpoint, "prompt_style": "none", "device": "cpu", "quantize": form, "quantize_head": form}
    return StarterOptions(**{**fields, "silence_s": SILENCE_S, "placement": "even", "wait_s": 60.0, **changes})  # type: ignore[arg-type]


@functools.cache
def undisturbed(checkpoint: Path, form: str, n_texts: int, seed: int, n_tokens: int = N_TOKENS) -> list[list[int]]:
    """What one node alone gives."""
    outcome = run(standalone(), options(checkpoint, form), texts(n_texts, n_tokens, seed))
    assert outcome.error is None and all(outcome.is_whole)
    return outcome.ids


def broken_run(
    nodes: FaultRing,
    checkpoint: Path,
    form: str,
    faults: list[list[Fault]],
    wanted: list[Wanted],
    n_nodes: int,
    silence_s: float = SILENCE_S,
    **changes: object,
) -> tuple[Outcome, Saboteur]:
    running = Running()
    n_tokens = sum(one.params.n_tokens for one in wanted)
    saboteur = Saboteur(nodes, faults, n_tokens, silence_s, running)
    try:
        outcome = run(
            nodes.cluster(n_nodes), options(checkpoint, form, silence_s=silence_s, **changes), wanted, running
        )
    finally:
        running.over.set()
        saboteur.join()
    return outcome, saboteur


@pytest.mark.slow
@pytest.mark.parametrize(("action", "form"), list(zip(["reset", "half a frame", "pause"], FORMATS, strict=True)))
def test_a_link_that_breaks_costs_no_text(nodes: FaultRing, checkpoint: Path, action: str, form: str) -> None:
    """Each link in turn, the one to the starter too; no ring is formed anew."""
    places = [(node, (1 + node) / 5) for node in range(0 if action != "pause" else 1, 3)]
    faults = [[Fault(action, node, "decode", after, 0.5)] for node, after in places]
    wanted = texts(4, N_TOKENS, 3)
    outcome, saboteur = broken_run(nodes, checkpoint, form, faults, wanted, 3)
    assert len(saboteur.done) == len(faults)
    assert complaint(outcome, undisturbed(checkpoint, form, 4, 3), may_be_lost=False) == ""
    assert not outcome.recoveries


@pytest.mark.parametrize("seed", range(12))
def test_links_that_break_at_random(nodes: FaultRing, checkpoint: Path, seed: int) -> None:
    n_nodes, form = 3 + seed % 2, FORMATS[seed % 3]
    faults = [
        [
            replace(fault, action=("reset", "half a frame", "pause")[i % 3], node=max(1, fault.node))
            for fault in together
        ]
        for i, together in enumerate(schedule(seed, n_nodes, 4))
        if together[0].point in ("decode", "prefill", "recovery")
    ]
    outcome, _ = broken_run(nodes, checkpoint, form, faults, texts(4, N_TOKENS, seed), n_nodes)
    assert complaint(outcome, undisturbed(checkpoint, form, 4, seed), may_be_lost=False) == "", faults
    nodes.wait_waiting()


def test_a_link_without_a_fault_is_not_broken(nodes: FaultRing, checkpoint: Path) -> None:
    before = [link.n_rings for link in nodes.links[:3]]
    outcome, _ = broken_run(nodes, checkpoint, "float32", [], texts(2, N_TOKENS, 1), 3)
    assert outcome.ids == undisturbed(checkpoint, "float32", 2, 1)
    assert [link.n_rings - n for link, n in zip(nodes.links, before, strict=False)] == [1, 1, 1]


def test_a_node_that_is_frozen_behind_its_link_is_lost(nodes: FaultRing, checkpoint: Path) -> None:
    """Half open: nobody is told, but nothing is heard any more."""
    running = Running()
    wanted = texts(2, 400, 1)
    saboteur = Freezer(nodes, running)
    outcome = run(nodes.cluster(3), options(checkpoint, fixed=True, silence_s=SHORT_SILENCE_S), wanted, running)
    saboteur.join()
    assert isinstance(outcome.error, NodeLostError)
    assert complaint(outcome, undisturbed(checkpoint, "float32", 2, 1, 400), may_be_lost=True) == ""


class Freezer(Saboteur):
    """Freezes the link to the second node."""

    def __init__(self, ring: FaultRing, running: Running) -> None:
        super().__init__(ring, [[Fault("freeze", 1, "decode", 0.1, 0.0)]], 800, SILENCE_S, running)

    def _do(self, fault: Fault) -> None:
        self.ring.links[fault.node].freeze()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32"])
def test_slow_links_lose_nobody(tmp_path: Path, checkpoint: Path, form: str) -> None:
    """100 ms and 1 Mbit/s: a round takes a third of a second, and nobody is taken for dead."""
    with fault_ring(tmp_path, 3, pace=Pace(0.1, 125_000)) as slow:
        slow.start_all()
        outcome = run(slow.cluster(), options(checkpoint, form), texts(2, 6, 3))
        assert outcome.error is None and outcome.ids == undisturbed(checkpoint, form, 2, 3, 6)
        assert not outcome.recoveries and [link.n_rings for link in slow.links] == [1, 1, 1]


class Loading(Saboteur):
    """Kills the first node as soon as it has been told of the run, with its weights on the way or all there."""

    def _reach(self, fault: Fault) -> bool:
        return self.running.wait_until(self._is_told)

    def _is_told(self) -> bool:
        node = self.running.node
        return node is not None and self.ring.knows(0, node.run_id)


def test_a_node_that_dies_before_the_ring_is_closed_is_replaced(nodes: FaultRing, checkpoint: Path) -> None:
    running = Running()
    saboteur = Loading(nodes, [[Fault("kill", 1, "load", 0.0, 0.0)]], 2 * N_TOKENS, SILENCE_S, running)
    outcome = run(nodes.cluster(3), options(checkpoint, silence_s=1.0), texts(2, N_TOKENS, 1), running)
    saboteur.join()
    assert complaint(outcome, undisturbed(checkpoint, "float32", 2, 1), may_be_lost=False) == ""
    assert [one["node"] for one in outcome.recoveries] == ["secondary0"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 204))
def test_whatever_breaks_while_tokens_are_guessed_no_text_differs(
    nodes: FaultRing, checkpoint: Path, seed: int
) -> None:
    n_nodes, form, wanted = 3 + seed % 2, FORMATS[seed % 3], texts(2, N_TOKENS, seed % 4)
    outcome, saboteur = broken_run(
        nodes, checkpoint, form, schedule(seed, n_nodes, 2), wanted, n_nodes, SHORT_SILENCE_S, draft=str(checkpoint)
    )
    assert complaint(outcome, undisturbed(checkpoint, form, 2, seed % 4), False, saboteur.done) == "", saboteur.done
    assert outcome.guesses[1] > N_TOKENS // 2
    nodes.let_go_on()
    nodes.wait_waiting()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_whatever_breaks_every_text_is_whole(nodes: FaultRing, checkpoint: Path, seed: int) -> None:
    """Nodes are killed, halted and started again: the others take their blocks, and the texts go on."""
    n_nodes, form = 3 + seed % 2, FORMATS[seed % 3]
    faults = schedule(seed, n_nodes, 2)
    wanted = texts(4, N_TOKENS, seed % 4)
    outcome, saboteur = broken_run(nodes, checkpoint, form, faults, wanted, n_nodes, SHORT_SILENCE_S)
    assert complaint(outcome, undisturbed(checkpoint, form, 4, seed % 4), False, saboteur.done) == "", saboteur.done
    nodes.let_go_on()
    nodes.wait_waiting()


def test_a_text_that_was_ended_alone_must_have_been_there_twice() -> None:
    kill = Fault("kill", 1, "decode", 0.5, 0.0)
    alone = Outcome(ids=[[1]], is_whole=[True], is_ended_alone=[True], losses=[{0: (3, 4, 4)}, {0: (0, 4, 4)}])
    assert complaint(alone, [[1, 2]], False, [kill, kill]) == ""
    assert complaint(alone, [[1, 2]], False, [kill, replace(kill, action="halt")]) != "", "one node ended"
    for second in ({0: (0, 5, 5)}, {0: (4, 5, 4)}, {1: (0, 4, 4)}):
        other = replace(alone, losses=[alone.losses[0], second])
        assert complaint(other, [[1, 2]], False, [kill, kill]) != "", second
