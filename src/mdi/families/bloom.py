"""BLOOM."""

from __future__ import annotations

from mdi.families.config_json import BEHIND_EACH_OTHER, NOT_THERE, Json, refuse, words
from mdi.families.family import Family
from mdi.families.gguf import FUSED, Gguf, layer_eps, names
from mdi.families.names import NORMS_BEFORE, Names, fused_qkv
from mdi.model.plain import ModelConfig

_RENAMED = {
    "n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "seq_length": "max_position_embeddings",
}  # fmt: skip
_DEFAULTS: Json = {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5}  # any length would do


def _read(hf: Json) -> Json:
    refuse(hf, apply_residual_connection_post_layernorm=(False,))
    own = {"gelu_approximate": "tanh", "alibi": "bloom", "embedding_norm": True}
    return {**BEHIND_EACH_OTHER, "norm_eps": hf["layer_norm_epsilon"], **own}


def _write(config: ModelConfig) -> Json:
    own = {"n_layer": "n_layer", "n_head": "n_head", "seq_length": "block_size"}
    return words(config, own, eps="layer_norm_epsilon", lacks=NOT_THERE)


_NAMES = Names(
    {**NORMS_BEFORE, **fused_qkv("self_attention")},
    {
        "transformer.wte": "word_embeddings",
        "transformer.wte_norm": "word_embeddings_layernorm",
        "transformer.ln_f": "ln_f",
    },
    prefixes=("transformer.", ""),
    blocks="h",
)


def _published(n_layer: int, n_embed: int, n_head: int) -> Json:
    return {"model_type": "bloom", "n_layer": n_layer, "n_embed": n_embed, "n_head": n_head, "vocab_size": 250880}


_PUBLISHED = {
    "bigscience/bloom-560m": _published(24, 1024, 16),
    "bigscience/bloom-1b1": _published(24, 1536, 16),
    "bigscience/bloom-1b7": _published(24, 2048, 16),
    "bigscience/bloom-3b": _published(30, 2560, 32),
    "bigscience/bloom-7b1": _published(30, 4096, 32),
    "bigscience/bloom": _published(70, 14336, 112),  # 176 billion
}

FAMILIES = (
    Family(
        "bloom", "BloomForCausalLM", _read, _write, lambda _: _NAMES, _RENAMED, _DEFAULTS,
        gguf=Gguf("bloom", layer_eps, names(FUSED)), published=_PUBLISHED,
    ),
)  # fmt: skip
