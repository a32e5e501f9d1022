"""A node's place in a group: its share of every block, the sum over all nodes, and logits that each has a part of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mdi.errors import EngineError
from mdi.tensor.allreduce import AllReduce
from mdi.tensor.mesh import Tally
from mdi.tensor.shares import Share


class GroupSum:
    """See the module.

    Args:
        share: what this node has of each block, and of the head.

    Attributes:
        tally: what sums took in this run.
        name: of the group that it is, or was, a part of.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.tally, self.name = Tally(), ""
        self._all: AllReduce | None = None

    def join(self, name: str, all_reduce: AllReduce) -> None:
        """The nodes of the group of this name are connected: from here on frames can be computed."""
        self._all, self.tally, self.name = all_reduce, all_reduce.mesh.tally, name

    def leave(self) -> None:
        """Close the connections; harmless if there are none."""
        joined, self._all = self._all, None
        if joined is not None:
            joined.mesh.close()

    @property
    def joined(self) -> AllReduce:
        """The sum over all nodes. Raises EngineError if they are not connected."""
        if self._all is None:
            raise EngineError(
                "a share of the blocks cannot be computed alone: the nodes of the group are not connected"
            )
        return self._all

    def send(self, logits: np.ndarray) -> None:
        """Send a member's part of the logits, float32 (M, tokens), to the first node."""
        self.joined.mesh.swap([(0, logits.reshape(-1).view(np.uint8).data)], [])


class SharedHead:
    """All logits on the first node, once the others have computed the same rows: float32 (M, n_embd) -> (M, vocabulary).

    Args:
        own: the first node's rows of the head; None if it has none.
    """

    def __init__(self, group: GroupSum, own: Callable[[np.ndarray], np.ndarray] | None) -> None:
        bounds = group.share.shares.vocabulary
        assert bounds is not None
        self._group, self._own, self._bounds = group, own, bounds
        self._widths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        bounds, widths = self._bounds, self._widths
        logits = np.empty((len(x), bounds[-1]), dtype=np.float32)
        if self._own is not None:
            logits[:, : widths[0]] = self._own(x)
        others = [rank for rank in range(1, len(widths)) if widths[rank]]
        found = self._group.joined.mesh.swap([], [(rank, 4 * len(x) * widths[rank]) for rank in others])
        for rank, data in found.items():
            logits[:, bounds[rank] : bounds[rank + 1]] = np.frombuffer(data, dtype=np.float32).reshape(len(x), -1)
        return logits
