"""Models with DeepSeek's latent attention: DeepSeek V3, R1 and V3.1, Moonlight, Kimi K2 and the language part of K2.5, and
GLM 4.7 Flash.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import numpy as np

from mdi.errors import CheckpointError
from mdi.families.config_json import LLAMA_LIKE, SIGMOIDS, SILU, Json, refuse, said, words
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf, check_sigmoid, experts, names, rms_eps
from mdi.families.names import EXPERTS, GATED, GATED_MLP, LLAMA_ENDS, NORMS_BEFORE, PREDICTING, Held, Names
from mdi.model.plain import ModelConfig

logger = logging.getLogger("mdi")

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_WORDS = {
    "num_experts_per_tok": "n_expert_per_token", "moe_intermediate_size": "moe_intermediate_size",
    "n_routed_experts": "n_expert", "n_shared_experts": "n_shared_expert", "routed_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
_LATENT_EPS = 1e-6  # of the norms of latent rows, whatever rms_norm_eps is, as in transformers
_SCORES_PER_GROUP = 2
_DENSE, _SPARSE = "dense", "sparse"


def _read(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), hidden_act=SILU, norm_topk_prob=(True,), moe_layer_freq=(1,))
    refuse(hf, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    return {
        **LLAMA_LIKE, **_experts(hf), "norm_eps": hf["rms_norm_eps"], "n_query_groups": hf["num_attention_heads"],
        "rope_interleave": bool(hf.get("rope_interleave", True)), "latent_attention": _latent(hf), **said(hf, _WORDS),
        "first_k_dense_replace": hf["first_k_dense_replace"], "routed_scaling_factor": float(hf["routed_scaling_factor"]),
    }  # fmt: skip


def _latent(hf: Json) -> Json:
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope scaling of the type {kind!r} is not supported for this architecture")
    found = {"q_lora_rank": hf.get("q_lora_rank"), **{key: hf[key] for key in _SIZES}}
    return found if _is_usual(hf["rms_norm_eps"]) else {**found, "norm_eps": _LATENT_EPS}


def _is_usual(eps: float) -> bool:
    """Whether it is that of the norms of latent rows; GGUF files have it in single precision."""
    return bool(np.float32(eps) == np.float32(_LATENT_EPS))


def _experts(hf: Json) -> Json:
    """One group is none."""
    n_groups = hf.get("n_group") or 1
    if n_groups == 1:
        return SIGMOIDS
    own = {"n_expert_groups": n_groups, "n_topk_groups": hf["topk_group"], "n_topk_scores_per_group": _SCORES_PER_GROUP}
    return {**SIGMOIDS, "sigmoid_router": False, **own}


def _read_lite(hf: Json) -> Json:
    n, kinds = hf["num_hidden_layers"], hf.get("mlp_layer_types")
    n_dense = 1 if kinds is None else kinds.count(_DENSE)
    if kinds is not None and kinds != [*[_DENSE] * n_dense, *[_SPARSE] * (n - n_dense)]:
        raise ValueError(f"mlp_layer_types does not say {_DENSE} for the first layers and {_SPARSE} for all others")
    return _read({**hf, "first_k_dense_replace": n_dense})


def _write(config: ModelConfig) -> Json:
    latent = config.latent_attention
    if latent is None or not _is_usual(latent.get("norm_eps", config.norm_eps)):
        raise ValueError("no latent attention, or norms of latent rows of another kind")
    sizes = {key: latent.get(key) for key in ("q_lora_rank", *_SIZES)}
    groups = {"n_group": config.n_expert_groups or 1, "topk_group": config.n_topk_groups or 1}
    own = {"norm_topk_prob": True, "rope_interleave": config.rope_interleave, "num_nextn_predict_layers": 0}
    n_dense = {"first_k_dense_replace": config.first_k_dense_replace or 0}
    return {**words(config, _WORDS, lacks=("head_dim",)), **sizes, **groups, **own, **n_dense}


def _write_lite(config: ModelConfig) -> Json:
    found = _write(config)
    n_dense = found.pop("first_k_dense_replace")
    return {**found, "mlp_layer_types": [*[_DENSE] * n_dense, *[_SPARSE] * (config.n_layer - n_dense)]}


def _read_sparse(hf: Json) -> NoReturn:
    raise ValueError(
        "its attention reads keys that an indexer chooses (DeepSeek sparse attention), which is not supported"
    )


_ATTENTION: dict[str, Any] = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.q_a_proj": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b_proj": "self_attn.q_b_proj",
    "attn.kv_a_proj_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b_proj": "self_attn.kv_b_proj",
    "attn.proj": "self_attn.o_proj",
}
_SHARED = {f"mlp.shared_experts.{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in GATED.items()}
_NAMES = Names({**NORMS_BEFORE, **_ATTENTION, **GATED_MLP, **EXPERTS, **_SHARED}, LLAMA_ENDS, predicting=PREDICTING)


def _whole_heads(fields: Fields) -> Fields:
    """As files of other attention are: with keys and values of all heads, of one size. Old files say it so."""
    n_head, name = fields.size("attention.head_count"), f"blk.0.{_of_queries(fields)}.weight"
    size = fields.size("attention.key_length_mla", fields.get("attention.key_length"))
    own = {"attention.key_length": size, "attention.value_length": size, "attention.head_count_kv": n_head}
    return fields.replaced(own, {"blk.0.attn_q.weight": fields.shape(name)})


def _of_queries(fields: Fields) -> str:
    return "attn_q_b" if "blk.0.attn_q_b.weight" in fields.shapes else "attn_q"


def _check_router(fields: Fields) -> None:
    """Files from before a field was written do not say what other programs then took for granted. Raises ValueError."""
    check_sigmoid(fields)
    is_flash = (fields.count("block_count"), fields.shape("token_embd.weight")[0]) in _FLASH_SIZES
    if fields.get("expert_gating_func") is None and not is_flash:
        raise ValueError(
            "it lacks the field deepseek2.expert_gating_func: its router is DeepSeek V2's, which is not supported"
        )
    if fields.get("expert_group_count") is None and fields.get("expert_count") == _V3["n_routed_experts"]:
        logger.warning(
            "warning: the GGUF file lacks the field deepseek2.expert_group_count: if it is a DeepSeek V3, R1 or V3.1, some "
            "rows go to other experts than the model means, as in llama.cpp; newer files of the model have the field"
        )


def _read_gguf(fields: Fields, hf: Json) -> Json:
    _check_router(fields)
    rotated, size = fields.size("rope.dimension_count"), hf["head_dim"]
    is_compressed = _of_queries(fields) == "attn_q_b"
    n_dense = fields.count("leading_dense_block_count")
    found: Json = {
        **rms_eps(fields, hf), **experts(fields, "n_routed_experts", n_dense), "head_dim": None,
        "q_lora_rank": fields.size("attention.q_lora_rank") if is_compressed else None,
        "kv_lora_rank": fields.size("attention.kv_lora_rank"), "qk_rope_head_dim": rotated, "qk_nope_head_dim": size - rotated,
        "v_head_dim": fields.size("attention.value_length_mla", fields.get("attention.value_length")),
        "first_k_dense_replace": n_dense, "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "n_shared_experts": fields.count("expert_shared_count"), "n_group": fields.count("expert_group_count", 1) or 1,
        "topk_group": fields.count("expert_group_used_count", 1) or 1,
        "norm_topk_prob": bool(fields.get("expert_weights_norm", False)),
        "routed_scaling_factor": float(fields.get("expert_weights_scale", 0.0)) or 1.0,
    }  # fmt: skip
    if (scaling := hf.get("rope_scaling")) is None:
        return found
    # What multiplies cosines and sines is one, and the softmax has a factor that this tells.
    scale = float(np.float32(10.0 * float(fields.need("rope.scaling.yarn_log_multiplier"))))
    own = {key: value for key, value in scaling.items() if key != "attention_factor"}
    return {**found, "rope_scaling": {**own, "mscale": scale, "mscale_all_dim": scale}}


def _own_fields(config: ModelConfig) -> Json:
    latent = config.latent_attention
    if latent is None:
        raise ValueError("no latent attention")
    if not config.n_shared_expert:  # llama.cpp needs their number and their tensors
        raise CheckpointError("a GGUF file with latent attention has shared experts, and this model has none")
    rank, rotated, nope, value = (latent[key] for key in _SIZES)
    found: Json = {
        "attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank,
        "attention.key_length_mla": nope + rotated, "attention.value_length_mla": value, "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": latent.get("q_lora_rank"), "rope.dimension_count": rotated,
        "leading_dense_block_count": config.first_k_dense_replace or 0, "expert_shared_count": config.n_shared_expert,
        "expert_weights_scale": float(config.routed_scaling_factor), "expert_weights_norm": True, "expert_gating_func": 2,
        "expert_group_count": config.n_expert_groups or 1, "expert_group_used_count": config.n_topk_groups or 1,
    }  # fmt: skip
    scaling = config.rope_adjustments or {}
    if scaling.get("rope_type") != "yarn":
        return found
    betas = {
        f"rope.scaling.yarn_{beta}": float(scaling[beta]) for beta in ("beta_fast", "beta_slow") if beta in scaling
    }
    return {
        **found, **betas, "rope.scaling.type": "yarn", "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
    }  # fmt: skip


_GGUF_NAMES = names(
    {
        "attn.q_proj": "attn_q",
        "attn.q_a_proj": "attn_q_a",
        "attn.q_a_norm": "attn_q_a_norm",
        "attn.q_b_proj": "attn_q_b",
        "attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "attn.kv_a_norm": "attn_kv_a_norm",
        "attn.kv_b_proj": Held(("attn_k_b", "attn_v_b"), is_by_head=True, otherwise=Held(("attn_kv_b",))),
    }
)
_GGUF = Gguf("deepseek2", _read_gguf, _GGUF_NAMES, sized=_whole_heads, own=_own_fields)

_HEADS: Json = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_YARN: Json = {
    "type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
_V3: Json = {
    "model_type": "deepseek_v3", **_HEADS, "q_lora_rank": 1536, "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6,
    "rope_scaling": {**_YARN, "factor": 40}, "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4,
    "vocab_size": 129280,
}  # fmt: skip
_KIMI: Json = {
    **_V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": {**_YARN, "beta_fast": 1, "factor": 32}, "rope_theta": 50000, "routed_scaling_factor": 2.827,
    "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
_MOONLIGHT: Json = {
    **_V3, "q_lora_rank": None, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
    "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 50000, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
_FLASH: Json = {
    "model_type": "glm4_moe_lite", **_HEADS, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "hidden_size": 2048, "intermediate_size": 10240, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1, "vocab_size": 154880,
}  # fmt: skip
_FLASH_SIZES = {(n, 154880) for n in (47, 48)}  # blocks, with or without that for a further token, and tokens
_LONGER: Json = {**_KIMI, "max_position_embeddings": 262144, "rope_scaling": {**_KIMI["rope_scaling"], "factor": 64}}
_OF_V3 = {f"deepseek-ai/DeepSeek-{name}": _V3 for name in ("V3", "V3-0324", "R1", "R1-0528", "V3.1")}
_ALL: dict[str, Any] = {"names": lambda _: _NAMES}

FAMILIES = (
    Family(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", _read_lite, _write_lite, **_ALL,
        published={"zai-org/GLM-4.7-Flash": _FLASH},
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", _read, _write, gguf=_GGUF, **_ALL,
        published={**_OF_V3, "moonshotai/Moonlight-16B-A3B": _MOONLIGHT},
    ),
    Family(
        "kimi_k2", "DeepseekV3ForCausalLM", _read, None, **_ALL,
        published={"moonshotai/Kimi-K2-Instruct": _KIMI, "moonshotai/Kimi-K2-Instruct-0905": _LONGER},
    ),
    Family("deepseek_v32", "DeepseekV32ForCausalLM", _read_sparse, None, **_ALL),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", _read_sparse, None, **_ALL),
)  # fmt: skip
