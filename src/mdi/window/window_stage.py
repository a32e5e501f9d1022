"""Stages of the kernels that read their weights from the disk while they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import numpy as np

from mdi.checkpoint.packing import EMBEDDING_SCALE
from mdi.errors import KernelError
from mdi.kernels.blocks import Weights
from mdi.kernels.kernel_stage import KernelStage, KernelStarterStage, WeightUse
from mdi.kernels.layout import Matrix
from mdi.slices import Slices
from mdi.window.pieced_head import PiecedHead
from mdi.window.stored import StoredPart
from mdi.window.weight_units import HEAD
from mdi.window.window import Window


class WindowStage(KernelStage):
    """Blocks whose weights a window holds; it is loaded with `take` instead of `load`."""

    _window: Window
    check: Callable[[], None]
    _cache_bytes: int | None
    _small_bytes: int

    def take(
        self, stored: Mapping[str, StoredPart], window: Window, cache_bytes: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Take the weights.

        Args:
            stored: the parts of the stage, by name.
            window: over their matrices.
            cache_bytes: what caches may take at most; None is not known.
            check: called after each pass over the blocks; its exceptions pass through.

        Raises:
            KernelError: a tensor is missing or of another shape.
        """
        self._window, self._cache_bytes, self.check = window, cache_bytes, check
        self._small_bytes = sum(array.nbytes for part in stored.values() for array in part.arrays.values())

        def weights(part: str) -> dict[str, Matrix | np.ndarray]:
            units = window.matrices(part) if part != HEAD else []
            return {**stored[part].arrays, **{name: matrix for unit in units for name, matrix in unit.items()}}

        KernelStage.load(self, list(stored), weights)

    def prepare(self, max_length: int, cache_limit: int | None = None) -> None:
        """See KernelStage.prepare."""
        limits = [limit for limit in (cache_limit, self._cache_bytes) if limit is not None]
        super().prepare(max_length, min(limits, default=None))

    @property
    def cache_limit(self) -> int | None:
        return self._cache_bytes

    @property
    def weight_bytes(self) -> int:
        """Of memory that weights take."""
        return self._window.plan.resident_bytes + self._small_bytes

    @property
    def weight_use(self) -> WeightUse:
        use = self._window.use
        return WeightUse(use.resident_bytes + self._small_bytes, use.read_bytes, use.wait_s)

    @property
    def window(self) -> Window:
        return self._window

    def _run(self, rows: np.ndarray, slices: Slices) -> None:
        self._blocks.forward_in_halves(rows, slices, self._ready)
        self.check()

    def _ready(self, block: int, half: int) -> contextlib.AbstractContextManager[None]:
        return self._window.unit(f"block.{block}", half)

    def close(self) -> None:
        self._window.close()


class WindowStarterStage(WindowStage, KernelStarterStage):
    """The starter's stage: rows of the embedding are read as tokens ask for them, and the head comes in pieces of rows."""

    def take(
        self, stored: Mapping[str, StoredPart], window: Window, cache_bytes: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().take(stored, window, cache_bytes, check)
        table = stored["embedding"].table
        shape = (int(self.config["padded_vocab_size"]), self.n_embd)
        if table is None or table.shape != shape:
            raise KernelError(f"the embedding of this model is {shape[0]} x {shape[1]}")
        self._table = table
        self._table_scale = stored["embedding"].arrays.get(EMBEDDING_SCALE)
        self._head = self._made_head(stored[HEAD].arrays)

    def _made_head(self, weights: Weights) -> Callable[[np.ndarray], np.ndarray]:
        return PiecedHead(self.config, weights, self._window, self._n_head_rows, self._context)

    @property
    def _n_head_rows(self) -> int:
        return int(self.config["padded_vocab_size"])
