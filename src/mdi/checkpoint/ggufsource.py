"""A GGUF file as a source of weights: its tensors under litgpt's names, and the folder that stands for it beside other
checkpoints, with config, tokenizer and a note with its path.

All that is done to a weight concerns whole rows, so that it can be done to the file's quantized blocks as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mdi.checkpoint.derived import cast
from mdi.checkpoint.folder import CONFIG_FILE, GGUF_FOLDERS, GGUF_NOTE, PARTS_FILE, gguf_file, gguf_name
from mdi.checkpoint.gguf import (
    CARRIED_OVER,
    OWN_FORMATS,
    PLAIN,
    ROUNDED_TO,
    GgufTensor,
    halves_of,
    read_gguf,
    read_rows,
    read_tensor,
    slice_tensor,
    spec_of,
)
from mdi.checkpoint.ggufconfig import gguf_config
from mdi.checkpoint.gguftokenizer import write_tokenizer
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.records import HashRecord, weights_stamp
from mdi.checkpoint.safetensors_layout import TYPES, TensorSpec, main_dtype
from mdi.checkpoint.shapes import check_tensors, model_shapes
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, UsageError
from mdi.files import replacing
from mdi.kernels.format_maps import joined_pieces, map_of
from mdi.kernels.layout import Halves, Matrix, aligned_bytes, matrix_bytes, pack, pack_halves
from mdi.kernels.lazy_rows import LazyRows, Rows, changed, joined, part_of_rows, spans
from mdi.kernels.weight_formats import PACKED_ROWS, is_packable
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.spec.cluster import what_is_there
from mdi.spec.settings_file import parse_json

_TOP = {
    "transformer.wte": "token_embd",
    "transformer.wte_norm": "token_embd_norm",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_BLOCK = {
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.proj": "attn_output",
    "attn.norm_q": "attn_q_norm",
    "attn.norm_k": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "mlp.fc_1": "ffn_gate",
    "mlp.fc_2": "ffn_up",
    "mlp.fc": "ffn_up",
    "mlp.proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.fc_1": "ffn_gate_shexp",
    "mlp.shared_experts.fc_2": "ffn_up_shexp",
    "mlp.shared_experts.proj": "ffn_down_shexp",
}
_EXPERT = {"fc_1": "ffn_gate_exps", "fc_2": "ffn_up_exps", "proj": "ffn_down_exps"}


@dataclass(frozen=True)
class GgufPiece:
    """Some rows of a tensor in the file.

    Attributes:
        tensor: its name there.
        expert: which of the stacked matrices, or None.
        rows: (start, stop), or None for all.
        paired_heads: if not 0, the rows of each of so many heads lie in pairs, as llama.cpp's Llama rotates them, and are
            to be put into two halves.
    """

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    paired_heads: int = 0


@dataclass(frozen=True)
class Recipe:
    """Pieces, one below the other; `minus` is taken off (llama.cpp keeps Gemma's norms with the one that is added)."""

    pieces: tuple[GgufPiece, ...]
    minus: float = 0.0


def recipe(name: str, config: ModelConfig, arch: str, tensors: Mapping[str, GgufTensor]) -> Recipe:
    """How `name` of litgpt's model is made."""
    is_norm = "norm" in name.rsplit(".", 2)[-2] or "ln_f" in name
    minus = 1.0 if arch.startswith("gemma") and is_norm else 0.0
    return Recipe(tuple(_pieces(name, config, arch, tensors)), minus)


def _pieces(name: str, config: ModelConfig, arch: str, tensors: Mapping[str, GgufTensor]) -> list[GgufPiece]:
    stem, ending = name.rsplit(".", 1)
    if stem in _TOP:
        found = f"{_TOP[stem]}.{ending}"
        tied = stem == "lm_head" and ending == "weight" and found not in tensors
        return [GgufPiece(f"{_TOP['transformer.wte']}.weight" if tied else found)]
    match = re.fullmatch(r"transformer\.h\.(\d+)\.(.*)", stem)
    assert match is not None  # the only ones in litgpt's models
    prefix, part = f"blk.{match[1]}.", match[2]
    if ending == "e_score_correction_bias":
        return [GgufPiece(f"{prefix}exp_probs_b.bias")]
    if part == "norm_2" and arch == "glm4moe":
        return [GgufPiece(f"{prefix}post_attention_norm.{ending}")]
    if part == "attn.qkv":
        return _qkv(prefix, ending, config, arch, tensors)
    if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", part):
        return [GgufPiece(f"{prefix}{_EXPERT[expert[2]]}.{ending}", expert=int(expert[1]))]
    if part in ("mlp.fc_1", "mlp.fc_2") and f"{prefix}ffn_gate.weight" not in tensors:  # Phi 3: one above the other
        n_rows = config.intermediate_size
        rows = (0, n_rows) if part == "mlp.fc_1" else (n_rows, 2 * n_rows)
        return [GgufPiece(f"{prefix}ffn_up.{ending}", rows=rows)]
    if ending == "sinks":
        return [GgufPiece(f"{prefix}attn_sinks.weight")]
    if part == "norm_2" and arch == "gpt-oss":
        return [GgufPiece(f"{prefix}post_attention_norm.{ending}")]
    return [GgufPiece(f"{prefix}{_BLOCK[part]}.{ending}")]


def _qkv(
    prefix: str, ending: str, config: ModelConfig, arch: str, tensors: Mapping[str, GgufTensor]
) -> list[GgufPiece]:
    if f"{prefix}attn_qkv.{ending}" in tensors:
        return [GgufPiece(f"{prefix}attn_qkv.{ending}")]
    heads = (config.n_head, config.n_query_groups) if arch == "llama" else (0, 0)
    paired = {"q": heads[0], "k": heads[1], "v": 0}
    return [GgufPiece(f"{prefix}attn_{which}.{ending}", paired_heads=n) for which, n in paired.items()]


class GgufSource(WeightSource):
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
        self.config = gguf_config(header)
        self.config_hash = config_hash(self.config)
        self.model = gguf_name(path)  # as the user knows it, and not as its publisher called it once
        arch = header.fields["general.architecture"]
        self._recipes = {
            name: recipe(name, self.config, arch, header.tensors) for name in model_shapes(self.config, str(path))
        }
        self.specs = {name: self._spec(made) for name, made in self._recipes.items()}
        check_tensors(self.config, self.specs, self.part_names(), str(path))
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
        made, spec = self._recipes[name], self.specs[name]

        def read(piece: GgufPiece, part: GgufTensor) -> np.ndarray:
            return cast(read_tensor(part, piece.tensor), spec_of(part), spec.dtype)

        minus = np.float32(made.minus)
        found = LazyRows(spec.shape, lambda at: joined(self._some(made, at, read)))
        return changed(found, lambda some: some - minus) if made.minus else found

    def _has_format(self, name: str) -> bool:
        return name == EMBEDDING or is_packable(name, self.specs[name].shape)

    def _own_format(self, name: str) -> str:
        """The formats of a weight's rows, as the file has them."""
        parts = [self._part(piece) for piece in self._recipes[name].pieces]
        own = [(part.shape[0], OWN_FORMATS.get(part.type_name, ROUNDED_TO)) for part in parts]
        return joined_pieces(own) or ROUNDED_TO

    def carried_over(self, name: str, form: str) -> Matrix | None:
        made = self._recipes[name]
        if not self._has_format(name) or self._own_format(name) != form or made.minus:
            return None
        kinds = [self._part(piece).type_name for piece in made.pieces]
        if not set(kinds) & CARRIED_OVER.keys():
            return None
        n_out, n_in = self.specs[name].shape
        whole = Matrix(form, n_out, n_in, aligned_bytes(matrix_bytes(form, n_out, n_in)))
        first = 0
        for into in whole.pieces:
            own = self._piece_of(name, into, first)
            into.data[:] = own.data
            first += into.n_out
        return whole

    def _piece_of(self, name: str, into: Matrix, first: int) -> Matrix:
        """Rows of a weight from `first` on, in the shape and format of `into`."""
        made, where = self._recipes[name], f"{self.path}: {name}"
        kind = next((kind for kind, form in CARRIED_OVER.items() if form == into.format), None)
        if kind is None:
            return pack(into.format, part_of_rows(self.rows(name), first, into.n_out), where)

        def read(at: slice) -> Halves:
            own = slice(first + at.start, first + at.stop)
            return halves_of(kind, joined(self._some(made, own, lambda piece, part: read_rows(part))), where)

        return pack_halves(into.format, into.n_out, into.n_in, read)

    def same_as(self, name: str) -> str:
        is_tied = name == HEAD and self._recipes[HEAD] == self._recipes[EMBEDDING]
        return EMBEDDING if is_tied else name

    def _some(self, made: Recipe, at: slice, read: Callable[[GgufPiece, GgufTensor], np.ndarray]) -> list[np.ndarray]:
        """Some rows of a tensor; a vector is given whole.

        Args:
            read: gives what a tensor of the file, or some rows of it, has.
        """
        parts = [self._part(piece) for piece in made.pieces]
        if len(parts[0].shape) < 2:
            whole = zip(made.pieces, parts, strict=True)
            return [read(piece, part)[self._places(piece, part.shape[0], slice(None))] for piece, part in whole]
        found = []
        for i, own in spans([part.shape[0] for part in parts], at):
            piece, part = made.pieces[i], parts[i]
            first, last, places = own.start, own.stop, self._places(piece, part.shape[0], own)
            if not isinstance(places, slice) and len(places):
                first, last = int(places.min()), int(places.max()) + 1
            rows = read(piece, slice_tensor(part, first, last, (last - first, *part.shape[1:])))
            found.append(rows if isinstance(places, slice) else rows[places - first])
        return found

    def part_names(self) -> list[str]:
        return stage_parts(0, self.config.n_layer, starter=True)

    def release(self) -> None:
        """Nothing stays mapped between two tensors."""

    def _spec(self, made: Recipe) -> TensorSpec:
        specs = [spec_of(self._part(piece)) for piece in made.pieces]
        codes = {spec.dtype for spec in specs}
        if any(spec.shape[1:] != specs[0].shape[1:] for spec in specs):
            raise CheckpointError(f"{self.path}: {' and '.join(p.tensor for p in made.pieces)} are not equally wide")
        if made.minus and codes != {"F32"}:
            raise CheckpointError(f"{self.path}: {made.pieces[0].tensor} is not in F32, as llama.cpp keeps norms")
        # of several types the one that holds all
        return TensorSpec(
            codes.pop() if len(codes) == 1 else "F32", (sum(s.shape[0] for s in specs), *specs[0].shape[1:])
        )

    def _part(self, piece: GgufPiece) -> GgufTensor:
        """The bytes of a piece in the file."""
        if piece.tensor not in self._tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {piece.tensor}")
        found = self._tensors[piece.tensor]
        if piece.expert is not None:
            if len(found.shape) != (2 if piece.tensor.endswith(".bias") else 3) or piece.expert >= found.shape[0]:
                raise CheckpointError(f"{self.path}: {piece.tensor} has the shape {list(found.shape)}")
            found = slice_tensor(found, piece.expert, piece.expert + 1, found.shape[1:])
        if piece.rows is not None:
            start, stop = piece.rows
            if len(found.shape) < 2 or stop > found.shape[0]:
                raise CheckpointError(f"{self.path}: {piece.tensor} has {found.shape[0]} rows, expected {stop}")
            found = slice_tensor(found, start, stop, (stop - start, *found.shape[1:]))
        return found

    @staticmethod
    def _places(piece: GgufPiece, n_rows: int, at: slice) -> np.ndarray | slice:
        """Where litgpt's rows are: it rotates element i with i + head_size / 2, llama.cpp's Llama 2 i with 2 i + 1."""
        if not piece.paired_heads:
            return at
        return np.arange(n_rows).reshape(piece.paired_heads, -1, 2).transpose(0, 2, 1).reshape(-1)[at]


WRITER = 2  # raised when config or tokenizer of a file are read otherwise than before


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
