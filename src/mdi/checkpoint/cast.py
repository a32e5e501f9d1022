"""Weights in another type than they are stored in."""

from __future__ import annotations

import torch

from mdi.checkpoint.layout import TensorSpec, dtype_name
from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.source import LitCheckpoint, WeightSource


class CastSource(WeightSource):
    """Another source with all floating-point weights in one dtype; casting happens tensor by tensor.

    Args:
        source: where the weights come from.
        dtype: to cast to.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self._hashes = source.hashes if isinstance(source, LitCheckpoint) else None
        self._infos: dict[str, PartInfo] = {}
        self.model, self.config_dict = source.model, source.config_dict
        self.config_hash, self.dtype = source.config_hash, dtype_name(dtype)
        self.specs = {
            name: TensorSpec(dtype if spec.dtype.is_floating_point else spec.dtype, spec.shape)
            for name, spec in source.specs.items()
        }

    def __str__(self) -> str:
        return f"{self._source} as {self.dtype}"

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(name).to(self.specs[name].dtype)

    def part_names(self) -> list[str]:
        return self._source.part_names()

    def known(self, part: str) -> PartInfo | None:
        return self._infos.get(part) or (self._hashes.get(self.dtype, part) if self._hashes else None)

    def remember(self, info: PartInfo) -> None:
        self._infos[info.name] = info
        if self._hashes:
            self._hashes.put(self.dtype, info)

    def release(self) -> None:
        self._source.release()
