"""Phi 1 to 2, and Phi 3 and 4."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SILU, TANH, Json, refuse, rotated_share, words
from mdi.families.family import Family
from mdi.families.gguf import FUSED, Fields, Gguf, layer_eps, names, partial_rotary, rms_eps
from mdi.families.names import LLAMA_BLOCK, LLAMA_ENDS, Held, Names
from mdi.model.plain import ModelConfig

_ROTATED = {"partial_rotary_factor": "rotary_percentage"}


def _read_phi(hf: Json) -> Json:
    refuse(hf, hidden_act=TANH, qk_layernorm=(False,))
    return {
        "norm_eps": hf["layer_norm_eps"], "rotary_percentage": rotated_share(hf, 0.5), "shared_attention_norm": True,
        "lm_head_bias": True, "gelu_approximate": "tanh",
    }  # fmt: skip


def _write_phi(config: ModelConfig) -> Json:
    return {**words(config, _ROTATED, eps="layer_norm_eps"), "hidden_act": "gelu_new"}


def _read_phi3(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), mlp_bias=(False,), hidden_act=SILU)
    window = hf.get("sliding_window")
    found = {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "rotary_percentage": rotated_share(hf, 1.0)}
    return {**found, **({"sliding_window_size": window} if window else {})}


def _write_phi3(config: ModelConfig) -> Json:
    return words(config, {"sliding_window": "sliding_window_size"}, _ROTATED)


_PHI = Names(
    {
        "norm_1": "input_layernorm",
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.proj": "self_attn.dense",
        "mlp.fc": "mlp.fc1",
        "mlp.proj": "mlp.fc2",
    },
    {"transformer.wte": "embed_tokens", "transformer.ln_f": "final_layernorm"},
)
_PHI3 = Names(
    {
        **LLAMA_BLOCK,
        "attn.qkv": "self_attn.qkv_proj",
        "mlp.fc_1": Held(("mlp.gate_up_proj",), half=0),
        "mlp.fc_2": Held(("mlp.gate_up_proj",), half=1),
    },
    LLAMA_ENDS,
)


def _read_gguf(fields: Fields, hf: Json) -> Json:
    return {**layer_eps(fields, hf, "layer_norm_eps"), **partial_rotary(fields, hf)}


def _read_gguf3(fields: Fields, hf: Json) -> Json:
    has_window = bool(fields.get("attention.sliding_window"))  # 0 is none
    window = {"sliding_window": fields.size("attention.sliding_window") if has_window else None}
    return {**rms_eps(fields, hf), **partial_rotary(fields, hf), **window}


_GGUF = Gguf("phi2", _read_gguf)
_HALVES = {f"mlp.fc_{half + 1}": Held(("ffn_up",), half=half) for half in (0, 1)}
_GGUF3 = Gguf("phi3", _read_gguf3, names({**FUSED, **_HALVES}))

FAMILIES = (
    Family("phi", "PhiForCausalLM", _read_phi, _write_phi, lambda _: _PHI, gguf=_GGUF),
    Family("phi3", "Phi3ForCausalLM", _read_phi3, _write_phi3, lambda _: _PHI3, gguf=_GGUF3),
)
