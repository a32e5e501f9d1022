"""Models that litgpt's table lacks, by their names on the hub: what of their config.json says how large they are.

A plan for a model whose files are not here needs no more. The files themselves, where they are, are read and never compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mdi.checkpoint.hfconfig import derive_config
from mdi.spec.model import ModelConfig

Json = dict[str, Any]

_GPT_OSS: Json = {
    "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
}  # fmt: skip
_GLM: Json = {
    "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 1, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "routed_scaling_factor": 2.5, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
_GLM_AIR: Json = {
    "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_hidden_layers": 46, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
_MINIMAX: Json = {
    "model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
    "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64,
    "vocab_size": 200064,
}  # fmt: skip
_FALCON_RW: Json = {
    "model_type": "falcon", "alibi": True, "bias": True, "layer_norm_epsilon": 1e-5, "multi_query": False,
    "new_decoder_architecture": False, "parallel_attn": False,
}  # fmt: skip


def _bloom(n_layer: int, n_embed: int, n_head: int) -> Json:
    return {"model_type": "bloom", "n_layer": n_layer, "n_embed": n_embed, "n_head": n_head, "vocab_size": 250880}


def _gpt2(n_layer: int, n_embd: int, n_head: int) -> Json:
    return {"model_type": "gpt2", "n_layer": n_layer, "n_embd": n_embd, "n_head": n_head, "vocab_size": 50257}


def _opt(n_layer: int, hidden_size: int, n_head: int, **other: Any) -> Json:
    return {
        "model_type": "opt", "num_hidden_layers": n_layer, "hidden_size": hidden_size, "num_attention_heads": n_head,
        "ffn_dim": 4 * hidden_size, "max_position_embeddings": 2048, "vocab_size": 50272, **other,
    }  # fmt: skip


# name on the hub -> config.json, without the fields that say nothing of sizes or have the value that is assumed
PUBLISHED: dict[str, Json] = {
    "openai/gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "zai-org/GLM-4.5": _GLM,
    "zai-org/GLM-4.5-Air": {**_GLM, **_GLM_AIR},
    "zai-org/GLM-4.6": {**_GLM, "max_position_embeddings": 202752},
    "zai-org/GLM-4.7": {**_GLM, "max_position_embeddings": 202752},
    "MiniMaxAI/MiniMax-M2": _MINIMAX,
    "bigscience/bloom-560m": _bloom(24, 1024, 16),
    "bigscience/bloom-1b1": _bloom(24, 1536, 16),
    "bigscience/bloom-1b7": _bloom(24, 2048, 16),
    "bigscience/bloom-3b": _bloom(30, 2560, 32),
    "bigscience/bloom-7b1": _bloom(30, 4096, 32),
    "bigscience/bloom": _bloom(70, 14336, 112),  # 176 billion
    "tiiuae/falcon-rw-1b": {
        **_FALCON_RW, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24, "vocab_size": 50304
    },
    "tiiuae/falcon-rw-7b": {
        **_FALCON_RW, "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 36, "vocab_size": 65024
    },
    "openai-community/gpt2": _gpt2(12, 768, 12),
    "openai-community/gpt2-medium": _gpt2(24, 1024, 16),
    "openai-community/gpt2-large": _gpt2(36, 1280, 20),
    "openai-community/gpt2-xl": _gpt2(48, 1600, 25),
    "facebook/opt-125m": _opt(12, 768, 12),
    "facebook/opt-350m": _opt(24, 1024, 16, do_layer_norm_before=False, word_embed_proj_dim=512),  # refused with a reason
    "facebook/opt-1.3b": _opt(24, 2048, 32),
    "facebook/opt-2.7b": _opt(32, 2560, 32),
    "facebook/opt-6.7b": _opt(32, 4096, 32),
    "facebook/opt-13b": _opt(40, 5120, 40),
    "facebook/opt-30b": _opt(48, 7168, 56),
    "facebook/opt-66b": _opt(64, 9216, 72),
}  # fmt: skip


def published_config(name: str) -> ModelConfig | None:
    """The configuration of a model of `PUBLISHED`; None if it is not there.

    Args:
        name: with its organisation or without.

    Raises:
        CheckpointError: nothing here computes this model.
    """
    found = next((hub for hub in PUBLISHED if name in (hub, hub.partition("/")[2])), None)
    return None if found is None else derive_config(PUBLISHED[found], found.partition("/")[2], Path(found))
