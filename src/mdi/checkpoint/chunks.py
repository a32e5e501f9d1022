"""Files with parts of a model: a received part, and chunks, one safetensors file per node with the tensors of its stage and
the manifest, in <checkpoint>/chunks/<N>nodes/, or <N>nodes-int8 and the like where the weights have a format.

Chunks are written tensor by tensor: no stage and no block is ever in memory as a whole. Knows no network.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdi.block_ranges import block_span, ranges
from mdi.cancel import Cancel
from mdi.checkpoint.disk_space import check_disk
from mdi.checkpoint.manifest import METADATA_KEY, PLAIN, Manifest
from mdi.checkpoint.packing import packing_of
from mdi.checkpoint.parts import Part, PartInfo, array_bytes, part_of, stage_parts
from mdi.checkpoint.records import HashRecord, in_threads, stamp_of
from mdi.checkpoint.safetensors_layout import TensorSpec, alignment, header_bytes, main_dtype, ordered
from mdi.checkpoint.shapes import check_tensors
from mdi.checkpoint.weightfile import SafetensorsFile
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError
from mdi.files import replacing
from mdi.kernels.format_maps import file_word
from mdi.kernels.lazy_rows import LazyRows, Rows
from mdi.kernels.weight_formats import OWN_FORMAT
from mdi.model.plain import ModelConfig
from mdi.spec.cluster import nearest_existing


class FileSource(WeightSource):
    """One .safetensors file as a source, whose hashes are fixed."""

    path: Path
    _file: SafetensorsFile

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        return self._file.view(name) if self.packing else self._file.array(name)

    def rows(self, name: str) -> Rows:
        return LazyRows(self.specs[name].shape, functools.partial(self._file.array, name))

    def extent(self, name: str) -> tuple[Path, int, int] | None:
        return (self.path, *self._file.extent(name))

    def remember(self, info: PartInfo) -> None:
        """The hash is known."""

    def release(self) -> None:
        """Mappings go with the arrays that look into them."""


class PartFile(FileSource):
    """Does not hash the bytes; the owner of the file does.

    Args:
        info: the part in the file.
        config, config_hash: of the model.

    Raises:
        CheckpointError: missing, cut short, damaged, or in a packed form of another version.
    """

    def __init__(self, path: Path, info: Part, config: ModelConfig, config_hash: str) -> None:
        self.path = path
        self._info = PartInfo(info.name, info.sha256, info.n_bytes)
        self._file = SafetensorsFile(path)
        self.model, self.config, self.config_hash = config.name, config, config_hash
        self.specs = self._file.specs
        self.packing = packing_of(self._file.metadata, str(path))
        self.dtype = main_dtype(self.specs.values())

    def part_names(self) -> list[str]:
        return [self._info.name]

    def known(self, part: str) -> PartInfo | None:
        return self._info if part == self._info.name else None


class ChunkFile(FileSource):
    """A chunk that mdi prepare-model wrote. Its hashes are those of its manifest; `verify` computes them.

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
        self.model, self.config = self.manifest.model, self.manifest.config
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

    def verify(self, parts: Collection[str], checked: HashRecord, cancel: Cancel | None = None) -> None:
        """Hash the parts that are not known to be whole, a few at a time.

        Args:
            checked: where it is kept that they are.
            cancel: looked at between parts.

        Raises:
            CheckpointError: a part differs from the manifest.
        """
        where, stamp = self.path.absolute(), stamp_of(self.path)

        def verify(name: str) -> None:
            if cancel is not None:
                cancel.check()
            key = f"{where}:{name}:{self.info(name).sha256}"
            if checked.find(key, stamp) is None:
                self.verify_part(name)
                checked.put(key, self.info(name), stamp)

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
        check_tensors(self.config, self.specs, self._infos, str(self.path), self.packing)
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
    return f"make it with: mdi prepare-model {model} --n-nodes {match[1] if match else 'N'}{form}"


Progress = Callable[[int, int], None]  # bytes written so far, bytes to write in all

RELEASE_BYTES = 256 << 20  # how much of the source may be mapped, and count as ours, at a time

_NAME = re.compile(r"model_(starter|secondary(?:0|[1-9][0-9]*))\.safetensors")


def node_names(n_nodes: int) -> list[str]:
    return ["starter", *(f"secondary{i}" for i in range(n_nodes - 1))]


def find_chunk(ckpt_dir: str | Path, n_nodes: int, node: str, quantize: str | None = None) -> Path:
    """Where a node's chunk is, or would be; `quantize` is the weight format of its blocks."""
    folder = f"{n_nodes}nodes" + (f"-{file_word(quantize)}" if quantize else "")
    return Path(ckpt_dir) / "chunks" / folder / f"model_{node}.safetensors"


def siblings(chunk_path: str | Path) -> dict[str, Path]:
    """The chunks in the same directory, itself included, by node in ring order."""
    found = {m[1]: path for path in Path(chunk_path).absolute().parent.iterdir() if (m := _NAME.fullmatch(path.name))}
    return {node: found[node] for node in sorted(found, key=lambda node: (node != "starter", len(node), node))}


def write_chunks(
    source: WeightSource, ckpt_dir: str | Path, counts: Sequence[int], progress: Progress | None = None
) -> list[Path]:
    """Cut a model. Existing chunks that are known to have exactly these weights are kept.

    Args:
        source: the whole model.
        ckpt_dir: where the directory chunks/ is or will be.
        counts: blocks per node, starter first; they must add up to the model's.
        progress: called after each piece.

    Returns:
        The files, in ring order.

    Raises:
        CheckpointError: the disk is too small, or a file cannot be read or written. No chunk is half-written.
    """
    plans = [_plan(source, counts, node) for node in range(len(counts))]
    paths = [find_chunk(ckpt_dir, len(counts), plan.node, _label(plan)) for plan in plans]
    pairs = zip(paths, plans, strict=True)
    todo = [(path, plan) for path, plan in pairs if not _is_current(path, plan, source)]
    _check_disk(todo)
    tally = _Tally(sum(spec.n_bytes for _, plan in todo for spec in _specs(source, plan).values()), progress)
    for path, plan in todo:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CheckpointError(f"cannot make the directory {path.parent}: {e.strerror or e}") from None
        for info in _write(source, path, plan, tally):
            source.remember(info)
    return paths


def _label(manifest: Manifest) -> str | None:
    """The format, if the folder's name needs it: not the one that keeps the checkpoint's numbers."""
    return None if manifest.format in (PLAIN, OWN_FORMAT.get(manifest.dtype)) else manifest.format


def _plan(source: WeightSource, counts: Sequence[int], node: int) -> Manifest:
    """The manifest of a node's chunk, still without hashes."""
    start, stop = ranges(counts)[node]
    names = stage_parts(start, stop, starter=node == 0)
    return Manifest(
        model=source.model,
        config=source.config,
        config_hash=source.config_hash,
        dtype=source.dtype,
        n_nodes=len(counts),
        node=node_names(len(counts))[node],
        blocks=(start, stop),
        n_layer=source.spec.n_layer,
        parts=tuple(PartInfo(name, "0" * 64, source.n_bytes(name)) for name in names),
        format=source.packing.blocks if source.packing else PLAIN,
        format_head=source.packing.head if source.packing else PLAIN,
    )


def _specs(source: WeightSource, plan: Manifest) -> dict[str, TensorSpec]:
    return {name: spec for part in plan.parts for name, spec in source.part_specs(part.name).items()}


def _is_current(path: Path, plan: Manifest, source: WeightSource) -> bool:
    """Whether the chunk on disk is the one that would be written, as far as is known without reading weights."""
    if not path.is_file():
        return False
    try:
        found = ChunkFile(path).manifest
    except CheckpointError:
        return False
    is_same_cut = dataclasses.replace(found, parts=plan.parts) == plan
    return is_same_cut and all(source.known(part.name) == part for part in found.parts)


def _write(source: WeightSource, path: Path, plan: Manifest, tally: _Tally) -> tuple[PartInfo, ...]:
    specs = _specs(source, plan)
    digests: dict[str, Any] = {}
    for part in plan.parts:
        of_part = source.part_specs(part.name)
        metadata = source.metadata(part.name)
        digests[part.name] = hashlib.sha256(header_bytes(of_part, ordered(of_part, bool(metadata)), metadata))
    order = _order(plan, specs)
    head = _head(plan, specs, order)
    mapped = 0
    with replacing(path) as file:
        file.write(head)
        for name in order:
            for piece in array_bytes(source.begun(name), specs[name].n_bytes):
                digests[part_of(name)].update(piece)
                file.write(piece)
                tally.add(len(piece))
            mapped += source.read_bytes(name)
            if mapped > RELEASE_BYTES:
                source.release()
                mapped = 0
        parts = tuple(PartInfo(part.name, digests[part.name].hexdigest(), part.n_bytes) for part in plan.parts)
        final = _head(dataclasses.replace(plan, parts=parts), specs, order)
        assert len(final) == len(head)  # hashes have a fixed length
        file.seek(0)
        file.write(final)
    source.release()
    return parts


def _order(plan: Manifest, specs: dict[str, TensorSpec]) -> list[str]:
    """Part after part, but what needs more alignment first over all, so that every tensor is aligned.

    Within a part that is the canonical order, so that its hash can be taken in passing.
    """
    place = {part.name: i for i, part in enumerate(plan.parts)}
    is_packed = plan.packing is not None
    return sorted(
        ordered(specs, is_packed), key=lambda name: (-alignment(specs[name], is_packed), place[part_of(name)])
    )


def _head(manifest: Manifest, specs: dict[str, TensorSpec], order: Sequence[str]) -> bytes:
    return header_bytes(specs, order, {METADATA_KEY: manifest.to_json()})


def _check_disk(todo: Sequence[tuple[Path, Manifest]]) -> None:
    """Each file is written under another name, and then replaces the old one."""
    if not todo:
        return
    held = peak = 0
    for path, manifest in todo:
        n_bytes = sum(part.n_bytes for part in manifest.parts)
        peak = max(peak, held + n_bytes)
        held += n_bytes - (path.stat().st_size if path.is_file() else 0)
    check_disk(todo[0][0].parent, peak, "cutting the model", CheckpointError)


class _Tally:
    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total_bytes, progress

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
