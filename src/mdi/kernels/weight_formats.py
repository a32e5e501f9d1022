"""The bytes of weights in each format, for all code that counts their memory (caches: `model.caches`).

Numbers alone; neither numpy nor torch is needed. To add a format: a line in LAYOUTS, its bytes in `kernels.layout`, and its
products in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mdi.errors import UsageError
from mdi.kernels.format_maps import PANEL, TABLE, TIED, FormatMap, format_map, matrix_pieces, with_table
from mdi.model.tensors import EMBEDDING, HEAD

AUTO = "auto"  # the largest format that fits
OWN = "own"  # a file of mixed formats as it is
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
MADE = (
    "q8_0",
    "q5_0",
    "q4_k",
    "q6_k",
)  # that numbers are brought into (kernels.block_search); files alone have the others
MIXTURES = ("q4_k", "q6_k")  # whose names, asked for, stand for a map of formats (checkpoint.mixtures)

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
        name: a word, or a map (kernels.format_maps).
        bits: of a weight of a linear layer, scales included; of a map, of those that have the fewest.
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
        if name == EMBEDDING and is_tied(self.name):
            return 0.0
        if (form := packed_form_of(self.name, name, shape)) is not None:
            return sum(_bits_of(piece.word) * piece.n for piece in matrix_pieces(form, shape[0])) * shape[1] / 8
        bits = 8.0 * self.value_bytes
        if name == EMBEDDING:
            bits = FORMATS["int8"].bits if table_is_int8(self.name) else _bits_of(format_map(self.name).rest)
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


def _bits_of(word: str) -> float:
    return FORMATS[word].bits if word in FORMATS else layout_of(word).bits


def weight_format(name: str) -> WeightFormat:
    """Raises UsageError: the format is unknown."""
    if name in FORMATS:
        return FORMATS[name]
    check_packed(name)
    least = min(layout_of(word).bits for word in format_map(name).words)
    return WeightFormat(name, least, 4)


def check_packed(name: str | None) -> None:
    """Raises UsageError if a name is neither a format of matrices nor a map of them; None means no format."""
    if name is None or name in PACKED:
        return
    found = format_map(name) if ";" in name else FormatMap(name, {})
    unknown = found.words.difference(_MATRIX_LAYOUTS)
    if unknown:
        raise UsageError(f"unknown weight format {min(unknown)!r}: expected one of {', '.join((*PACKED, *MIXTURES))}")


def check_made(name: str) -> None:
    """Raises UsageError if a format is none that numbers can be brought into."""
    check_packed(name)
    held = format_map(name).words.intersection(BLOCK_TYPES).difference(MADE)
    if held:
        raise UsageError(
            f"{min(held)} is a type of GGUF files, which run in it with --quantize own: other weights are not brought into it "
            f"(only into {', '.join(MIXTURES)})"
        )


def check_whole(blocks: str | None, head: str | None) -> None:
    """Raises UsageError if a word of MIXTURES is asked for a part of a model only."""
    for word in MIXTURES:
        if word in (blocks, head) and (blocks != word or head not in (None, word)):
            raise UsageError(
                f"{word} is a mixture for a whole model: give --quantize {word}, and no other --quantize-head"
            )


def is_made(name: str) -> bool:
    """Whether a map has a format whose scales are searched: it is packed once, by the starter."""
    return not format_map(name).words.isdisjoint(MADE)


def is_packed_form(name: str) -> bool:
    """As `check_packed`, as an answer."""
    try:
        check_packed(name)
    except UsageError:
        return False
    return True


def format_within(form: str, name: str) -> str:
    """The format of one linear layer in a part that is in a format, see `format_maps.matrix_pieces`.

    Models come with MLPs or experts in mxfp4, which has steps too coarse for attention and the head: those are in int8 there.
    """
    own = format_map(form).at(name)
    return "int8" if form == own == "mxfp4" and ".mlp." not in name else own


def packed_form_of(form: str, name: str, shape: Sequence[int]) -> str | None:
    """The format of a tensor in a part that is in a format; None for what is in plain numbers there.

    An embedding is packed where a map names it, unless it `is_tied`: then the part does not have it.
    """
    if name == EMBEDDING:
        return table_of(form)
    return format_within(form, name) if is_packable(name, shape) else None


def table_is_int8(form: str) -> bool:
    """Whether an embedding that no map names has 8 bits. One row of it is read per token: 4 would only cost precision."""
    return format_map(form).rest in ROUNDED


def is_tied(form: str) -> bool:
    """Whether the embedding has the head's weight."""
    return table_of(form) == TIED


def table_of(form: str) -> str | None:
    """What a map says of the embedding; None if it does not name it."""
    return format_map(form).of.get((TABLE, None))


def tied_form(form: str, dtype: str) -> str:
    """The formats of a model whose embedding is its head as well: that is held once, if both would have the same numbers.

    The gain of the final norm is not folded into such a head (checkpoint.packing.folded).

    Args:
        dtype: number type of the embedding in the checkpoint.
    """
    head, table = format_within(form, HEAD), table_of(form)
    if table is None:
        stays = OWN_FORMAT.get(dtype, "float32")
        same = ("int8",) if table_is_int8(form) else (stays, "float32")
    else:
        same = (table,)
    tied = with_table(form, TIED)
    return tied if head in same and format_within(tied, HEAD) == head else form


def untied_form(form: str) -> str:
    """The same formats where the embedding is held beside the head, with the same numbers."""
    return with_table(form, format_within(form, HEAD)) if is_tied(form) else form


def is_packable(name: str, shape: Sequence[int]) -> bool:
    """Whether this is the weight of a linear layer that a format is for.

    Routers of experts, and gates of whole heads and experts, are not: they are small, and a wrong choice costs more than
    rounding. Nor is the up-projection of latent attention, whose weights are read in pieces.
    """
    path = name.removesuffix(".weight")
    return path != name and len(shape) == 2 and not path.endswith((".wte", ".wpe", ".gate", ".gates", "kv_b_proj"))


def held_bytes(parts: Sequence[int], stored: str, held: str, stored_format: str | None = None) -> int:
    """Memory of parts once they are loaded, and while the last one is loaded, from their sizes in files.

    Args:
        parts: bytes of each, as stored: in a type, or packed (checkpoint.packing) if `stored_format` names how.
        held: their format in memory, a name in FORMATS.
    """
    # If the format stays, weights are mapped unchanged; otherwise the plain ones of one part are beside the packed ones.
    is_mapped = held == (stored_format or stored)
    stored_bits = weight_format(stored_format).bits if stored_format else 8 * NUMBER_BYTES.get(stored, 4)
    form = weight_format(held)
    extra = 0 if is_mapped else max(parts, default=0) * 8 * form.value_bytes / stored_bits
    return int(sum(parts) * form.bits / stored_bits + extra)
