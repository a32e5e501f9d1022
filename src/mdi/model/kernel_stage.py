"""A stage in the kernels, for an engine that works with tensors of torch: memory is shared, nothing is copied for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mdi.kernels.page_sizes import PAGE
from mdi.kernels.pages import CachePages
from mdi.kernels.stage import KernelStage, KernelStarterStage, Weights
from mdi.model.room import CacheKind

KV_TYPES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}


class TensorStage:
    """A kernel stage with the methods of `model.stage.Stage`.

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

    def run_bytes(self, max_length: int, dtype: torch.dtype) -> int:
        return self.inner.run_bytes(max_length)

    def prepare(self, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        """What caches hold was decided when the stage was made."""
        assert device.type == "cpu" and KV_TYPES[dtype] == self.inner.cache_type
        self.inner.prepare(max_length)

    def compile(self) -> None:
        """The kernels are compiled already."""

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

    def copy_bytes(self, dtype: torch.dtype) -> int:
        """Pages do not move."""
        return 0

    def cache_kinds(self, dtype: torch.dtype) -> list[CacheKind]:
        """What a position of a sequence takes. A window's first page is kept whole, which is up to 31 positions more."""
        return [
            CacheKind(None if c.window is None else c.window + 32, -(-c.page_bytes // PAGE))
            for c in self.inner.cache_classes
        ]

    def __call__(self, x: torch.Tensor, slices: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """(N, n_embd) -> (N, n_embd), see KernelStage.forward."""
        return torch.from_numpy(self.inner.forward(x.numpy(), slices))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) token ids -> (N, n_embd)"""
        assert isinstance(self.inner, KernelStarterStage)
        return torch.from_numpy(self.inner.embed(ids.numpy()))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """(M, n_embd) rows that went through all blocks -> (M, padded_vocab_size) logits"""
        assert isinstance(self.inner, KernelStarterStage)
        return torch.from_numpy(self.inner.head(x.numpy()))
