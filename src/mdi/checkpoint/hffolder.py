"""A Hugging Face folder as a source of weights: its tensors under litgpt's names, read one by one from its safetensors files.

Nothing is converted, and nothing is written into the folder. Needs neither torch nor transformers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mdi.checkpoint.derived import cast
from mdi.checkpoint.folder import model_name, no_checkpoint, weight_files
from mdi.checkpoint.hfconfig import choose_config, n_predicting, read_hf_config
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.quantized import Decoded, decoded, read_quantization
from mdi.checkpoint.records import HashRecord, weights_stamp
from mdi.checkpoint.safetensors_layout import TensorSpec, main_dtype
from mdi.checkpoint.shapes import check_tensors, interleaved_rows, model_shapes
from mdi.checkpoint.weightfile import WeightFile, open_weight_file
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, Code
from mdi.files import default_cache_dir
from mdi.kernels.layout import Halves, Matrix, pack_halves
from mdi.kernels.lazy_rows import LazyRows, Rows, joined, spans
from mdi.spec.model import ModelConfig

# Names of modules in litgpt's model -> in transformers' one. Of several, the first one that the file has.
_TOP = {
    "transformer.wte": (
        "{model}.embed_tokens", "gpt_neox.embed_in", "transformer.word_embeddings", "word_embeddings", "transformer.wte", "wte",
        "model.decoder.embed_tokens", "decoder.embed_tokens",
    ),
    "transformer.wte_norm": ("transformer.word_embeddings_layernorm", "word_embeddings_layernorm"),
    "transformer.wpe": ("transformer.wpe", "wpe", "model.decoder.embed_positions", "decoder.embed_positions"),
    "transformer.ln_f": (
        "{model}.norm", "{model}.final_layernorm", "gpt_neox.final_layer_norm", "transformer.ln_f", "ln_f",
        "model.decoder.final_layer_norm", "decoder.final_layer_norm",
    ),
    "lm_head": ("lm_head", "{model}.lm_head", "language_model.lm_head", "embed_out"),
}  # fmt: skip
BLOCK_MODULES: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "norm_1": ("input_layernorm", "ln_attn", "ln_1", "self_attn_layer_norm"),
    # Where a norm follows the attention, the one before the MLP has a name of its own.
    "norm_2": ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_mlp", "ln_2", "final_layer_norm"),
    "post_attention_norm": ("post_attention_layernorm", "self_attn_layer_norm"),
    "post_mlp_norm": ("post_feedforward_layernorm", "final_layer_norm"),
    "attn.qkv": (
        "self_attn.qkv_proj", "attention.query_key_value", "self_attention.query_key_value", "attn.c_attn",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "attn.proj": (
        "self_attn.o_proj", "self_attn.dense", "attention.dense", "self_attention.dense", "attn.c_proj", "self_attn.out_proj",
    ),
    "attn.norm_q": ("self_attn.q_norm",),
    "attn.norm_k": ("self_attn.k_norm",),
    "mlp.fc_1": ("mlp.gate_proj", "mlp.gate_up_proj"),
    "mlp.fc_2": ("mlp.up_proj", "mlp.gate_up_proj"),
    "mlp.fc": ("mlp.fc1", "mlp.dense_h_to_4h", "mlp.c_fc", "fc1"),
    "mlp.proj": ("mlp.down_proj", "mlp.fc2", "mlp.dense_4h_to_h", "mlp.c_proj", "fc2"),
    "mlp.gate": ("mlp.gate", "block_sparse_moe.gate", "block_sparse_moe", "mlp.router"),
    "mlp.shared_experts.fc_1": ("mlp.shared_experts.gate_proj",),
    "mlp.shared_experts.fc_2": ("mlp.shared_experts.up_proj",),
    "mlp.shared_experts.proj": ("mlp.shared_experts.down_proj",),
    "attn": ("self_attn",),
}  # fmt: skip
_EXPERT = {
    "fc_1": ("mlp.experts.{i}.gate_proj", "block_sparse_moe.experts.{i}.w1"),
    "fc_2": ("mlp.experts.{i}.up_proj", "block_sparse_moe.experts.{i}.w3"),
    "proj": ("mlp.experts.{i}.down_proj", "block_sparse_moe.experts.{i}.w2"),
}
# The same of gpt-oss, whose experts are stacked in one tensor, with the rows of fc_1 and fc_2 in turn.
_STACKED = {"fc_1": "gate_up_proj", "fc_2": "gate_up_proj", "proj": "down_proj"}
# Where the language part of a model begins, if it is not "model"; then the other parts are left out.
_LANGUAGE = ("model.language_model", "language_model.model")
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual|embed_vision)\.")
# Modules that predict several tokens (MTP) have this name, or numbers of blocks behind the last one.
_PREDICTING = re.compile(r"(model\.)?mtp\.")
# Tables that follow from the settings, which older versions of transformers wrote as well.
_NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))")
_BLOCK_NAME = re.compile(r"transformer\.h\.(\d+)\.(.*)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
TRANSPOSED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # (inputs, outputs)
FIRST_POSITION = {"embed_positions": 2}  # OPT's table begins with rows for padding
INTERLEAVED = ("attention.query_key_value", "self_attention.query_key_value")


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor.

    Attributes:
        tensor: its name in the files.
        rows: (start, stop, step), or None for all.
        expert: which of the matrices (or rows) that are stacked in the tensor; None if there is one.
        is_interleaved: whether they are query, key and value group by group, and not all queries first.
        is_transposed: whether the tensor has the outputs in its columns.
    """

    tensor: str
    rows: tuple[int, int, int] | None = None
    expert: int | None = None
    is_interleaved: bool = False
    is_transposed: bool = False


class HfFolder(WeightSource):
    """A folder with config.json and *.safetensors, with or without an index.

    If the embedding or the head is missing, the other is used for it (tied weights).

    Args:
        path: of the folder.
        model_name: litgpt's name of the model, see `choose_config`.
        cache: where hashes of its parts are kept; None is the place for this user's cache files.
        takes_pickles: whether files of torch are read as well, with its restricted unpickler.

    Raises:
        CheckpointError: something is missing, cut short, damaged, of an unknown architecture, or of another shape than
            config.json says.

    Attributes:
        tensor_pieces: of what each tensor of the model is made, by its name.
    """

    def __init__(
        self, path: str | Path, model_name: str | None = None, cache: Path | None = None, takes_pickles: bool = False
    ) -> None:
        self.path = Path(path)
        self._hint = "" if model_name is None else ": is --model-name right?"
        opened = _open_files(self.path, takes_pickles)
        self._opened = list({id(file): file for file in opened.values()}.values())
        self._files = decoded(self.path, opened, read_quantization(self.path))
        self.config = folder_config(self.path, model_name)
        self.config_hash = config_hash(self.config)
        self.model = self.config.name
        self._prefix = next((p for p in _LANGUAGE if any(name.startswith(f"{p}.") for name in self._files)), "model")
        shapes = model_shapes(self.config, str(path))
        self.tensor_pieces = {name: self._pieces_of(name, shape) for name, shape in shapes.items()}
        self._check_used()
        self.specs = {name: self._spec(pieces) for name, pieces in self.tensor_pieces.items()}
        check_tensors(self.config, self.specs, self.part_names(), str(path))
        self.dtype = main_dtype(self.specs.values())
        files = sorted({file.path for file in opened.values()})
        self.native = next((f.form for f in self._files.values() if isinstance(f, Decoded) and f.form), None)
        self.folds_gains = (
            self.native is None
        )  # weights that were rounded once keep the numbers that they were rounded to
        kept = (cache or default_cache_dir()) / "folders" / f"{_stamp(self.path)}.json"
        self.hashes = HashRecord(kept, weights_stamp(files, self.config_hash))

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.rows(name)[:])

    def rows(self, name: str) -> Rows:
        pieces, code = self.tensor_pieces[name], self.specs[name].dtype
        counts = [self._piece_spec(piece).shape[0] for piece in pieces]
        readers = [self._reader(piece) for piece in pieces]

        def read(at: slice) -> np.ndarray:
            found = []
            for i, own in spans(counts, at):
                file = self._files[pieces[i].tensor]
                found.append(cast(self._rows(pieces[i], own, readers[i]), file.specs[pieces[i].tensor], code))
            return joined(found)

        return LazyRows(self.specs[name].shape, read)

    def carried_over(self, name: str, form: str) -> Matrix | None:
        pieces = self.tensor_pieces[name]
        files = [self._files[piece.tensor] for piece in pieces]
        stored = [file for file in files if isinstance(file, Decoded) and file.form == form and file.has_halves]
        if len(stored) < len(files) or any(piece.is_transposed for piece in pieces):
            return None
        counts = [self._piece_spec(piece).shape[0] for piece in pieces]

        def read(at: slice) -> Halves:
            found = [self._rows(pieces[i], own, stored[i].halves) for i, own in spans(counts, at)]
            return Halves(*map(joined, zip(*found, strict=True)))

        n_out, n_in = self.specs[name].shape
        return pack_halves(form, n_out, n_in, read)

    @functools.cached_property
    def _interleaved(self) -> np.ndarray:
        return interleaved_rows(self.config)

    def read_bytes(self, name: str) -> int:
        return self.specs[name].n_bytes if any(file.stays_mapped for file in self._opened) else 0

    def part_names(self) -> list[str]:
        return stage_parts(0, self.config.n_layer, starter=True)

    def release(self) -> None:
        for file in self._opened:
            file.release()

    def _reader(self, piece: Piece) -> Callable[[slice], np.ndarray]:
        """What gives rows of a tensor, or of a matrix in it, as a piece has them but for their order."""
        file, tensor = self._files[piece.tensor], piece.tensor
        one = None if piece.expert is None else slice(piece.expert, piece.expert + 1)
        if piece.is_transposed:  # all of it is read for each row: it stays mapped
            whole = file.array(tensor, one)
            columns = (whole if one is None else whole[0]).T
            return lambda rows: columns[rows]
        if one is None:
            return partial(file.array, tensor)
        return lambda rows: file.array(tensor, one)[0][rows]

    def _rows(self, piece: Piece, at: slice, read: Callable[[slice], Any]) -> Any:
        """Some rows of a piece: as few as possible are read, and put into order.

        Args:
            read: gives rows of the tensor, in one array or several.
        """
        if piece.is_interleaved:
            places = self._interleaved[at]
        else:
            start, _, step = piece.rows or (0, 0, 1)
            places = np.arange(start + at.start * step, start + at.stop * step, step)
        if not len(places):
            return read(slice(0, 0))
        first, last = int(places.min()), int(places.max()) + 1
        found = read(slice(first, last))
        if not piece.is_interleaved and places.size == last - first:
            return found
        if isinstance(found, tuple):
            return [array[places - first] for array in found]
        return found[places - first]

    def _pieces_of(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        stem, ending = name.rsplit(".", 1)
        if stem in _TOP:
            return (self._top(stem, ending, shape),)
        match = _BLOCK_NAME.fullmatch(stem)
        assert match is not None  # the only ones in litgpt's models
        expert = _EXPERT_NAME.fullmatch(match[2])
        if expert and self.config.glu_limit:
            return (self._stacked(f"{self._layers()}.{match[1]}.mlp.experts", expert, ending, shape),)
        known = _EXPERT[expert[2]] if expert else BLOCK_MODULES.get(match[2], ())
        for one in known:
            modules = [one] if isinstance(one, str) else one
            names = [f"{self._layers()}.{match[1]}.{module}.{ending}" for module in modules]
            if expert:
                names = [found.format(i=expert[1]) for found in names]
            if all(found in self._files for found in names):
                return tuple(self._piece(found, modules[0], match[2], shape) for found in names)
        raise self._lacks(name, known)

    def _piece(self, tensor: str, module: str, ours: str, shape: tuple[int, ...]) -> Piece:
        rows = None
        if module == "mlp.gate_up_proj":
            rows = (0, shape[0], 1) if ours == "mlp.fc_1" else (shape[0], 2 * shape[0], 1)
            self._check_rows(tensor, 2 * shape[0])
        if module in INTERLEAVED:
            self._check_rows(tensor, shape[0])
        is_transposed = module in TRANSPOSED and len(shape) == 2
        return Piece(tensor, rows, is_interleaved=module in INTERLEAVED, is_transposed=is_transposed)

    def _stacked(self, path: str, expert: re.Match[str], ending: str, shape: tuple[int, ...]) -> Piece:
        """Of gpt-oss: plain weights have their inputs in rows, and those in MXFP4 their outputs."""
        module, rows, whole = _STACKED[expert[2]], None, shape
        if expert[2] != "proj":
            rows, whole = (int(expert[2] == "fc_2"), 2 * shape[0], 2), (2 * shape[0], *shape[1:])
        alone = f"{path}.{expert[1]}.{module}.{ending}"
        if alone in self._files:
            self._check_shape(alone, whole)
            return Piece(alone, rows)
        tensor = f"{path}.{module}" + ("_bias" if ending == "bias" else "")
        if tensor not in self._files:
            raise self._lacks(alone, (tensor, f"{tensor}_blocks"))
        self._check_shape(tensor, (self.config.n_expert, *whole[::-1]))
        return Piece(tensor, rows, int(expert[1]), is_transposed=ending == "weight")

    def _top(self, stem: str, ending: str, shape: tuple[int, ...]) -> Piece:
        tied = {"lm_head": "transformer.wte", "transformer.wte": "lm_head"}.get(stem) if ending == "weight" else None
        for ours in filter(None, (stem, tied)):
            for module in _TOP[ours]:
                tensor = f"{module.format(model=self._prefix)}.{ending}"
                if tensor in self._files:
                    found = self._files[tensor].specs[tensor].shape
                    # Rows for images follow those of the words.
                    is_longer = self._prefix != "model" and len(found) == 2 and found[0] > shape[0]
                    first = FIRST_POSITION.get(module.rpartition(".")[2], 0)
                    if first:
                        self._check_rows(tensor, first + shape[0])
                    return Piece(tensor, (first, first + shape[0], 1) if is_longer or first else None)
        if tied is not None:
            raise CheckpointError(f"{self.path} has neither an embedding nor a head")
        raise self._lacks(f"{stem}.{ending}", _TOP[stem])

    def _layers(self) -> str:
        for prefix in ("gpt_neox.layers", "transformer.h", "h", "model.decoder.layers", "decoder.layers"):
            if any(name.startswith(f"{prefix}.") for name in self._files):
                return prefix
        return f"{self._prefix}.layers"

    def _lacks(self, name: str, known: tuple[Any, ...]) -> CheckpointError:
        theirs = " or ".join(one if isinstance(one, str) else ", ".join(one) for one in known)
        return CheckpointError(f"{self.path} lacks the tensor {name}" + (f" ({theirs})" if theirs else ""))

    def _check_rows(self, tensor: str, n_rows: int) -> None:
        shape = self._files[tensor].specs[tensor].shape
        if not shape or shape[0] != n_rows:
            raise CheckpointError(
                f"{self.path}: tensor {tensor} has the shape {list(shape)}, expected {n_rows} rows by config.json"
            )

    def _check_shape(self, tensor: str, expected: tuple[int, ...]) -> None:
        shape = self._files[tensor].specs[tensor].shape
        if shape != expected:
            raise CheckpointError(
                f"{self.path}: tensor {tensor} has the shape {list(shape)}, expected {list(expected)} by config.json"
            )

    def _check_used(self) -> None:
        """Raises CheckpointError for a tensor that the model would be computed without."""
        used = {piece.tensor for pieces in self.tensor_pieces.values() for piece in pieces}
        n_layer, layers = self.config.n_layer, self._layers()
        more = n_predicting(read_hf_config(self.path / "config.json"))
        predicting = tuple(f"{layers}.{i}." for i in range(n_layer, n_layer + more))
        for name in self._files:
            is_other = self._prefix != "model" and _OTHER_PARTS.match(name) is not None
            is_other = is_other or name.startswith(predicting) or _PREDICTING.match(name) is not None
            if name not in used and not is_other and not _NOT_WEIGHTS.fullmatch(name):
                raise CheckpointError(
                    f"{self.path} holds the tensor {re.sub(r'[.][0-9]+[.]', '.<i>.', name)}, which a "
                    f"{self.config.name} does not have{self._hint}"
                )

    def _piece_spec(self, piece: Piece) -> TensorSpec:
        spec = self._files[piece.tensor].specs[piece.tensor]
        if piece.expert is not None:
            spec = TensorSpec(spec.dtype, spec.shape[1:])
        if piece.is_transposed:
            spec = TensorSpec(spec.dtype, spec.shape[::-1])
        if piece.rows is not None:
            spec = TensorSpec(spec.dtype, (len(range(*piece.rows)), *spec.shape[1:]))
        return spec

    def _spec(self, pieces: tuple[Piece, ...]) -> TensorSpec:
        specs = [self._piece_spec(piece) for piece in pieces]
        if len(specs) == 1:
            return specs[0]
        if any(not spec.shape or spec.shape[1:] != specs[0].shape[1:] for spec in specs):
            raise CheckpointError(f"{self.path}: {' and '.join(p.tensor for p in pieces)} are not equally wide")
        codes = {spec.dtype for spec in specs}  # of several types, the one that holds all
        return TensorSpec(
            codes.pop() if len(codes) == 1 else "F32", (sum(s.shape[0] for s in specs), *specs[0].shape[1:])
        )


def folder_config(path: Path, model_name: str | None = None) -> ModelConfig:
    """The configuration of a Hugging Face folder. Raises CheckpointError."""
    read_quantization(path)  # refuses what cannot be read
    return choose_config(path, model_name)


def _open_files(path: Path, takes_pickles: bool) -> dict[str, WeightFile]:
    """The file of each tensor, by its name. Raises CheckpointError."""
    files = weight_files(path)
    if not files or not (takes_pickles or all(file.suffix == ".safetensors" for file in files)):
        raise CheckpointError(no_checkpoint(path), code=Code.UNSAFE if files else None)
    found: dict[str, WeightFile] = {}
    for file in map(open_weight_file, files):
        for name in file.specs:
            if name in found:
                raise CheckpointError(f"the tensor {name} is in both {found[name].path} and {file.path}")
            found[name] = file
    return found


def _stamp(path: Path) -> str:
    """A name for the folder among others."""
    where = str(path.resolve())
    return f"{model_name(path)}-{hashlib.sha256(json.dumps(where).encode()).hexdigest()[:8]}"
