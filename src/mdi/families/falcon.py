"""Falcon: the first ones, and those of the new decoder with two norms in parallel."""

from __future__ import annotations

from mdi.families.config_json import NOT_ROTARY, NOT_THERE, Json, gelu, refuse, words
from mdi.families.family import Family
from mdi.families.names import NORMS_BEFORE, Names, fused_qkv
from mdi.model.plain import ModelConfig


def _read(hf: Json) -> Json:
    refuse(hf, activation=("gelu",), apply_residual_connection_post_layernorm=(False,))
    is_new = bool(hf.get("new_decoder_architecture"))
    is_parallel = is_new or bool(hf.get("parallel_attn", True))
    one_query_group = 1 if hf.get("multi_query", True) else hf["num_attention_heads"]
    positions = {**NOT_ROTARY, "alibi": "falcon"} if hf.get("alibi") else {"rotary_percentage": 1.0}
    return {
        "norm_eps": hf["layer_norm_epsilon"],
        "bias": bool(hf.get("bias", False)),
        "intermediate_size": hf.get("ffn_hidden_size") or 4 * hf["hidden_size"],
        "n_query_groups": (hf.get("num_kv_heads") or hf["num_attention_heads"]) if is_new else one_query_group,
        "parallel_residual": is_parallel,
        "shared_attention_norm": is_parallel and (not is_new or hf.get("num_ln_in_parallel_attn") == 1),
        **positions,
    }


def _write(config: ModelConfig) -> Json:
    groups, is_parallel = config.n_query_groups, config.parallel_residual
    is_new = is_parallel and (groups > 1 or not config.shared_attention_norm)
    norms = {"num_ln_in_parallel_attn": 1 if config.shared_attention_norm else 2}
    own = {"num_kv_heads": "n_query_groups", "bias": "bias", "ffn_hidden_size": "intermediate_size"}
    return {
        **words(config, own, eps="layer_norm_epsilon", lacks=NOT_THERE), **(norms if is_new else {}),
        "new_decoder_architecture": is_new, "multi_query": groups == 1, "parallel_attn": is_parallel,
        "alibi": config.alibi == "falcon", "activation": gelu(config),
    }  # fmt: skip


def _names(config: ModelConfig) -> Names:
    has_two_norms = config.parallel_residual and not config.shared_attention_norm
    norms = {"norm_1": "ln_attn", "norm_2": "ln_mlp"} if has_two_norms else NORMS_BEFORE
    ends = {"transformer.wte": "word_embeddings", "transformer.ln_f": "ln_f"}
    return Names({**norms, **fused_qkv("self_attention")}, ends, prefixes=("transformer.", ""), blocks="h")


_RW: Json = {
    "model_type": "falcon", "alibi": True, "bias": True, "layer_norm_epsilon": 1e-5, "multi_query": False,
    "new_decoder_architecture": False, "parallel_attn": False,
}  # fmt: skip
_PUBLISHED: dict[str, Json] = {
    "tiiuae/falcon-rw-1b": {
        **_RW, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24, "vocab_size": 50304
    },
    "tiiuae/falcon-rw-7b": {
        **_RW, "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 36, "vocab_size": 65024
    },
}  # fmt: skip
_DEFAULTS: Json = {"max_position_embeddings": 2048}

FAMILIES = (
    Family("falcon", "FalconForCausalLM", _read, _write, _names, defaults=_DEFAULTS, published=_PUBLISHED),
)  # fmt: skip
