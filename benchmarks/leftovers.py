"""LLaMPS' placements by left-over capacity: its Optimal Placement Algorithm, its greedy baseline, and any ranking.

"Leftovers for LLaMA" (Singh et al., ICPE 2024), algorithms 1 and 2: nodes are sorted by a score and filled with as many
blocks as their left-over memory holds, one after the other. GMA's score is the left-over memory; OPA's is the weighted sum
of left-over memory in GB and cores. The weights come from pairwise preferences by the analytic hierarchy process (T. L. Saaty,
"The Analytic Hierarchy Process", 1980): somebody says for each two criteria how much more one matters than the other (1: as
much, 3: somewhat, 5: clearly, 9: far more); the weights are the means of the rows of the matrix of these numbers, its columns
scaled to sum up to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import on_path  # noqa: F401
from mdi.errors import PlacementError
from mdi.placement.cost import CostModel
from mdi.placement.methods import filled, left_over, ranked
from mdi.placement.placement import Placement, check_fits, describe

Matrix = tuple[tuple[float, ...], ...]


def comparison_matrix(criteria: Sequence[str], preferences: Mapping[tuple[str, str], float]) -> Matrix:
    """The matrix of how much each criterion matters against each other one.

    Args:
        preferences: (a, b) -> how much more a matters than b, 1/9 to 9; one entry for each pair, in either direction.
    """

    def over(a: str, b: str) -> float:
        if a == b:
            return 1.0
        return preferences[a, b] if (a, b) in preferences else 1 / preferences[b, a]

    return tuple(tuple(over(a, b) for b in criteria) for a in criteria)


def weights(matrix: Matrix) -> tuple[float, ...]:
    """Weight of each criterion; they sum up to one."""
    columns = [sum(column) for column in zip(*matrix, strict=True)]
    return tuple(sum(v / total for v, total in zip(row, columns, strict=True)) / len(matrix) for row in matrix)


CRITERIA = ("memory", "cores")
# The paper gives no number, only that memory is preferred; 5 is "clearly more". Its Table 3 comes out with anything from 4 on.
PREFERENCES = {("memory", "cores"): 5.0}

Scores = Callable[[Sequence[float], Sequence[float]], "list[float]"]


def opa_weights(preferences: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Weights of a GB of left-over memory and of a core; two judgements cannot contradict each other."""
    memory, cores = weights(comparison_matrix(CRITERIA, preferences))
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
        if (placed := sum(counts.values())) < cost.n_layer:
            raise PlacementError(f"{describe(cost)} does not fit: {method} places {placed} of {cost.n_layer} blocks")
        n_used = len(counts.keys() | {0})
    ring = [0, *(i for i in order if i in counts and i)]
    placement = Placement.of(method, cost.profile, ring, [counts.get(i, 0) for i in ring], _reasons(cost, ring, most))
    check_fits(cost, placement)
    return placement


def _reasons(cost: CostModel, ring: Sequence[int], most: Sequence[int]) -> dict[int, str]:
    others = set(range(cost.n_nodes)) - set(ring)
    return {i: "all blocks were placed before its turn" if most[i] else "not one block fits" for i in others}
