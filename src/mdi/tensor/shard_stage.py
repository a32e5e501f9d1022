"""The stage of a node with a share of every block, computed together with its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mdi.errors import EngineError
from mdi.kernels.blocks import Blocks, Weights
from mdi.kernels.kernel_stage import KernelStage
from mdi.slices import Slices
from mdi.tensor.allreduce import AllReduce
from mdi.tensor.mesh import Tally
from mdi.tensor.shard_blocks import ShardBlocks
from mdi.tensor.shared_head import made_head, send_logits
from mdi.tensor.shares import Share


class ShardStage(KernelStage):
    """A share of the blocks [start, stop).

    Args:
        share: what this node has of each of them.
        n_threads, cache_type: see KernelStage.

    Attributes:
        group: the sum over all nodes; set (`join`) while these are connected.
        tally: what sums took in this run; group_name: the group that it is, or was, a part of.
    """

    _blocks: ShardBlocks

    def __init__(self, share: Share, start: int, stop: int, n_threads: int = 1, cache_type: str = "float32") -> None:
        super().__init__(share.shard_config(), start, stop, n_threads, cache_type)
        self.share = share
        self.group: AllReduce | None = None
        self.tally, self.group_name = Tally(), ""
        self._own_head: Callable[[np.ndarray], np.ndarray] | None = None

    def join(self, name: str, group: AllReduce) -> None:
        """The nodes of the group of this name are connected: from here on frames can be computed."""
        self.group, self.tally, self.group_name = group, group.mesh.tally, name

    def leave(self) -> None:
        """Close the connections; harmless if there are none."""
        group, self.group = self.group, None
        if group is not None:
            group.mesh.close()

    def load(self, parts: Sequence[str], weights: Callable[[str], Weights]) -> None:
        """As KernelStage's; with the part "head", also this node's rows of that."""
        super().load(parts, weights)
        has_rows = (
            "head" in parts
            and self.share.vocabulary is not None
            and self.share.vocabulary[0] < self.share.vocabulary[1]
        )
        self._own_head = made_head(self.share, self._weights["head"], self._context) if has_rows else None

    def tell_logits(self, x: np.ndarray) -> None:
        """Send this node's part of the logits of some rows (M, n_embd), if it has any, to the first node."""
        if self._own_head is not None and self.group is not None and len(x):
            send_logits(self.group.mesh, self._own_head, x)

    def _made_blocks(self) -> Blocks:
        return ShardBlocks(self.share, self.start, self.stop, self._of_block, self.cache_type, self._context)

    def _run(self, rows: np.ndarray, slices: Slices) -> None:
        """As KernelStage's, together with the other nodes: all of them compute the same rows at the same time.

        Raises:
            RingError: one of them is lost.
        """
        self._blocks.forward_shared(rows, slices, self._joined)

    @property
    def _joined(self) -> AllReduce:
        if self.group is None:
            raise EngineError("a share of the blocks cannot be computed alone")
        return self.group
