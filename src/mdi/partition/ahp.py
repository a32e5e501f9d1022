"""Weights from pairwise preferences: the analytic hierarchy process (T. L. Saaty, "The Analytic Hierarchy Process", 1980).

Somebody says for each two criteria how much more one matters than the other (1: as much, 3: somewhat, 5: clearly, 9: far
more). The weights are the means of the rows of the matrix of these numbers, its columns scaled to sum up to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mdi.errors import UsageError

Matrix = tuple[tuple[float, ...], ...]

# Consistency index of random judgements for 1, 2, 3 ... criteria (Saaty 1980).
RANDOM_INDEX = (0.0, 0.0, 0.58, 0.90, 1.12, 1.24, 1.32, 1.41, 1.45)
CONSISTENT = 0.1  # judgements with a larger ratio contradict each other too much
SCALE = 9.0  # of preferences


def comparison_matrix(criteria: Sequence[str], preferences: Mapping[tuple[str, str], float]) -> Matrix:
    """The matrix of how much each criterion matters against each other one.

    Args:
        preferences: (a, b) -> how much more a matters than b, 1/9 to 9; one entry for each pair, in either direction.

    Raises:
        UsageError: a pair is missing or unknown, or a number is out of range.
    """
    if not 1 <= len(criteria) <= len(RANDOM_INDEX):
        raise UsageError(f"expected 1 to {len(RANDOM_INDEX)} criteria, found {len(criteria)}")
    for (a, b), value in preferences.items():
        if a not in criteria or b not in criteria or a == b:
            raise UsageError(f"preference of {a!r} over {b!r}: expected two of {', '.join(criteria)}")
        if not 1 / SCALE <= value <= SCALE:
            raise UsageError(f"preference of {a!r} over {b!r}: expected 1/9 to 9, found {value:g}")

    def over(a: str, b: str) -> float:
        if a == b:
            return 1.0
        if (a, b) in preferences:
            return preferences[a, b]
        if (b, a) in preferences:
            return 1 / preferences[b, a]
        raise UsageError(f"no preference of {a!r} over {b!r} is given")

    return tuple(tuple(over(a, b) for b in criteria) for a in criteria)


def weights(matrix: Matrix) -> tuple[float, ...]:
    """Weight of each criterion; they sum up to one."""
    columns = [sum(column) for column in zip(*matrix, strict=True)]
    return tuple(sum(v / total for v, total in zip(row, columns, strict=True)) / len(matrix) for row in matrix)


def consistency_ratio(matrix: Matrix) -> float:
    """How much the judgements contradict each other: 0 not at all; above CONSISTENT they should be revised."""
    n = len(matrix)
    if n < 3:
        return 0.0  # two judgements cannot contradict each other
    w = weights(matrix)
    largest = sum(sum(v * x for v, x in zip(row, w, strict=True)) / own for row, own in zip(matrix, w, strict=True)) / n
    return max(0.0, (largest - n) / (n - 1) / RANDOM_INDEX[n - 1])
