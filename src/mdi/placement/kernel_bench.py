"""Blocks and head in the kernels for `mdi.placement.profiling`, with random weights. Torch is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mdi.checkpoint.packing import Packing, PartWeights
from mdi.checkpoint.parts import part_of
from mdi.host.threads import n_threads
from mdi.kernels.block_rows import drawn_rows
from mdi.kernels.blocks import Context, Head
from mdi.kernels.layout import Matrix, empty, pack, pack_blocks
from mdi.kernels.weight_formats import BLOCK_TYPES, PANEL, weight_format
from mdi.model.tensors import EMBEDDING
from mdi.placement.profiling import Bench
from mdi.stages.kernel_stage import KernelStage, Resident

SIZE = 0.02  # of a weight


def random_weights(shapes: Mapping[str, tuple[int, ...]], packing: Packing, seed: int = 1) -> PartWeights:
    """Packed weights of the given shapes, by their names in the full model. An embedding is all zeros, and takes no memory."""
    generator = np.random.default_rng(seed)
    weights: PartWeights = {}
    for name, shape in shapes.items():
        form = packing.format_of(name, shape)
        if form is not None:
            n_out, n_in = shape
            weights[name] = _matrix(form, n_out, n_in, generator)
        elif name == EMBEDDING:
            weights[name] = np.broadcast_to(np.zeros(1, dtype=np.float32), shape)
        else:
            weights[name] = (generator.standard_normal(shape, dtype=np.float32) * SIZE).astype(np.float32)
    return weights


def _matrix(form: str, n_out: int, n_in: int, generator: np.random.Generator) -> Matrix:
    """One panel of chance, repeated: to pack each would take longer than measuring."""
    whole = empty(form, n_out, n_in)
    for piece in whole.pieces:
        if piece.format in BLOCK_TYPES:
            one = empty(piece.format, PANEL, n_in)
            pack_blocks(one, lambda at, form=piece.format: drawn_rows(form, PANEL, n_in, generator)[at])  # type: ignore[misc]
            panel = one.data
        else:
            numbers = generator.standard_normal((PANEL, n_in), dtype=np.float32) * np.float32(SIZE)
            panel = pack(piece.format, numbers).data
        piece.data.reshape(-1, panel.size)[:] = panel
    return whole


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
        stage = KernelStage(self._spec, start, stop, parts, n_threads())
        stage.prepare(max_length)
        return stage

    def _weights(self, part: str) -> PartWeights:
        shapes = {name: shape for name, shape in self._shapes.items() if part_of(name) == part}
        return random_weights(shapes, self._packing)

    def head(self) -> Callable[[np.ndarray], object]:
        return Head(self._spec, self._weights("head"), self._spec.n_rows, Context(n_threads()))

    def rows(self, n: int) -> np.ndarray:
        return self._random.standard_normal((n, self._row_width), dtype=np.float32)

    def synchronize(self) -> None:
        """Calls of the kernels end when they are done."""

    def bytes_of(self, name: str) -> float:
        return weight_format(self._packing.of_part(part_of(name))).tensor_bytes(name, self._shapes[name])
