"""Maps tensors of a GGUF file to tensors of litgpt's model. Pure: names and shapes.

All that is done to a weight concerns whole rows, so that it can be done to the file's quantized blocks as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mdi.checkpoint.ggufheader import GgufTensor

_TOP = {"transformer.wte": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"}
_BLOCK = {
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.proj": "attn_output",
    "attn.norm_q": "attn_q_norm",
    "attn.norm_k": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "mlp.fc_1": "ffn_gate",
    "mlp.fc_2": "ffn_up",
    "mlp.fc": "ffn_up",
    "mlp.proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_EXPERT = {"fc_1": "ffn_gate_exps", "fc_2": "ffn_up_exps", "proj": "ffn_down_exps"}


@dataclass(frozen=True)
class GgufPiece:
    """Some rows of a tensor in the file.

    Attributes:
        tensor: its name there.
        expert: which of the stacked matrices, or None.
        rows: (start, stop), or None for all.
        paired_heads: if not 0, the rows of each of so many heads lie in pairs, as llama.cpp's Llama rotates them, and are
            to be put into two halves.
    """

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    paired_heads: int = 0


@dataclass(frozen=True)
class Recipe:
    """Pieces, one below the other; `minus` is taken off (llama.cpp keeps Gemma's norms with the one that is added)."""

    pieces: tuple[GgufPiece, ...]
    minus: float = 0.0


def recipe(name: str, config: Mapping[str, Any], arch: str, tensors: Mapping[str, GgufTensor]) -> Recipe:
    """How `name` of litgpt's model is made."""
    is_norm = "norm" in name.rsplit(".", 2)[-2] or "ln_f" in name
    minus = 1.0 if arch.startswith("gemma") and is_norm else 0.0
    return Recipe(tuple(_pieces(name, config, arch, tensors)), minus)


def _pieces(name: str, config: Mapping[str, Any], arch: str, tensors: Mapping[str, GgufTensor]) -> list[GgufPiece]:
    stem, ending = name.rsplit(".", 1)
    if stem in _TOP:
        found = f"{_TOP[stem]}.{ending}"
        tied = stem == "lm_head" and ending == "weight" and found not in tensors
        return [GgufPiece(f"{_TOP['transformer.wte']}.weight" if tied else found)]
    match = re.fullmatch(r"transformer\.h\.(\d+)\.(.*)", stem)
    assert match is not None  # the only ones in litgpt's models
    prefix, part = f"blk.{match[1]}.", match[2]
    if part == "attn.qkv":
        return _qkv(prefix, ending, config, arch, tensors)
    if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", part):
        return [GgufPiece(f"{prefix}{_EXPERT[expert[2]]}.{ending}", expert=int(expert[1]))]
    if part in ("mlp.fc_1", "mlp.fc_2") and f"{prefix}ffn_gate.weight" not in tensors:  # Phi 3: one above the other
        n_rows = config["intermediate_size"]
        rows = (0, n_rows) if part == "mlp.fc_1" else (n_rows, 2 * n_rows)
        return [GgufPiece(f"{prefix}ffn_up.{ending}", rows=rows)]
    return [GgufPiece(f"{prefix}{_BLOCK[part]}.{ending}")]


def _qkv(
    prefix: str, ending: str, config: Mapping[str, Any], arch: str, tensors: Mapping[str, GgufTensor]
) -> list[GgufPiece]:
    if f"{prefix}attn_qkv.{ending}" in tensors:
        return [GgufPiece(f"{prefix}attn_qkv.{ending}")]
    heads = (config["n_head"], config["n_query_groups"]) if arch == "llama" else (0, 0)
    paired = {"q": heads[0], "k": heads[1], "v": 0}
    return [GgufPiece(f"{prefix}attn_{which}.{ending}", paired_heads=n) for which, n in paired.items()]
