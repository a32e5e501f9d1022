"""Decides whether sequences fit into the caches of all nodes. Pure: from the nodes' reports to a yes or no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdi.kernels.page_sizes import CHUNK_ROWS, CacheClass
from mdi.units import size


@dataclass(frozen=True)
class NodeCaches:
    """What one node can hold.

    Attributes:
        name: of the node.
        limit_bytes: what all caches together may take there.
        classes: what pages take there.
        chunk_rows: rows that a slice has at most.
    """

    name: str
    limit_bytes: int
    classes: tuple[CacheClass, ...]
    chunk_rows: int = CHUNK_ROWS

    def n_bytes(self, length: int) -> int:
        """What a sequence of `length` positions takes at most, from its first token to its last: whole pages."""
        return sum(c.n_bytes(length, self.chunk_rows) for c in self.classes)


@dataclass(frozen=True)
class CacheMemory:
    """The cache memory of a whole ring."""

    nodes: tuple[NodeCaches, ...]

    def needs(self, length: int) -> tuple[int, ...]:
        """Bytes on each node that a sequence of `length` positions takes at most."""
        return tuple(node.n_bytes(length) for node in self.nodes)

    def holds(self, n_bytes: Sequence[int]) -> bool:
        """Whether every node can hold its share of `n_bytes`."""
        return all(n <= node.limit_bytes for n, node in zip(n_bytes, self.nodes, strict=True))

    def refusal(self, length: int) -> str | None:
        """Why a sequence of `length` positions can never enter; None if it can."""
        for node, needed in zip(self.nodes, self.needs(length), strict=True):
            if needed > node.limit_bytes:
                return (
                    f"a sequence of up to {length} tokens needs {size(needed)} of cache on {node.name}, which has "
                    f"{size(node.limit_bytes)} for caches: ask for fewer tokens, give it more (--kv-memory), store less "
                    "per token (--kv-dtype bf16), or give it fewer blocks (--layers)"
                )
        return None

    def n_sequences(self, length: int) -> int | None:
        """How many sequences of `length` positions fit at once; None if any number does."""
        fits = [node.limit_bytes // n for node, n in zip(self.nodes, self.needs(length), strict=True) if n]
        return min(fits) if fits else None
