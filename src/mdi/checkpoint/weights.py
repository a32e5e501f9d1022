"""The interface of every source of weights: the parts of one model, tensor by tensor, with their full names.

Knows no files, no network and no devices.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, PartWeights, folded, input_importance, plain, plain_rows
from mdi.checkpoint.parts import PartInfo, part_of, serialize, sha256_of, spec_bytes
from mdi.checkpoint.records import HashRecord
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.shapes import part_shapes
from mdi.errors import CheckpointError
from mdi.kernels.format_maps import matrix_pieces
from mdi.kernels.layout import Matrix
from mdi.kernels.lazy_rows import Rows
from mdi.kernels.weight_formats import MADE, OWN_FORMAT, ROUNDED
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import ModelSpec
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.spec.model_id import Formats, ModelId

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class WeightSource(ABC):
    """Some or all parts of one model.

    Attributes:
        model: its name.
        config: its configuration; `config_hash` is the hash of that.
        dtype: number type of most weights, e.g. "bfloat16"; for packed ones, their type before.
        specs: type and shape of every tensor that can be had, as it is stored.
        packing: the formats of packed weights; None if they are plain, each tensor as torch has it.
        hashes: where hashes of parts are kept, in any form that they are brought into; None is nowhere.
        form: names the form that parts have here, among those hashes.
        native: the packed format that weights have already, whose numbers `packed` keeps as they are; None if they have none.
        own_formats: a map of those that a file mixes (kernels.format_maps), which `packed` keeps; None if it is plain.
        is_predicting: whether it has blocks that predict further tokens, and neither embedding nor head (`predicting`).
        folds_gains: whether gains of norms may go into the weights that read them (checkpoint.packing.folded).
    """

    model: str
    config: ModelConfig
    config_hash: str
    dtype: str
    specs: dict[str, TensorSpec]
    packing: Packing | None = None
    hashes: HashRecord | None = None
    form: str = "stored"
    native: str | None = None
    own_formats: str | None = None
    folds_gains: bool = True
    is_predicting: bool = False

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.config)

    @property
    def model_id(self) -> ModelId:
        formats = None if self.packing is None else Formats.one(self.packing.blocks)
        return ModelId(self.model, self.config, self.config_hash, self.dtype, formats, not self.folds_gains)

    @abstractmethod
    def array(self, name: str) -> np.ndarray:
        """One tensor as stored, mapped from the file where possible; see layout.TYPES for types that numpy lacks."""

    def begun(self, name: str) -> np.ndarray:
        """As `array`, but zeros at its end may be missing, for which it need not be copied."""
        return self.array(name)

    def rows(self, name: str) -> Rows:
        """As `array`, but so that the rows of a matrix may be read a few at a time; what reads them does not change them."""
        return self.array(name)

    @abstractmethod
    def part_names(self) -> list[str]:
        """The parts that can be had, in the order in which they are computed."""

    def known(self, part: str) -> PartInfo | None:
        """The part's hash, if it is known without reading the weights."""
        return None if self.hashes is None else self.hashes.find(f"{self.form}/{part}")

    def remember(self, info: PartInfo) -> None:
        """Take a hash that was computed while the part was read for another purpose."""
        if self.hashes is not None:
            self.hashes.put(f"{self.form}/{info.name}", info)

    @abstractmethod
    def release(self) -> None:
        """Unmap the files; they are mapped again when needed."""

    def predicting(self) -> WeightSource | None:
        """The blocks that predict further tokens (`mdi.checkpoint.predicting`); None if there are none. Those that cannot be
        read are left out with a warning.
        """
        return None

    def extent(self, name: str) -> tuple[Path, int, int] | None:
        """The file that has a tensor in the form of `array`, and its bytes [start, stop) there; None if there is none."""
        return None

    def read_bytes(self, name: str) -> int:
        """Bytes of the file that are read, and stay mapped until `release`, when a tensor is asked for."""
        return 0

    def info(self, part: str) -> PartInfo:
        """The part's hash; computed at the first call if the source does not know it yet.

        Raises:
            CheckpointError: the source does not have the part, or cannot be read.
        """
        info = self.known(part)
        if info is None:
            info = compute_info(self, part)
            self.remember(info)
        return info

    def part_specs(self, part: str) -> dict[str, TensorSpec]:
        """Type and shape of a part's tensors. Raises CheckpointError if the source does not have it."""
        if part not in self.part_names():
            raise CheckpointError(f"{self} does not hold {part}, only {', '.join(self.part_names())}")
        return {name: spec for name, spec in self.specs.items() if part_of(name) == part}

    def n_bytes(self, part: str) -> int:
        """Length of a part's canonical bytes; known without reading it."""
        return spec_bytes(self.part_specs(part), self.metadata(part))

    def pieces(self, part: str) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a part, in pieces of at most 4 MiB."""
        return serialize(self.part_specs(part), self.begun, self.metadata(part))

    def metadata(self, part: str) -> dict[str, str]:
        """Metadata of the part's file; empty if its weights are plain."""
        return {} if self.packing is None else self.packing.metadata(part)

    def weights(self, part: str, packing: Packing | None = None) -> PartWeights:
        """A part as the kernels read it: from its file if that has the right form, else packed in memory.

        Args:
            packing: the formats wanted; None takes those of the file, or for plain weights those that lose nothing.

        Raises:
            CheckpointError: the source does not have the part, or it does not fit the model's config.
        """
        if self.packing is None:
            wanted = packing or own_packing(self.dtype)
            return _joined(self.packed(name, wanted) for name in self.part_specs(part))
        stored = self._stored_weights(part)
        if packing is None or packing.of_part(part) == self.packing.of_part(part):
            return stored
        if part == part_of(EMBEDDING) and self.packing.is_tied:
            stored = {**stored, EMBEDDING: self._stored_weights(part_of(HEAD))[HEAD]}
        if packing.of_part(part) == self.packing.untied.of_part(part):
            return stored
        return repacked(stored, packing, self.spec)

    def _stored_weights(self, part: str) -> PartWeights:
        """Of a packed source, a part in its own form."""
        assert self.packing is not None
        read, specs, shapes = self.packing.read, self.part_specs(part), self.shapes(part)
        return _joined(read(name, shape, self.array, specs, str(self)) for name, shape in shapes.items())

    def packed(self, name: str, packing: Packing) -> PartWeights:
        """A tensor as it is in packed form, where the source has its tensors alone (`has_single_tensors`)."""
        if packing.leaves_out(name):
            return {}
        form = packing.format_of(name, self.specs[name].shape)
        carried = None if form is None else self.carried_over(name, form)
        if carried is not None:
            return {name: carried}
        searches = form is not None and {piece.word for piece in matrix_pieces(form)}.intersection(MADE)
        importance = input_importance(name, packing, self.spec, self.rows, self.specs) if searches else None
        return packing.pack(name, *self.for_packing(name, packing), importance)

    def carried_over(self, name: str, form: str) -> Matrix | None:
        """A weight with the very numbers of the file, if it is stored in just that format; else None."""
        return None

    def for_packing(self, name: str, packing: Packing) -> tuple[Rows, TensorSpec]:
        """A plain tensor in the form for packing, see checkpoint.packing.folded."""
        if not (self.folds_gains and packing.folds):
            return self.rows(name), self.specs[name]
        return folded(name, packing, self.spec, self.rows, self.specs)

    def same_as(self, name: str) -> str:
        """The name of the tensor that this one has its numbers from, as a head that is the embedding; else its own."""
        return name

    @property
    def tied_type(self) -> str | None:
        """Number type of an embedding that is the head as well; None if they are two weights."""
        if self.packing is not None:
            return self.dtype if self.packing.is_tied else None
        has_ends = HEAD in self.specs and EMBEDDING in self.specs
        return self.specs[EMBEDDING].name if has_ends and self.same_as(HEAD) == EMBEDDING else None

    @property
    def has_single_tensors(self) -> bool:
        """Whether `packed` gives each tensor alone, so that a part need not be in memory as a whole."""
        return self.packing is None

    def skipped_inputs(self, name: str) -> int:
        """Of a packed weight, see kernels.layout.Matrix."""
        return 0

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that the model has in a part."""
        return dict(part_shapes(self.config, str(self), part))

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part for torch, on the CPU: plain ones in the memory of `array`, packed ones as float32.

        Raises:
            CheckpointError: as `weights`.
        """
        from mdi.checkpoint.torch_tensors import as_tensor

        if self.packing is None:
            return {name: self.tensor(name) for name in self.part_specs(part)}
        arrays = plain(self.weights(part, self.packing.untied))
        return {name: as_tensor(array, TensorSpec("F32", array.shape)) for name, array in arrays.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One plain tensor for torch."""
        from mdi.checkpoint.torch_tensors import as_tensor

        return as_tensor(self.array(name), self.specs[name])

    def close(self) -> None:
        self.release()


class DerivedSource(WeightSource):
    """Another source's weights in another form.

    Args:
        form: names it among the hashes of parts.
        hashes: where to keep them; None: where the other source keeps its own, else in memory.
    """

    def __init__(self, source: WeightSource, form: str, hashes: HashRecord | None = None) -> None:
        self._source, self.form = source, form
        self.hashes = hashes or source.hashes or HashRecord()
        self.model, self.config = source.model, source.config
        self.config_hash, self.dtype = source.config_hash, source.dtype

    def part_names(self) -> list[str]:
        return self._source.part_names()

    def release(self) -> None:
        self._source.release()


def own_packing(dtype: str) -> Packing:
    """The formats that lose nothing of weights of this type."""
    form = OWN_FORMAT.get(dtype, "float32")
    return Packing(form, form)


def warn_of_rounding(model: str, native: str | None, form: str | None) -> None:
    """Say that weights which were rounded to one format before, see `WeightSource.native`, are rounded again to another."""
    if native is not None and form in ROUNDED and form != native:
        logger.warning(
            "warning: the weights of %s are in %s: --quantize %s rounds them a second time (--quantize %s keeps their numbers)",
            model, native, form, native,
        )  # fmt: skip


def compute_info(source: WeightSource, part: str) -> PartInfo:
    """Read a part and hash it."""
    sha256 = sha256_of(source.part_specs(part), source.begun, source.metadata(part))
    source.release()
    return PartInfo(part, sha256, source.n_bytes(part))


def _joined(weights: Iterable[PartWeights]) -> PartWeights:
    return {name: weight for some in weights for name, weight in some.items()}


def repacked(stored: PartWeights, packing: Packing, model: ModelSpec) -> PartWeights:
    """Packed weights in another form."""

    names = [name for name in stored if name != EMBEDDING_SCALE]
    specs = {name: TensorSpec("F32", _shape(stored[name])) for name in names}
    rows = partial(plain_rows, stored)
    return _joined(packing.pack(name, *folded(name, packing, model, rows, specs)) for name in names)


def _shape(weight: Matrix | np.ndarray) -> tuple[int, ...]:
    return (weight.n_out, weight.n_in) if isinstance(weight, Matrix) else weight.shape
