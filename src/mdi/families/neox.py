"""GPT-NeoX and Pythia."""

from __future__ import annotations

from mdi.families.config_json import TANH, Json, activation, refuse, rotated_share, whole, words
from mdi.families.family import Family
from mdi.families.names import NORMS_BEFORE, Names, fused_qkv
from mdi.model.plain import ModelConfig


def _read(hf: Json) -> Json:
    refuse(hf, hidden_act=("gelu", *TANH), attention_bias=(True,), num_key_value_heads=(hf["num_attention_heads"],))
    parameters = hf.get("rope_parameters") or {}
    return {
        "norm_eps": hf["layer_norm_eps"],
        "parallel_residual": hf.get("use_parallel_residual", True),
        "rotary_percentage": rotated_share(hf, hf.get("rotary_pct", 0.25)),
        "rope_base": whole(parameters.get("rope_theta") or hf.get("rotary_emb_base") or hf.get("rope_theta") or 10000),
        "gelu_approximate": "tanh" if hf.get("hidden_act") in TANH else "none",
    }


def _write(config: ModelConfig) -> Json:
    own = {"rotary_pct": "rotary_percentage", "use_parallel_residual": "parallel_residual"}
    return {**words(config, own, eps="layer_norm_eps"), "hidden_act": activation(config)}


_NAMES = Names(
    {**NORMS_BEFORE, **fused_qkv("attention")},
    {"transformer.wte": "embed_in", "transformer.ln_f": "final_layer_norm"},
    head="embed_out",
    prefixes=("gpt_neox.",),
)

FAMILIES = (Family("gpt_neox", "GPTNeoXForCausalLM", _read, _write, lambda _: _NAMES),)
