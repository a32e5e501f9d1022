"""A GGUF file as a source of weights. Unpacks a tensor when it is needed, never the whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mdi.checkpoint.cast import cast
from mdi.checkpoint.ggufblocks import CARRIED_OVER, carry_over
from mdi.checkpoint.ggufconfig import gguf_config
from mdi.checkpoint.ggufheader import GgufTensor, read_gguf
from mdi.checkpoint.ggufnames import GgufPiece, Recipe, recipe
from mdi.checkpoint.gguftensors import PLAIN, read_rows, read_tensor, slice_tensor, spec_of
from mdi.checkpoint.hashes import HashCache, PartHashes
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.packing import Packing, PartWeights
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.safetensors_layout import TensorSpec, main_dtype
from mdi.checkpoint.shapes import check_tensors, model_shapes
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError


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
        self.config_dict = gguf_config(header)
        self.config_hash = config_hash(self.config_dict)
        self.model = self.config_dict["name"]
        arch = header.fields["general.architecture"]
        self._recipes = {
            name: recipe(name, self.config_dict, arch, header.tensors)
            for name in model_shapes(self.config_dict, str(path))
        }
        self.specs = {name: self._spec(made) for name, made in self._recipes.items()}
        check_tensors(self.config_dict, self.specs, self.part_names(), str(path))
        self.dtype = main_dtype(self.specs.values())
        # Weights that were rounded once keep the numbers that they were rounded to.
        self.folds_gains = all(tensor.type_name in PLAIN for tensor in self._tensors.values())
        self.hashes = PartHashes() if hashes is None else HashCache(hashes, path, self.config_hash)

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        made, code = self._recipes[name], self.specs[name].dtype
        pieces = []
        for piece in made.pieces:
            part = self._part(piece)
            pieces.append(self._ordered(piece, cast(read_tensor(part, piece.tensor), spec_of(part), code)))
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return whole - np.float32(made.minus) if made.minus else whole

    def packed(self, name: str, packing: Packing) -> PartWeights:
        """As of any source; but blocks that are the same numbers in the kernels' format are not rounded again."""
        spec = self.specs[name]
        form = packing.format_of(name, spec.shape)
        blocks = self._stored_blocks(name) if form is not None else None
        if form is None or blocks is None or CARRIED_OVER.get(blocks[0]) != form:
            return super().packed(name, packing)
        return {name: carry_over(blocks[1], spec.shape[1], f"{self.path}: {name}")}

    def _stored_blocks(self, name: str) -> tuple[str, np.ndarray] | None:
        """The format of a weight, and its rows as uint8 (out, bytes of a row); None if it is put together of several."""
        made = self._recipes[name]
        parts = [self._part(piece) for piece in made.pieces]
        kinds = {part.type_name for part in parts}
        if len(kinds) > 1 or kinds <= set(PLAIN) or made.minus:
            return None
        rows = [self._ordered(piece, read_rows(part)) for piece, part in zip(made.pieces, parts, strict=True)]
        return parts[0].type_name, np.concatenate(rows)

    def part_names(self) -> list[str]:
        return stage_parts(0, self.config_dict["n_layer"], starter=True)

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
            if len(found.shape) != 3 or piece.expert >= found.shape[0]:
                raise CheckpointError(f"{self.path}: {piece.tensor} has the shape {list(found.shape)}")
            found = slice_tensor(found, piece.expert, piece.expert + 1, found.shape[1:])
        if piece.rows is not None:
            start, stop = piece.rows
            if len(found.shape) < 2 or stop > found.shape[0]:
                raise CheckpointError(f"{self.path}: {piece.tensor} has {found.shape[0]} rows, expected {stop}")
            found = slice_tensor(found, start, stop, (stop - start, *found.shape[1:]))
        return found

    @staticmethod
    def _ordered(piece: GgufPiece, rows: np.ndarray) -> np.ndarray:
        """The rows in litgpt's order: it rotates element i with i + head_size / 2, llama.cpp's Llama 2 i with 2 i + 1."""
        if not piece.paired_heads:
            return rows
        order = np.arange(rows.shape[0]).reshape(piece.paired_heads, -1, 2).transpose(0, 2, 1).reshape(-1)
        return rows[order]
