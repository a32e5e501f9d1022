"""A GGUF file as a source of weights: its tensors under litgpt's names, and the folder that stands for it beside other
checkpoints, with config, tokenizer and a note with its path. What its fields and tensors mean, its family knows.

All that is done to a weight concerns whole rows, so that it can be done to the file's quantized blocks as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mdi.checkpoint.derived import cast
from mdi.checkpoint.folder import CONFIG_FILE, GGUF_FOLDERS, GGUF_NOTE, PARTS_FILE, gguf_file, gguf_name
from mdi.checkpoint.gguf import (
    CARRIED_OVER,
    HELD,
    OWN_FORMATS,
    PLAIN,
    ROUNDED_TO,
    GgufHeader,
    GgufTensor,
    halves_of,
    read_gguf,
    read_rows,
    read_tensor,
    slice_tensor,
    spec_of,
)
from mdi.checkpoint.gguftokenizer import write_tokenizer
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.pooling import write_pooling
from mdi.checkpoint.predicting import NamedSource, block_numbers
from mdi.checkpoint.records import HashRecord, weights_stamp
from mdi.checkpoint.safetensors_layout import TYPES, TensorSpec, main_dtype
from mdi.checkpoint.shapes import model_shapes
from mdi.errors import CheckpointError, UsageError
from mdi.families.gguf import Fields
from mdi.families.names import Names, Piece
from mdi.families.registry import GGUF, family_in_gguf
from mdi.files import replacing
from mdi.kernels import library
from mdi.kernels.format_maps import joined_pieces, map_of
from mdi.kernels.layout import Matrix, empty, pack_blocks, pack_halves, pack_into
from mdi.kernels.lazy_rows import LazyRows, Rows, joined, part_of_rows, spans
from mdi.kernels.weight_formats import PACKED_ROWS, is_packable
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.spec.cluster import what_is_there
from mdi.spec.decode import shown
from mdi.spec.settings_file import parse_json


class GgufSource(NamedSource):
    """A GGUF file (or all files of a model that is split).

    Args:
        path: the file, or the first of several.
        hashes: where the hashes of its parts are kept; None is in memory.

    Raises:
        CheckpointError: it cannot be read, is damaged, or of an architecture or type that is not supported.
    """

    def __init__(self, path: Path, hashes: Path | None = None) -> None:
        self.path = path
        header = read_gguf(path)
        self._tensors = header.tensors
        self.config, self._names = _derived(header)
        self._prefix = ""
        self.config_hash = config_hash(self.config)
        self.model = gguf_name(path)  # as the user knows it, and not as its publisher called it once
        self.tensor_pieces = {
            name: self._pieces_of(name, shape) for name, shape in model_shapes(self.config, str(path)).items()
        }
        self.specs = {name: self._spec(pieces) for name, pieces in self.tensor_pieces.items()}
        self.dtype = main_dtype(self.specs.values())
        kinds = {tensor.type_name for tensor in self._tensors.values()}
        self.native = next((form for kind, form in reversed(CARRIED_OVER.items()) if kind in kinds), None)
        # Weights that were rounded once keep the numbers that they were rounded to.
        self.folds_gains = kinds <= set(PLAIN)
        self.hashes = HashRecord(hashes, weights_stamp([path], self.config_hash))
        if not self.folds_gains:
            self.own_formats = map_of({name: self._own_format(name) for name in self.specs if self._has_format(name)})

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        rows, spec = self.rows(name), self.specs[name]
        if len(spec.shape) < 2:
            return rows[:]
        whole = np.empty(spec.shape, dtype=TYPES[spec.dtype].numpy)
        for first in range(0, len(whole), PACKED_ROWS):
            whole[first : first + PACKED_ROWS] = rows[first : first + PACKED_ROWS]
        return whole

    def rows(self, name: str) -> Rows:
        pieces, spec = self.tensor_pieces[name], self.specs[name]

        def read(piece: Piece, part: GgufTensor) -> np.ndarray:
            found = cast(read_tensor(part, piece.tensor), spec_of(part), spec.dtype)
            if piece.is_neg_exp:
                if not (found < 0).all():
                    raise CheckpointError(f"{self.path}: {piece.tensor} has numbers that are not below zero")
                return np.log(-found)
            return found - np.float32(piece.plus) if piece.plus else found

        return LazyRows(spec.shape, lambda at: joined(self._some(pieces, at, read)))

    def _has_format(self, name: str) -> bool:
        return name == EMBEDDING or is_packable(name, self.specs[name].shape)

    def _own_format(self, name: str) -> str:
        """The formats of a weight's rows, as the file has them."""
        pieces = self.tensor_pieces[name]
        parts = [self._part(piece) for piece in pieces]
        own = [
            (_n_rows(piece, part), OWN_FORMATS.get(part.type_name, ROUNDED_TO))
            for piece, part in zip(pieces, parts, strict=True)
        ]
        return joined_pieces(own) or ROUNDED_TO

    def carried_over(self, name: str, form: str) -> Matrix | None:
        pieces = self.tensor_pieces[name]
        if not self._has_format(name) or self._own_format(name) != form or any(piece.plus for piece in pieces):
            return None
        kinds = [self._part(piece).type_name for piece in pieces]
        if not set(kinds) & HELD.keys():
            return None
        n_out, n_in = self.specs[name].shape
        whole, first = empty(form, n_out, n_in), 0
        for into in whole.pieces:
            self._fill(into, name, first)
            first += into.n_out
        return whole

    def _fill(self, into: Matrix, name: str, first: int) -> None:
        """Rows of a weight from `first` on, in the shape and format of `into`."""
        pieces, where = self.tensor_pieces[name], f"{self.path}: {name}"
        kind = next((kind for kind, form in HELD.items() if form == into.format), None)
        if kind is None:
            return pack_into(into, part_of_rows(self.rows(name), first, into.n_out), where)

        def read(at: slice) -> np.ndarray:
            own = slice(first + at.start, first + at.stop)
            return joined(self._some(pieces, own, lambda piece, part: read_rows(part)))

        if kind in CARRIED_OVER and library.load() is None:
            pack_halves(into, lambda at: halves_of(kind, read(at), where))
        else:
            pack_blocks(into, read, where)

    def _some(
        self, pieces: Sequence[Piece], at: slice, read: Callable[[Piece, GgufTensor], np.ndarray]
    ) -> list[np.ndarray]:
        """Some rows of a tensor; a vector is given whole.

        Args:
            read: gives what a tensor of the file, or some rows of it, has.
        """
        parts = [self._part(piece) for piece in pieces]
        if len(parts[0].shape) < 2:
            whole = zip(pieces, parts, strict=True)
            return [read(piece, part)[self._places(piece, part.shape[0], slice(None))] for piece, part in whole]
        found = []
        for i, own in spans([_n_rows(piece, part) for piece, part in zip(pieces, parts, strict=True)], at):
            piece, part = pieces[i], parts[i]
            if piece.is_transposed:
                found.append(read(piece, part).T[own])
                continue
            first, last, places = own.start, own.stop, self._places(piece, part.shape[0], own)
            if not isinstance(places, slice) and len(places):
                first, last = int(places.min()), int(places.max()) + 1
            rows = read(piece, slice_tensor(part, first, last, (last - first, *part.shape[1:])))
            found.append(rows if isinstance(places, slice) else rows[places - first])
        return found

    def _of_predicting(self) -> list[str]:
        return [name for name, number in block_numbers(self._tensors, "blk.").items() if number >= self.spec.n_layer]

    def release(self) -> None:
        """Nothing stays mapped between two tensors."""

    def _pieces_of(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        tied = (EMBEDDING,) if name == HEAD else ()
        places = [found for one in (name, *tied) for found in self._names.places(one, shape, self.config)]
        for pieces in places:
            if all(piece.tensor in self._tensors for piece in pieces):
                return pieces
        missing = next(
            (piece.tensor for found in places[:1] for piece in found if piece.tensor not in self._tensors), name
        )
        raise CheckpointError(f"{self.path} lacks the tensor {missing}")

    def _spec(self, pieces: tuple[Piece, ...]) -> TensorSpec:
        parts = [self._part(piece) for piece in pieces]
        specs = [spec_of(part) for part in parts]
        n_rows = sum(_n_rows(piece, part) for piece, part in zip(pieces, parts, strict=True))
        codes = {spec.dtype for spec in specs}
        if any(piece.plus or piece.is_neg_exp for piece in pieces) and codes != {"F32"}:
            raise CheckpointError(f"{self.path}: {pieces[0].tensor} is not in F32, as llama.cpp keeps norms")
        rest = specs[0].shape[:1] if pieces[0].is_transposed else specs[0].shape[1:]
        # of several types the one that holds all
        return TensorSpec(codes.pop() if len(codes) == 1 else "F32", (n_rows, *rest))

    def _part(self, piece: Piece) -> GgufTensor:
        """The bytes of a piece in the file. Raises CheckpointError: the tensor is of another shape."""
        found = self._tensors[piece.tensor]
        if tuple(n for n in found.shape if n > 1) != tuple(
            n for n in piece.shape if n > 1
        ):  # it has no dimensions of one
            raise CheckpointError(
                f"{self.path}: tensor {piece.tensor} has the shape {list(found.shape)}, expected {list(piece.shape)} by the "
                "file's fields"
            )
        if found.shape != piece.shape:
            found = slice_tensor(found, 0, found.shape[0], piece.shape)
        if piece.expert is not None:
            found = slice_tensor(found, piece.expert, piece.expert + 1, found.shape[1:])
        if piece.rows is not None:
            start, stop, _ = piece.rows
            found = slice_tensor(found, start, stop, (stop - start, *found.shape[1:]))
        return found

    @staticmethod
    def _places(piece: Piece, n_rows: int, at: slice) -> np.ndarray | slice:
        """Where our rows are: where those of one half of a head come first, the file may have them in pairs."""
        if (numbers := piece.row_numbers) is not None:
            return numbers[at]
        if not piece.n_paired:
            return at
        return np.arange(n_rows).reshape(piece.n_paired, -1, 2).transpose(0, 2, 1).reshape(-1)[at]


def _n_rows(piece: Piece, part: GgufTensor) -> int:
    """Rows of ours that a piece has."""
    numbers = piece.row_numbers
    if piece.is_transposed:
        return part.shape[1]
    return part.shape[0] if numbers is None else len(numbers)


def _derived(header: GgufHeader) -> tuple[ModelConfig, Names]:
    """The configuration of the model in a file, and the names of its tensors.

    Raises:
        CheckpointError: an architecture that is not supported, or fields that are missing or contradict the tensors.
    """
    tensors = header.tensors
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    fields = Fields(header.fields, shapes, lambda name: read_tensor(tensors[name], name))
    try:
        found = family_in_gguf(fields)
        if found is None:
            raise ValueError(
                f"its architecture is {shown(fields.arch)}, and only {', '.join(GGUF)} can be read from GGUF"
            )
        family, of = found
        hf = {"model_type": family.model_type, **of.config_json(fields)}
    except (ValueError, TypeError, OverflowError) as e:
        raise CheckpointError(f"{header.path} cannot be used: {e}") from None
    name = header.fields.get("general.name")
    name = name[:100] if isinstance(name, str) and name else header.path.stem
    return derive_config(hf, re.sub(r"[^\w.+-]+", "-", name)[:100], header.path), of.names


WRITER = 5  # raised when config or tokenizer of a file are read otherwise than before


def gguf_directory(path: Path, folder: Path, directory: Path | None = None) -> Path:
    """The directory for a GGUF file, made below `folder` at the first call; another one if the file has changed.

    What an earlier version of this project wrote there is written again.

    Args:
        directory: the one in which the file lies, if it is to be that.

    Raises:
        UsageError: there is no such file.
        CheckpointError: it cannot be used; or the disk refuses.
    """
    path = path.absolute()
    try:
        stat = path.stat()
    except OSError as e:
        raise UsageError(f"{path} cannot be opened: {e.strerror or e} ({what_is_there(path)})") from None
    stamp = hashlib.sha256(json.dumps([str(path), stat.st_size, stat.st_mtime_ns]).encode()).hexdigest()[:8]
    directory = directory or folder / GGUF_FOLDERS / f"{path.stem}-{stamp}"
    return directory if _is_current(directory) else _written(path, directory)


def current(directory: Path) -> Path:
    """The directory of a GGUF file, written again if an earlier version wrote it. Raises CheckpointError."""
    path = None if _is_current(directory) else gguf_file(directory)
    return directory if path is None or not path.is_file() else _written(path, directory)


def _is_current(directory: Path) -> bool:
    try:
        return bool(parse_json((directory / GGUF_NOTE).read_bytes()).get("written_by") == WRITER)
    except (OSError, ValueError, AttributeError, CheckpointError):
        return False


def _written(path: Path, directory: Path) -> Path:
    """The directory, with config, tokenizer and note of a file."""
    import yaml

    header = read_gguf(path)
    source = GgufSource(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_pooling(directory, header.fields.get(f"{header.fields.get('general.architecture')}.pooling_type"))
    except OSError as e:
        raise CheckpointError(f"cannot make {directory}: {e.strerror or e}") from None
    write_tokenizer(header.fields, directory, path)
    with replacing(directory / CONFIG_FILE) as file:
        file.write(yaml.safe_dump(source.config.plain()).encode())
    with replacing(directory / GGUF_NOTE) as file:  # last, because it says that the others exist
        inside = path.relative_to(directory.absolute()) if path.is_relative_to(directory.absolute()) else path
        file.write(json.dumps({"file": str(inside), "written_by": WRITER}).encode())
    return directory


def open_gguf_directory(directory: Path) -> GgufSource | None:
    """The GGUF file of a directory as a source; None if it has none. Raises CheckpointError."""
    note = directory / GGUF_NOTE
    if not note.is_file():
        return None
    path = gguf_file(directory)
    if path is None:
        raise CheckpointError(f"{note} cannot be read: remove {directory}, and give the GGUF file again")
    return GgufSource(path, directory / PARTS_FILE)
