"""Chooses the nodes of a swarm that a ring goes through, of those that hold the blocks already. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

N_LIMITS = 8  # limits of the slowest stage that are tried


@dataclass(frozen=True)
class Holder:
    """A node that holds blocks.

    Attributes:
        start, stop: the blocks, half-open.
        block_s: seconds of one block for a frame.
        delay_s: of a frame's way to it, and of its hand-over.
    """

    name: str
    start: int
    stop: int
    block_s: float
    delay_s: float = 0.0


@dataclass(frozen=True)
class Part:
    """A node's part of a chain: some of the blocks that it holds, half-open."""

    name: str
    start: int
    stop: int


Chain = tuple[Part, ...]


def choose_chain(holders: Sequence[Holder], n_layer: int, cuts: Sequence[int] | None = None) -> Chain | None:
    """A chain over all blocks in which no node comes twice, with a short round; None if a block is on no node.

    Args:
        cuts: where the model may be cut; None is everywhere.
    """
    allowed = range(n_layer + 1) if cuts is None else sorted(cuts)
    holders = [one for one in (_within(holder, allowed) for holder in holders) if one.start < one.stop]
    reach = _furthest(holders, n_layer)
    if reach is None:
        return None
    by_name = {holder.name: holder for holder in holders}
    edges: list[list[Holder]] = [[] for _ in range(n_layer)]
    for holder in sorted(holders, key=lambda one: (one.block_s, one.name)):
        for at in range(max(0, holder.start), min(holder.stop, n_layer)):
            edges[at].append(holder)
    best = _even(reach, by_name, allowed)
    limit = max(by_name[part.name].block_s * (part.stop - part.start) for part in best)
    for _ in range(N_LIMITS):
        if (path := _shortest(edges, n_layer, limit, allowed)) is not None:
            found = _even(path, by_name, allowed)
            if round_s(found, by_name) < round_s(best, by_name):
                best = found
        limit *= 0.7
    return best


def _within(holder: Holder, cuts: Sequence[int]) -> Holder:
    """Without the blocks at its ends that belong to others that it has not."""
    start = min((c for c in cuts if c >= holder.start), default=cuts[-1])
    return replace(holder, start=start, stop=max((c for c in cuts if c <= holder.stop), default=0))


def round_s(chain: Chain, holders: Mapping[str, Holder]) -> float:
    """Seconds until a frame is back, when there are as many frames under way as nodes: the slowest stage, or the whole way."""
    stages = [holders[part.name].block_s * (part.stop - part.start) for part in chain]
    return max(len(stages) * max(stages), sum(stages) + sum(holders[part.name].delay_s for part in chain))


def _furthest(holders: Sequence[Holder], n_layer: int) -> Chain | None:
    """The chain with the fewest nodes, always to the one that reaches furthest; None if there is none."""
    chain: list[Part] = []
    at = 0
    while at < n_layer:
        here = [holder for holder in holders if holder.start <= at < holder.stop]
        if not here:
            return None
        furthest = max(here, key=lambda one: (one.stop, -one.block_s, one.name))
        chain.append(Part(furthest.name, at, min(furthest.stop, n_layer)))
        at = furthest.stop
    return tuple(chain)


def _shortest(edges: Sequence[Sequence[Holder]], n_layer: int, limit_s: float, cuts: Sequence[int]) -> Chain | None:
    """The shortest way through all blocks in which no stage takes longer than a limit; None if none is found."""
    way: list[tuple[float, Chain] | None] = [(0.0, ())] + [None] * n_layer
    for at in range(n_layer):
        if (here := way[at]) is None:
            continue
        seconds, chain = here
        used = {part.name for part in chain}
        for holder in edges[at]:
            if holder.name in used:
                continue
            for stop in (c for c in cuts if at < c <= holder.stop):
                stage_s = holder.block_s * (stop - at)
                if stage_s > limit_s * (1 + 1e-9):
                    break
                total = seconds + stage_s + holder.delay_s
                known = way[stop]
                if known is None or total < known[0]:
                    way[stop] = total, (*chain, Part(holder.name, at, stop))
    last = way[n_layer]
    return None if last is None else last[1]


def _even(chain: Chain, holders: Mapping[str, Holder], cuts: Sequence[int]) -> Chain:
    """The same nodes in the same order, cut so that the slowest stage takes the least time; each keeps a block."""
    n_layer = chain[-1].stop
    slowest: list[float] = [0.0] + [float("inf")] * n_layer  # of the nodes so far, if they end with a block
    ways: list[list[int]] = []
    for part in chain:
        holder = holders[part.name]
        after, way = [float("inf")] * (n_layer + 1), [0] * (n_layer + 1)
        own = [c for c in cuts if holder.start <= c <= holder.stop]
        for i, start in enumerate(own):
            for stop in own[i + 1 :]:
                stage_s = max(slowest[start], holder.block_s * (stop - start))
                if stage_s < after[stop]:
                    after[stop], way[stop] = stage_s, start
        slowest = after
        ways.append(way)
    parts, stop = [], n_layer
    for part, way in zip(reversed(chain), reversed(ways), strict=True):
        parts.append(Part(part.name, way[stop], stop))
        stop = way[stop]
    return tuple(reversed(parts))
