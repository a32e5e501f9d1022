"""Sharing out blocks over nodes that come and go: by properties, and beside the best of all assignments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.placement.balance import Move, Served, moved, plan, speeds, weakest_span


@st.composite
def swarms(draw: st.DrawFn, most: int = 12) -> tuple[list[Served], int]:
    n_layer = draw(st.integers(1, 16))
    nodes = []
    for i in range(draw(st.integers(1, most))):
        n_blocks = draw(st.integers(1, n_layer))
        start = draw(st.integers(0, n_layer - n_blocks))
        nodes.append(Served(f"n{i}", draw(st.floats(0, 100)), start, n_blocks))
    return nodes, n_layer


def by_hand(nodes: Sequence[Served], n_layer: int) -> list[float]:
    return [sum(n.speed for n in nodes if n.start <= i < n.start + n.n_blocks) for i in range(n_layer)]


@given(swarms())
@settings(max_examples=50, deadline=None)
def test_speed_of_a_block_is_that_of_its_nodes(swarm: tuple[list[Served], int]) -> None:
    assert speeds(*swarm) == pytest.approx(by_hand(*swarm), abs=1e-9)


def test_a_block_without_a_node_has_exactly_no_speed() -> None:
    """Though 0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3, rounded each time, is more."""
    nodes = [Served("a", 0.1, 0, 3), Served("b", 0.2, 1, 3), Served("c", 0.3, 2, 3)]
    assert speeds(nodes, 6)[5] == 0.0


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=1, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_a_new_node_takes_the_weakest_span(served: list[float], data: st.DataObject) -> None:
    """Rule 1 of Petals, as it is written: sorted speeds are compared one after the other, the leftmost of equal ones counts."""
    n_blocks = data.draw(st.integers(1, len(served)))
    wanted = min(range(len(served) - n_blocks + 1), key=lambda k: (sorted(served[k : k + n_blocks]), k))
    assert weakest_span(np.array(served), n_blocks) == wanted


@given(swarms(), st.sampled_from([0.01, 0.2, 0.5]))
@settings(max_examples=60, deadline=None)
def test_moves_gain_more_than_the_margin_and_stay_within_the_model(
    swarm: tuple[list[Served], int], margin: float
) -> None:
    nodes, n_layer = swarm
    moves = plan(nodes, n_layer, margin, n_tries=5)
    assert moves == plan(nodes[::-1], n_layer, margin, n_tries=5), "another order of the same nodes"
    after = moved(nodes, moves)
    assert {(n.name, n.speed, n.n_blocks) for n in after} == {(n.name, n.speed, n.n_blocks) for n in nodes}
    assert all(0 <= n.start <= n_layer - n.n_blocks for n in after)
    assert len({move.name for move in moves}) == len(moves)
    if moves:
        assert speeds(after, n_layer).min() > speeds(nodes, n_layer).min() * (1 + margin)


@given(swarms())
@settings(max_examples=30, deadline=None)
def test_moves_come_to_an_end(swarm: tuple[list[Served], int]) -> None:
    nodes, n_layer = swarm
    for _ in range(100):
        if not (moves := plan(nodes, n_layer, 0.2, n_tries=5)):
            return
        nodes = moved(nodes, moves[:1] if speeds(moved(nodes, moves[:1]), n_layer).min() else moves)
    raise AssertionError("nodes move for ever")


def test_a_lost_span_is_served_again() -> None:
    nodes = [Served(f"n{i}", 10.0, 4 * (i % 4), 4) for i in range(8)]
    left = [n for n in nodes if n.start != 8]
    moves = plan(left, 16)
    assert len(moves) == 1 and moves[0].start == 8 and speeds(moved(left, moves), 16).min() == 10.0


def best_of_all(nodes: Sequence[Served], n_layer: int) -> float:
    """The speed of the slowest block, where that is highest of all assignments: one row of `served` is one of these."""
    served = np.zeros((1, n_layer))
    for node in nodes:
        spans = [by_hand([replace(node, start=k)], n_layer) for k in range(n_layer - node.n_blocks + 1)]
        served = (served[:, None] + np.array(spans)).reshape(-1, n_layer)
    return float(served.min(axis=1).max())


def test_small_swarms_come_near_the_best_of_all_assignments() -> None:
    rng, ratios = random.Random(3), []
    for _ in range(30):
        n_layer = 6
        nodes = [Served(f"n{i}", rng.uniform(1, 10), 0, rng.randint(1, 4)) for i in range(6)]
        best = best_of_all(nodes, n_layer)
        ratios.append(float(speeds(moved(nodes, plan(nodes, n_layer, 0.01)), n_layer).min() / best) if best else 1.0)
    assert min(ratios) >= 0.8 and sum(ratios) / len(ratios) >= 0.95


def test_the_margin_decides_whether_a_node_moves() -> None:
    nodes = [Served("a", 10.0, 0, 1), Served("b", 30.0, 1, 1), Served("c", 1.0, 1, 1)]
    assert plan(nodes, 2, 0.05) == (Move("c", 0),) and plan(nodes, 2, 0.2) == ()
