"""Llama, Mistral and Mixtral, as transformers has them."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, said, words
from mdi.families.family import Family
from mdi.families.names import ATTENTION, LLAMA, LLAMA_ENDS, MIXTRAL_EXPERTS, NORMS_BEFORE, Names
from mdi.model.plain import ModelConfig


def _read_llama(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), mlp_bias=(False,), hidden_act=SILU)
    return {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"]}


def _read_mistral(hf: Json) -> Json:
    window = hf.get("sliding_window")
    return {**_read_llama(hf), **({"sliding_window_size": window} if window else {})}


def _read_mixtral(hf: Json) -> Json:
    return {**_read_mistral(hf), "mlp_class_name": "LLaMAMoE", **said(hf, _EXPERTS)}


def _write_mistral(config: ModelConfig) -> Json:
    return words(config, _WINDOW)


def _write_mixtral(config: ModelConfig) -> Json:
    return words(config, _EXPERTS, _WINDOW)


_WINDOW = {"sliding_window": "sliding_window_size"}
_EXPERTS = {"num_experts_per_tok": "n_expert_per_token", "num_local_experts": "n_expert"}
_MIXTRAL = Names({**NORMS_BEFORE, **ATTENTION, **MIXTRAL_EXPERTS}, LLAMA_ENDS)

FAMILIES = (
    Family("llama", "LlamaForCausalLM", _read_llama, words, lambda _: LLAMA),
    Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral, lambda _: LLAMA),
    Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, lambda _: _MIXTRAL),
)
