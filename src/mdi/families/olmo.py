"""OLMo, whose norms have no weights, and OLMo 2, whose norms are behind attention and MLP."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, words
from mdi.families.family import Family
from mdi.families.names import ATTENTION, GATED_MLP, LLAMA, LLAMA_ENDS, NORMS_BEHIND, QK_NORMS, Names


def _read_olmo(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), hidden_act=SILU, clip_qkv=())
    return {**LLAMA_LIKE, "norm_class_name": "LayerNorm", "norm_eps": 1e-5, "norm_has_weight": False}


def _read_olmo2(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), mlp_bias=(False,), hidden_act=SILU)
    own = {"norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True}
    return {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "norm_qk": True, "norm_qk_type": "olmo2", **own}


_OLMO2 = Names({**ATTENTION, **GATED_MLP, **QK_NORMS, **NORMS_BEHIND}, LLAMA_ENDS)

FAMILIES = (
    Family("olmo", "OlmoForCausalLM", _read_olmo, words, lambda _: LLAMA, name_word="OLMo"),
    Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, words, lambda _: _OLMO2, name_word="OLMo"),
)
