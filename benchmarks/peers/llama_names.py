"""A litgpt checkpoint of Llama's kind under the names of transformers and of llama.cpp. Tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# litgpt's name -> transformers', llama.cpp's.
BLOCK = {
    "norm_1.weight": ("input_layernorm.weight", "attn_norm.weight"),
    "attn.proj.weight": ("self_attn.o_proj.weight", "attn_output.weight"),
    "norm_2.weight": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "mlp.fc_1.weight": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "mlp.fc_2.weight": ("mlp.up_proj.weight", "ffn_up.weight"),
    "mlp.proj.weight": ("mlp.down_proj.weight", "ffn_down.weight"),
}
TOP = {
    "transformer.wte.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "transformer.ln_f.weight": ("model.norm.weight", "output_norm.weight"),
    "lm_head.weight": ("lm_head.weight", "output.weight"),
}


def plain_weights(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Those of the checkpoint, under litgpt's names."""
    weights = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def hf_tensors(weights: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Under transformers' names, with queries, keys and values apart; views, not copies."""
    found = {TOP[name][0]: t for name, t in weights.items() if name in TOP}
    for i in range(config.n_layer):
        prefix = f"transformer.h.{i}."
        found |= {f"model.layers.{i}.{name}": weights[prefix + n] for n, (name, _) in BLOCK.items()}
        for kind, part in zip("qkv", split_qkv(weights[f"{prefix}attn.qkv.weight"], config), strict=True):
            found[f"model.layers.{i}.self_attn.{kind}_proj.weight"] = part
    return found


def gguf_tensors(weights: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Under llama.cpp's names, queries and keys in the row order that its rotation wants."""
    found = {TOP[name][1]: t for name, t in weights.items() if name in TOP}
    for i in range(config.n_layer):
        prefix = f"transformer.h.{i}."
        found |= {f"blk.{i}.{name}": weights[prefix + n] for n, (_, name) in BLOCK.items()}
        q, k, v = split_qkv(weights[f"{prefix}attn.qkv.weight"], config)
        found[f"blk.{i}.attn_q.weight"] = interleave_halves(q, config.n_head)
        found[f"blk.{i}.attn_k.weight"] = interleave_halves(k, config.n_query_groups)
        found[f"blk.{i}.attn_v.weight"] = v
    return found


def split_qkv(qkv: torch.Tensor, config: Any) -> tuple[torch.Tensor, ...]:
    """(rows of q, of k, of v): litgpt keeps them one below the other."""
    n_kv = config.n_query_groups * config.head_size
    return qkv.split([config.n_head * config.head_size, n_kv, n_kv])


def interleave_halves(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of each head from (first halves, second halves) to pairs.

    litgpt rotates element i with element i + head_size / 2; llama.cpp's Llama rotates 2 i with 2 i + 1.

    Args:
        weight: (n_heads * head_size, n_embd).
    """
    n_rows, n_cols = weight.shape
    halves = weight.reshape(n_heads, 2, n_rows // n_heads // 2, n_cols)
    return halves.transpose(1, 2).reshape(n_rows, n_cols)
