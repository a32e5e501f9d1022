"""A node's share of a model's weights, cut out of a source with whole weights.

Each shard of a part has the part's name, canonical bytes of its own, and so a hash of its own: it is stored, sent and kept like
a whole part. Its file says in its metadata what it is a shard of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from mdi.checkpoint.chunks import ChunkFile, PartFile
from mdi.checkpoint.derived import packed_form
from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, PartWeights, stored_bytes
from mdi.checkpoint.parts import Part, part_of
from mdi.checkpoint.records import HashRecord, weights_stamp
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.shapes import part_shapes
from mdi.checkpoint.weights import DerivedSource, WeightSource
from mdi.kernels.format_maps import map_of, matrix_pieces, rows_form
from mdi.kernels.layout import Matrix, aligned_bytes, cut, skipped
from mdi.kernels.lazy_rows import LazyRows, joined, spans
from mdi.kernels.weight_formats import format_within, layout_of
from mdi.model.tensors import HEAD
from mdi.tensor.shares import Piece, Share, piece_of

SHARD_KEY = "shard"


def shard_name(share: Share) -> str:
    """The name that a shard's file says of itself."""
    heads, columns = (bounds[share.rank : share.rank + 2] for bounds in (share.shares.heads, share.shares.columns))
    vocabulary = share.vocabulary
    first = ", with biases" if share.adds_attention_bias or share.rank == 0 else ""
    rows = "" if vocabulary is None else f", tokens {vocabulary[0]} to {vocabulary[1]}"
    return f"heads {heads[0]} to {heads[1]}, columns {columns[0]} to {columns[1]} of {share.shares.columns[-1]}{rows}{first}"


def shard_shapes(share: Share, packing: Packing, part: str) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a shard, as it is packed."""
    found = {}
    for name, shape in part_shapes(share.config, "this model", part).items():
        if (piece := piece_of(name, share)) is not None:
            found[name] = piece.shape(shape, packing.format_of(name, shape))
    return found


class ShardSource(DerivedSource):
    """The share of a node in another source's weights, packed.

    Args:
        source: has the parts whole, packed or plain.
        packing: the formats of the shards; where `source` is packed, its own.
    """

    packing: Packing

    def __init__(self, source: WeightSource, share: Share, packing: Packing) -> None:
        hashes = None if source.hashes else _hashes_beside(source)
        super().__init__(source, f"{shard_name(share)}; {packed_form(source, packing)}", hashes)
        self.share, self._packing_of_whole = share, packing
        self.packing = packing = _packing_of_share(packing, share, source)
        self._table: tuple[str, PartWeights] | None = None
        self.specs = {}
        self._owner: dict[str, str] = {}
        plain_types = {name: spec.dtype for name, spec in source.specs.items()}
        self._whole: dict[str, tuple[int, ...]] = {}
        for part in source.part_names():
            self._whole |= part_shapes(share.config, str(source), part)
            for name, shape in shard_shapes(share, packing, part).items():
                stored = packing.stored(name, TensorSpec(plain_types.get(name, "F32"), shape))
                self.specs.update(stored)
                self._owner.update(dict.fromkeys(stored, name))

    def __str__(self) -> str:
        return f"{shard_name(self.share)} of {self._source}"

    def metadata(self, part: str) -> dict[str, str]:
        return {**self.packing.metadata(part), SHARD_KEY: shard_name(self.share)}

    def array(self, name: str) -> np.ndarray:
        owner = self._owner[name]
        if self._table is None or self._table[0] != owner:
            self._table = owner, self.shard_of(owner)  # an embedding and its scales are asked for one after the other
        found = stored_bytes(self._table[1][name], self.specs[name])
        if name == owner and EMBEDDING_SCALE not in self._table[1]:
            self._table = None
        return found

    def shard_of(self, name: str) -> PartWeights:
        """The share of one tensor."""
        piece = piece_of(name, self.share)
        assert piece is not None
        shape = self._whole[name]
        form = self.packing.format_of(name, shape)
        if self._source.packing is None and form is not None and not piece.is_whole and form != self._source.native:
            return {name: self._packed_piece(name, shape, form, piece)}
        weights = self._whole_tensor(name, shape)
        found = weights[name]
        if piece.is_whole:
            return weights
        if isinstance(found, Matrix):
            return {name: cut(found, piece.rows, piece.columns)}
        assert piece.rows is not None
        return {name: np.concatenate([found[a:b] for a, b in piece.rows])}

    def _whole_tensor(self, name: str, shape: tuple[int, ...]) -> PartWeights:
        source = self._source
        if source.packing is None:
            return source.packed(name, self._packing_of_whole)
        if source.packing.leaves_out(name):
            return {name: source.packing.read(HEAD, shape, source.array, source.specs, str(source))[HEAD]}
        return source.packing.read(name, shape, source.array, source.specs, str(source))

    def _packed_piece(self, name: str, shape: tuple[int, ...], form: str, piece: Piece) -> Matrix:
        """Packs only the needed part of a plain tensor, with the result of packing all of it first."""
        source = self._source
        whole, spec = source.for_packing(name, self.packing)
        rows = piece.rows or ((0, shape[0]),)
        first, last = piece.columns or (0, shape[1])
        group = max(layout_of(piece.word).group for piece in matrix_pieces(form)) or 1
        start, end = first // group * group, min(-(-last // group) * group, shape[1]) if last > first else last
        counts = [b - a for a, b in rows]
        n_out, n_in = sum(counts), end - start
        if not n_out or not n_in:
            return Matrix(form, n_out, n_in, aligned_bytes(0))

        def read(at: slice) -> np.ndarray:
            found = ((rows[i][0], own) for i, own in spans(counts, at))
            return joined([whole[a + own.start : a + own.stop][:, start:end] for a, own in found])

        numbers = LazyRows((n_out, n_in), read)
        packed = self.packing.pack(name, numbers, TensorSpec(spec.dtype, numbers.shape))[name]
        assert isinstance(packed, Matrix)
        return cut(packed, None, (first - start, last - start)) if piece.columns else packed

    @property
    def has_single_tensors(self) -> bool:
        return True

    def packed(self, name: str, packing: Packing) -> PartWeights:
        """The share of a tensor; a node's own choice of another format is ignored."""
        return self.shard_of(name)

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        return shard_shapes(self.share, self.packing, part)

    def weights(self, part: str, packing: Packing | None = None) -> PartWeights:
        """The shards of a part, if they are packed already. A node's own choice of another format is ignored."""
        return {key: weight for name in self.shapes(part) for key, weight in self.shard_of(name).items()}


def _packing_of_share(packing: Packing, share: Share, source: WeightSource) -> Packing:
    """The formats of the pieces that a node has, where a weight has rows in several."""

    def of(form: str, parts: Iterable[str]) -> str:
        if "+" not in form:
            return form
        found = {}
        for part in parts:
            for name, shape in part_shapes(share.config, str(source), part).items():
                own, piece = packing.format_of(name, shape), piece_of(name, share)
                if own is not None and piece is not None:
                    found[name] = own if piece.rows is None else rows_form(own, shape[0], piece.rows)
        return map_of(found)

    names = source.part_names()
    blocks = [name for name in names if name.startswith("block.")]
    return replace(packing, blocks=of(packing.blocks, blocks), head=of(packing.head, set(names).difference(blocks)))


def _hashes_beside(source: WeightSource) -> HashRecord | None:
    """Where hashes of a chunk's shards are kept, so that they are computed once."""
    if not isinstance(source, ChunkFile):
        return None
    beside = source.path.with_name(f"{source.path.stem}.shards.json")
    return HashRecord(beside, weights_stamp([source.path], source.config_hash))


class ShardFile(PartFile):
    """A shard that was sent, in its file."""

    def __init__(self, path: Path, info: Part, share: Share, config_hash: str) -> None:
        super().__init__(path, info, share.config, config_hash)
        self.share = share

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        assert self.packing is not None
        return shard_shapes(self.share, self.packing, part)

    def weights(self, part: str, packing: Packing | None = None) -> PartWeights:
        """As PartFile's, with what the kernels must know of weights that were cut within a group."""
        found = super().weights(part, self.packing)
        return {name: self._with_skip(name, weight) for name, weight in found.items()}

    def _with_skip(self, name: str, weight: Matrix | np.ndarray) -> Matrix | np.ndarray:
        return replace(weight, skip=self.skipped_inputs(name)) if isinstance(weight, Matrix) else weight

    def skipped_inputs(self, name: str) -> int:
        piece = piece_of(name, self.share)
        if piece is None or piece.columns is None or self.packing is None:
            return 0
        return skipped(format_within(self.packing.of_part(part_of(name)), name), *piece.columns)
