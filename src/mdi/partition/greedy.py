"""Placements by left-over capacity: LLaMPS' Optimal Placement Algorithm, its greedy baseline, and any ranking.

"Leftovers for LLaMA" (Singh et al., ICPE 2024), algorithms 1 and 2: nodes are sorted by a score and filled with as many
blocks as their left-over memory holds, one after the other. GMA's score is the left-over memory; OPA's is the weighted sum
of left-over memory in GB and cores, the weights from pairwise preferences (AHP).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mdi.errors import PlacementError, UsageError
from mdi.partition.ahp import CONSISTENT, comparison_matrix, consistency_ratio, weights
from mdi.partition.cost import CostModel
from mdi.partition.placement import Placement, check_fits, describe
from mdi.units import size

CRITERIA = ("memory", "cores")
# The paper gives no number, only that memory is preferred; 5 is "clearly more". Its Table 3 comes out with anything from 4 on.
PREFERENCES = {("memory", "cores"): 5.0}

Scores = Callable[[Sequence[float], Sequence[float]], "list[float]"]


def opa_weights(preferences: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Weights of a GB of left-over memory and of a core. Raises UsageError."""
    matrix = comparison_matrix(CRITERIA, preferences)
    ratio = consistency_ratio(matrix)
    if ratio > CONSISTENT:
        raise UsageError(f"the preferences contradict each other (consistency ratio {ratio:.2f}, at most {CONSISTENT})")
    memory, cores = weights(matrix)
    return memory, cores


def opa_scores(
    left_over_gb: Sequence[float], cores: Sequence[float], preferences: Mapping[tuple[str, str], float] = PREFERENCES
) -> list[float]:
    """Algorithm 1, step 10."""
    of_memory, of_cores = opa_weights(preferences)
    return [of_memory * gb + of_cores * n for gb, n in zip(left_over_gb, cores, strict=True)]


def gma_scores(left_over_gb: Sequence[float], cores: Sequence[float]) -> list[float]:
    """Algorithm 2, step 4."""
    return list(left_over_gb)


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


def by_score(cost: CostModel, method: str, scores: Scores) -> Placement:
    """Sort the nodes and fill them. On our ring the starter is first and has embedding and head, whatever its rank.

    Raises:
        PlacementError: the model does not fit the nodes together.
    """
    n_used, looked_at = 1, set()
    most = [cost.n_layer] * cost.n_nodes
    while n_used not in looked_at:  # a frame's memory depends on the number of nodes, which depends on that memory
        looked_at.add(n_used)
        left, capacity = left_over(cost, n_used)
        most = [min(a, b) for a, b in zip(most, capacity, strict=True)]
        order = ranked(scores([b / 1e9 for b in left], [node.n_cores for node in cost.profile.nodes]))
        counts = filled(order, most, cost.n_layer)
        _refuse_the_rest(cost, method, counts)
        n_used = len(counts.keys() | {0})
    ring = [0, *(i for i in order if i in counts and i)]
    placement = Placement.of(method, cost.profile, ring, [counts.get(i, 0) for i in ring], _reasons(cost, ring, most))
    check_fits(cost, placement)
    return placement


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


def _refuse_the_rest(cost: CostModel, method: str, counts: Mapping[int, int]) -> None:
    starter = cost.profile.nodes[0]
    least = cost.memory(0, 0, 0, max(1, len(counts))).total
    if least > starter.memory_bytes:
        lack = least - starter.memory_bytes
        raise PlacementError(
            f"{starter.name} has {size(lack)} too little for embedding and head of {describe(cost)}",
            ((starter.name, lack),),
        )
    placed = sum(counts.values())
    if placed < cost.n_layer:
        each = max(
            b - a + d - c
            for a, b, c, d in zip(cost.weights, cost.weights[1:], cost.caches, cost.caches[1:], strict=False)
        )
        lack = int((cost.n_layer - placed) * each)
        raise PlacementError(
            f"{describe(cost)} does not fit: {method} places {placed} of {cost.n_layer} blocks, for the others "
            f"{size(lack)} are missing",
            (("", lack),),
        )


def _reasons(cost: CostModel, ring: Sequence[int], most: Sequence[int]) -> dict[int, str]:
    others = set(range(cost.n_nodes)) - set(ring)
    return {i: "all blocks were placed before its turn" if most[i] else "not one block fits" for i in others}
