"""The placements by name, as `--placement` chooses them, and the rings that their search starts from.

Starting rings take nodes by left-over capacity, filled one after the other. The scores are those of LLaMPS ("Leftovers for
LLaMA", Singh et al., ICPE 2024): left-over memory (GMA, algorithm 2), and the sum of left-over memory in GB and cores,
weighted 5 to 1 (OPA, algorithm 1, with the weights that give the paper's table 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mdi.block_ranges import split_layers
from mdi.errors import PlacementError, UsageError
from mdi.placement.cost import CostModel
from mdi.placement.placement import Placement, check_counts, check_fits, describe
from mdi.placement.search import fastest, preferred, ring_of, spread, useful_nodes
from mdi.spec.options import DEFAULT_PLACEMENT, PLACEMENTS
from mdi.units import size

GB_TO_CORE = 5.0


def ranked(scores: Sequence[float]) -> list[int]:
    """Places of the nodes, best score first; equal ones as they are listed."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def filled(order: Sequence[int], most_blocks: Sequence[int], n_layer: int) -> dict[int, int]:
    """Blocks of each node that gets some, in this order; fewer than `n_layer` in all if they do not fit."""
    counts: dict[int, int] = {}
    for i in order:
        count = min(most_blocks[i], n_layer - sum(counts.values()))
        if count > 0:
            counts[i] = count
    return counts


def starting_rings(cost: CostModel) -> Iterator[tuple[int, ...]]:
    """The ring of each score, if the model fits its nodes."""
    cores = [node.n_cores for node in cost.profile.nodes]
    for weights in ((1.0, 0.0), (GB_TO_CORE, 1.0)):
        if (ring := _filled_ring(cost, cores, *weights)) is not None:
            yield ring


def _filled_ring(cost: CostModel, cores: Sequence[float], of_gb: float, of_core: float) -> tuple[int, ...] | None:
    """The starter first, because it has embedding and head; then the others by their score."""
    n_used, tried = 1, set()
    most = [cost.n_layer] * cost.n_nodes
    order: list[int] = []
    counts: Mapping[int, int] = {}
    while n_used not in tried:  # a frame's memory depends on the number of nodes, which depends on that memory
        tried.add(n_used)
        left, capacity = left_over(cost, n_used)
        most = [min(a, b) for a, b in zip(most, capacity, strict=True)]
        order = ranked([of_gb * n_bytes / 1e9 + of_core * n for n_bytes, n in zip(left, cores, strict=True)])
        counts = filled(order, most, cost.n_layer)
        if sum(counts.values()) < cost.n_layer:
            return None
        n_used = len(counts.keys() | {0})
    return (0, *(i for i in order if i in counts and i))


def left_over(cost: CostModel, n_used: int) -> tuple[list[float], list[int]]:
    """Of each node: memory left for blocks, and how many blocks with their caches it holds.

    If blocks differ, all count as large as the largest.
    """
    terms = cost.terms(n_used)
    sizes = [
        (b - a, d - c) for a, b, c, d in zip(cost.weights, cost.weights[1:], cost.caches, cost.caches[1:], strict=False)
    ]
    block = max(weight + cache for weight, cache in sizes)
    weight = max(weight for weight, _ in sizes)
    left, most = [], []
    for i in range(cost.n_nodes):
        running, loading = terms.capacity(i)
        left.append(running)
        most.append(max(0, int(min(running // block, loading // weight))))
    return left, most


EXPLAINED = 7  # nodes without a part that are looked at one by one


def place(cost: CostModel, method: str = DEFAULT_PLACEMENT) -> Placement:
    """Raises PlacementError: the model does not fit; UsageError: the placement is unknown."""
    if method == "throughput":
        return _fastest(cost, method)
    if method == "latency":
        return _fastest(CostModel(cost.profile, cost.shape, cost.workload, timed=1), method)
    if method == "even":
        return even(cost)
    raise UsageError(f"unknown placement {method!r}: expected {', '.join(PLACEMENTS)}")


def even(cost: CostModel) -> Placement:
    """As many blocks for each node as for any other, as they are listed; the head counts as the blocks that it is worth."""
    order = range(min(cost.n_nodes, cost.shape.most_nodes))
    head_blocks = cost.shape.head_macs / cost.shape.reference.macs
    counts = split_layers(cost.n_layer, len(order), head_blocks, cost.shape.cuts)
    left = dict.fromkeys(range(len(order), cost.n_nodes), "there are more nodes than blocks")
    placement = Placement.of("even", cost.profile, order, counts, left)
    check_fits(cost, placement)
    return placement


def by_hand(cost: CostModel, counts: Sequence[int]) -> Placement:
    """So many blocks for each node, as listed."""
    order = range(len(counts))
    check_counts(cost, order, counts)
    placement = Placement.of("layers", cost.profile, order, counts)
    check_fits(cost, placement)
    return placement


def _fastest(cost: CostModel, method: str) -> Placement:
    """Of the rings that are about as fast as the fastest the one to prefer (`mdi.placement.search`).

    Also tries what the simpler ways would choose, so that it is never much worse, however many nodes there are.
    """
    simple = []
    if cost.n_nodes > 1:
        simple.append(tuple(range(min(cost.n_nodes, cost.shape.most_nodes))))
        simple.extend(starting_rings(cost))
    best = fastest(cost, simple)
    if best is None:
        raise misfit(cost)
    best = preferred(cost, best)
    check_counts(cost, best.order, best.counts)
    reasons = {i: _reason(cost, i, best.order, best.round_s) for i in _few_left_out(cost, best.order)}
    placement = Placement.of(method, cost.profile, best.order, best.counts, reasons)
    check_fits(cost, placement)
    return placement


def _few_left_out(cost: CostModel, order: Sequence[int]) -> list[int]:
    """Of many nodes without a part, only the first are looked at one by one."""
    used = set(order)
    return [i for i in range(cost.n_nodes) if i not in used][:EXPLAINED]


def _reason(cost: CostModel, i: int, order: Sequence[int], round_s: float) -> str:
    """Why a node has no part: nothing fits it, or the best ring that it is put into is slower."""
    n_used = len(order) + 1
    terms = cost.terms(n_used)
    cuts = range(cost.n_layer + 1) if cost.shape.cuts is None else cost.shape.cuts
    if not any(terms.fits(i, start, stop) for start, stop in itertools.pairwise(cuts)):
        return "not one block fits"
    if n_used > cost.shape.most_nodes:
        return "there are more nodes than blocks"
    places = {n_used - 1} if cost.links.are_equal else {1, (n_used + 1) // 2, n_used - 1}
    rings = (ring_of(cost, [*order[:k], i, *order[k:]], terms.n_rows) for k in sorted(places))
    found = [spread(cost, ring) for ring in rings]
    rounds = [s.round_s for s in found if s is not None]
    if not rounds:
        return "not needed"
    if n_used > useful_nodes(cost):
        n = cost.timed.n_sequences
        return f"{'one sequence keeps' if n == 1 else f'{n} sequences keep'} no more nodes busy"
    return f"without it the ring is {min(rounds) / round_s:.2f} times as fast"


def misfit(cost: CostModel) -> PlacementError:
    """The refusal for a cluster that is too small: how much is missing, and where."""
    n_used = min(cost.n_nodes, cost.shape.most_nodes)
    nodes = cost.profile.nodes
    least = cost.memory(0, 0, 0, n_used).total
    if least > nodes[0].memory_bytes:
        lack = least - nodes[0].memory_bytes
        return PlacementError(
            f"{describe(cost)} does not fit: {nodes[0].name} has {size(lack)} too little for embedding, head and the "
            f"process alone ({size(least)} needed, {size(nodes[0].memory_bytes)} free)",
            ((nodes[0].name, lack),),
        )
    terms = cost.terms(n_used)
    capacities = sorted(
        ((max(0.0, min(terms.capacity(i))), i) for i in range(1, cost.n_nodes)), key=lambda x: (-x[0], x[1])
    )
    capacities = [(max(0.0, min(terms.capacity(0))), 0), *capacities[: n_used - 1]]
    blocks = cost.weights[-1] + cost.caches[-1]
    each = blocks / cost.n_layer
    placed = sum(
        max(0, terms.most_blocks(i)) if cost.is_uniform else int(capacity // each) for capacity, i in capacities
    )
    lack = max(1, round((cost.n_layer - placed) * each))
    shown = ", ".join(f"{nodes[i].name} has room for {size(capacity)}" for capacity, i in capacities[:6])
    more = f" and {len(capacities) - 6} more" if len(capacities) > 6 else ""
    return PlacementError(
        f"{describe(cost)} does not fit: its {cost.n_layer} blocks with caches take {size(blocks)}, and {size(lack)} of "
        f"that do not fit ({shown}{more})",
        (("", lack),),
    )
