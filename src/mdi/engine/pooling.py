"""One row of all rows of a text, as models that embed texts say it."""

from __future__ import annotations

import numpy as np


class Pool:
    """Rows of one text as they come: their sum, which has the direction of their mean, or the last of them.

    Args:
        pooling: one of spec.options.POOLINGS.
        n: tokens of the text.

    Attributes:
        read_from: the first position whose row counts.
    """

    def __init__(self, pooling: str, n: int) -> None:
        self.read_from = 0 if pooling == "mean" else n - 1
        self._sum: np.ndarray | float = 0.0

    def take(self, rows: np.ndarray) -> None:
        """float32 (any, n_embd), the next ones."""
        self._sum = self._sum + rows.sum(axis=0, dtype=np.float64)

    @property
    def vector(self) -> np.ndarray:
        """float32 (n_embd), of length 1; all rows have come."""
        length = np.sqrt(np.square(self._sum).sum())
        return np.asarray(self._sum / max(length, np.finfo(np.float32).tiny), dtype=np.float32)
