"""A Hugging Face folder as a source of weights: its tensors under litgpt's names, read one by one from its safetensors files.

Nothing is converted, and nothing is written into the folder. Needs neither torch nor transformers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mdi.checkpoint.derived import cast
from mdi.checkpoint.folder import model_name, no_checkpoint, weight_files
from mdi.checkpoint.hfconfig import choose_config, n_predicting, read_hf_config
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.predicting import NamedSource, block_numbers
from mdi.checkpoint.quantized import Decoded, decoded, read_quantization
from mdi.checkpoint.records import HashRecord, weights_stamp
from mdi.checkpoint.safetensors_layout import TensorSpec, main_dtype
from mdi.checkpoint.shapes import check_tensors, interleaved_rows, model_shapes
from mdi.checkpoint.weightfile import WeightFile, open_weight_file
from mdi.errors import CheckpointError, Code
from mdi.families.family import Family
from mdi.families.names import LANGUAGE, Piece
from mdi.families.registry import family_of, stated_family
from mdi.files import default_cache_dir
from mdi.kernels.layout import Halves, Matrix, empty, pack_halves
from mdi.kernels.lazy_rows import LazyRows, Rows, joined, spans
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING, HEAD

# Parts of a model that also sees or hears, beside its language part.
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|mm_projector|visual|embed_vision|embed_audio)\."
)
# Modules that predict several tokens (MTP) have this name, or numbers of blocks behind the last one.
_PREDICTING = re.compile(r"(model\.)?mtp\.")
# Tables that follow from the settings, which older versions of transformers wrote as well.
_NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))")


class HfFolder(NamedSource):
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
        self._names = self._family().names(self.config)
        self._prefix = self._names.prefix(self._files)
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
        kept = folder_record(cache or default_cache_dir(), self.path)
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
        return pack_halves(empty(form, n_out, n_in), read)

    @functools.cached_property
    def _interleaved(self) -> np.ndarray:
        return interleaved_rows(self.spec)

    def read_bytes(self, name: str) -> int:
        return self.specs[name].n_bytes if any(file.stays_mapped for file in self._opened) else 0

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
        elif (numbers := piece.row_numbers) is not None:
            places = numbers[at]
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

    def _family(self) -> Family:
        """As config.json says it, or else as the settings of its name in litgpt's table show."""
        return stated_family(read_hf_config(self.path / "config.json")) or family_of(self.config)

    def _pieces_of(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        tied = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(name)
        places = [
            pieces
            for one in filter(None, (name, tied))
            for pieces in self._names.places(one, shape, self.config, self._prefix)
        ]
        found = next((pieces for pieces in places if all(piece.tensor in self._files for piece in pieces)), None)
        if found is None and tied is not None:
            raise CheckpointError(f"{self.path} has neither an embedding nor a head")
        if found is None:
            theirs = " or ".join(", ".join(piece.tensor for piece in pieces) for pieces in places)
            raise CheckpointError(f"{self.path} lacks the tensor {name}" + (f" ({theirs})" if theirs else ""))
        return tuple(self._words_only(piece) if tied else self._checked(piece) for piece in found)

    def _words_only(self, piece: Piece) -> Piece:
        """Of a language part, whose rows for images follow those of the words."""
        found, n_rows = self._files[piece.tensor].specs[piece.tensor].shape, piece.shape[0]
        is_longer = self._prefix in LANGUAGE and len(found) == 2 and found[0] > n_rows
        return replace(piece, rows=(0, n_rows, 1)) if is_longer else piece

    def _checked(self, piece: Piece) -> Piece:
        """Raises CheckpointError: a tensor of which rows are taken is of another shape. All others are compared with ours."""
        shape = self._files[piece.tensor].specs[piece.tensor].shape
        if shape != piece.shape and (piece.rows or piece.of_heads or piece.is_interleaved or piece.expert is not None):
            raise CheckpointError(
                f"{self.path}: tensor {piece.tensor} has the shape {list(shape)}, expected {list(piece.shape)} by config.json"
            )
        return piece

    def _check_used(self) -> None:
        """Raises CheckpointError for a tensor that the model would be computed without."""
        used = {piece.tensor for pieces in self.tensor_pieces.values() for piece in pieces}
        predicting = set(self._of_predicting())
        for name in self._files:
            is_other = self._prefix in LANGUAGE and _OTHER_PARTS.match(name) is not None
            is_other = is_other or self._is_unused(name) or name in predicting
            if name not in used and not is_other and not _NOT_WEIGHTS.fullmatch(name):
                raise CheckpointError(
                    f"{self.path} holds the tensor {re.sub(r'[.][0-9]+[.]', '.<i>.', name)}, which a "
                    f"{self.config.name} does not have{self._hint}"
                )

    def _of_predicting(self) -> list[str]:
        n_layer, layers = self.spec.n_layer, f"{self._prefix}{self._names.blocks}"
        more = n_predicting(read_hf_config(self.path / "config.json"))
        numbers = block_numbers(self._files, f"{layers}.")
        numbered = {name for name, number in numbers.items() if n_layer <= number < n_layer + more}
        return [name for name in self._files if name in numbered or _PREDICTING.match(name) is not None]

    def _is_unused(self, name: str) -> bool:
        unused = self._names.unused
        return unused is not None and unused.fullmatch(name.removeprefix(self._prefix)) is not None

    def _piece_spec(self, piece: Piece) -> TensorSpec:
        spec = self._files[piece.tensor].specs[piece.tensor]
        if piece.expert is not None:
            spec = TensorSpec(spec.dtype, spec.shape[1:])
        if piece.is_transposed:
            spec = TensorSpec(spec.dtype, spec.shape[::-1])
        if piece.rows is not None:
            spec = TensorSpec(spec.dtype, (len(range(*piece.rows)), *spec.shape[1:]))
        if (numbers := piece.row_numbers) is not None:
            spec = TensorSpec(spec.dtype, (len(numbers), *spec.shape[1:]))
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


def folder_record(cache: Path, path: Path) -> Path:
    """The record of a folder's hashes in a cache folder; its name has a hash of where the folder is."""
    where = hashlib.sha256(json.dumps(str(path.resolve())).encode()).hexdigest()[:8]
    return cache / "folders" / f"{model_name(path)}-{where}.json"
