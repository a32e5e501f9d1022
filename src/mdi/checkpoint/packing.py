"""The packed form of each tensor of a model, and how tensors are packed and unpacked.

Weights of linear layers have the layout of the kernels (kernels.layout). Norms, biases and routers of experts are float32. The
embedding keeps its type of the checkpoint, or has 8 bits and a scale per token; one that is the head as well is left out where
the head has its numbers (`Packing.tied`), and the gain of the norm before is then not multiplied into it. In a file each
tensor is a list of bytes or numbers, padded with zeros so that the next one begins on a cache line, and that large ones fill
pages.

Before weights are rounded to 8 or 4 bits, the gains of the norm before them are multiplied into them (`folded`). A norm
multiplies each channel by its gain, and the linear layers behind it multiply that by a column of their weights: the gain may
as well stand in the column. In exact numbers nothing changes. What does change is rounding: channels that a gain makes many
times larger than the rest (as in real language models) are as large as the others when they are rounded, and a weight's
rounding error counts by what it is multiplied with. The norm's own gain becomes one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mdi.checkpoint.parts import part_of
from mdi.checkpoint.safetensors_layout import PAGE_BYTES, TYPES, TensorSpec
from mdi.errors import CheckpointError
from mdi.kernels import LAYOUT_VERSION
from mdi.kernels.format_maps import format_map
from mdi.kernels.layout import (
    ALIGN_BYTES,
    Matrix,
    check_range,
    floats,
    largest_of,
    matrix_bytes,
    pack,
    unpack,
    unpacked_rows,
)
from mdi.kernels.lazy_rows import LazyRows, Rows, changed
from mdi.kernels.weight_formats import (
    PACKED_ROWS,
    is_packed_form,
    is_tied,
    packed_form_of,
    table_is_int8,
    table_of,
    tied_form,
    untied_form,
)
from mdi.model.spec import Experts, ModelSpec
from mdi.model.tensors import EMBEDDING, FINAL_NORM, HEAD

EMBEDDING_SCALE = EMBEDDING + "_scale"  # float32 (vocabulary)
BIG_BYTES = 1 << 16  # from here on a tensor fills whole pages

_TABLE_TYPES = ("F32", "BF16", "F16")
_FORMAT_KEY, _VERSION_KEY = "format", "layout_version"
_TINY = 1e-12  # the smallest scale

# A packed weight; else float32 in its own shape; of the embedding (vocabulary, n_embd) float32, float16, uint16 (the bits of
# bfloat16) or int8, the last with EMBEDDING_SCALE beside it.
PartWeights = dict[str, Matrix | np.ndarray]


@dataclass(frozen=True)
class Packing:
    """The formats of a packed model: of its blocks, and of head and embedding; each a word or a map (kernels.format_maps).

    Attributes:
        clips: whether weights that are too large for a format are clipped instead of refused.
        means: of each linear layer, the mean squares of its inputs over a text, float32 (n_in); None: there is no text.
        folds: whether gains of norms may go into the weights that read them (`folded`), on every node of a ring.
    """

    blocks: str
    head: str
    clips: bool = field(default=False, compare=False)
    means: Mapping[str, np.ndarray] | None = field(default=None, compare=False, repr=False)
    folds: bool = True

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head's weight, which alone is packed."""
        return is_tied(self.head)

    def tied(self, dtype: str | None) -> Packing:
        """Of a model whose embedding is its head: that is packed once, where both have the same format.

        Args:
            dtype: number type of such an embedding; None: it is another weight.
        """
        return self if dtype is None else replace(self, head=tied_form(self.head, dtype))

    @property
    def untied(self) -> Packing:
        """The same numbers, with the embedding in its part: for nodes that do not have all of the head."""
        return replace(self, head=untied_form(self.head))

    def of_part(self, part: str) -> str:
        return format_map(self.blocks if part.startswith("block.") else self.head).of_part(part)

    def metadata(self, part: str) -> dict[str, str]:
        """Metadata of this part's file, so that its hash tells formats and versions apart."""
        return {_FORMAT_KEY: self.of_part(part), _VERSION_KEY: str(LAYOUT_VERSION)}

    def format_of(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The format that a tensor is packed in; None for the embedding and what stays float32."""
        return packed_form_of(self.of_part(part_of(name)), name, shape)

    def stored(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """The stored tensors of a tensor of the model, by their names in the file; none of what another one stands for.

        Args:
            spec: of the plain tensor.
        """
        if self.leaves_out(name):
            return {}
        if form := self.format_of(name, spec.shape):
            n_out, n_in = spec.shape
            return {name: _padded("U8", matrix_bytes(form, n_out, n_in))}
        n_values = math.prod(spec.shape)
        if name != EMBEDDING:
            return {name: _padded("F32", n_values)}
        if self._table_is_int8:
            return {name: _padded("I8", n_values), EMBEDDING_SCALE: _padded("F32", spec.shape[0])}
        return {name: _padded(spec.dtype if spec.dtype in _TABLE_TYPES else "F32", n_values)}

    def leaves_out(self, name: str) -> bool:
        """Whether this is an embedding that is the head's weight."""
        return name == EMBEDDING and self.is_tied

    @property
    def _table_is_int8(self) -> bool:
        return table_is_int8(self.head)

    def pack(self, name: str, rows: Rows, spec: TensorSpec, importance: np.ndarray | None = None) -> PartWeights:
        """A plain tensor in the form that it takes here.

        Args:
            rows: as they are stored, see layout.TYPES; of what is packed, a few are asked for at a time, else all.
            importance: of its inputs, see `input_importance`.

        Raises:
            CheckpointError: a number is not finite, or too large for the format. An embedding that stays as it is is not looked
                at, because it is not read here.
        """
        if self.leaves_out(name):
            return {}
        values = _numbers(rows, spec)
        if form := self.format_of(name, spec.shape):
            return {name: pack(form, values, name, self.clips, importance)}
        if name == EMBEDDING and self._table_is_int8:
            table, scale = int8_rows(values, name)
            return {name: table, EMBEDDING_SCALE: scale}
        whole = values[:]
        if name == EMBEDDING:
            return {name: whole}
        check_range("float32", largest_of(whole), name, self.clips)
        return {name: floats(whole)}

    def check(self, name: str, shape: tuple[int, ...], specs: Mapping[str, TensorSpec], where: str) -> set[str]:
        """Compare a file's entries for a tensor of the model with the expected ones, and return their names.

        Raises:
            CheckpointError: something is missing, or of another type or length.
        """
        found_type = specs[name].dtype if name in specs else "F32"
        wanted = self.stored(name, TensorSpec(found_type, shape))
        for key, spec in wanted.items():
            if specs.get(key) != spec:
                found = f"{specs[key].name}, {list(specs[key].shape)}" if key in specs else "nothing"
                raise CheckpointError(
                    f"{where}: tensor {key}, of shape {list(shape)} by the model's config: expected {spec.name}, "
                    f"{list(spec.shape)}, found {found}"
                )
        return set(wanted)

    def read(
        self, name: str, shape: tuple[int, ...], array: Callable[[str], np.ndarray], specs: Mapping[str, TensorSpec], where: str
    ) -> PartWeights:  # fmt: skip
        """A tensor of the model from a file that `array` reads, without copying it.

        Raises:
            CheckpointError: as `check`, which comes first.
        """
        keys = self.check(name, shape, specs, where)
        if not keys:
            return {}
        if form := self.format_of(name, shape):
            n_out, n_in = shape
            return {name: Matrix(form, n_out, n_in, array(name)[: matrix_bytes(form, n_out, n_in)])}
        weights: PartWeights = {name: array(name)[: math.prod(shape)].reshape(shape)}
        if EMBEDDING_SCALE in keys:
            weights[EMBEDDING_SCALE] = array(EMBEDDING_SCALE)[: shape[0]]
        return weights


def packing_of(metadata: Mapping[str, str], where: str) -> Packing | None:
    """The formats of a file with one part, by its metadata; None for plain weights, which have none.

    Raises:
        CheckpointError: it is of another version, or of no format that there is.
    """
    if not metadata:
        return None
    form, version = metadata.get(_FORMAT_KEY), metadata.get(_VERSION_KEY)
    if version != str(LAYOUT_VERSION) or form is None or not is_packed_form(form):
        raise CheckpointError(
            f"{where} holds weights in {form!r} of layout version {version!r}, this program reads {LAYOUT_VERSION}: remove it, "
            "and install the same version of MDI-LLM on all nodes"
        )
    return Packing(form, form)


def stored_bytes(weight: Matrix | np.ndarray, spec: TensorSpec) -> np.ndarray:
    """A weight as stored in a file: of its spec's shape and type, with zeros behind the numbers."""
    return with_zeros(flat_numbers(weight), spec)


def flat_numbers(weight: Matrix | np.ndarray) -> np.ndarray:
    """The same without the zeros."""
    return (weight.data if isinstance(weight, Matrix) else weight).reshape(-1)


def with_zeros(values: np.ndarray, spec: TensorSpec) -> np.ndarray:
    if values.size == spec.shape[0]:
        return values
    padded = np.zeros(spec.shape, dtype=values.dtype)
    padded[: values.size] = values
    return padded


def arrays_of(weights: PartWeights) -> list[np.ndarray]:
    """The memory of the weights."""
    return [weight.data if isinstance(weight, Matrix) else weight for weight in weights.values()]


def plain(weights: PartWeights) -> dict[str, np.ndarray]:
    """The weights as float32 tensors in their own shapes; for torch."""
    found = {}
    for name, weight in weights.items():
        if isinstance(weight, Matrix):
            found[name] = unpack(weight)
        elif name != EMBEDDING_SCALE:
            found[name] = weight.astype(np.float32) if weight.dtype == np.int8 else floats(weight)
    if EMBEDDING_SCALE in weights:
        scale = weights[EMBEDDING_SCALE]
        assert isinstance(scale, np.ndarray)
        found[EMBEDDING] *= scale[:, None]
    return found


def plain_rows(weights: PartWeights, name: str) -> Rows:
    """The same of one tensor, a few rows at a time; for packing it again."""
    weight = weights[name]
    if isinstance(weight, Matrix):
        return unpacked_rows(weight)
    if name != EMBEDDING or EMBEDDING_SCALE not in weights:
        return changed(weight, floats)
    table, scale = weight, weights[EMBEDDING_SCALE]
    assert isinstance(scale, np.ndarray)
    return LazyRows(table.shape, lambda at: table[at].astype(np.float32) * scale[at, None])


def int8_rows(table: Rows, name: str = EMBEDDING) -> tuple[np.ndarray, np.ndarray]:
    """(n, width), as `kernels.layout.pack` takes it -> int8 (n, width) within +-127, and a scale per row, float32 (n)

    Raises:
        CheckpointError: a number is not finite.
    """
    q, scale = np.empty(table.shape, dtype=np.int8), np.empty(table.shape[0], dtype=np.float32)
    for first in range(0, table.shape[0], PACKED_ROWS):
        rows = floats(table[first : first + PACKED_ROWS])
        largest = np.maximum(np.abs(rows).max(axis=1), _TINY * 127) / 127
        check_range("float32", largest_of(largest), name, clips=False)
        scale[first : first + len(rows)] = largest
        q[first : first + len(rows)] = np.clip(np.rint(rows / largest[:, None]), -127, 127)
    return q, scale


def _padded(code: str, n_values: int) -> TensorSpec:
    itemsize = TYPES[code].numpy.itemsize
    n_bytes = n_values * itemsize
    to = PAGE_BYTES if n_bytes >= BIG_BYTES else ALIGN_BYTES
    return TensorSpec(code, (-(-n_bytes // to) * to // itemsize,))


def _numbers(rows: Rows, spec: TensorSpec) -> Rows:
    """float32, float16 or the bits of bfloat16: what `kernels.layout.pack` takes."""
    if spec.dtype in _TABLE_TYPES:
        return rows
    if spec.dtype.startswith("F8"):
        raise CheckpointError(f"weights of type {spec.name} cannot be packed: convert the model with --dtype bfloat16")
    return changed(rows, lambda some: some.astype(np.float32))


FOLDED_FORMATS = (
    "int8",
    "int4",
)  # only in formats of a few bits; in others, weights stay as in the checkpoint

_BLOCK = re.compile(r"(transformer\.h\.(\d+)\.)(.*)\.weight")
_MIXERS = re.compile(r"attn\.(qkv|out_gate|q_proj|q_a_proj|kv_a_proj_with_mqa)|delta\.(qkv|out_gate|gates)")
_MLP = re.compile(r"mlp\.(gate|shared_experts\.gate|(experts\.\d+\.|shared_experts\.)?fc(_1|_2)?)")


def folded(
    name: str, packing: Packing, model: ModelSpec, rows: Callable[[str], Rows], specs: Mapping[str, TensorSpec]
) -> tuple[Rows, TensorSpec]:  # fmt: skip
    """A plain tensor in the form for packing.

    A head stays as it is where the embedding is packed as matrices are: both may be the same weight.

    Args:
        rows: gives those of tensors of the same part; specs are theirs.
    """
    is_end = name in (HEAD, FINAL_NORM) and table_of(packing.head) is not None
    if not is_end and packing.of_part(part_of(name)) in FOLDED_FORMATS:
        spec = TensorSpec("F32", specs[name].shape)
        if _is_folded(name, specs):
            return np.full(spec.shape, 1 - gain_offset(name, model), dtype=np.float32), spec
        norm = norm_before(name, model)
        if norm is not None and _is_folded(norm, specs):
            gain = _floats(rows(norm)[:], specs[norm]) + gain_offset(norm, model)
            check_range("float32", largest_of(gain), norm, packing.clips)
            dtype = specs[name]
            return changed(rows(name), lambda some: np.multiply(_floats(some, dtype), gain)), spec
    return rows(name), specs[name]


def input_importance(
    name: str, packing: Packing, model: ModelSpec, rows: Callable[[str], Rows], specs: Mapping[str, TensorSpec]
) -> np.ndarray | None:  # fmt: skip
    """How much the error of each input of a linear layer counts for a format that searches (kernels.block_search).

    That is the mean square of what the input is multiplied with: of a text (`Packing.means`), or else in proportion to the
    square of its gain in the norm before, which makes all channels equally large.

    Args:
        rows: gives those of tensors of the same part; specs are theirs.
    """
    if packing.means is not None and name in packing.means:
        return packing.means[name]
    norm = norm_before(name, model)
    if norm is None or norm not in specs:
        return None
    return np.square(_floats(rows(norm)[:], specs[norm]) + gain_offset(norm, model))


def norm_before(name: str, model: ModelSpec) -> str | None:
    """The norm before a linear layer; None if the layer has another input."""
    if name == "lm_head.weight":
        return FINAL_NORM
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    block, layer = match[1], match[3]
    if _MIXERS.fullmatch(layer):
        return f"{block}norm_1.weight"
    if _MLP.fullmatch(layer):
        of = model.blocks[int(match[2])]
        if isinstance(of.mlp, Experts) and of.mlp.own_norm is not None and not layer.startswith("mlp.shared"):
            return None  # a norm of their own, which stays as it is
        is_shared = of.norm_is_shared
        return f"{block}norm_1.weight" if is_shared else f"{block}norm_2.weight"
    return None


def gain_offset(norm: str, model: ModelSpec) -> np.float32:
    """What is added to the weight of a norm, which is named by it, to get its gain."""
    match = _BLOCK.fullmatch(norm)
    found = model.ends.final_norm if match is None else model.blocks[int(match[2])].norms.get(match[3])
    return np.float32(found is not None and found.unit_offset)


def _is_folded(norm: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether this is a norm whose results only linear layers read: one before them, without a bias."""
    is_before = norm == FINAL_NORM or norm.endswith((".norm_1.weight", ".norm_2.weight"))
    return is_before and norm in specs and norm.removesuffix("weight") + "bias" not in specs


def _floats(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    return floats(array) if spec.dtype in ("F32", "BF16", "F16") else array.astype(np.float32)
