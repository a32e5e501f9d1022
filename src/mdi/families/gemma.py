"""Gemma, Gemma 2 and the language part of Gemma 3: one is added to the weights of their norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdi.families.config_json import LLAMA_LIKE, Json, gelu, layer_types, refuse, rope_type, said, whole, windows, words
from mdi.families.family import Family
from mdi.families.gguf import BLOCK, ENDS, Fields, Gguf, names, rms_eps
from mdi.families.names import LLAMA, LLAMA_BLOCK, LLAMA_ENDS, NORMS_BEHIND, QK_NORMS, Names, held
from mdi.model.plain import ModelConfig

_BEHIND: Json = {"post_attention_norm": True, "post_mlp_norm": True}
_NEAR = {"sliding_window": "sliding_window_size", "query_pre_attn_scalar": "attention_scores_scalar"}
_CAPS = {
    "attn_logit_softcapping": "attention_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def _read(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,))
    # the first Gemma's config.json says "gelu", and means its tanh form
    refuse(hf, hidden_act=("gelu", "gelu_pytorch_tanh"), hidden_activation=("gelu_pytorch_tanh",))
    own = {"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "scale_embeddings": True, "norm_unit_offset": True}
    return {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "head_size": hf["head_dim"], **own}


def _read_gemma2(hf: Json) -> Json:
    return {**_read(hf), **_BEHIND, **said(hf, _NEAR), **said(hf, _CAPS), "sliding_window_indices": windows(hf, 2)}


def _read_gemma3(hf: Json) -> Json:
    refuse(hf, attn_logit_softcapping=(), final_logit_softcapping=(), use_bidirectional_attention=(False,))
    indices = windows(hf, hf["sliding_window_pattern"])
    parameters = hf.get("rope_parameters") or {}
    far = parameters.get("full_attention") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf["rope_theta"]}
    near = parameters.get("sliding_attention") or {"rope_theta": hf["rope_local_base_freq"]}
    kind = rope_type(far)
    if kind not in ("default", "linear") or rope_type(near) != "default":
        raise ValueError(f"rope scaling of the type {kind!r} is not supported for this architecture")
    return {
        **_read(hf), **_BEHIND, **said(hf, _NEAR), "norm_qk": True, "sliding_window_indices": indices,
        "rope_base": whole(far["rope_theta"]), "rope_condense_ratio": 1,
        "rope_adjustments": {"factor": far["factor"]} if kind == "linear" else None,
        "rope_local_base_freq": whole(near["rope_theta"]), "rope_indices": list(indices),
    }  # fmt: skip


def _write(config: ModelConfig) -> Json:
    return {**words(config), "hidden_act": gelu(config)}


def _write_gemma2(config: ModelConfig) -> Json:
    return {**words(config, _NEAR, _CAPS), **_windows(config)}


def _write_gemma3(config: ModelConfig) -> Json:
    return {**words(config, _NEAR, {"rope_local_base_freq": "rope_local_base_freq"}), **_windows(config)}


def _windows(config: ModelConfig) -> Json:
    return {**dict.fromkeys(("hidden_act", "hidden_activation"), gelu(config)), "layer_types": layer_types(config)}


# The language part of a larger model leaves these out of the file.
_GEMMA3_DEFAULTS: Json = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA2 = Names({**LLAMA_BLOCK, "norm_2": "pre_feedforward_layernorm", **NORMS_BEHIND}, LLAMA_ENDS)
_GEMMA3 = Names({**_GEMMA2.block, **QK_NORMS}, LLAMA_ENDS)
_ALL: dict[str, Any] = {"name_word": "Gemma", "has_one_matrix": True}


def _plus_one(*modules: str, of: Json) -> Json:
    """Norms as llama.cpp keeps them: with the one that is added."""
    return {module: replace(held(of[module]), plus=1.0) for module in modules}


_NORMS = ("norm_1", "norm_2", "post_attention_norm", "post_mlp_norm", *QK_NORMS)
_GGUF_NAMES = names(_plus_one(*_NORMS, of=BLOCK), _plus_one("transformer.ln_f", of=ENDS))


def _query_scalar(hf: Json, largest: int) -> Json:
    """Not in the file; llama.cpp knows it by the number of blocks of the 27 B models."""
    is_largest = hf["num_hidden_layers"] == largest
    return {"query_pre_attn_scalar": hf["hidden_size"] // hf["num_attention_heads"] if is_largest else hf["head_dim"]}


def _read_gguf2(fields: Fields, hf: Json) -> Json:
    caps = {word: float(fields.get(word, cap)) for word, cap in zip(_CAPS, (50.0, 30.0), strict=True)}
    window = {"sliding_window": fields.size("attention.sliding_window", 4096)}
    return {**rms_eps(fields, hf), **_query_scalar(hf, 46), **caps, **window}


def _read_gguf3(fields: Fields, hf: Json) -> Json:
    return {
        **rms_eps(fields, hf), **_query_scalar(hf, 62), "sliding_window": fields.size("attention.sliding_window"),
        "rope_theta": float(fields.get("rope.freq_base", 1e6)),
        "rope_local_base_freq": float(fields.get("rope.freq_base_swa", 10000.0)),
    }  # fmt: skip


_GGUF = Gguf("gemma", rms_eps, _GGUF_NAMES)
_GGUF2 = Gguf("gemma2", _read_gguf2, _GGUF_NAMES)
_GGUF3 = Gguf("gemma3", _read_gguf3, _GGUF_NAMES)

FAMILIES = (
    Family("gemma", "GemmaForCausalLM", _read, _write, lambda _: LLAMA, gguf=_GGUF, **_ALL),
    Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2, lambda _: _GEMMA2, gguf=_GGUF2, **_ALL),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, lambda _: _GEMMA3, defaults=_GEMMA3_DEFAULTS,
        gguf=_GGUF3, **_ALL,
    ),
)  # fmt: skip
