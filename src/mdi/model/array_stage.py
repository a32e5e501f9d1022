"""Stages in the kernels for a whole run. Their rows are arrays; torch is not needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mdi.kernels.head import Weights
from mdi.kernels.kernel_stage import KernelStage, KernelStarterStage, WeightUse
from mdi.kernels.pages import CachePages
from mdi.slices import Slices


class ArrayStage:
    """See the module.

    Attributes:
        inner: the stage itself.
    """

    def __init__(self, inner: KernelStage) -> None:
        self.inner = inner
        self.start, self.stop = inner.start, inner.stop
        self.n_embd = self.returned_width = inner.n_embd

    def load(self, parts: Sequence[str], weights: Callable[[str], Weights]) -> None:
        """See KernelStage.load."""
        self.inner.load(parts, weights)

    def run_bytes(self, max_length: int) -> int:
        return self.inner.run_bytes(max_length)

    def prepare(self, max_length: int, cache_limit: int | None = None) -> None:
        """What caches hold was decided when the stage was made; see KernelStage.prepare."""
        self.inner.prepare(max_length, cache_limit)

    def compile(self) -> None:
        """The kernels are compiled already."""

    @property
    def weight_use(self) -> WeightUse:
        return self.inner.weight_use

    def close(self) -> None:
        """See KernelStage.close."""
        self.inner.close()

    @property
    def max_length(self) -> int:
        return self.inner.max_length

    @property
    def caches(self) -> CachePages:
        return self.inner.caches

    @property
    def mapped_bytes(self) -> int:
        """Weights that are pages of a file, which the system counts as free memory, but which must stay."""
        return self.inner.weight_bytes if self.inner.is_mapped else 0

    @property
    def cache_limit(self) -> int | None:
        """See KernelStage.cache_limit."""
        return self.inner.cache_limit

    @property
    def gathered_share(self) -> float:
        """The kernels read keys and values where they lie."""
        return 0.0

    def __call__(self, x: Any, slices: Slices) -> Any:
        """float32 (N, n_embd) -> (N, n_embd), see KernelStage.forward."""
        found: np.ndarray = self.inner.forward(x, slices)
        return found


class ArrayStarterStage(ArrayStage):
    """The starter's, with the methods that its engine calls."""

    inner: KernelStarterStage

    def __init__(self, inner: KernelStarterStage) -> None:
        super().__init__(inner)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """(N,) token ids -> (N, n_embd)"""
        return self.inner.embed(ids)

    def head(self, x: np.ndarray) -> np.ndarray:
        """(M, n_embd) rows that went through all blocks -> (M, padded_vocab_size) logits"""
        return self.inner.head(x)
