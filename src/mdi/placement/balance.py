"""Chooses the blocks that a node of a swarm holds: pure functions of what all nodes have announced.

A node that comes takes the span whose slowest block is served slowest (Petals, Borzunov et al. 2023, appendix D). Nodes that
are there move if the slowest block of all gains more than a margin. The plan of these moves depends on nothing but the nodes,
so that all of them find the same one, and each makes its own move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MARGIN = 0.01  # what moves must gain; Petals' p is 0.2, with which a day of a swarm serves less (docs/seeds.md)
N_TRIES = 100  # searches from another beginning
SOFTNESS = 0.06  # how far above the slowest block others still count, as a part of the mean speed
N_DISTURBED = 3  # nodes that are set elsewhere for a try, at most


@dataclass(frozen=True)
class Served:
    """A node, and the blocks that it serves.

    Attributes:
        speed: tokens per second through its blocks.
        start, n_blocks: the blocks; it has memory for as many as that.
    """

    name: str
    speed: float
    start: int
    n_blocks: int


@dataclass(frozen=True)
class Move:
    """Node `name` serves other blocks from now on, from `start` on."""

    name: str
    start: int


def speeds(nodes: Sequence[Served], n_layer: int) -> Floats:
    """Of each block, the tokens per second of all nodes together that serve it; shape (n_layer,)."""
    return _speeds(*_arrays(nodes), n_layer)


def weakest_span(served: Floats, n_blocks: int) -> int:
    """The first block of the span that a new node takes: rule 1 of Petals.

    Args:
        served: tokens per second of each block without the node, shape (n_layer,).
        n_blocks: that it can hold, at most n_layer.
    """
    spans = np.sort(np.lib.stride_tricks.sliding_window_view(served, n_blocks), axis=1)
    return int(np.lexsort(spans.T[::-1])[0])


def plan(nodes: Sequence[Served], n_layer: int, margin: float = MARGIN, n_tries: int = N_TRIES) -> tuple[Move, ...]:
    """The moves that make the slowest block faster by more than `margin`; none if none are found.

    They stand in an order in which, as far as possible, no step makes the slowest block slower.
    """
    nodes = sorted(nodes, key=lambda node: node.name)
    if not nodes:
        return ()
    speed, starts, sizes = _arrays(nodes)
    least = float(_speeds(speed, starts, sizes, n_layer).min())
    mean = float(speed @ sizes) / n_layer
    if mean <= least * (1 + margin) or mean == 0:
        return ()  # no assignment serves its slowest block faster than the mean
    found = _search(speed, starts, sizes, n_layer, mean, n_tries)
    found = _without_needless(speed, starts, found, sizes, n_layer)
    if not _speeds(speed, found, sizes, n_layer).min() > least * (1 + margin):
        return ()
    return tuple(Move(nodes[i].name, int(found[i])) for i in _ordered(speed, starts, found, sizes, n_layer, mean))


def moved(nodes: Sequence[Served], moves: Sequence[Move]) -> list[Served]:
    """The nodes after these moves."""
    starts = {move.name: move.start for move in moves}
    return [replace(node, start=starts.get(node.name, node.start)) for node in nodes]


def _arrays(nodes: Sequence[Served]) -> tuple[Floats, Ints, Ints]:
    return (
        np.array([node.speed for node in nodes], dtype=np.float64),
        np.array([node.start for node in nodes], dtype=np.int64),
        np.array([node.n_blocks for node in nodes], dtype=np.int64),
    )


def _speeds(speed: Floats, starts: Ints, sizes: Ints, n_layer: int) -> Floats:
    steps = np.bincount(starts, speed, n_layer + 1) - np.bincount(starts + sizes, speed, n_layer + 1)
    served = np.cumsum(steps)[:n_layer]
    n_serving = np.cumsum(
        np.bincount(starts, minlength=n_layer + 1) - np.bincount(starts + sizes, minlength=n_layer + 1)
    )
    return np.where(n_serving[:n_layer] > 0, served, 0.0)  # exactly: sums round


def _search(speed: Floats, starts: Ints, sizes: Ints, n_layer: int, mean: float, n_tries: int) -> Ints:
    """The best starts that are found, by descents from the present ones and from disturbed ones."""
    random: Any = np.random.default_rng(len(starts))  # the same for all nodes
    softness = SOFTNESS * mean
    last = _descended(speed, starts, sizes, n_layer, softness)
    least_cost = _cost(speed, last, sizes, n_layer, softness)
    best, best_speed = last, float(_speeds(speed, last, sizes, n_layer).min())
    for _ in range(n_tries):
        tried = last.copy()
        for i in random.choice(len(starts), min(int(random.integers(1, N_DISTURBED + 1)), len(starts)), replace=False):
            tried[i] = random.integers(0, n_layer - sizes[i] + 1)
        tried = _descended(speed, tried, sizes, n_layer, softness)
        slowest = float(_speeds(speed, tried, sizes, n_layer).min())
        if slowest > best_speed:
            best, best_speed = tried, slowest
        cost = _cost(speed, tried, sizes, n_layer, softness)
        if cost <= least_cost:
            last, least_cost = tried, cost
    return best


def _cost(speed: Floats, starts: Ints, sizes: Ints, n_layer: int, softness: float) -> float:
    """Smaller if slow blocks are faster: a smooth minimum, so that the second slowest block counts as well."""
    return float(np.exp(-_speeds(speed, starts, sizes, n_layer) / softness).sum())


def _descended(speed: Floats, starts: Ints, sizes: Ints, n_layer: int, softness: float) -> Ints:
    """The best single move, again and again, until none makes `_cost` smaller."""
    starts, n = starts.copy(), len(starts)
    blocks = np.arange(n_layer)
    stops = np.minimum(blocks + sizes[:, None], n_layer)
    is_span = blocks + sizes[:, None] <= n_layer
    factor = -np.expm1(-speed / softness)[:, None]
    for _ in range(10 * n):
        served = _speeds(speed, starts, sizes, n_layer)
        own = (blocks >= starts[:, None]) & (blocks < (starts + sizes)[:, None])
        # What each block costs less if the node serves it.
        gain = np.exp(-(served - own * speed[:, None]) / softness) * factor
        sums = np.concatenate([np.zeros((n, 1)), np.cumsum(gain, axis=1)], axis=1)
        of_span = np.where(is_span, np.take_along_axis(sums, stops, axis=1) - sums[:, :n_layer], -1.0)
        best = of_span.argmax(axis=1)
        more = of_span[np.arange(n), best] - of_span[np.arange(n), starts]
        i = int(more.argmax())
        if more[i] <= 1e-9 * sums[i, -1]:
            break
        starts[i] = best[i]
    return starts


def _without_needless(speed: Floats, before: Ints, after: Ints, sizes: Ints, n_layer: int) -> Ints:
    """Without those moves that make the slowest block no faster."""
    after, slowest = after.copy(), float(_speeds(speed, after, sizes, n_layer).min())
    for i in np.flatnonzero(after != before):
        there, after[i] = after[i], before[i]
        if _speeds(speed, after, sizes, n_layer).min() < slowest:
            after[i] = there
    return after


def _ordered(speed: Floats, before: Ints, after: Ints, sizes: Ints, n_layer: int, mean: float) -> list[int]:
    """Indices of the nodes that move, the move first after which slow blocks are fastest."""
    now, left, order = before.copy(), [int(i) for i in np.flatnonzero(after != before)], []
    while left:

        def worth(i: int) -> tuple[float, float]:
            tried = now.copy()
            tried[i] = after[i]
            slowest = float(_speeds(speed, tried, sizes, n_layer).min())
            return slowest, -_cost(speed, tried, sizes, n_layer, SOFTNESS * mean)

        first = max(left, key=worth)
        left.remove(first)
        now[first] = after[first]
        order.append(first)
    return order
