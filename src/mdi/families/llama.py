"""Llama, Mistral and Mixtral, as transformers and llama.cpp have them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, said, words
from mdi.families.family import Family
from mdi.families.gguf import ROPE_FACTORS, Fields, Gguf, experts, names, rms_eps
from mdi.families.names import ATTENTION, LLAMA, LLAMA_ENDS, MIXTRAL_EXPERTS, NORMS_BEFORE, Held, Names
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

# Mistral's files are Llama's as well: the format has no field for its window.
# llama.cpp rotates neighbours. A file whose queries and keys are in one matrix is not one of its converter's.
_GGUF_NAMES = names({"attn.qkv": Held(("attn_q", "attn_k", "attn_v"), is_paired=True)})


def _read_gguf(fields: Fields, hf: Json) -> Json:
    own = {**rms_eps(fields, hf), "hidden_act": "silu"}
    if ROPE_FACTORS not in fields.shapes:
        return own
    factors = fields.numbers(ROPE_FACTORS)
    if len(factors) != hf["head_dim"] // 2:
        raise ValueError(f"{ROPE_FACTORS} has {len(factors)} numbers for heads of {hf['head_dim']}")
    return {**own, "rope_scaling": llama3_scaling(factors, hf["rope_theta"])}


def _read_gguf_experts(fields: Fields, hf: Json) -> Json:
    return {**_read_gguf(fields, hf), **experts(fields, "num_local_experts")}


def _has_experts(fields: Fields) -> bool:
    return bool(fields.get("expert_count"))


def llama3_scaling(factors: np.ndarray, theta: float) -> Json | None:
    """The settings of Llama 3.1's scaling that give these factors, one for each frequency (head_size / 2); None: none.

    The files have only the factors. Between the two bounds a factor's inverse is a straight line over the frequency, from which
    the bounds follow. With less than two frequencies there, every bound that separates the others will do.

    Raises:
        ValueError: they are not of that kind.
    """
    factors = factors.astype(np.float64)
    frequencies = theta ** (-np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    if (factors == 1).all():
        return None
    blend = (1 / factors - 1 / factor) / max(1 - 1 / factor, 1e-9)
    between = (blend > 1e-4) & (blend < 1 - 1e-4)
    low, high = 1.0, 4.0  # as in all that were published
    if between.sum() >= 2:
        slope, intercept = np.polyfit(frequencies[between], blend[between], 1)
        high = round(float(low - low / intercept), 2)
        original = 2 * math.pi * float(slope) * (high - low)
    elif between.any():
        original = 2 * math.pi * float(((low + (high - low) * blend[between]) / frequencies[between])[0])
    else:
        bounds = frequencies[blend >= 0.5].min(initial=1.0) * frequencies[blend < 0.5].max(initial=0.0)
        original = 2 * math.pi * math.sqrt(low * high / max(float(bounds), 1e-18))
    smooth = np.clip((round(original) * frequencies / (2 * math.pi) - low) / max(high - low, 1e-9), 0, 1)
    if factor <= 1 or not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=2e-3):
        raise ValueError(f"{ROPE_FACTORS} scales in a way that is not supported")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": round(original),
    }  # fmt: skip


_GGUF = Gguf("llama", _read_gguf, _GGUF_NAMES, is_one=lambda fields: not _has_experts(fields))
_GGUF_MIXTRAL = Gguf("llama", _read_gguf_experts, _GGUF_NAMES, is_one=_has_experts)


def _published(
    n_layer: int, hidden_size: int, n_kv_heads: int, intermediate_size: int, length: int, **other: Any
) -> Json:
    return {
        "model_type": "llama", "num_hidden_layers": n_layer, "hidden_size": hidden_size, "num_key_value_heads": n_kv_heads,
        "intermediate_size": intermediate_size, "max_position_embeddings": length, "num_attention_heads": 32,
        "rms_norm_eps": 1e-5, "vocab_size": 32000, **other,
    }  # fmt: skip


_LLAMA_3_1: Json = {
    "vocab_size": 128256, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_PUBLISHED = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _published(22, 2048, 4, 5632, 2048),
    "meta-llama/Llama-2-7b-hf": _published(32, 4096, 32, 11008, 4096),
    "meta-llama/Llama-3.1-8B": _published(32, 4096, 8, 14336, 131072, **_LLAMA_3_1),
    "meta-llama/Llama-3.1-70B": _published(80, 8192, 8, 28672, 131072, num_attention_heads=64, **_LLAMA_3_1),
}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", _read_llama, words, lambda _: LLAMA, gguf=_GGUF, published=_PUBLISHED),
    Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral, lambda _: LLAMA),
    Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, lambda _: _MIXTRAL, gguf=_GGUF_MIXTRAL),
)
