"""How long a starter waits for a loading node: as long as it makes progress. Pure: no clock, no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdi.errors import NodeLostError

STALL_S = 300.0  # without any progress: a slow card reads a large part, and a slow board packs one, in less


class Patience:
    """With one node, in one step of its set-up.

    Args:
        name: of the node.
        n_parts: number of parts that it looks for and loads; a larger count is no progress.
        limit_s: how long it may be without progress.
        now_s: any clock's time.
    """

    def __init__(self, name: str, n_parts: int, limit_s: float, now_s: float) -> None:
        self._name = name
        self._n_parts = n_parts
        self._limit_s = limit_s
        self._since_s = now_s
        self._done = 0

    def look(self, status: Mapping[str, Any], now_s: float) -> None:
        """Take the node's status. Raises NodeLostError if it was without progress for too long."""
        done = self._count(status.get("looking")) + self._count(status.get("loading"))
        if done > self._done:
            self._done, self._since_s = done, now_s
        elif now_s - self._since_s > self._limit_s:
            raise NodeLostError(
                self._name,
                f"{self._name} is loading, but has made no progress for {self._limit_s:.0f} s: look at "
                "what it prints, and start it again",
            )

    def _count(self, stage: Any) -> int:
        done = stage.get("done") if isinstance(stage, Mapping) else None
        return min(max(done, 0), self._n_parts) if isinstance(done, int) else 0
