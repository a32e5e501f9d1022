"""A model's weights in a packed form, tensor by tensor, for writing chunks. Keeps nothing in memory."""

from __future__ import annotations

import numpy as np

from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, stored_bytes
from mdi.checkpoint.weights import DerivedSource, WeightSource
from mdi.kernels import LAYOUT_VERSION


class PackedSource(DerivedSource):
    """Another source in packed form.

    Args:
        source: where the plain weights come from.
        packing: the formats.
    """

    packing: Packing

    def __init__(self, source: WeightSource, packing: Packing) -> None:
        super().__init__(source, form=packed_form(source, packing))
        self.packing = packing
        self._scale: np.ndarray | None = None
        self._owner: dict[str, str] = {}  # name of a stored tensor -> name of the plain one that it comes from
        self.specs = {}
        for name, spec in source.specs.items():
            stored = packing.stored(name, spec)
            self.specs.update(stored)
            self._owner.update(dict.fromkeys(stored, name))

    def __str__(self) -> str:
        return f"{self._source} in {self.packing.blocks}"

    def array(self, name: str) -> np.ndarray:
        if name == EMBEDDING_SCALE and self._scale is not None:
            return stored_bytes(self._scale, self.specs[name])
        owner = self._owner[name]
        weights = self._source.packed(owner, self.packing)
        if EMBEDDING_SCALE in weights:
            # A file holds wide types first, so that scales are asked for long before or after their embedding.
            scale = weights[EMBEDDING_SCALE]
            assert isinstance(scale, np.ndarray)
            self._scale = scale
        return stored_bytes(weights[name], self.specs[name])

    def read_bytes(self, name: str) -> int:
        return self._source.read_bytes(self._owner[name])


def packed_form(source: WeightSource, packing: Packing) -> str:
    """Name of the packed form of a source's parts, under which their hashes are kept."""
    return f"{source.dtype}-{packing.blocks}-{packing.head}-{LAYOUT_VERSION}"
