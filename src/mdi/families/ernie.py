"""ERNIE 4.5, the dense one: Llama whose pairs that are rotated lie beside each other."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, said, words
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf, rms_eps
from mdi.families.names import LLAMA
from mdi.model.plain import ModelConfig

_WORDS = {"use_bias": "bias"}


def _read(hf: Json) -> Json:
    refuse(hf, hidden_act=SILU)
    return {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "rope_interleave": True, **said(hf, _WORDS)}


def _write(config: ModelConfig) -> Json:
    return words(config, _WORDS)


def _read_gguf(fields: Fields, hf: Json) -> Json:
    return {**rms_eps(fields, hf), "use_bias": "blk.0.attn_q.bias" in fields.shapes}


_GGUF = Gguf("ernie4_5", _read_gguf)  # llama.cpp rotates neighbours, too
_DEFAULTS: Json = {"use_bias": False, "head_dim": 128, "rope_theta": 500_000}

FAMILIES = (Family("ernie4_5", "Ernie4_5ForCausalLM", _read, _write, lambda _: LLAMA, defaults=_DEFAULTS, gguf=_GGUF),)
