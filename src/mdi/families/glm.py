"""GLM 4.5 to 4.7, and the language part of GLM 4.5V."""

from __future__ import annotations

from typing import Any

import numpy as np

from mdi.families.config_json import LLAMA_LIKE, SIGMOIDS, SILU, Json, refuse, rotated_share, said, words
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf, check_sigmoid, experts, names, partial_rotary, rms_eps
from mdi.families.names import EXPERTS, GATED, LLAMA_BLOCK, LLAMA_ENDS, PREDICTING, QK_NORMS, Names
from mdi.model.plain import ModelConfig

_WORDS = {
    "num_experts_per_tok": "n_expert_per_token", "first_k_dense_replace": "first_k_dense_replace",
    "moe_intermediate_size": "moe_intermediate_size", "n_routed_experts": "n_expert", "n_shared_experts": "n_shared_expert",
    "routed_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
_OPTIONAL = {"partial_rotary_factor": "rotary_percentage", "attention_bias": "attn_bias", "use_qk_norm": "norm_qk"}


def _read(hf: Json) -> Json:
    refuse(hf, n_group=(1,), topk_group=(1,), norm_topk_prob=(True,), hidden_act=SILU)
    return {
        **LLAMA_LIKE,
        **SIGMOIDS,
        "norm_eps": hf["rms_norm_eps"],
        "attn_bias": bool(hf.get("attention_bias")),
        "norm_qk": bool(hf.get("use_qk_norm")),
        "rotary_percentage": rotated_share(hf, 0.5),
        **said(hf, _WORDS),
        "routed_scaling_factor": float(hf["routed_scaling_factor"]),
    }


def _write(config: ModelConfig) -> Json:
    return {**words(config, _WORDS, _OPTIONAL), "num_nextn_predict_layers": 0}


_SHARED = {f"mlp.shared_experts.{ours}": f"mlp.shared_experts.{GATED[ours]}" for ours in GATED}
_NAMES = Names({**LLAMA_BLOCK, **QK_NORMS, **EXPERTS, **_SHARED}, LLAMA_ENDS, predicting=PREDICTING)


def _read_gguf(fields: Fields, hf: Json) -> Json:
    check_sigmoid(fields)
    if np.any(fields.get("rope.dimension_sections", 0)):
        raise ValueError("positions of images are not supported")
    n_dense = fields.count("leading_dense_block_count")
    return {
        **rms_eps(fields, hf), **partial_rotary(fields, hf), **experts(fields, "n_routed_experts", n_dense),
        "attention_bias": "blk.0.attn_q.bias" in fields.shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.shapes,
        "first_k_dense_replace": n_dense,
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "n_shared_experts": fields.count("expert_shared_count"),
        "n_group": fields.count("expert_group_count", 1) or 1,
        "norm_topk_prob": bool(fields.get("expert_weights_norm", False)),
        "routed_scaling_factor": float(fields.get("expert_weights_scale", 0.0)) or 1.0,
    }  # fmt: skip


_GGUF = Gguf("glm4moe", _read_gguf, names({"norm_2": "post_attention_norm"}))

_SIZES: Json = {
    "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 1, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "routed_scaling_factor": 2.5, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
_AIR: Json = {
    "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_hidden_layers": 46, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
_LONG: Json = {**_SIZES, "max_position_embeddings": 202752}
_PUBLISHED: dict[str, Json] = {
    "zai-org/GLM-4.5": _SIZES,
    "zai-org/GLM-4.5-Air": {**_SIZES, **_AIR},
    "zai-org/GLM-4.6": _LONG,
    "zai-org/GLM-4.7": _LONG,
}
_ALL: dict[str, Any] = {"names": lambda _: _NAMES}

FAMILIES = (
    Family("glm4_moe", "Glm4MoeForCausalLM", _read, _write, gguf=_GGUF, published=_PUBLISHED, **_ALL),
    Family(
        "glm4v_moe_text", "Glm4vMoeForConditionalGeneration", _read, None, defaults={"attention_bias": True}, **_ALL
    ),
)
