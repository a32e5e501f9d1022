"""The interface between the starter's loop and its part of a model, in the kernels or in torch."""

from __future__ import annotations

from typing import Any, Protocol

from mdi.engine.worker import FrameRows, FrameStage


class StarterRows(FrameRows, Protocol):
    """As the starter has them: engine.rows.ArrayRows, engine.rows.TensorRows."""

    def ids(self, ids: list[int]) -> Any:
        """Token ids (N,), as the stage embeds them."""

    def none(self, n_cols: int) -> Any:
        """No rows, (0, n_cols)"""

    def are_finite(self, x: Any) -> bool:
        """Whether all numbers are."""


class StarterFrameStage(FrameStage, Protocol):
    """The starter's part: model.stage.StarterStage, or kernels.kernel_stage.KernelStarterStage."""

    @property
    def returned_width(self) -> int: ...

    def embed(self, ids: Any) -> Any:
        """(N,) token ids -> (N, n_embd)"""

    def head(self, x: Any) -> Any:
        """(M, returned_width) rows that went through all blocks -> (M, vocabulary) logits"""
