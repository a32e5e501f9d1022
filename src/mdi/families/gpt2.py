"""GPT-2, whose matrices have the outputs in their columns."""

from __future__ import annotations

from mdi.families.config_json import BEHIND_EACH_OTHER, NOT_THERE, Json, activation, plain_mlp, refuse, words
from mdi.families.family import Family
from mdi.families.gguf import FUSED, Gguf, layer_eps, names
from mdi.families.names import Held, Names
from mdi.model.plain import ModelConfig

_RENAMED = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
}  # fmt: skip
_WORDS = {
    "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "n_positions": "block_size", "n_inner": "intermediate_size",
}  # fmt: skip
_DEFAULTS: Json = {"max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5}


def _read(hf: Json) -> Json:
    refuse(hf, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    own = {"norm_eps": hf["layer_norm_epsilon"], "learned_positions": True}
    return {**BEHIND_EACH_OTHER, **own, **plain_mlp(hf, "gelu_new")}


def _write(config: ModelConfig) -> Json:
    found = words(config, _WORDS, eps="layer_norm_epsilon", lacks=NOT_THERE)
    return {**found, "activation_function": activation(config)}


def _columns(module: str) -> Held:
    return Held((module,), is_transposed=True)


_NAMES = Names(
    {
        "norm_1": "ln_1",
        "norm_2": "ln_2",
        "attn.qkv": _columns("attn.c_attn"),
        "attn.proj": _columns("attn.c_proj"),
        "mlp.fc": _columns("mlp.c_fc"),
        "mlp.proj": _columns("mlp.c_proj"),
    },
    {"transformer.wte": "wte", "transformer.wpe": "wpe", "transformer.ln_f": "ln_f"},
    prefixes=("transformer.", ""),
    blocks="h",
)


def _published(n_layer: int, n_embd: int, n_head: int) -> Json:
    return {"model_type": "gpt2", "n_layer": n_layer, "n_embd": n_embd, "n_head": n_head, "vocab_size": 50257}


_PUBLISHED = {
    "openai-community/gpt2": _published(12, 768, 12),
    "openai-community/gpt2-medium": _published(24, 1024, 16),
    "openai-community/gpt2-large": _published(36, 1280, 20),
    "openai-community/gpt2-xl": _published(48, 1600, 25),
}

FAMILIES = (
    Family(
        "gpt2", "GPT2LMHeadModel", _read, _write, lambda _: _NAMES, _RENAMED, _DEFAULTS,
        gguf=Gguf("gpt2", layer_eps, names(FUSED)), published=_PUBLISHED,
    ),
)  # fmt: skip
