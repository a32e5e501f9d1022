"""Parts that were packed for the kernels, kept on disk, so that the next start maps them instead of packing.

They are in a node's store of parts under the sha256 of their own bytes, which equal those of mdi prepare-model --quantize.
A small file beside them says which one was made from which plain part.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

import mdi
from mdi.cancel import Cancel
from mdi.checkpoint.chunks import PartFile
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import Packing, PartWeights
from mdi.checkpoint.part_users import note_user
from mdi.checkpoint.parts import Part, PartInfo, part_of
from mdi.checkpoint.records import read_kept, write_kept
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError
from mdi.files import replacing
from mdi.kernels import LAYOUT_VERSION
from mdi.kernels.block_search import SEARCH_VERSION
from mdi.kernels.weight_formats import is_made
from mdi.model.tensors import EMBEDDING
from mdi.units import size

FILE = "packed.json"
LEAST_BYTES = 1 << 20  # a smaller part is packed sooner than a file is written
DISK_LEFT_BYTES = 1 << 30  # that stay free; less than that, and nothing is kept
TOLD_BYTES = 1 << 30  # so many are not written without a word

logger = logging.getLogger("mdi")


class KeptPacked:
    """Packed parts in a store. For one thread at a time; of several processes each may make the same file.

    Args:
        n_bytes: of all parts that may be made. Many are announced before the first is.
    """

    def __init__(self, store: BlockStore, n_bytes: Callable[[], int] = lambda: 0) -> None:
        self._store, self._n_bytes, self._is_told = store, n_bytes, False

    def part(self, source: WeightSource, part: Part, packing: Packing, keep: set[str], cancel: Cancel) -> WeightSource:
        """The source of a part: its packed form, made now if it is missing; `source` if that cannot be kept.

        Args:
            source: has the part.
            keep: sha256 of parts that are not removed for it; this one is added to them.

        Raises:
            CheckpointError: the source cannot be read.
        """
        if not self.may_take(source, part.n_bytes):
            return source
        if (
            packing.is_tied
            and part.name == part_of(EMBEDDING)
            and not PackedSource(source, packing).part_specs(part.name)
        ):
            return source
        key = key_of(source, part, packing)
        info = self._find(key, part.name)
        if info is not None:
            keep.add(info.sha256)
        if info is None or not self._store.has(info.sha256, cancel):
            packed = PackedSource(source, packing)
            if not self._has_space(packed.n_bytes(part.name), keep):
                return source
            try:
                info = self._make(packed, part.name, key, keep, cancel)
            except CheckpointError as e:  # the source may be damaged; reading it reports that
                logger.warning("packed weights are not kept: %s", e)
                return source
        return self._store.part(info, source.config, source.config_hash)

    def may_take(self, source: WeightSource, n_bytes: int) -> bool:
        """Whether a part of so many bytes is worth a file."""
        return source.packing is None and n_bytes >= LEAST_BYTES

    def _has_space(self, n_bytes: int, keep: Collection[str]) -> bool:
        try:
            self._store.free_space(n_bytes, keep)
        except CheckpointError:
            return False
        return self._store.free_bytes() >= n_bytes + DISK_LEFT_BYTES

    def _make(
        self, packed: PackedSource, part: str, key: str, keep: set[str], cancel: Cancel
    ) -> PartInfo:  # fmt: skip
        self._tell()
        digest, n_bytes = hashlib.sha256(), 0
        path = self._store.directory / f"{key}.packed"
        with replacing(path, makes_folder=True) as file:
            for piece in packed.pieces(part):
                cancel.check()
                file.write(piece)
                digest.update(piece)
                n_bytes += len(piece)
        packed.release()
        info = PartInfo(part, digest.hexdigest(), n_bytes)
        keep.add(info.sha256)
        self._store.take(path, info)
        self._remember(key, info)
        logger.debug("%s is packed, %s, and kept for the next start", part, size(n_bytes))
        return info

    def _tell(self) -> None:
        if not self._is_told and (n_bytes := self._n_bytes()) >= TOLD_BYTES:
            logger.info(
                "packed weights, up to %s, are kept in %s for the next start (--cache-dir moves them, `mdi cache` cleans)",
                size(n_bytes), self._store.directory,
            )  # fmt: skip
        self._is_told = True

    def _find(self, key: str, part: str) -> PartInfo | None:
        entry = read_packed(self._store.directory).get(key)
        return PartInfo(part, *entry) if entry is not None and entry[0] in self._store.parts() else None

    def _remember(self, key: str, info: PartInfo) -> None:
        here = set(self._store.parts())
        kept = {k: entry for k, entry in read_packed(self._store.directory).items() if entry[0] in here}
        kept[key] = info.sha256, info.n_bytes
        write_kept(self._store.directory / FILE, kept)


class MadeSource(PackedSource):
    """Another source's weights in a format that takes long to make: each part is made once, and kept on disk.

    Args:
        folder: of the store that keeps parts.
        directory: of the model, for who looks at the store.
    """

    def __init__(self, source: WeightSource, packing: Packing, folder: Path, directory: Path) -> None:
        super().__init__(source, packing)
        self._store, self._directory = BlockStore(folder), directory
        self._kept, self._keep = KeptPacked(self._store, lambda: sum(map(self.n_bytes, self.part_names()))), set[str]()
        self._parts: dict[str, PartFile | None] = {}  # None: it is not kept

    def _part(self, name: str) -> PartFile | None:
        known = self._parts.get(name)
        if name not in self._parts or (known is not None and not known.path.is_file()):  # who cleans up may remove it
            found = self._kept.part(self.source, self.source.info(name), self.packing, self._keep, Cancel())
            note_user(self._store, self._keep, self.model, self._directory)
            self._parts[name] = found if isinstance(found, PartFile) else None
        return self._parts[name]

    def _stored_weights(self, part: str) -> PartWeights:
        kept = self._part(part)
        return super()._stored_weights(part) if kept is None else kept.weights(part)

    def begun(self, name: str) -> np.ndarray:
        kept = self._part(part_of(name))
        return super().begun(name) if kept is None else kept.array(name)

    def extent(self, name: str) -> tuple[Path, int, int] | None:
        kept = self._part(part_of(name))
        return None if kept is None else kept.extent(name)

    def release(self) -> None:
        for kept in self._parts.values():
            if kept is not None:
                kept.release()
        super().release()


def read_packed(folder: Path) -> dict[str, tuple[str, int]]:
    """The sha256 and bytes of each packed part that a store has had, by a hash of what it was made of."""

    def take(data: Any) -> dict[str, tuple[str, int]]:
        return {str(key): (str(sha256), int(n_bytes)) for key, (sha256, n_bytes) in data.items()}

    return read_kept(folder / FILE, take, {})


def key_of(source: WeightSource, part: Part, packing: Packing) -> str:
    """A hash of everything that the packed bytes depend on."""
    form = packing.metadata(part.name)
    made_by = [source.folds_gains and packing.folds, source.native, mdi.__version__, LAYOUT_VERSION]
    made_of = [part.sha256, source.config_hash, part.name, form, *made_by]
    if is_made(packing.of_part(part.name)):
        made_of.append(SEARCH_VERSION)
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
