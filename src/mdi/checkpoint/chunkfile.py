"""A chunk on this machine: its manifest, its tensors, and the check of one against the other."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path

from mdi.block_ranges import block_span
from mdi.checkpoint.checked import CheckedFiles, in_threads, stamp_of
from mdi.checkpoint.manifest import METADATA_KEY, Manifest
from mdi.checkpoint.partfile import FileSource
from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.safetensors_layout import header_bytes, ordered
from mdi.checkpoint.shapes import check_tensors
from mdi.checkpoint.weightfile import SafetensorsFile
from mdi.config import nearest_existing
from mdi.errors import CheckpointError


class ChunkFile(FileSource):
    """A chunk that prepare_model.py wrote. Its hashes are those of its manifest; `verify` computes them.

    Raises:
        CheckpointError: missing, cut short, damaged, not what its manifest says, or no chunk of this program.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _chunk_path(Path(path))
        self._file = SafetensorsFile(self.path)
        if METADATA_KEY not in self._file.metadata:
            raise CheckpointError(
                f"{self.path} is not a chunk of this version, it has no manifest; {_remedy(self.path)}"
            )
        try:
            self.manifest = Manifest.from_json(self._file.metadata[METADATA_KEY])
        except CheckpointError as e:
            raise CheckpointError(f"{self.path}: {e}; {_remedy(self.path)}") from None
        self.model, self.config_dict = self.manifest.model, self.manifest.config
        self.config_hash, self.dtype = self.manifest.config_hash, self.manifest.dtype
        self.packing = self.manifest.packing
        self.specs = self._file.specs
        self._infos = {part.name: part for part in self.manifest.parts}
        self._check()

    def part_names(self) -> list[str]:
        return list(self._infos)

    def known(self, part: str) -> PartInfo:
        if part not in self._infos:
            raise CheckpointError(f"{self} does not hold {part}, only {', '.join(self._infos)}")
        return self._infos[part]

    def verify(self, parts: Collection[str], checked: CheckedFiles, check: Callable[[], None] = lambda: None) -> None:
        """Hash the parts that are not known to be whole, a few at a time.

        Args:
            checked: where it is kept that they are.
            check: called between parts; its exceptions pass through.

        Raises:
            CheckpointError: a part differs from the manifest.
        """
        where, stamp = self.path.absolute(), stamp_of(self.path)

        def verify(name: str) -> None:
            check()
            key = f"{where}:{name}:{self.info(name).sha256}"
            if not checked.knows(key, stamp):
                self.verify_part(name)
                checked.add(key, stamp)

        in_threads(functools.partial(verify, name) for name in parts)

    def verify_part(self, name: str) -> None:
        """Compute the sha256 of a part. Raises CheckpointError if it is not the one of the manifest."""
        expected, found = self.info(name), self._hashed(name)
        if found != expected:
            raise CheckpointError(
                f"{self.path}: {name} is damaged: sha256 {found.sha256}, expected {expected.sha256}; "
                f"{_remedy(self.path)}"
            )

    def _hashed(self, name: str) -> PartInfo:
        """A part with the sha256 of its bytes in the file. They are read, not mapped, because a node may have little memory."""
        specs, metadata = self.part_specs(name), self.metadata(name)
        order = ordered(specs, bool(metadata))
        digest = hashlib.sha256(header_bytes(specs, order, metadata))
        for tensor in order:
            for piece in self._file.pieces(tensor):
                digest.update(piece)
        return PartInfo(name, digest.hexdigest(), self.n_bytes(name))

    def _check(self) -> None:
        start, stop = self.manifest.blocks
        numbers = {int(m[1]) for name in self.specs if (m := re.match(r"transformer\.h\.(\d+)\.", name))}
        if start > 0 and numbers == set(range(stop - start)):
            raise CheckpointError(
                f"{self.path} numbers its blocks from 0, but holds {block_span(start, stop)}; {_remedy(self.path)}"
            )
        check_tensors(self.config_dict, self.specs, self._infos, str(self.path), self.packing)
        for part, info in self._infos.items():
            if (n_bytes := self.n_bytes(part)) != info.n_bytes:
                raise CheckpointError(
                    f"{self.path}: {part} has {n_bytes} bytes, expected {info.n_bytes} by its manifest; "
                    f"{_remedy(self.path)}"
                )


def _chunk_path(path: Path) -> Path:
    """The .safetensors file itself, or the one beside a .pth name."""
    if path.suffix == ".safetensors":
        return path
    beside = path.with_suffix(".safetensors")
    if beside.is_file():
        return beside
    if path.is_file():
        raise CheckpointError(
            f"{path} is not a safetensors file, and there is no {beside.name} beside it; {_remedy(path)}"
        )
    raise CheckpointError(f"no such file: {path} (the nearest that exists is {nearest_existing(path)})")


def _remedy(path: Path) -> str:
    """The command that makes a valid chunk; the path has the number of nodes, and often the model."""
    folder = path.absolute().parent
    match = re.fullmatch(r"(\d+)nodes(?:-(\w+))?", folder.name)
    model = folder.parents[1] if match and folder.parent.name == "chunks" else "MODEL"
    form = f" --quantize {match[2]}" if match and match[2] else ""
    return f"make it with: prepare_model.py {model} --n-nodes {match[1] if match else 'N'}{form}"
