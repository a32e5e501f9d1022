"""Runs over standing nodes: they use blocks where they are, several at the same time, and go on when a node leaves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swarm_members import SOON, held_by, swarm_member, wait_covered

from families import greedy
from lying_nodes import LIARS, spoil
from mdi.cancel import Cancel
from mdi.control.meeting import Peer
from mdi.engine.sequence import SamplingParams
from mdi.errors import PlacementError
from mdi.node import swarm_member as member_module
from mdi.node.secondary import SecondaryNode
from mdi.node.swarm_member import SwarmMember
from mdi.placement.balance import Move, Served
from mdi.run.nodes import SwarmNodes
from mdi.run.run import Run
from mdi.run.swarm import Swarm, SwarmPart
from mdi.spec.cluster import NodeConfig
from mdi.spec.options import StarterOptions
from test_adapters import texts
from test_virtual_rows import EACH, KINDS, tuned_in
from tiny_checkpoint import encode, tiny_gpt, write_checkpoint
from waiting import DEADLINE_S, until

PROMPT, N_LAYER = "The ring", 5
Node = tuple[SecondaryNode, SwarmMember]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("swarm") / "ckpt", n_layer=N_LAYER)


@contextlib.contextmanager
def swarm(n: int, most_blocks: int, folder: Path, checkpoint: Path) -> Iterator[list[Node]]:
    """Standing nodes that hold all blocks."""
    with contextlib.ExitStack() as stack:
        nodes: list[Node] = []
        for i in range(n):
            first = [nodes[0][0]] if nodes else []
            nodes.append(stack.enter_context(swarm_member(i, folder, checkpoint, first, most_blocks)))
            until(lambda: held_by(nodes[-1][1]) is not None)
        wait_covered(lambda: [one for _, one in nodes], N_LAYER)
        until(lambda: sum(one.is_ready for one in nodes[-1][0].table.nodes) == n)
        yield nodes


def opened(node: SecondaryNode, checkpoint: Path, n_tokens: int = 60, wait_s: float = 60.0, **options: object) -> Run:
    """A run that knows one node."""
    return run_over(Swarm([Peer("127.0.0.1", node.control_port)], None, wait_s), checkpoint, n_tokens, **options)


def run_over(found: Swarm, checkpoint: Path, n_tokens: int = 60, **options: object) -> Run:
    cancel = Cancel()
    nodes = SwarmNodes(found, lambda: NodeConfig("starter", "127.0.0.1", 0, 0), cancel, None, None, close=lambda: None)
    made = StarterOptions(ckpt=checkpoint, prompt_style="none", device="cpu", cache_share=0.5, **options)  # type: ignore[arg-type]
    return Run(nodes, made, n_tokens, n_texts=2, cancel=cancel)


def wanted(n_tokens: int) -> list[int]:
    return greedy(tiny_gpt(n_layer=N_LAYER), encode(PROMPT), n_tokens)


@pytest.mark.slow
def test_a_run_uses_the_blocks_where_they_are(tmp_path: Path, checkpoint: Path) -> None:
    """It loads nothing, though it knows one node only, and leaves the nodes as they were."""
    with swarm(3, 2, tmp_path, checkpoint) as nodes:
        spans = {one.label: (one.start, one.stop) for one in nodes[-1][0].table.nodes}
        before = {one: held_by(one) for _, one in nodes}
        for _ in range(2):
            with opened(nodes[0][0], checkpoint) as run:
                sample = run.submit(PROMPT, encode(PROMPT), SamplingParams(12, temperature=0))
                run.read()
                ring = run.ring
                assert ring is not None and ring.stages[0].stop == 0
                for stage in ring.stages[1:]:
                    start, stop = spans[stage.name]
                    assert start <= stage.start < stage.stop <= stop
            assert list(sample.token_ids) == wanted(12)
        assert {one: held_by(one) for _, one in nodes} == before


@pytest.mark.slow
def test_several_starters_use_the_same_nodes(tmp_path: Path, checkpoint: Path) -> None:
    texts: list[list[int]] = []

    def generate() -> None:
        with opened(nodes[1][0], checkpoint) as run:
            samples = [run.submit(PROMPT, encode(PROMPT), SamplingParams(30, temperature=0)) for _ in range(2)]
            run.read()
        texts.extend(list(sample.token_ids) for sample in samples)

    with swarm(2, 3, tmp_path, checkpoint) as nodes:
        starters = [threading.Thread(target=generate) for _ in range(3)]
        for one in starters:
            one.start()
        for one in starters:
            one.join(120)
    assert texts == [wanted(30)] * 6


@pytest.mark.slow
def test_a_node_that_leaves_is_replaced_by_one_that_holds_its_blocks(tmp_path: Path, checkpoint: Path) -> None:
    with swarm(4, 3, tmp_path, checkpoint) as nodes:
        until(
            lambda: all(
                len({n for _, o in nodes if o is not one for n in held_by(o) or ()}) == N_LAYER for _, one in nodes
            )
        )
        with opened(nodes[0][0], checkpoint) as run:
            samples = [run.submit(PROMPT, encode(PROMPT), SamplingParams(50, temperature=0))]
            until(lambda: run.engine.n_tokens > 5)
            ring = run.ring
            assert ring is not None
            lost = ring.stages[1].name
            next(node for node, _ in nodes if lost.endswith(node.process[:6])).leave()

            def is_replaced() -> bool:
                samples.append(run.submit(PROMPT, encode(PROMPT), SamplingParams(50, temperature=0)))
                run.read()
                return run.ring is not None and lost not in {stage.name for stage in run.ring.stages}

            until(is_replaced)
            assert len(run.loop.recoveries) == 1
    known = wanted(50)
    assert all(list(sample.token_ids) == known for sample in samples)


class SwarmThatChanges(Swarm):
    """A node leaves when the first ring has been chosen."""

    leaves: Callable[[], None]

    def choose(self, *args: Any) -> SwarmPart:
        part = super().choose(*args)
        self.leaves()
        return part


@pytest.mark.slow
def test_a_node_that_comes_takes_part_in_the_first_ring(tmp_path: Path, checkpoint: Path) -> None:
    """The chosen nodes do not hold all blocks any more, and the run did not know the one that does."""
    with contextlib.ExitStack() as stack:
        first, one = stack.enter_context(swarm_member(0, tmp_path, checkpoint, most_blocks=3))
        until(lambda: held_by(one) is not None)
        second = contextlib.ExitStack()
        stack.callback(second.close)
        _, member = second.enter_context(swarm_member(1, tmp_path, checkpoint, [first], 3))
        until(lambda: held_by(member) is not None)
        wait_covered(lambda: [one, member], N_LAYER)
        until(lambda: sum(node.is_ready for node in first.table.nodes) == 2)
        found = SwarmThatChanges([Peer("127.0.0.1", first.control_port)], None, 60.0)
        has_left = threading.Event()

        def leave() -> None:
            second.close()
            has_left.set()

        found.leaves = leave

        def come() -> None:
            assert has_left.wait(DEADLINE_S)
            stack.enter_context(swarm_member(2, tmp_path, checkpoint, [first], 3))

        comes = threading.Thread(target=come)
        comes.start()
        try:
            with run_over(found, checkpoint) as run:
                sample = run.submit(PROMPT, encode(PROMPT), SamplingParams(12, temperature=0))
                run.read()
        finally:
            comes.join()
    assert list(sample.token_ids) == wanted(12)


def test_a_run_goes_on_without_a_node_whose_memory_is_needed(tmp_path: Path, checkpoint: Path) -> None:
    free = [1 << 40] * 2
    with contextlib.ExitStack() as stack:
        nodes: list[Node] = []
        for i in range(2):  # both hold all blocks, so that a ring has one of them
            nodes.append(
                stack.enter_context(
                    swarm_member(
                        i, tmp_path, checkpoint, [n for n, _ in nodes], 5, spare_bytes=1, free_bytes=lambda i=i: free[i]
                    )
                )
            )
            until(lambda: held_by(nodes[-1][1]) == range(N_LAYER))
        until(lambda: all(sum(one.is_ready for one in node.table.nodes) == 2 for node, _ in nodes))
        with opened(nodes[0][0], checkpoint) as run:
            samples = [run.submit(PROMPT, encode(PROMPT), SamplingParams(50, temperature=0))]
            run.read()
            ring = run.ring
            assert ring is not None
            used = next(i for i, (node, _) in enumerate(nodes) if ring.stages[1].name.endswith(node.process[:6]))
            free[used] = 0
            until(lambda: nodes[used][1].has_given_back and not nodes[used][0].stages.listed)
            samples.append(run.submit(PROMPT, encode(PROMPT), SamplingParams(50, temperature=0)))
            run.read()
            assert run.ring is not None and run.ring.stages[1].name != ring.stages[1].name
    known = wanted(50)
    assert all(list(sample.token_ids) == known for sample in samples)


def test_memory_that_is_needed_is_not_kept_by_rings_that_cannot_go_on(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else holds the blocks, so the ring has nowhere to go."""
    free = 1 << 40
    soon = replace(SOON, leave_s=0.1)
    with swarm_member(
        0, tmp_path, checkpoint, most_blocks=N_LAYER, spare_bytes=1, free_bytes=lambda: free, waits=soon
    ) as (node, member):  # fmt: skip
        until(lambda: held_by(member) == range(N_LAYER))
        with opened(node, checkpoint) as run:
            assert node.runs.active and run.ring is not None
            name = run.ring.stages[1].name
            free = 0
            until(lambda: member.has_given_back and not node.stages.listed)
        assert name != node.config.name and f"{name} is lost: its memory is needed" in caplog.text, (
            "as the ring calls it"
        )


@pytest.mark.slow
def test_a_node_does_not_move_from_under_a_ring_that_needs_its_blocks(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving: list[str] = []
    looks: list[str] = []

    def planned(nodes: Sequence[Served], n_layer: int) -> list[Move]:
        looks.extend(moving)
        return [Move(process, 2) for process in moving]

    monkeypatch.setattr(member_module, "plan", planned)
    with swarm(2, 3, tmp_path, checkpoint) as nodes:
        first = next(node for node in nodes if held_by(node[1]) == range(3))
        with opened(first[0], checkpoint):
            until(lambda: first[0].runs.active)
            moving.append(first[0].process)
            n_before = len(looks)
            until(lambda: len(looks) > n_before + 6)  # both nodes look
            assert held_by(first[1]) == range(3)
        until(lambda: held_by(first[1]) == range(2, 5))


@pytest.mark.slow
def test_a_node_that_lies_is_found_by_one_that_holds_its_blocks(tmp_path: Path, checkpoint: Path) -> None:
    """It leaves the ring, and another takes its place."""
    with swarm(2, N_LAYER, tmp_path, checkpoint) as nodes, opened(nodes[0][0], checkpoint, verify=1.0) as run:
        assert run.ring is not None
        (used,) = (node for node, _ in nodes if run.ring.stages[1].name.endswith(node.process[:6]))
        for held in used.stages.listed:
            spoil(held, LIARS["after many rows"])
        samples = [run.submit(PROMPT, encode(PROMPT), SamplingParams(50, temperature=0)) for _ in range(2)]
        run.read()
        told = run.verifier
        assert told is not None and told.n_by_others > 0
        (untrue, _), *_ = told.found
        assert all(name.endswith(used.process[:6]) for name in untrue.nodes) and len(told.found) == 1
        assert [list(sample.token_ids) for sample in samples] == [wanted(50)] * 2


@pytest.mark.slow
def test_adapters_come_to_nodes_that_hold_the_blocks(tmp_path: Path) -> None:
    """LoRA and learned rows, also when another node takes over; and others' runs do not have them."""
    made = tuned_in(tmp_path / "made")
    expected = [made.ids(*one) for one in EACH[: len(KINDS) + 1]]
    with swarm(3, 4, tmp_path, made.checkpoint) as nodes:
        with opened(nodes[0][0], made.checkpoint, 200, adapter=made.flags) as run:
            assert texts(run, *EACH[: len(KINDS) + 1]) == expected
            assert run.ring is not None
            lost = run.ring.stages[1].name
            next(node for node, _ in nodes if lost.endswith(node.process[:6])).leave()

            def is_replaced() -> bool:
                assert texts(run, *EACH[: len(KINDS) + 1]) == expected
                return run.ring is not None and lost not in {stage.name for stage in run.ring.stages}

            until(is_replaced)
        with opened(nodes[0][0], made.checkpoint, 200) as run:
            assert texts(run, EACH[0]) == expected[:1]


@pytest.mark.slow
def test_blocks_that_nobody_holds_are_named(tmp_path: Path, checkpoint: Path) -> None:
    with swarm_member(0, tmp_path, checkpoint, most_blocks=2) as (node, member):
        until(lambda: held_by(member) is not None)
        with pytest.raises(PlacementError, match="block 2 and 2 others"), opened(node, checkpoint, wait_s=0.5):
            pass


@pytest.mark.slow
def test_a_ring_has_one_format(tmp_path: Path, checkpoint: Path) -> None:
    """All blocks are there, in another one than is wanted."""
    with swarm_member(0, tmp_path, checkpoint, most_blocks=N_LAYER) as (node, member):
        until(lambda: held_by(member) is not None)
        with pytest.raises(PlacementError, match="--quantize"), opened(node, checkpoint, wait_s=0.5, quantize="int8"):
            pass
