"""Starting rings for the search: nodes by left-over capacity, filled one after the other.

The scores are those of LLaMPS ("Leftovers for LLaMA", Singh et al., ICPE 2024): left-over memory (GMA, algorithm 2), and the
sum of left-over memory in GB and cores, weighted 5 to 1 (OPA, algorithm 1, with the weights that give the paper's table 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mdi.partition.cost import CostModel

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
