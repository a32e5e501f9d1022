"""StableLM."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, rotated_share, words
from mdi.families.family import Family
from mdi.families.names import LLAMA
from mdi.model.plain import ModelConfig


def _read(hf: Json) -> Json:
    refuse(hf, use_qkv_bias=(False,), qk_layernorm=(False,), use_parallel_residual=(False,), hidden_act=SILU)
    own = {"norm_class_name": "LayerNorm", "norm_eps": hf["layer_norm_eps"]}
    return {**LLAMA_LIKE, **own, "rotary_percentage": rotated_share(hf, 0.25)}


def _write(config: ModelConfig) -> Json:
    return words(config, {"partial_rotary_factor": "rotary_percentage"}, eps="layer_norm_eps")


FAMILIES = (Family("stablelm", "StableLmForCausalLM", _read, _write, lambda _: LLAMA),)
