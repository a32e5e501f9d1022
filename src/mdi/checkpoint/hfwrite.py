"""Writes config.json for a litgpt Config, the reverse of hffamilies.py, and checks it by reading it back.

Pure: settings in, JSON out. What config.json cannot say is refused: what was written is read back and compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.hffamilies import Json
from mdi.errors import CheckpointError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "falcon": "FalconForCausalLM",
}
_EPS = {"layer_norm_eps": ("gpt_neox", "phi", "stablelm"), "layer_norm_epsilon": ("falcon",)}
# not what is computed
_NOT_COMPARED = ("name", "hf_config", "vocab_size", "padding_multiple")


def hf_config(config: Json) -> Json:
    """config.json of a model; its `model_type` says the family.

    Raises:
        CheckpointError: transformers has no model with these settings.
    """
    model_type = _model_type(config)
    eps = next((key for key, kinds in _EPS.items() if model_type in kinds), "rms_norm_eps")
    written = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "num_hidden_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": config["n_query_groups"],
        "head_dim": config["head_size"],
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["padded_vocab_size"],
        "max_position_embeddings": config["block_size"],
        "rope_theta": config["rope_base"],
        "hidden_act": "silu",
        eps: config["norm_eps"],
        **_rope(config),
        **_own(model_type, config),
    }
    again = derive_config(written, str(config["name"]), Path("config.json"))
    for key, value in config.items():
        if key not in _NOT_COMPARED and again[key] != value:
            raise CheckpointError(
                f"a Hugging Face {model_type} model has no such settings: {key} is {value!r} here, and would be "
                f"{again[key]!r} there"
            )
    return written


def _model_type(config: Json) -> str:
    if config["mlp_class_name"] == "GptNeoxMLP":
        return "phi" if config["lm_head_bias"] else "gpt_neox" if config["bias"] else "falcon"
    if config["norm_class_name"] == "LayerNorm":
        return "olmo" if "OLMo" in str(config["name"]) else "stablelm"
    if config["mlp_class_name"] == "GemmaMLP":
        return "gemma3_text" if config["norm_qk"] else "gemma2" if config["post_mlp_norm"] else "gemma"
    if config["mlp_class_name"] == "LLaMAMoE":
        return "qwen3_moe" if config["norm_qk"] else "mixtral"
    if config["norm_qk"]:
        return "olmo2" if config["norm_qk_type"] == "olmo2" else "qwen3"
    if config["attn_bias"]:
        return "qwen2"
    if config["rotary_percentage"] != 1:
        return "phi3"
    return "mistral" if config["sliding_window_size"] else "llama"


def _rope(config: Json) -> Json:
    scaling = config["rope_adjustments"]
    if scaling and "low_freq_factor" in scaling:
        llama3 = {key: scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        original = {"original_max_position_embeddings": scaling["original_max_seq_len"]}
        return {"rope_scaling": {"rope_type": "llama3", **llama3, **original}}
    factor = scaling["factor"] if scaling else config["rope_condense_ratio"]
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}


def _own(model_type: str, config: Json) -> dict[str, Any]:
    """Settings that only this family has."""
    window = config["sliding_window_size"]
    gelu = "gelu_pytorch_tanh" if config["gelu_approximate"] == "tanh" else "gelu"
    layers = [
        "sliding_attention" if is_near else "full_attention" for is_near in config["sliding_window_indices"] or ()
    ]
    near = {"sliding_window": window, "layer_types": layers, "query_pre_attn_scalar": config["attention_scores_scalar"]}
    experts = {"num_experts_per_tok": config["n_expert_per_token"]}
    partial = {"partial_rotary_factor": config["rotary_percentage"]}
    if model_type == "falcon":
        groups = config["n_query_groups"]
        is_new = groups > 1 or not config["shared_attention_norm"]
        new = {"new_decoder_architecture": is_new, "num_kv_heads": groups, "multi_query": not is_new}
        norms = {"num_ln_in_parallel_attn": 1 if config["shared_attention_norm"] else 2}
        return {**new, **(norms if is_new else {}), "activation": gelu, "ffn_hidden_size": config["intermediate_size"]}
    own: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": window},
        "phi3": {"sliding_window": window, **partial},
        "mixtral": {**experts, "num_local_experts": config["n_expert"], "sliding_window": window},
        "qwen3_moe": {
            **experts,
            "num_experts": config["n_expert"],
            "moe_intermediate_size": config["moe_intermediate_size"],
            "norm_topk_prob": True,
        },
        "gemma": {"hidden_act": gelu},
        "gemma2": {
            "hidden_act": gelu,
            "hidden_activation": gelu,
            **near,
            "attn_logit_softcapping": config["attention_logit_softcapping"],
            "final_logit_softcapping": config["final_logit_softcapping"],
        },
        "gemma3_text": {
            "hidden_act": gelu,
            "hidden_activation": gelu,
            **near,
            "rope_local_base_freq": config["rope_local_base_freq"],
        },
        "stablelm": partial,
        "gpt_neox": {
            "hidden_act": "gelu_new" if config["gelu_approximate"] == "tanh" else "gelu",
            "rotary_pct": config["rotary_percentage"],
            "use_parallel_residual": config["parallel_residual"],
        },
        "phi": {"hidden_act": "gelu_new", **partial},
    }
    return own.get(model_type, {})
