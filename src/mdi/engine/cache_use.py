"""The memory that the caches of running sequences take on each node, as a running sum. Pure numbers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from mdi.engine.cache_memory import CacheMemory
from mdi.engine.sequence import Sequence
from mdi.kernels.page_sizes import PAGE

AHEAD_POSITIONS = 2 * PAGE  # how much all sequences can grow after one was admitted, before one must be evicted


class CacheUse:
    """With `memory` None there is no limit, and nothing is counted.

    Attributes:
        total: bytes on each node.
    """

    def __init__(self, memory: CacheMemory | None) -> None:
        self.needs = _no_bytes if memory is None else lru_cache(1 << 16)(memory.needs)
        self.total = [0] * (0 if memory is None else len(memory.nodes))
        self._used: dict[int, tuple[int, ...]] = {}

    def count(self, sequence: Sequence) -> None:
        """Count all known tokens: they are sent before the sequence can get new ones."""
        before, now = self._used.get(sequence.seq_id), self.needs(sequence.n_cached)
        if before != now:
            if before is not None:
                self._add(before, -1)
            self._add(now, 1)
            self._used[sequence.seq_id] = now

    def drop(self, sequence: Sequence) -> None:
        self._add(self._used.pop(sequence.seq_id), -1)

    def ahead(self, sequences: Iterable[Sequence]) -> list[int]:
        """Bytes on each node that these take when all of them have grown by AHEAD_POSITIONS, or to their ends."""
        needs = [self.needs(min(one.n_cached + AHEAD_POSITIONS, one.n_positions)) for one in sequences]
        return [sum(node) for node in zip(*needs, strict=True)]

    def _add(self, n_bytes: tuple[int, ...], sign: int) -> None:
        for node, n in enumerate(n_bytes):
            self.total[node] += sign * n


def _no_bytes(length: int) -> tuple[int, ...]:
    """What a sequence takes of a memory without limits."""
    return ()
