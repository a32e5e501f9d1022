"""Mixtures of block types for models that are not packed yet: which matrix is in which one.

`q4_k` is mixed as llama.cpp's Q4_K_M: head and embedding, and values and down-projections of about half of the blocks, lose
more than other matrices when they are rounded, and have 6 bits. Rows that are no multiple of 256 do not fit the types of 256
inputs, and are in those of 32; rows that are no multiple of 32 are in half precision.
"""

from __future__ import annotations

import re

from mdi.checkpoint.shapes import model_shapes
from mdi.kernels.format_maps import joined_pieces, map_of
from mdi.kernels.weight_formats import BLOCK_TYPES, MIXTURES, is_packable
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention, ModelSpec
from mdi.model.tensors import EMBEDDING, HEAD

_MORE = "q6_k"
_NARROW = {"q4_k": "q5_0", "q6_k": "q8_0"}  # for rows that these do not fit
_WHOLE = "fp16"
_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(.+)\.weight")
_DOWN = re.compile(r"mlp\.(experts\.\d+\.|shared_experts\.)?proj")


def meant(form: str, config: ModelConfig) -> str:
    """The map of formats (kernels.format_maps) that a word of MIXTURES stands for; another format as it is.

    Raises:
        CheckpointError: there is no such model.
    """
    return mixture(form, config) if form in MIXTURES else form


def mixture(word: str, config: ModelConfig) -> str:
    """The map of a word of MIXTURES. Raises CheckpointError."""
    shapes, spec = model_shapes(config, config.name or "this model"), spec_of(config)
    chosen = {name: shape for name, shape in shapes.items() if name == EMBEDDING or is_packable(name, shape)}
    return map_of({name: _form(word, name, (shape[0], shape[1]), spec) for name, shape in chosen.items()})


def _form(word: str, name: str, shape: tuple[int, int], spec: ModelSpec) -> str:
    n_out, n_in = shape
    usual, more = _fitting(word, n_in), _fitting(_MORE, n_in)
    match = _BLOCK.fullmatch(name)
    if match is None:
        return more if name in (EMBEDDING, HEAD) else usual
    number, layer = int(match[1]), match[2]
    if not _has_more(number, spec.n_layer):
        return usual
    if _DOWN.fullmatch(layer):
        return more
    mixer = spec.blocks[number].mixer
    if layer == "attn.qkv" and isinstance(mixer, Attention) and mixer.makes == "keys and values":
        n_values = mixer.n_groups * mixer.head_size
        return joined_pieces([(n_out - n_values, usual), (n_values, more)]) or usual
    return usual


def _has_more(block: int, n_layer: int) -> bool:
    """Whether a block is in the first or last eighth, or each third one between."""
    first, last = n_layer // 8, 7 * n_layer // 8
    return not first <= block < last or (block - first) % 3 == 2


def _fitting(word: str, n_in: int) -> str:
    found = next((form for form in (word, _NARROW[word]) if n_in % BLOCK_TYPES[form].inputs == 0), None)
    return found or _WHOLE
