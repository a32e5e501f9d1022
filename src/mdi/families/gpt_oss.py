"""gpt-oss."""

from __future__ import annotations

from typing import Any

from mdi.families.config_json import LLAMA_LIKE, Json, layer_types, refuse, said, windows, words
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf, experts, names, rms_eps
from mdi.families.names import ATTENTION, LLAMA_ENDS, NORMS_BEFORE, Held, Names
from mdi.model.plain import ModelConfig

_WORDS = {
    "num_experts_per_tok": "n_expert_per_token", "num_local_experts": "n_expert", "sliding_window": "sliding_window_size",
    "swiglu_limit": "glu_limit",
}  # fmt: skip


def _read(hf: Json) -> Json:
    refuse(hf, attention_bias=(True,), hidden_act=("silu",), swiglu_alpha=(1.702,))
    return {
        **LLAMA_LIKE,
        "bias": True, "norm_eps": hf["rms_norm_eps"], "mlp_class_name": "LLaMAMoE", "router_bias": True,
        "attention_sinks": True, **said(hf, _WORDS), "sliding_window_indices": windows(hf, 2),
    }  # fmt: skip


def _write(config: ModelConfig) -> Json:
    return {**words(config, _WORDS), "layer_types": layer_types(config), "attention_bias": True}


def _experts(ours: str, module: str, half: int | None) -> dict[str, Any]:
    """Stacked in one tensor, with their inputs in rows; in MXFP4 matrices of their own, with their outputs in rows."""
    path = f"mlp.experts.{module}"
    alone = [Held((f"mlp.experts.{{i}}.{module}.{ending}",), half, True) for ending in ("weight", "bias")]
    return {
        f"{ours}.weight": Held((path,), half, True, is_stacked=True, is_transposed=True, otherwise=alone[0]),
        f"{ours}.bias": Held((f"{path}_bias",), half, True, is_stacked=True, otherwise=alone[1]),
    }


_NAMES = Names(
    {
        **NORMS_BEFORE,
        **ATTENTION,
        "attn": "self_attn",  # which has sinks
        "mlp.gate": "mlp.router",
        **_experts("mlp.experts.{i}.fc_1", "gate_up_proj", 0),
        **_experts("mlp.experts.{i}.fc_2", "gate_up_proj", 1),
        **_experts("mlp.experts.{i}.proj", "down_proj", None),
    },
    LLAMA_ENDS,
)


def _read_gguf(fields: Fields, hf: Json) -> Json:
    own: Json = {**experts(fields, "num_local_experts"), "sliding_window": fields.size("attention.sliding_window")}
    if (scaling := hf.get("rope_scaling")) is not None:  # the file cannot say it, and llama.cpp truncates
        own["rope_scaling"] = {**scaling, "truncate": False}
    return {**rms_eps(fields, hf), **own}


_GGUF = Gguf("gpt-oss", _read_gguf, names({"norm_2": "post_attention_norm"}))

_SIZES: Json = {
    "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
}  # fmt: skip
_PUBLISHED = {
    "openai/gpt-oss-20b": {**_SIZES, "num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": {**_SIZES, "num_hidden_layers": 36, "num_local_experts": 128},
}

FAMILIES = (
    Family(
        "gpt_oss", "GptOssForCausalLM", _read, _write, lambda _: _NAMES, defaults={"swiglu_limit": 7.0},
        gguf=_GGUF, published=_PUBLISHED,
    ),
)  # fmt: skip
