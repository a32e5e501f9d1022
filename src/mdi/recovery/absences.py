"""Lost nodes, and how long each must wait before it is used again: longer after each loss."""

from __future__ import annotations

LONGEST_S = 600.0


class Absences:
    """Pure: the time is given to it.

    Args:
        step_s: what a node waits after its second loss; after the first it may come back at once, and every further one
            doubles the time.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._losses: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, name: str, now: float) -> None:
        """Node `name` was lost."""
        n = self._losses[name] = self._losses.get(name, 0) + 1
        self._until[name] = now + self.wait_s(n)

    def wait_s(self, n_losses: int) -> float:
        if n_losses < 2:
            return 0.0
        return float(min(LONGEST_S, self._step_s * 2 ** min(n_losses - 2, 30)))

    def n_losses(self, name: str) -> int:
        return self._losses.get(name, 0)

    def is_over(self, name: str, now: float) -> bool:
        """Whether the node may be used again."""
        return now >= self._until.get(name, now)

    def left_s(self, name: str, now: float) -> float:
        """How long it still has to wait."""
        return max(0.0, self._until.get(name, now) - now)
