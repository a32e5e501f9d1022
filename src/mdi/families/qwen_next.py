"""Qwen 3.5 and Qwen3-Next: three of four blocks have a gated delta net in place of attention, whose heads have gates."""

from __future__ import annotations

from typing import Any

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, rotated_share, said, words
from mdi.families.family import Family
from mdi.families.gguf import PREDICTING_IN_GGUF, Fields, Gguf, names, partial_rotary, rms_eps
from mdi.families.names import (
    ATTENTION,
    EXPERTS,
    GATED,
    GATED_MLP,
    LLAMA_ENDS,
    NORMS_BEFORE,
    QK_NORMS,
    Held,
    Names,
    gated_qkv,
)
from mdi.model.plain import ModelConfig
from mdi.model.spec import DeltaNet

_SIZES = {
    "linear_num_value_heads": "n_head", "linear_num_key_heads": "n_groups", "linear_key_head_dim": "k_size",
    "linear_value_head_dim": "v_size", "linear_conv_kernel_dim": "n_taps",
}  # fmt: skip
_IN_TURN = "linear_value_heads_in_turn"
_PREDICTING_WORD = "mtp_num_hidden_layers"
_LINEAR, _FULL = "linear_attention", "full_attention"


def _read(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), hidden_act=SILU, attn_output_gate=(True,))
    return {
        **LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "norm_unit_offset": True, "norm_qk": True, "attention_gate": True,
        "rotary_percentage": rotated_share(hf, 0.25),
        "delta_net": {**said(hf, _SIZES), "blocks": _delta_blocks(hf), **_order(hf)},
    }  # fmt: skip


def _order(hf: Json) -> Json:
    """A GGUF file has the heads of values in another order, which no config.json says."""
    return {"is_in_turn": True} if hf.get(_IN_TURN) else {}


def _delta_blocks(hf: Json) -> list[int]:
    """1 for a block with a delta net. If the file does not say, every fourth is without."""
    n, interval = hf["num_hidden_layers"], hf.get("full_attention_interval", 4)
    kinds = hf.get("layer_types") or [_LINEAR if (i + 1) % interval else _FULL for i in range(n)]
    if set(kinds) - {_LINEAR, _FULL} or len(kinds) != n:
        raise ValueError(f"layer_types does not say {_LINEAR} or {_FULL} for each layer")
    return [int(kind == _LINEAR) for kind in kinds]


def _read_moe(hf: Json) -> Json:
    width, shared = hf["moe_intermediate_size"], hf["shared_expert_intermediate_size"]
    refuse(hf, norm_topk_prob=(True,), decoder_sparse_step=(1,), mlp_only_layers=([],))
    if not shared or shared % width:
        raise ValueError(f"a shared expert of {shared} columns beside experts of {width} is not supported")
    own = {"mlp_class_name": "LLaMAMoE", "n_shared_expert": shared // width, "shared_expert_gate": True}
    return {**_read(hf), **own, **said(hf, _WORDS)}


def _read_next(hf: Json) -> Json:
    if hf.get("norm_topk_prob") is not True:  # the router weighs the chosen experts only
        raise ValueError("norm_topk_prob is not true, which is not supported")
    return _read_moe(hf)


def _write(config: ModelConfig) -> Json:
    net = config.delta_net
    if net is None or net.get("is_in_turn"):
        raise ValueError("no delta nets, or heads in the order of GGUF files")
    sizes = {theirs: net[ours] for theirs, ours in _SIZES.items()}
    kinds = [_LINEAR if one else _FULL for one in net["blocks"]]
    return {**words(config, {"partial_rotary_factor": "rotary_percentage"}), **sizes, "layer_types": kinds}


def _write_moe(config: ModelConfig) -> Json:
    shared = (config.moe_intermediate_size or 0) * (config.n_shared_expert or 0)
    return {**_write(config), **words(config, _WORDS), "shared_expert_intermediate_size": shared}


def _write_next(config: ModelConfig) -> Json:
    return {**_write_moe(config), "norm_topk_prob": True}


_WORDS = {
    "num_experts_per_tok": "n_expert_per_token", "num_experts": "n_expert", "moe_intermediate_size": "moe_intermediate_size",
}  # fmt: skip

Heads = tuple[tuple[int, int, int, int], ...]


def _of_gates(of: DeltaNet) -> Heads:
    return ((of.n_head, 0, 1, 1),) * 2


def _queries_keys_values(of: DeltaNet) -> Heads:
    """Qwen3-Next has the rows of each head of keys together: query, key, values, and what gates these."""
    k, values, period = _sizes(of)
    return (of.n_groups, 0, k, period), (of.n_groups, k, k, period), (of.n_groups, 2 * k, values, period)


def _out_gates(of: DeltaNet) -> Heads:
    k, values, period = _sizes(of)
    return ((of.n_groups, 2 * k + values, values, period),)


def _gates_of_keys(of: DeltaNet) -> Heads:
    n = of.n_head // of.n_groups
    return (of.n_groups, 0, n, 2 * n), (of.n_groups, n, n, 2 * n)


def _sizes(of: DeltaNet) -> tuple[int, int, int]:
    """Rows of a key, of the values that it serves, and of all together."""
    values = of.n_head // of.n_groups * of.v_size
    return of.k_size, values, 2 * (of.k_size + values)


_BOTH: dict[str, Any] = {
    **NORMS_BEFORE,
    **gated_qkv(ATTENTION["attn.qkv"]),
    "attn.proj": ATTENTION["attn.proj"],
    **QK_NORMS,
    "delta.conv": "linear_attn.conv1d",
    "delta.dt_bias": "linear_attn.dt_bias",
    "delta.A_log": "linear_attn.A_log",
    "delta.norm": "linear_attn.norm",
    "delta.proj": "linear_attn.out_proj",
}
_APART: dict[str, Any] = {
    "delta.qkv": "linear_attn.in_proj_qkv",
    "delta.out_gate": "linear_attn.in_proj_z",
    "delta.gates": Held(("linear_attn.in_proj_b", "linear_attn.in_proj_a"), heads=_of_gates),
}
_BY_KEYS: dict[str, Any] = {
    "delta.qkv": Held(("linear_attn.in_proj_qkvz",) * 3, heads=_queries_keys_values),
    "delta.out_gate": Held(("linear_attn.in_proj_qkvz",), heads=_out_gates),
    "delta.gates": Held(("linear_attn.in_proj_ba",) * 2, heads=_gates_of_keys),
}
_SHARED = {f"mlp.shared_experts.{ours}": f"mlp.shared_expert.{theirs}" for ours, theirs in GATED.items()}
_MOE: dict[str, Any] = {**EXPERTS, **_SHARED, "mlp.shared_experts.gate": "mlp.shared_expert_gate"}


def _stacked(ours: str, module: str, half: int | None) -> dict[str, Any]:
    """Experts in one tensor; in some files they have one each."""
    alone = Held((f"mlp.experts.{{i}}.{GATED[ours]}.weight",))
    return {
        f"mlp.experts.{{i}}.{ours}.weight": Held((f"mlp.experts.{module}",), half, is_stacked=True, otherwise=alone)
    }


_STACKED = {
    **_stacked("fc_1", "gate_up_proj", 0),
    **_stacked("fc_2", "gate_up_proj", 1),
    **_stacked("proj", "down_proj", None),
}
_PREDICTING: dict[str, Any] = {
    "predicting_prefix": "mtp.",
    "predicting": {
        "mtp.proj": "fc", "mtp.norm_token": "pre_fc_norm_embedding", "mtp.norm_hidden": "pre_fc_norm_hidden",
        "mtp.norm": "norm", "mtp.wte": "embed_tokens",
    },
}  # fmt: skip
_QWEN35 = Names({**_BOTH, **_APART, **GATED_MLP}, LLAMA_ENDS, **_PREDICTING)
_QWEN35_MOE = Names({**_BOTH, **_APART, **_MOE, **_STACKED}, LLAMA_ENDS, **_PREDICTING)
_NEXT = Names({**_BOTH, **_BY_KEYS, **_MOE}, LLAMA_ENDS, **_PREDICTING)


def _read_gguf(fields: Fields, hf: Json) -> Json:
    n_head, n_groups, inner = (fields.size(f"ssm.{key}") for key in ("time_step_rank", "group_count", "inner_size"))
    sizes = [n_head, n_groups, fields.size("ssm.state_size"), inner // n_head, fields.size("ssm.conv_kernel")]
    kinds = [
        _FULL if f"blk.{i}.attn_output.weight" in fields.shapes else _LINEAR for i in range(hf["num_hidden_layers"])
    ]
    return {
        **rms_eps(fields, hf), **partial_rotary(fields, hf), **dict(zip(_SIZES, sizes, strict=True)), "hidden_act": "silu",
        "layer_types": kinds, _IN_TURN: n_head != n_groups,
    }  # fmt: skip


def _read_gguf_moe(fields: Fields, hf: Json) -> Json:
    own = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    widths = {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    return {**_read_gguf(fields, hf), **{word: fields.size(key) for word, key in (own | widths).items()}}


def _read_gguf_next(fields: Fields, hf: Json) -> Json:
    """Heads of values are in the order of config.json."""
    return {**_read_gguf_moe(fields, hf), _IN_TURN: False, "norm_topk_prob": True}


def _own_fields(config: ModelConfig) -> Json:
    net = config.delta_net
    blocks = list(net["blocks"]) if net is not None else []
    interval = blocks.index(0) + 1  # a file says this alone
    if net is None or blocks != [int((i + 1) % interval != 0) for i in range(config.n_layer)]:
        raise ValueError("no delta nets, or attention not in every so many blocks")
    n_pairs = config.rope_n_elem // 2
    return {
        "ssm.conv_kernel": net["n_taps"], "ssm.state_size": net["k_size"], "ssm.group_count": net["n_groups"],
        "ssm.time_step_rank": net["n_head"], "ssm.inner_size": net["n_head"] * net["v_size"],
        "full_attention_interval": interval,
        # Times, rows and columns of images; words have the same position in all three.
        "rope.dimension_sections": [-(-(n_pairs - i) // 3) for i in range(3)] + [0],
        "expert_shared_feed_forward_length": (config.moe_intermediate_size or 0) * (config.n_shared_expert or 0) or None,
    }  # fmt: skip


def _in_gguf(ours: str, module: str, half: int) -> dict[str, Any]:
    both = Held(("ffn_gate_up_exps",), half, is_stacked=True)
    return {f"mlp.experts.{{i}}.{ours}": Held((module,), is_stacked=True, otherwise=both)}


_IN_GGUF: dict[str, Any] = {
    "norm_1": Held(("attn_norm",), plus=1.0),
    "norm_2": Held(("post_attention_norm",), plus=1.0),
    **gated_qkv(("attn_q", "attn_k", "attn_v")),
    "attn.norm_q": Held(("attn_q_norm",), plus=1.0),
    "attn.norm_k": Held(("attn_k_norm",), plus=1.0),
    "delta.qkv": "attn_qkv",
    "delta.out_gate": "attn_gate",
    "delta.gates": Held(("ssm_beta", "ssm_alpha"), heads=_of_gates),
    "delta.conv": "ssm_conv1d",
    "delta.dt_bias": "ssm_dt.bias",
    "delta.A_log": Held(("ssm_a",), is_neg_exp=True),
    "delta.norm": "ssm_norm",
    "delta.proj": "ssm_out",
    "mlp.shared_experts.gate": "ffn_gate_inp_shexp",
    **_in_gguf("fc_1", "ffn_gate_exps", 0),
    **_in_gguf("fc_2", "ffn_up_exps", 1),
}
_ENDS_IN_GGUF = {"transformer.ln_f": Held(("output_norm",), plus=1.0)}
_PREDICTING_IN_GGUF = {
    ours: Held((theirs,), plus=1.0) if "norm" in ours else theirs for ours, theirs in PREDICTING_IN_GGUF.items()
}
_GGUF_NAMES = names(_IN_GGUF, _ENDS_IN_GGUF, _PREDICTING_IN_GGUF)
_NEXT_IN_GGUF = {**_IN_GGUF, "delta.gates": Held(("ssm_ba",) * 2, heads=_gates_of_keys)}
_NEXT_GGUF_NAMES = names(_NEXT_IN_GGUF, _ENDS_IN_GGUF, _PREDICTING_IN_GGUF)

_PUBLISHED_NEXT: Json = {
    "model_type": "qwen3_next", "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}  # fmt: skip
_35B: Json = {
    **_PUBLISHED_NEXT, "model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 40, "vocab_size": 248320,
}  # fmt: skip
_WIDER: Json = {
    "linear_num_value_heads": 64, "moe_intermediate_size": 1024, "num_attention_heads": 32,
    "shared_expert_intermediate_size": 1024,
}  # fmt: skip
_PUBLISHED_35 = {
    "Qwen/Qwen3.5-35B-A3B": _35B,
    "Qwen/Qwen3.5-122B-A10B": {**_35B, **_WIDER, "hidden_size": 3072, "num_hidden_layers": 48},
    "Qwen/Qwen3.5-397B-A17B": {
        **_35B, **_WIDER, "hidden_size": 4096, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 60,
    },
}  # fmt: skip

FAMILIES = (
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _read,
        _write,
        lambda _: _QWEN35,
        gguf=Gguf("qwen35", _read_gguf, _GGUF_NAMES, own=_own_fields),
        predicting_word=_PREDICTING_WORD,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _read_moe,
        _write_moe,
        lambda _: _QWEN35_MOE,
        gguf=Gguf("qwen35moe", _read_gguf_moe, _GGUF_NAMES, own=_own_fields),
        predicting_word=_PREDICTING_WORD,
        published=_PUBLISHED_35,
    ),
    Family(
        "qwen3_next", "Qwen3NextForCausalLM", _read_next, _write_next, lambda _: _NEXT,
        gguf=Gguf("qwen3next", _read_gguf_next, _NEXT_GGUF_NAMES, own=_own_fields), predicting_word=_PREDICTING_WORD,
        published={"Qwen/Qwen3-Next-80B-A3B-Instruct": _PUBLISHED_NEXT},
    ),
)  # fmt: skip
