"""Llama, Mistral and Mixtral, as transformers has them."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, words
from mdi.families.family import Family
from mdi.families.names import ATTENTION, LLAMA, LLAMA_ENDS, MIXTRAL_EXPERTS, NORMS_BEFORE, Names
from mdi.spec.model import ModelConfig


def _read_llama(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), mlp_bias=(False,), hidden_act=SILU)
    return {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"]}


def _read_mistral(hf: Json) -> Json:
    window = hf.get("sliding_window")
    return {**_read_llama(hf), **({"sliding_window_size": window} if window else {})}


def _read_mixtral(hf: Json) -> Json:
    experts = {"n_expert": hf["num_local_experts"], "n_expert_per_token": hf["num_experts_per_tok"]}
    return {**_read_mistral(hf), "mlp_class_name": "LLaMAMoE", **experts}


def _write_mistral(config: ModelConfig) -> Json:
    return {**words(config), "sliding_window": config.sliding_window_size}


def _write_mixtral(config: ModelConfig) -> Json:
    return {
        **words(config),
        "num_experts_per_tok": config.n_expert_per_token,
        "num_local_experts": config.n_expert,
        "sliding_window": config.sliding_window_size,
    }


_MIXTRAL = Names({**NORMS_BEFORE, **ATTENTION, **MIXTRAL_EXPERTS}, LLAMA_ENDS)

FAMILIES = (
    Family("llama", "LlamaForCausalLM", _read_llama, words, lambda _: LLAMA),
    Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral, lambda _: LLAMA),
    Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, lambda _: _MIXTRAL),
)
