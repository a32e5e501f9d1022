"""The places of a part's weights on the disk in the layout of the kernels. Weights without such a place are packed and written
to a nameless file, which disappears with the process."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, PartWeights
from mdi.checkpoint.safetensors_layout import TYPES
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, LimitError
from mdi.kernels.layout import Matrix
from mdi.units import size
from mdi.weight_formats import EMBEDDING
from mdi.window.budget import taken_bytes
from mdi.window.files import PAGE_BYTES, RowTable, WeightBytes
from mdi.window.weight_units import StoredMatrix

PACKING_COPIES = 3  # of a tensor in float32, that there are while it is packed


@dataclass
class StoredPart:
    """A part of a model.

    Attributes:
        matrices: packed weights, by name, on the disk.
        arrays: all small tensors, in memory.
        table: the embedding, on the disk.
    """

    matrices: dict[str, StoredMatrix] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    table: RowTable | None = None


class StoredParts:
    """Finds the parts of one stage.

    Args:
        packing: the formats wanted.
        folder: for weights that must be packed first.
        limit: bytes that the process may take meanwhile; None is no limit.

    Attributes:
        packed_bytes: that were.
    """

    def __init__(self, packing: Packing, folder: Path, limit: int | None = None) -> None:
        self._packing, self._folder, self._limit = packing, folder, limit
        self._files: dict[Path, WeightBytes] = {}
        self._spill: _Spill | None = None
        self.packed_bytes = 0

    def part(self, source: WeightSource, part: str) -> StoredPart:
        """Raises CheckpointError: the source does not have it, or there is no space for packed weights."""
        stored = source.packing
        is_packed_so = stored is not None and stored.of_part(part) == self._packing.of_part(part)
        if stored is not None and is_packed_so and all(map(source.extent, source.part_specs(part))):
            return self._in_place(source, part, stored)
        return self._spilled(source, part)

    def finish(self) -> None:
        """All parts have been requested: packed weights are on the disk now."""
        if self._spill is not None:
            self._spill.finish()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._spill is not None:
            self._spill.file.close()

    def _in_place(self, source: WeightSource, part: str, packing: Packing) -> StoredPart:
        specs = source.part_specs(part)
        found = StoredPart()
        for name, shape in source.shapes(part).items():
            keys = packing.check(name, shape, specs, str(source))
            file, start = self._place(source, name)
            if form := packing.format_of(name, shape):
                found.matrices[name] = StoredMatrix(
                    name, form, shape[0], shape[1], file, start, source.skipped_inputs(name)
                )
                continue
            dtype = TYPES[specs[name].dtype].numpy
            if name == EMBEDDING:
                found.table = RowTable(file, start, (shape[0], shape[1]), dtype)
            else:
                n_bytes = math.prod(shape) * dtype.itemsize
                found.arrays[name] = file.read(start, n_bytes).view(dtype).reshape(shape)
            if EMBEDDING_SCALE in keys:
                file, start = self._place(source, EMBEDDING_SCALE)
                found.arrays[EMBEDDING_SCALE] = file.read(start, 4 * shape[0]).view(np.float32)
        return found

    def _place(self, source: WeightSource, name: str) -> tuple[WeightBytes, int]:
        extent = source.extent(name)
        if extent is None:
            raise CheckpointError(f"{source}: {name} lies in no file")
        path, start, stop = extent
        if path not in self._files:
            self._files[path] = WeightBytes(path)
        if stop > self._files[path].n_bytes:
            raise CheckpointError(f"{path} was cut short: {self._files[path].n_bytes} bytes, {stop} expected at least")
        return self._files[path], start

    def _spilled(self, source: WeightSource, part: str) -> StoredPart:
        """Packed, tensor by tensor where the source has plain ones, so that little is in memory at a time."""
        if self._spill is None:
            self._spill = _Spill(self._folder)
        found = StoredPart()
        if not source.has_single_tensors:
            self._check_memory(part, source.n_bytes(part))
            self._add(found, source.weights(part, self._packing))
            return found
        for name, shape in source.shapes(part).items():
            self._check_memory(name, 4 * math.prod(shape))
            self._add(found, source.packed(name, self._packing))
            source.release()
        return found

    def _add(self, found: StoredPart, weights: PartWeights) -> None:
        assert self._spill is not None
        spill = self._spill
        for name, weight in weights.items():
            if isinstance(weight, Matrix):
                start = spill.add(weight.data)
                found.matrices[name] = StoredMatrix(
                    name, weight.format, weight.n_out, weight.n_in, spill.file, start, weight.skip
                )
            elif name == EMBEDDING:
                found.table = RowTable(spill.file, spill.add(weight), (weight.shape[0], weight.shape[1]), weight.dtype)
            else:
                found.arrays[name] = weight.copy()
        self.packed_bytes = spill.n_bytes

    def _check_memory(self, name: str, n_bytes: int) -> None:
        """Packing takes memory, too. Raises LimitError."""
        needed = taken_bytes() + PACKING_COPIES * n_bytes
        if self._limit is not None and needed > self._limit:
            raise LimitError(
                f"packing {name} takes {size(needed)}, more than the {size(self._limit)} of --memory: store the weights packed "
                "(prepare_model.py --quantize) and ask for that format with --quantize",
                needed,
            )


class _Spill:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._fd = os.dup(file.fileno())
        except OSError as e:
            raise self._failed(e) from None
        self.file = WeightBytes(folder / "packed weights", self._fd)
        self.n_bytes = 0

    def add(self, weight: np.ndarray) -> int:
        """Where it lies, on a page of its own."""
        start = self.n_bytes
        data = np.ascontiguousarray(weight).reshape(-1).view(np.uint8).data
        try:
            while data:
                n = os.pwrite(self._fd, data, self.n_bytes)
                data, self.n_bytes = data[n:], self.n_bytes + n
        except OSError as e:
            raise self._failed(e) from None
        self.n_bytes = -(-self.n_bytes // PAGE_BYTES) * PAGE_BYTES
        return start

    def finish(self) -> None:
        try:
            os.ftruncate(self._fd, self.n_bytes)
            os.fsync(self._fd)
        except OSError as e:
            raise self._failed(e) from None
        self.file.settle()
        self.file.drop(0, self.n_bytes)

    def _failed(self, e: OSError) -> CheckpointError:
        return CheckpointError(
            f"weights cannot be packed into {self._folder} ({e.strerror or e}): free some space, choose another place with "
            "MDI_CACHE_DIR, or store them packed (prepare_model.py --quantize)"
        )
