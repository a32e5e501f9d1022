"""The bytes of weights in each format, for all code that counts their memory (caches: `model.caches`).

Numbers alone; neither numpy nor torch is needed. To add a format: a line in LAYOUTS, its bytes in `kernels.layout`, and its
products in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mdi.errors import UsageError
from mdi.model.tensors import EMBEDDING

PANEL = 16  # adjacent outputs of a packed weight
AUTO = "auto"  # the largest format that fits
PACKED_ROWS = 64  # of a tensor that are read, decoded and packed at a time: whole panels
PACKING_BYTES = 48  # that this takes at most for each number of these rows, besides what is packed


@dataclass(frozen=True)
class Layout:
    """The layout of one packed format, see `kernels.layout`.

    Attributes:
        number: of the format in the kernels.
        record_inputs: inputs to which n_in is padded.
        record_bytes: of these inputs in one panel.
        group: inputs that share a scale; 0 without scales.
    """

    number: int
    record_inputs: int
    record_bytes: int
    group: int

    @property
    def bits(self) -> float:
        """Per weight, scales included."""
        return 8 * self.record_bytes / (PANEL * self.record_inputs)


@dataclass(frozen=True)
class BlockType:
    """A block type of GGUF files, whose numbers are packed as they are; csrc/block_types.h has how they lie.

    Attributes:
        number: of the format in the kernels.
        type_id: GGUF's.
        inputs: numbers of a block.
        block_bytes: of it in a file.
        halves, bytes, words: how many of two bytes, one, and four these are; in this order, of q6_k in the opposite one.
    """

    number: int
    type_id: int
    inputs: int
    block_bytes: int
    halves: int
    bytes: int
    words: int

    @property
    def blocks(self) -> int:
        """Of a record: two of 32 inputs, which share a group of activations, or one of 256."""
        return 2 if self.inputs == 32 else 1

    @property
    def layout(self) -> Layout:
        """Its records cannot be cut: a `group` is all of one."""
        n_inputs, n_bytes = self.blocks * self.inputs, PANEL * self.blocks * self.block_bytes
        return Layout(self.number, n_inputs, -(-n_bytes // 64) * 64, n_inputs)


BLOCK_TYPES = {
    "q8_0": BlockType(6, 8, 32, 34, 1, 0, 8),
    "q4_1": BlockType(7, 3, 32, 20, 2, 0, 4),
    "q5_0": BlockType(8, 6, 32, 22, 1, 0, 5),
    "q5_1": BlockType(9, 7, 32, 24, 2, 0, 5),
    "q4_k": BlockType(10, 12, 256, 144, 2, 12, 32),
    "q5_k": BlockType(11, 13, 256, 176, 2, 12, 40),
    "q6_k": BlockType(12, 14, 256, 210, 1, 16, 48),
    "iq4_nl": BlockType(13, 20, 32, 18, 1, 0, 4),
    "iq4_xs": BlockType(14, 23, 256, 136, 1, 6, 32),
}

# What weights can be packed in, the most precise first.
LAYOUTS = {
    "float32": Layout(0, 1, 64, 0),
    "bf16": Layout(1, 2, 64, 0),
    "fp16": Layout(2, 2, 64, 0),
    "int8": Layout(3, 128, 33 * 64, 64),
    "int4": Layout(4, 64, 9 * 64, 32),
    "mxfp4": Layout(5, 128, 17 * 64, 32),
}
PACKED = tuple(LAYOUTS)
_MATRIX_LAYOUTS = LAYOUTS | {name: kind.layout for name, kind in BLOCK_TYPES.items()}
SMALLER = ("fp16", "int8", "int4")  # that a model can be brought into to take less, the most precise first
HALVES = ("int4", "mxfp4")  # two weights in a byte
ROUNDED = ("int8", "int4", "mxfp4")  # that lose something, the larger first


def layout_of(form: str) -> Layout:
    """Of a matrix: a format that weights are packed in, or a block type. Raises KeyError for any other."""
    return _MATRIX_LAYOUTS[form]


NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
OWN_FORMAT = {"float32": "float32", "float64": "float32", "bfloat16": "bf16", "float16": "fp16"}  # loses nothing


@dataclass(frozen=True)
class WeightFormat:
    """The format of linear layers in blocks and head, and the computing type.

    Attributes:
        bits: of a weight of a linear layer, scales included.
        value_bytes: of everything else: norms, biases, activations, rows on the wire.
    """

    name: str
    bits: float
    value_bytes: int

    @property
    def is_packed_smaller(self) -> bool:
        """Whether some plain weights are in memory beside the packed ones during packing."""
        return self.bits < 8 * self.value_bytes

    def tensor_bytes(self, name: str, shape: Sequence[int]) -> float:
        """The bytes of a tensor. An embedding is never in 4 bits, because one row of it is read per token."""
        bits = 8.0 * self.value_bytes
        if name == EMBEDDING:
            bits = FORMATS["int8"].bits if self.name in HALVES else self.bits
        elif is_packable(name, shape):
            bits = FORMATS[format_within(self.name, name)].bits
        return math.prod(shape) * bits / 8

    def load_bytes(self, n_in: int) -> int:
        """Additional memory while a part is loaded, besides its final weights.

        A plain part is mapped from its file, and stays there or can be read again. Of a part that will be packed, a few rows of
        one tensor after the other are in memory in plain numbers.

        Args:
            n_in: numbers in a row of the widest tensor.
        """
        return PACKED_ROWS * PACKING_BYTES * n_in if self.is_packed_smaller else 0


# Types that torch computes in, and packed formats, whose kernels compute in float32.
FORMATS = {
    **{
        name: WeightFormat(name, 8 * NUMBER_BYTES[name], NUMBER_BYTES[name])
        for name in ("float32", "bfloat16", "float16")
    },
    **{name: WeightFormat(name, layout.bits, 4) for name, layout in LAYOUTS.items()},
}


def weight_format(name: str) -> WeightFormat:
    """Raises UsageError: the format is unknown."""
    if name not in FORMATS:
        raise UsageError(f"unknown weight format {name!r}: expected {', '.join(FORMATS)}")
    return FORMATS[name]


def check_packed(name: str | None) -> None:
    """Raises UsageError if a name is not one of `PACKED`; None means no format."""
    if name is not None and name not in PACKED:
        raise UsageError(f"unknown weight format {name!r}: expected one of {', '.join(PACKED)}")


def format_within(form: str, name: str) -> str:
    """The format of one linear layer in a part that is in a format.

    Models come with MLPs or experts in mxfp4, which has steps too coarse for attention and the head: those are in int8 there.
    """
    return "int8" if form == "mxfp4" and ".mlp." not in name else form


def is_packable(name: str, shape: Sequence[int]) -> bool:
    """Whether this is the weight of a linear layer that a format is for.

    Routers of experts are not: they are small, and a wrong choice of expert costs more than rounding. Nor is the up-projection
    of latent attention, whose weights are read in pieces.
    """
    path = name.removesuffix(".weight")
    return path != name and len(shape) == 2 and not path.endswith((".wte", ".wpe", ".gate", "kv_b_proj"))


def held_bytes(parts: Sequence[int], stored: str, held: str, stored_format: str | None = None) -> int:
    """Memory of parts once they are loaded, and while the last one is loaded, from their sizes in files.

    Args:
        parts: bytes of each, as stored: in a type, or packed (checkpoint.packing) if `stored_format` names how.
        held: their format in memory, a name in FORMATS.
    """
    stored_bits = LAYOUTS[stored_format].bits if stored_format else 8 * NUMBER_BYTES.get(stored, 4)
    form = weight_format(held)
    # If the format stays, weights are mapped unchanged; otherwise the plain ones of one part are beside the packed ones.
    is_mapped = held == (stored_format or stored)
    extra = 0 if is_mapped else max(parts, default=0) * 8 * form.value_bytes / stored_bits
    return int(sum(parts) * form.bits / stored_bits + extra)
