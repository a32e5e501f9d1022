"""Random weights of a trained model's size for measurements, made as fast as memory is written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mdi.checkpoint.packing import Packing, PartWeights
from mdi.kernels.layout import Matrix, aligned_bytes, matrix_bytes, pack
from mdi.kernels.weight_formats import EMBEDDING, PANEL

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
    panel = pack(form, generator.standard_normal((PANEL, n_in), dtype=np.float32) * np.float32(SIZE)).data
    data = aligned_bytes(matrix_bytes(form, n_out, n_in))
    data.reshape(-1, panel.size)[:] = panel
    return Matrix(form, n_out, n_in, data)
