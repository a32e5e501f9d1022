"""Converts weights from their stored number type to another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mdi.checkpoint.safetensors_layout import CODES, TYPES, TensorSpec
from mdi.checkpoint.weights import DerivedSource, WeightSource
from mdi.kernels.layout import bf16_from_float32, float32_from_bf16


class CastSource(DerivedSource):
    """Another source with all floating-point weights in one type; casting happens tensor by tensor.

    Args:
        source: where the weights come from.
        dtype: name of the type, e.g. "bfloat16".
    """

    def __init__(self, source: WeightSource, dtype: str) -> None:
        super().__init__(source, form=dtype)
        self.dtype = dtype
        self.specs = {
            name: replace(spec, dtype=CODES[dtype]) if spec.is_floating else spec for name, spec in source.specs.items()
        }

    def __str__(self) -> str:
        return f"{self._source} as {self.dtype}"

    def array(self, name: str) -> np.ndarray:
        return cast(self._source.array(name), self._source.specs[name], self.specs[name].dtype)

    def read_bytes(self, name: str) -> int:
        return self._source.read_bytes(name)


def cast(array: np.ndarray, spec: TensorSpec, code: str) -> np.ndarray:
    """Numbers in another type, rounded to the nearest; too large ones become infinite.

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
