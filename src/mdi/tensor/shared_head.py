"""The head, shared over the nodes of a group: each has some rows of the vocabulary; the starter gets all logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mdi.kernels.blocks import Head, Weights
from mdi.kernels.kernel_stage import KernelStarterStage
from mdi.tensor.mesh import Mesh
from mdi.tensor.shares import Share


class SharedHeadStage(KernelStarterStage):
    """Embedding and the first node's rows of the head.

    Args:
        config: litgpt's Config of the whole model, as a plain dict.
        mesh: gives the group's connections, once they are open.
    """

    def __init__(
        self, config: Mapping[str, Any], share: Share, mesh: Callable[[], Mesh], n_threads: int, cache_type: str
    ) -> None:  # fmt: skip
        super().__init__(config, 0, n_threads, cache_type)
        self._share, self._mesh = share, mesh

    def _made_head(self, weights: Weights) -> Callable[[np.ndarray], np.ndarray]:
        return made_head(self._share, weights, self._context)

    def head(self, x: np.ndarray) -> np.ndarray:
        """As KernelStarterStage's, once the others have computed the same rows."""
        bounds = self._share.shares.vocabulary
        assert bounds is not None
        widths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        logits = np.empty((len(x), bounds[-1]), dtype=np.float32)
        if widths[0]:
            logits[:, : widths[0]] = self._head(x)
        others = [rank for rank in range(1, len(widths)) if widths[rank]]
        found = self._mesh().swap([], [(rank, 4 * len(x) * widths[rank]) for rank in others])
        for rank, data in found.items():
            logits[:, bounds[rank] : bounds[rank + 1]] = np.frombuffer(data, dtype=np.float32).reshape(len(x), -1)
        return logits


def made_head(share: Share, weights: Weights, context: Any) -> Head:
    """A node's rows of the head. KernelError if they are not just those."""
    assert share.vocabulary is not None
    first, end = share.vocabulary
    return Head(share.config, weights, end - first, context)


def send_logits(mesh: Mesh, head: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> None:
    """A member's rows of the logits of rows x (M, n_embd), to the first node."""
    mesh.swap([(0, head(x).reshape(-1).view(np.uint8).data)], [])
