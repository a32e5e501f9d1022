"""Weights in another type than they are stored in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.safetensors_layout import CODES, TYPES, TensorSpec
from mdi.checkpoint.weights import WeightSource
from mdi.kernels.layout import bf16_from_float32, float32_from_bf16


class CastSource(WeightSource):
    """Another source with all floating-point weights in one type; casting happens tensor by tensor.

    Args:
        source: where the weights come from.
        dtype: name of the type, e.g. "bfloat16".
    """

    def __init__(self, source: WeightSource, dtype: str) -> None:
        self._source = source
        self.hashes = source.hashes
        self._infos: dict[str, PartInfo] = {}
        self.model, self.config_dict = source.model, source.config_dict
        self.config_hash, self.dtype = source.config_hash, dtype
        self.specs = {
            name: replace(spec, dtype=CODES[dtype]) if spec.is_floating else spec for name, spec in source.specs.items()
        }

    def __str__(self) -> str:
        return f"{self._source} as {self.dtype}"

    def array(self, name: str) -> np.ndarray:
        return cast(self._source.array(name), self._source.specs[name], self.specs[name].dtype)

    def read_bytes(self, name: str) -> int:
        return self._source.read_bytes(name)

    def part_names(self) -> list[str]:
        return self._source.part_names()

    def known(self, part: str) -> PartInfo | None:
        return self._infos.get(part) or (self.hashes.get(self.dtype, part) if self.hashes else None)

    def remember(self, info: PartInfo) -> None:
        self._infos[info.name] = info
        if self.hashes:
            self.hashes.put(self.dtype, info)

    def release(self) -> None:
        self._source.release()


def cast(array: np.ndarray, spec: TensorSpec, code: str) -> np.ndarray:
    """Numbers in another type, rounded to the nearest; what is too large for it becomes infinite.

    Args:
        spec: of `array`.
        code: of the type, see layout.TYPES.
    """
    if spec.dtype == code:
        return array
    if spec.dtype == "BF16":
        array = float32_from_bf16(array)
    if code == "BF16":
        return bf16_from_float32(array.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):
        return array.astype(TYPES[code].numpy)
