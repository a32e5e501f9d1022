"""Chunks: one safetensors file per node with the tensors of its stage and the manifest, in <checkpoint>/chunks/<N>nodes/,
or <N>nodes-int8 and the like where the weights have a format.

Written tensor by tensor: no stage and no block is ever in memory as a whole. Knows no network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mdi.checkpoint.chunkfile import ChunkFile
from mdi.checkpoint.manifest import METADATA_KEY, PLAIN, Manifest
from mdi.checkpoint.parts import PartInfo, array_bytes, part_of, stage_parts
from mdi.checkpoint.safetensors_layout import TensorSpec, alignment, header_bytes, ordered
from mdi.checkpoint.weights import WeightSource
from mdi.disk_space import check_disk
from mdi.errors import CheckpointError
from mdi.partition.split import ranges
from mdi.weight_formats import OWN_FORMAT
from mdi.whole_files import replacing

Progress = Callable[[int, int], None]  # bytes written so far, bytes to write in all

RELEASE_BYTES = 256 << 20  # how much of the source may be mapped, and count as ours, at a time

_NAME = re.compile(r"model_(starter|secondary(?:0|[1-9][0-9]*))\.safetensors")


def node_names(n_nodes: int) -> list[str]:
    return ["starter", *(f"secondary{i}" for i in range(n_nodes - 1))]


def find_chunk(ckpt_dir: str | Path, n_nodes: int, node: str, quantize: str | None = None) -> Path:
    """Where a node's chunk is, or would be; `quantize` is the weight format of its blocks."""
    folder = f"{n_nodes}nodes" + (f"-{quantize}" if quantize else "")
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
        config=source.config_dict,
        config_hash=source.config_hash,
        dtype=source.dtype,
        n_nodes=len(counts),
        node=node_names(len(counts))[node],
        blocks=(start, stop),
        n_layer=source.config_dict["n_layer"],
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
            for piece in array_bytes(source.array(name)):
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
