"""MiniMax M2."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SIGMOIDS, SILU, Json, refuse, rotated_share, words
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf, check_sigmoid, experts, partial_rotary, rms_eps
from mdi.families.names import ATTENTION, LLAMA_ENDS, MIXTRAL_EXPERTS, NORMS_BEFORE, QK_NORMS, Names
from mdi.model.plain import ModelConfig


def _read(hf: Json) -> Json:
    refuse(hf, scoring_func=("sigmoid",), use_routing_bias=(True,), use_qk_norm=(True,), qk_norm_type=("per_layer",))
    refuse(hf, hidden_act=SILU, shared_intermediate_size=(0,), sliding_window=())
    if set(hf.get("attn_type_list") or [1]) != {1}:
        raise ValueError("attn_type_list has other attention than full one, which is not supported")
    rotated = hf["rotary_dim"] / hf["head_dim"] if "rotary_dim" in hf else 1.0  # as released, and as written again
    return {
        **LLAMA_LIKE,
        **SIGMOIDS,
        "norm_eps": hf["rms_norm_eps"],
        "norm_qk": True,
        "norm_qk_type": "olmo2",
        "rotary_percentage": rotated_share(hf, rotated),
        "n_expert": hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"],
        "n_expert_per_token": hf["num_experts_per_tok"],
    }


def _write(config: ModelConfig) -> Json:
    experts = {"num_experts_per_tok": config.n_expert_per_token, "num_local_experts": config.n_expert}
    own = {"rotary_dim": config.rope_n_elem, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    return {**words(config), **experts, **own, "qk_norm_type": "per_layer"}


_CORRECTION = {"mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias"}
_NAMES = Names({**NORMS_BEFORE, **ATTENTION, **QK_NORMS, **MIXTRAL_EXPERTS, **_CORRECTION}, LLAMA_ENDS)


def _read_gguf(fields: Fields, hf: Json) -> Json:
    check_sigmoid(fields)
    width = fields.size("expert_feed_forward_length", fields.size("feed_forward_length"))
    own = {**experts(fields, "num_local_experts"), "intermediate_size": width}
    return {**rms_eps(fields, hf), **partial_rotary(fields, hf), **own}


_PUBLISHED: dict[str, Json] = {
    "MiniMaxAI/MiniMax-M2": {
        "model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "num_local_experts": 256, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64,
        "vocab_size": 200064,
    },
}  # fmt: skip

FAMILIES = (
    Family(
        "minimax_m2", "MiniMaxM2ForCausalLM", _read, _write, lambda _: _NAMES, gguf=Gguf("minimax-m2", _read_gguf),
        published=_PUBLISHED,
    ),
)  # fmt: skip
