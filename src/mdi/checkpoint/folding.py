"""Multiplies the gains of norms into the weights that follow, before these are rounded to 8 or 4 bits.

A norm multiplies each channel by its gain, and the linear layers behind it multiply that by a column of their weights: the
gain may as well stand in the column. In exact numbers nothing changes. What does change is rounding: channels that a gain makes
many times larger than the rest (as in real language models) are as large as the others when they are rounded, and a weight's
rounding error counts by what it is multiplied with. The norm's own gain becomes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.kernels.layout import floats
from mdi.kernels.weight_range import check_range, largest_of

FOLDED_FORMATS = (
    "int8",
    "int4",
)  # only in formats of a few bits; in others, weights stay as in the checkpoint

_BLOCK = re.compile(r"(transformer\.h\.\d+\.)(.*)\.weight")
_ATTENTION = ("attn.qkv", "attn.q_a_proj", "attn.kv_a_proj_with_mqa")
_MLP = re.compile(r"mlp\.(gate|(experts\.\d+\.|shared_experts\.)?fc(_1|_2)?)")


def folded(
    name: str, packing: Packing, config: Mapping[str, Any], array: Callable[[str], np.ndarray],
    specs: Mapping[str, TensorSpec],
) -> tuple[np.ndarray, TensorSpec]:  # fmt: skip
    """A plain tensor in the form for packing.

    Args:
        array: gives tensors of the same part; specs are theirs.
    """
    if packing.of_part(part_of(name)) in FOLDED_FORMATS:
        offset = np.float32(
            config["norm_class_name"] == "RMSNorm" and "Gemma" in config["name"]
        )  # the gain is 1 + weight
        if _is_folded(name, specs):
            return np.full(specs[name].shape, 1 - offset, dtype=np.float32), TensorSpec("F32", specs[name].shape)
        norm = norm_before(name, config)
        if norm is not None and _is_folded(norm, specs):
            gain = _floats(array(norm), specs[norm]) + offset
            check_range("float32", largest_of(gain), norm, packing.clips)
            stored = array(name)
            weight = _floats(stored, specs[name])
            own = None if np.may_share_memory(weight, stored) else weight  # a large one is not copied twice
            return np.multiply(weight, gain, out=own), TensorSpec("F32", specs[name].shape)
    return array(name), specs[name]


def norm_before(name: str, config: Mapping[str, Any]) -> str | None:
    """The norm before a linear layer; None if the layer has another input."""
    if name == "lm_head.weight":
        return "transformer.ln_f.weight"
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    block, layer = match.groups()
    if layer in _ATTENTION:
        return f"{block}norm_1.weight"
    if _MLP.fullmatch(layer):
        return f"{block}norm_1.weight" if config["shared_attention_norm"] else f"{block}norm_2.weight"
    return None


def _is_folded(norm: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether this is a norm whose results only linear layers read: one before them, without a bias."""
    is_before = norm == "transformer.ln_f.weight" or norm.endswith((".norm_1.weight", ".norm_2.weight"))
    return is_before and norm in specs and norm.removesuffix("weight") + "bias" not in specs


def _floats(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    return floats(array) if spec.dtype in ("F32", "BF16", "F16") else array.astype(np.float32)
