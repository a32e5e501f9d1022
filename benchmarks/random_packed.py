"""A model of a shape's size in packed form whose plain weights exist nowhere: for shapes too large to be made and then packed.

Each matrix is a few rows of chance, repeated: speed does not depend on what weights say, but they must fill memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import on_path  # noqa: F401
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, int8_rows, stored_bytes
from mdi.checkpoint.parts import PartInfo, stage_parts
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.shapes import model_shapes
from mdi.checkpoint.weights import WeightSource
from mdi.kernels.layout import bf16_from_float32
from mdi.kernels.weight_formats import ROUNDED
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING
from mdi.placement.kernel_bench import random_weights

SCALE = np.float32(0.02)  # of a weight


class RandomPacked(WeightSource):
    """A source that makes its tensors up.

    Args:
        config: of the model.
    """

    packing: Packing

    def __init__(self, config: ModelConfig, form: str) -> None:
        self.config = config
        self.config_hash, self.model = config_hash(self.config), config.name
        self.dtype, self.packing = "bfloat16", Packing(form, form)
        self._shapes_of = model_shapes(self.config, self.model)
        self.specs = {}
        for name, shape in self._shapes_of.items():
            self.specs.update(self.packing.stored(name, TensorSpec("BF16", shape)))
        self._infos: dict[str, PartInfo] = {}

    def array(self, name: str) -> np.ndarray:
        owner = EMBEDDING if name == EMBEDDING_SCALE else name
        return stored_bytes(self._weights(owner)[name], self.specs[name])

    def _weights(self, name: str) -> Mapping[str, Any]:
        shape = self._shapes_of[name]
        if name != EMBEDDING:
            return random_weights({name: shape}, self.packing)
        rows = np.random.default_rng(0).standard_normal((256, shape[1]), dtype=np.float32) * SCALE
        if self.packing.head not in ROUNDED:
            return {EMBEDDING: np.resize(bf16_from_float32(rows), shape)}
        table, scale = int8_rows(np.resize(rows, shape))
        return {EMBEDDING: table, EMBEDDING_SCALE: scale}

    def part_names(self) -> list[str]:
        return stage_parts(0, self.config.n_layer, starter=True)

    def known(self, part: str) -> PartInfo | None:
        return self._infos.get(part)

    def remember(self, info: PartInfo) -> None:
        self._infos[info.name] = info

    def release(self) -> None: ...
