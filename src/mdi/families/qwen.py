"""Qwen 2 and 2.5, Qwen 3, and Qwen 3 with experts."""

from __future__ import annotations

from typing import Any

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, said, words
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf, experts, rms_eps
from mdi.families.names import EXPERTS, LLAMA, LLAMA_BLOCK, LLAMA_ENDS, QK_NORMS, Names
from mdi.model.plain import ModelConfig


def _read(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), mlp_bias=(False,), hidden_act=SILU, use_sliding_window=(False,))
    return {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"]}


def _read_qwen2(hf: Json) -> Json:
    return {**_read(hf), "attn_bias": True}


def _read_qwen3(hf: Json) -> Json:
    return {**_read(hf), "norm_qk": True}


def _read_moe(hf: Json) -> Json:
    # litgpt's router weighs the chosen experts only, which is norm_topk_prob; transformers' default is without
    if hf.get("norm_topk_prob") is not True:
        raise ValueError("norm_topk_prob is not true, which is not supported")
    refuse(hf, decoder_sparse_step=(1,), mlp_only_layers=([],))
    if "num_local_experts" in hf:  # as transformers 5 calls it
        hf = {"num_experts": hf["num_local_experts"], **hf}
    return {**_read_qwen3(hf), "mlp_class_name": "LLaMAMoE", **said(hf, _EXPERTS)}


def _write_moe(config: ModelConfig) -> Json:
    return {**words(config, _EXPERTS), "norm_topk_prob": True}


def _read_gguf_moe(fields: Fields, hf: Json) -> Json:
    own = {"moe_intermediate_size": fields.size("expert_feed_forward_length"), "norm_topk_prob": True}
    return {**rms_eps(fields, hf), **experts(fields, "num_experts"), **own}


_EXPERTS = {
    "num_experts_per_tok": "n_expert_per_token", "num_experts": "n_expert", "moe_intermediate_size": "moe_intermediate_size",
}  # fmt: skip
_QWEN3 = Names({**LLAMA_BLOCK, **QK_NORMS}, LLAMA_ENDS)
_MOE = Names({**LLAMA_BLOCK, **QK_NORMS, **EXPERTS}, LLAMA_ENDS)


def _published(
    n_layer: int, hidden_size: int, n_head: int, n_kv_heads: int, intermediate_size: int, **other: Any
) -> Json:
    return {
        "model_type": "qwen2", "num_hidden_layers": n_layer, "hidden_size": hidden_size, "num_attention_heads": n_head,
        "num_key_value_heads": n_kv_heads, "intermediate_size": intermediate_size, "rope_theta": 1000000.0, **other,
    }  # fmt: skip


_PUBLISHED = {
    "Qwen/Qwen2.5-3B": _published(
        36, 2048, 16, 2, 11008, max_position_embeddings=32768, rms_norm_eps=1e-6, vocab_size=151936
    ),
    "Qwen/Qwen2.5-32B": _published(
        64, 5120, 40, 8, 27648, max_position_embeddings=131072, rms_norm_eps=1e-5, vocab_size=152064
    ),
}

FAMILIES = (
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _read_qwen2,
        words,
        lambda _: LLAMA,
        gguf=Gguf("qwen2", rms_eps),
        published=_PUBLISHED,
    ),
    Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, words, lambda _: _QWEN3, gguf=Gguf("qwen3", rms_eps)),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", _read_moe, _write_moe, lambda _: _MOE, gguf=Gguf("qwen3moe", _read_gguf_moe)
    ),
)
