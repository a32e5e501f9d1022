"""A stage in the kernels, for an engine that works with tensors of torch: memory is shared, nothing is copied for that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mdi.kernels.kernel_stage import KernelStarterStage
from mdi.model.array_stage import ArrayStage


class TensorStage(ArrayStage):
    """The starter's stage, with the methods of `model.stage.StarterStage` that the engine calls."""

    inner: KernelStarterStage

    def __init__(self, inner: KernelStarterStage) -> None:
        super().__init__(inner)

    def __call__(self, x: torch.Tensor, slices: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """(N, n_embd) -> (N, n_embd), see KernelStage.forward."""
        return torch.from_numpy(self.inner.forward(x.numpy(), slices))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) token ids -> (N, n_embd)"""
        return torch.from_numpy(self.inner.embed(ids.numpy()))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """(M, n_embd) rows that went through all blocks -> (M, padded_vocab_size) logits"""
        return torch.from_numpy(self.inner.head(x.numpy()))
