"""Shares of blocks that read their weights through a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mdi.slices import Slices
from mdi.tensor.mesh import Mesh
from mdi.tensor.shard_stage import ShardStage
from mdi.tensor.shared_head import SharedHeadStage
from mdi.tensor.shares import Share
from mdi.window.pieced_head import PiecedHead
from mdi.window.stored import StoredPart
from mdi.window.weight_units import HEAD
from mdi.window.window import Window
from mdi.window.window_stage import WindowStage, WindowStarterStage


class WindowShardStage(WindowStage, ShardStage):
    """A share of blocks, and of the head where that is shared out."""

    def take(
        self, stored: Mapping[str, StoredPart], window: Window, cache_bytes: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().take(stored, window, cache_bytes, check)
        rows = self.share.vocabulary
        if HEAD in stored and rows is not None and rows[0] < rows[1]:
            arrays, n_rows = stored[HEAD].arrays, rows[1] - rows[0]
            self._own_head = PiecedHead(self.share.config, arrays, window, n_rows, self._context)

    def _run(self, rows: np.ndarray, slices: Slices) -> None:
        self._blocks.forward_shared(rows, slices, self._joined, self._ready)
        self.check()


class WindowSharedHeadStage(WindowStarterStage, SharedHeadStage):
    """Embedding and the first node's rows of the head."""

    @property
    def _n_head_rows(self) -> int:
        rows = self._share.vocabulary
        assert rows is not None
        return rows[1] - rows[0]


class LeaderStages:
    """The two stages of a group's first node, which share one window: embedding and head, and a share of the blocks.

    Attributes:
        ends, share: the two.
        config: of the whole model.
    """

    def __init__(self, ends: WindowStarterStage, share: WindowShardStage) -> None:
        self.ends, self.share = ends, share
        self.config: Mapping[str, Any] = ends.config

    def run_bytes(self, max_length: int) -> int:
        """See KernelStage.run_bytes."""
        return self.ends.run_bytes(max_length) + self.share.run_bytes(max_length)

    def take(
        self, stored: Mapping[str, StoredPart], window: Window, cache_bytes: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """See WindowStage.take."""
        blocks = {name: part for name, part in stored.items() if name.startswith("block.")}
        self.share.take(blocks, window, cache_bytes, check)
        self.ends.take({name: stored[name] for name in ("embedding", HEAD)}, window, 0, check)


def leader_stages(
    share: Share, blocks: tuple[int, int], n_threads: int, cache_type: str, mesh: Callable[[], Mesh]
) -> LeaderStages:
    """Those for a share of some blocks, without weights.

    Args:
        mesh: see SharedHeadStage.
    """
    config = dict(share.config)
    if share.vocabulary is None:
        ends = WindowStarterStage(config, 0, n_threads, cache_type)
    else:
        ends = WindowSharedHeadStage(config, share, mesh, n_threads, cache_type)
    return LeaderStages(ends, WindowShardStage(share, *blocks, n_threads, cache_type))
