"""A torch stage for a whole run, with device and types decided. Nothing else of a secondary needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mdi.engine.rows import TensorRows
from mdi.host.computing import Computing
from mdi.kernels.slices import Slices
from mdi.model.cache import TORCH_TYPES, TorchCaches
from mdi.model.packed_linear import Weights
from mdi.model.stage import Stage
from mdi.stages.kernel_stage import WeightUse


class TorchStage:
    """See the module; the same methods as kernels.kernel_stage.KernelStage.

    Args:
        inner: the stage itself.
        stored: type of the weights that it is loaded with; None if they are packed.
    """

    def __init__(self, inner: Stage, computing: Computing, stored: str | None) -> None:
        self.inner = inner
        self.start, self.stop, self.n_embd = inner.start, inner.stop, inner.n_embd
        self._device, self._dtype = torch.device(computing.device), getattr(torch, computing.dtype)
        self._kv_dtype = TORCH_TYPES[computing.kv_dtype]
        self._may_be_mapped = stored == computing.dtype and computing.device == "cpu"
        self.rows = TensorRows(self._device, self._dtype)

    def load(self, parts: Sequence[str], weights: Callable[[str], Weights]) -> None:
        """See Stage.load."""
        self.inner.load(parts, weights, self._device, self._dtype)

    @property
    def weight_use(self) -> WeightUse:
        """Nothing is read from the disk while it computes."""
        n_bytes = sum(tensor.nbytes for tensor in self.inner.state_dict().values())
        return WeightUse(n_bytes, n_bytes, 0.0)

    def close(self) -> None:
        """Nothing needs to be ended."""

    def run_bytes(self, max_length: int) -> int:
        return self.inner.run_bytes(max_length, self._kv_dtype)

    def prepare(self, max_length: int, cache_limit: int | None = None) -> None:
        self.inner.prepare(max_length, self._device, self._kv_dtype, cache_limit)

    def compile(self) -> None:
        self.inner.compile()

    @property
    def max_length(self) -> int:
        return self.inner.max_length

    @property
    def n_finished(self) -> int:
        """Blocks that it has computed so far; a replayed step counts none. From any thread."""
        return getattr(self.inner, "n_finished", 0)

    @property
    def caches(self) -> TorchCaches:
        return self.inner.caches

    @property
    def cache_limit(self) -> int | None:
        """There is none for the whole process."""
        return None

    @property
    def gathered_share(self) -> float:
        """See Stage.gathered_share."""
        return self.inner.gathered_share

    @property
    def mapped_bytes(self) -> int:
        """Weights that are pages of a file. Those in another format are no parameters of the stage any more."""
        return sum(p.nbytes for p in self.inner.parameters()) if self._may_be_mapped else 0

    @property
    def config(self) -> Any:
        """Of the model, in the form of `ModelFamily.config`."""
        return self.inner.config

    def __call__(self, x: torch.Tensor, slices: Slices) -> torch.Tensor:
        found: torch.Tensor = self.inner(x, slices)
        return found
