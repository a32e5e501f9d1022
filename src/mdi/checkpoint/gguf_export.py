"""A model as a GGUF file for other programs: the tensors as they are packed here, byte for byte, with fields and tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.folder import RANKS, tokenizer_file
from mdi.checkpoint.gguftokenizer import tokenizer_fields
from mdi.checkpoint.hfconfig import read_hf_config
from mdi.checkpoint.packing import PartWeights, plain
from mdi.checkpoint.shapes import Shape, model_shapes
from mdi.checkpoint.token_ranks import made_of_ranks
from mdi.errors import CheckpointError, UsageError
from mdi.families.names import Piece
from mdi.families.registry import stated_family, written_in_gguf
from mdi.kernels.format_maps import matrix_pieces, runs_of_rows
from mdi.kernels.layout import Matrix, bf16_from_float32, block_rows
from mdi.kernels.weight_formats import BLOCK_TYPES
from mdi.model.tensors import EMBEDDING, HEAD

if TYPE_CHECKING:
    from gguf import GGUFWriter

_TYPES = {"float32": "F32", "fp16": "F16", "bf16": "BF16", **{form: form.upper() for form in BLOCK_TYPES}}
_STORED = {"F32": "float32", "F16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True)
class _Rows:
    """Rows of one of our tensors, from `first` on, and which rows of a tensor of the file they are; `whole` is its shape."""

    source: PackedSource
    name: str
    whole: Shape
    first: int
    piece: Piece

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, or of the matrix of one expert or head."""
        return self.piece.shape if self.piece.expert is None else self.piece.shape[1:]

    @property
    def stop(self) -> int:
        """One behind the last of the rows."""
        return self.first + (self.shape[1] if self.piece.is_transposed else len(self.places))

    @property
    def places(self) -> np.ndarray:
        """In that."""
        if self.piece.row_numbers is not None:
            return self.piece.row_numbers
        found = np.arange(self.shape[0])
        if self.piece.rows is not None:
            found = found[slice(*self.piece.rows)]
        if self.piece.n_paired:
            found = found.reshape(self.piece.n_paired, -1, 2).transpose(0, 2, 1).reshape(-1)
        return found


def export_gguf(
    source: PackedSource, directory: Path, path: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write one file.

    Args:
        source: of the whole model, packed in formats that GGUF has.
        directory: where its tokenizer is.
        path: a file that is not there yet.

    Raises:
        UsageError: the file is there, or a format is none of GGUF's.
        CheckpointError: no family of GGUF's has such a model or such a tokenizer, or the disk refuses.
    """
    from gguf import GGUFWriter

    if path.exists():
        raise UsageError(f"{path} is there already: name a new file")
    config = source.config
    shapes = model_shapes(config, str(source))
    stated = directory / "config.json"
    model = written_in_gguf(config, shapes, stated_family(read_hf_config(stated)) if stated.is_file() else None)
    held, n_more = _held(model.pieces, shapes, source), {}
    if (plain_more := source.source.predicting()) is not None:
        assert source.packing is not None
        more, numbered = PackedSource(plain_more, source.packing), model.names.of_predicting(source.spec.n_layer, "")
        assert numbered is not None
        of_more = {name: spec.shape for name, spec in plain_more.specs.items()}
        pieces = {name: numbered.places(name, shape, more.config)[0] for name, shape in of_more.items()}
        held |= _held(pieces, of_more, more)
        n_more = {
            f"{model.architecture}.block_count": source.spec.n_layer + more.spec.n_layer,
            f"{model.architecture}.nextn_predict_layers": more.spec.n_layer,
        }
    kinds = {name: _type_of(rows, name) for name, rows in held.items()}
    made = made_of_ranks(directory) if tokenizer_file(directory) == directory / RANKS else None
    fields = {
        **model.fields,
        **n_more,
        "general.name": config.name or path.stem,
        **tokenizer_fields(directory, shapes[EMBEDDING][0], made),
    }
    writer = GGUFWriter(None, str(fields.pop("general.architecture")))
    writer.add_quantization_version(2)
    for key, value in fields.items():
        _add(writer, key, value)
    unfinished = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(writer, unfinished, held, kinds, model.more, progress)
        unfinished.replace(path)
    except OSError as e:
        raise CheckpointError(f"cannot write {path}: {e.strerror or e}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _held(
    pieces: dict[str, tuple[Piece, ...]], shapes: dict[str, Shape], source: PackedSource
) -> dict[str, list[_Rows]]:  # fmt: skip
    """What each tensor of the file is made of."""
    found: dict[str, list[_Rows]] = {}
    assert source.packing is not None
    is_tied = HEAD in pieces and source.source.same_as(HEAD) != HEAD
    for name, some in pieces.items():
        first = 0
        for piece in some if not (is_tied and name == HEAD) else ():
            if piece.is_interleaved or (piece.is_transposed and piece.expert is None):
                raise CheckpointError(f"{name} lies otherwise in GGUF files, which is not written")
            held = HEAD if source.packing.leaves_out(name) else name
            rows = _Rows(source, held, shapes[held], first, piece)
            found.setdefault(piece.tensor, []).append(rows)
            first = rows.stop
    return found


def _type_of(held: list[_Rows], tensor: str) -> str:
    """ggml's name of the type of a tensor. Raises CheckpointError, UsageError."""
    found: set[str] = set()
    for rows in held:
        source, shape = rows.source, rows.whole
        assert source.packing is not None
        form = source.packing.format_of(rows.name, shape)
        if form is None:
            dtype = source.specs[rows.name].dtype if rows.name == EMBEDDING else "F32"
            found.add(_STORED.get(dtype, "int8"))
            continue
        of = matrix_pieces(form, shape[0])
        found |= {of[i].word for i, _ in runs_of_rows(form, shape[0], [(rows.first, rows.stop)])}
    if len(found) > 1:
        raise CheckpointError(f"{tensor} would be in {' and '.join(sorted(found))}, but has one type in a GGUF file")
    (form,) = found
    if form not in _TYPES:
        raise UsageError(
            f"--export gguf: {form} is no type of GGUF files: give --quantize q4_k, q6_k, bf16, fp16 or float32"
        )
    return _TYPES[form]


def _write(
    writer: GGUFWriter, path: Path, held: dict[str, list[_Rows]], kinds: dict[str, str], more: dict[str, np.ndarray],
    progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    stored: dict[str, tuple[int, ...]] = {}
    for name, rows in held.items():
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kinds[name]]]
        *outer, n_in = rows[0].piece.shape
        stored[name] = (*(n for n in outer if n > 1), n_in // per_block * block_bytes)
        kind = GGMLQuantizationType[kinds[name]]
        writer.add_tensor_info(name, stored[name], np.dtype(np.uint8), math.prod(stored[name]), kind)
    for name, array in more.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    writer.write_header_to_file(path)
    try:
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        latest: tuple[PackedSource | None, str, PartWeights] = None, "", {}
        done, total = 0, sum(map(math.prod, stored.values()))
        for name, rows in held.items():
            whole = np.zeros(stored[name], dtype=np.uint8)
            for one in rows:
                if latest[0] is not one.source or latest[1] != one.name:
                    latest = one.source, one.name, one.source.tensor_weights(one.name)
                number = one.piece.expert
                by_row = whole.reshape(*one.piece.shape[: 1 if number is None else 2], -1)
                into = by_row if number is None else by_row[number]
                into[one.places] = _bytes_of(latest[2], one, kinds[name])
            writer.write_tensor_data(whole)
            rows[0].source.source.release()
            done += whole.nbytes
            if progress is not None:
                progress(done, total)
        for array in more.values():
            writer.write_tensor_data(array)
    finally:
        writer.close()


def _bytes_of(weights: PartWeights, rows: _Rows, kind: str) -> np.ndarray:
    """uint8 (rows, bytes of a row)"""
    at = slice(rows.first, rows.stop)
    weight = weights[rows.name]
    if isinstance(weight, Matrix) and kind not in _STORED:
        found, first = [], 0
        for piece in weight.pieces:
            own = slice(max(at.start - first, 0), max(min(at.stop - first, piece.n_out), 0))
            if own.start < own.stop:
                found.append(block_rows(piece)[own])
            first += piece.n_out
        return np.concatenate(found)
    numbers = plain({rows.name: weight})[rows.name][at] + np.float32(rows.piece.plus)
    if rows.piece.is_neg_exp:
        numbers = -np.exp(numbers)
    if rows.piece.is_transposed:
        numbers = np.ascontiguousarray(numbers.T)
    made: dict[str, Callable[[], np.ndarray]] = {
        "F32": lambda: numbers, "F16": lambda: numbers.astype(np.float16), "BF16": lambda: bf16_from_float32(numbers)
    }  # fmt: skip
    stored = made[kind]()
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(stored), -1)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
