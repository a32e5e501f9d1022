"""Sources that change another source's numbers, tensor by tensor: cast to another type, or packed. They keep nothing in
memory."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial

import numpy as np

from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, PartWeights, flat_numbers, with_zeros
from mdi.checkpoint.safetensors_layout import CODES, TYPES, TensorSpec
from mdi.checkpoint.weights import DerivedSource, WeightSource
from mdi.kernels import LAYOUT_VERSION
from mdi.kernels.block_search import SEARCH_VERSION
from mdi.kernels.format_maps import shown
from mdi.kernels.layout import MOST, bf16_from_float32, check_range, float32_from_bf16, largest_of
from mdi.kernels.lazy_rows import Rows, changed
from mdi.kernels.weight_formats import is_made


class CastSource(DerivedSource):
    """Another source with all floating-point weights in one type; casting happens tensor by tensor.

    Args:
        source: where the weights come from.
        dtype: name of the type, e.g. "bfloat16".
        clips: whether numbers that are too large for it are clipped instead of refused.
    """

    def __init__(self, source: WeightSource, dtype: str, clips: bool = False) -> None:
        super().__init__(source, form=dtype)
        self.dtype, self._clips = dtype, clips
        self.specs = {
            name: replace(spec, dtype=CODES[dtype]) if spec.is_floating else spec for name, spec in source.specs.items()
        }

    def __str__(self) -> str:
        return f"{self._source} as {self.dtype}"

    def array(self, name: str) -> np.ndarray:
        """Raises CheckpointError: a number is not finite, or too large for the type."""
        return self._cast(name, self._source.array(name))

    def rows(self, name: str) -> Rows:
        return changed(self._source.rows(name), partial(self._cast, name))

    def same_as(self, name: str) -> str:
        return self._source.same_as(name)

    def predicting(self) -> WeightSource | None:
        found = self._source.predicting()
        return None if found is None else CastSource(found, self.dtype, self._clips)

    def _cast(self, name: str, stored: np.ndarray) -> np.ndarray:
        spec, code = self._source.specs[name], self.specs[name].dtype
        if spec.dtype == code:
            return stored
        return cast(*fitted(stored, spec, self.dtype, name, self._clips), code)

    def read_bytes(self, name: str) -> int:
        return self._source.read_bytes(name)


def fitted(
    array: np.ndarray, spec: TensorSpec, dtype: str, name: str, clips: bool
) -> tuple[np.ndarray, TensorSpec]:  # fmt: skip
    """A tensor, clipped where it is too large for a type.

    Args:
        dtype: name of the type, e.g. "bfloat16".
        clips: whether that is allowed.

    Raises:
        CheckpointError: a number is not finite, or too large and must not be clipped.
    """
    if not spec.is_floating or dtype not in MOST or spec.dtype.startswith("F8"):
        return array, spec
    if not check_range(dtype, largest_of(array), name, clips):
        return array, spec
    numbers = float32_from_bf16(array) if spec.dtype == "BF16" else array
    wide = np.clip(numbers.astype(np.float32), -np.float32(MOST[dtype]), np.float32(MOST[dtype]))
    return wide, replace(spec, dtype="F32")


def cast(array: np.ndarray, spec: TensorSpec, code: str) -> np.ndarray:
    """Numbers in another type, rounded to the nearest; too large ones become infinite.

    Args:
        spec: of `array`.
        code: of the type, see layout.TYPES.
    """
    if spec.dtype == code:
        return array
    if spec.dtype == "BF16":
        array = float32_from_bf16(array)
    if code == "BF16":
        return bf16_from_float32(array.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):
        return array.astype(TYPES[code].numpy)


class PackedSource(DerivedSource):
    """Another source in packed form.

    Args:
        source: where the plain weights come from.
        packing: the formats.
    """

    packing: Packing

    @property
    def source(self) -> WeightSource:
        return self._source

    def __init__(self, source: WeightSource, packing: Packing) -> None:
        super().__init__(source, form=packed_form(source, packing))
        self.packing = packing
        self._scale: np.ndarray | None = None
        self._owner: dict[str, str] = {}  # name of a stored tensor -> name of the plain one that it comes from
        self.specs = {}
        for name, spec in source.specs.items():
            stored = packing.stored(name, spec)
            self.specs.update(stored)
            self._owner.update(dict.fromkeys(stored, name))

    def __str__(self) -> str:
        return f"{self._source} in {shown(self.packing.blocks)}"

    def array(self, name: str) -> np.ndarray:
        return with_zeros(self.begun(name), self.specs[name])

    def _stored_weights(self, part: str) -> PartWeights:
        found: PartWeights = {}
        for name in dict.fromkeys(self._owner[key] for key in self.part_specs(part)):
            found |= self.tensor_weights(name)
        return found

    def tensor_weights(self, name: str) -> PartWeights:
        """One tensor of the model, packed."""
        return self._source.packed(name, self.packing)

    def begun(self, name: str) -> np.ndarray:
        if name == EMBEDDING_SCALE and self._scale is not None:
            return self._scale
        weights = self.tensor_weights(self._owner[name])
        if EMBEDDING_SCALE in weights:
            # A file holds wide types first, so that scales are asked for long before or after their embedding.
            scale = weights[EMBEDDING_SCALE]
            assert isinstance(scale, np.ndarray)
            self._scale = scale
        return flat_numbers(weights[name])

    def read_bytes(self, name: str) -> int:
        return self._source.read_bytes(self._owner[name])


def own_bits(source: WeightSource) -> PackedSource | None:
    """A file that mixes formats, in these formats; None of any other source.

    A block of numbers in the kernels' order has all bits that it has in the file, and no others. So parts have the same hash if
    the bytes of their tensors are the same, whatever else differs in two files.
    """
    form = source.own_formats
    return None if form is None else PackedSource(source, Packing(form, form).tied(source.tied_type))


def packed_form(source: WeightSource, packing: Packing) -> str:
    """Name of the packed form of a source's parts, under which their hashes are kept."""
    form = f"{source.dtype}-{packing.blocks}-{packing.head}-{LAYOUT_VERSION}"
    if is_made(packing.blocks) or is_made(packing.head):
        form += f"-{SEARCH_VERSION}"
    if not packing.folds:
        form += "-apart"
    if packing.means is None:
        return form
    digest = hashlib.sha256()
    for name, means in sorted(packing.means.items()):
        digest.update(name.encode() + means.tobytes())
    return f"{form}-{digest.hexdigest()[:16]}"
