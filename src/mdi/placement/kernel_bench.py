"""Blocks and head in the kernels for `mdi.placement.profiling`. Torch is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mdi.checkpoint.packing import PartWeights
from mdi.checkpoint.parts import part_of
from mdi.host.threads import n_threads
from mdi.kernels.blocks import Context, Head
from mdi.kernels.weight_formats import weight_format
from mdi.placement.profiling import Bench
from mdi.placement.random_weights import random_weights
from mdi.stages.kernel_stage import KernelStage, Resident


class KernelBench(Bench):
    """See `Bench`. The subject has a packing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._subject.computing.packing is not None
        self._packing = self._subject.computing.packing
        self._random = np.random.default_rng(1)

    def blocks_of(self, start: int, stop: int, max_length: int) -> KernelStage:
        def weights(part: str) -> PartWeights:
            self._cancel.check()
            return self._weights(part)

        parts = Resident([f"block.{i}" for i in range(start, stop)], weights)
        stage = KernelStage(self._subject.config, start, stop, parts, n_threads())
        stage.prepare(max_length)
        return stage

    def _weights(self, part: str) -> PartWeights:
        shapes = {name: shape for name, shape in self._shapes.items() if part_of(name) == part}
        return random_weights(shapes, self._packing)

    def head(self) -> Callable[[np.ndarray], object]:
        config = self._subject.config
        return Head(config, self._weights("head"), int(config["padded_vocab_size"]), Context(n_threads()))

    def rows(self, n: int) -> np.ndarray:
        return self._random.standard_normal((n, self._subject.config["n_embd"]), dtype=np.float32)

    def synchronize(self) -> None:
        """Calls of the kernels end when they are done."""

    def bytes_of(self, name: str) -> float:
        return weight_format(self._packing.of_part(part_of(name))).tensor_bytes(name, self._shapes[name])
