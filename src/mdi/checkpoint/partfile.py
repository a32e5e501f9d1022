"""A file with one part of a model, as a node stores a received part. Its bytes are the part's canonical ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mdi.checkpoint.packing import packing_of
from mdi.checkpoint.parts import Part, PartInfo
from mdi.checkpoint.safetensors_layout import main_dtype
from mdi.checkpoint.weightfile import SafetensorsFile
from mdi.checkpoint.weights import WeightSource


class FileSource(WeightSource):
    """One .safetensors file as a source, whose hashes are fixed."""

    path: Path
    _file: SafetensorsFile

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        return self._file.view(name) if self.packing else self._file.array(name)

    def extent(self, name: str) -> tuple[Path, int, int] | None:
        return (self.path, *self._file.extent(name))

    def remember(self, info: PartInfo) -> None:
        """The hash is known."""

    def release(self) -> None:
        """Mappings go with the arrays that look into them."""


class PartFile(FileSource):
    """See the module. Does not hash the bytes; the owner of the file does.

    Args:
        info: the part in the file.
        config, config_hash: of the model.

    Raises:
        CheckpointError: missing, cut short, damaged, or in a packed form of another version.
    """

    def __init__(self, path: Path, info: Part, config: dict[str, Any], config_hash: str) -> None:
        self.path = path
        self._info = PartInfo(info.name, info.sha256, info.n_bytes)
        self._file = SafetensorsFile(path)
        self.model, self.config_dict, self.config_hash = str(config.get("name", "")), config, config_hash
        self.specs = self._file.specs
        self.packing = packing_of(self._file.metadata, str(path))
        self.dtype = main_dtype(self.specs.values())

    def part_names(self) -> list[str]:
        return [self._info.name]

    def known(self, part: str) -> PartInfo | None:
        return self._info if part == self._info.name else None
