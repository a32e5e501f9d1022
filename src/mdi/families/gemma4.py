"""The language part of Gemma 4: E2B, E4B, 26B-A4B and 31B."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mdi.families.config_json import LLAMA_LIKE, Json, layer_types, refuse, said, whole, windows, words
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf, names, rms_eps
from mdi.families.names import LLAMA_BLOCK, LLAMA_ENDS, NORMS_BEHIND, QK_NORMS, Held, Names
from mdi.model.plain import ModelConfig, spec_of

_WORDS = {
    "sliding_window": "sliding_window_size", "final_logit_softcapping": "final_logit_softcapping",
    "hidden_size_per_layer_input": "block_inputs", "num_kv_shared_layers": "n_shared_kv", "attention_k_eq_v": "far_k_eq_v",
    "enable_moe_block": "experts_beside_mlp",
}  # fmt: skip
_EXPERTS = {
    "num_experts": "n_expert", "top_k_experts": "n_expert_per_token", "moe_intermediate_size": "moe_intermediate_size",
}  # fmt: skip
_DEFAULTS: Json = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "sliding_window": 512, "final_logit_softcapping": None, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0,
    "attention_k_eq_v": False, "enable_moe_block": False,
}  # fmt: skip
_FAR_ROPE: Json = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
_NEAR_ROPE: Json = {"rope_type": "default", "rope_theta": 10_000.0}


def _read(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), hidden_activation=("gelu_pytorch_tanh",))
    refuse(hf, use_bidirectional_attention=("vision",))  # that of images
    refuse(
        hf,
        vocab_size_per_layer_input=(hf["vocab_size"],)
        if hf["hidden_size_per_layer_input"]
        else (hf.get("vocab_size_per_layer_input"),),
    )
    if hf.get("layer_types"):
        hf = {**hf, "layer_types": [*hf["layer_types"][:-1], "full_attention"]}
    indices = windows(hf, 6)
    indices[-1] = 0
    near, far = _ropes(hf)
    return {
        **LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh",
        "scale_embeddings": True, "post_attention_norm": True, "post_mlp_norm": True, "norm_qk": True, "v_norm": True,
        "attention_scores_scalar": 1.0, "block_scalars": True, **said(hf, _WORDS),
        **(said(hf, _EXPERTS) if hf["enable_moe_block"] else {}), **_far_heads(hf, indices),
        "shared_kv_mlp": 2 if hf.get("use_double_wide_mlp") and hf["num_kv_shared_layers"] else 1,
        "sliding_window_indices": indices, "rope_indices": indices, "rope_base": whole(far["rope_theta"]),
        "rope_local_base_freq": whole(near["rope_theta"]), "rope_condense_ratio": 1,
        "rope_adjustments": {key: far[key] for key in ("rope_type", "partial_rotary_factor")},
    }  # fmt: skip


def _ropes(hf: Json) -> tuple[Json, Json]:
    """Rotary positions of blocks with a window, and without."""
    given = hf.get("rope_parameters") or {}
    near, far = given.get("sliding_attention", _NEAR_ROPE), {**_FAR_ROPE, **given.get("full_attention", {})}
    kinds = near.get("rope_type", "default"), far["rope_type"]
    if kinds != ("default", "proportional") or far.get("factor", 1.0) != 1.0:
        raise ValueError(f"rope scaling of the types {kinds} is not supported for this architecture")
    return near, far


def _far_heads(hf: Json, indices: list[int]) -> Json:
    """Heads of blocks without a window; newer files say them of each such block."""
    n_groups = hf.get("num_global_key_value_heads") if hf["attention_k_eq_v"] else None
    own = {"head_dim": hf["global_head_dim"], **({"num_key_value_heads": n_groups} if n_groups else {})}
    if (of_layers := hf.get("per_layer_config")) is not None:
        found = {int(layer): one for layer, one in of_layers.items()}
        own = next(iter(found.values()), {})
        expected = {i: own for i, is_near in enumerate(indices) if not is_near}
        if found != expected or not set(own) <= {"head_dim", "num_key_value_heads"}:
            raise ValueError("per_layer_config does not say the same heads for all blocks without a window")
    n_groups = own.get("num_key_value_heads")
    return {
        "far_head_size": own.get("head_dim"), "far_query_groups": None if n_groups == hf["num_key_value_heads"] else n_groups,
    }  # fmt: skip


def _write(config: ModelConfig) -> Json:
    far = {**(config.rope_adjustments or {}), "rope_theta": config.rope_base}
    found = words(
        config,
        _WORDS,
        _EXPERTS if config.experts_beside_mlp else {},
        lacks=("rope_theta", "hidden_act", "rope_scaling"),
    )
    return {
        **found, "hidden_activation": "gelu_pytorch_tanh", "layer_types": layer_types(config),
        "rope_parameters": {
            "sliding_attention": {**_NEAR_ROPE, "rope_theta": config.rope_local_base_freq}, "full_attention": far,
        },
        "global_head_dim": config.far_head_size, "num_global_key_value_heads": config.far_query_groups,
        "use_double_wide_mlp": config.shared_kv_mlp == 2, "vocab_size_per_layer_input": config.padded_vocab_size,
    }  # fmt: skip


def _stacked(ours: str, module: str, half: int | None) -> dict[str, Any]:
    """One matrix of all experts."""
    return {f"mlp.experts.{{i}}.{ours}.weight": Held((f"experts.{module}",), half, is_stacked=True)}


_BLOCK: dict[str, Any] = {
    **LLAMA_BLOCK, "norm_2": "pre_feedforward_layernorm", **NORMS_BEHIND, **QK_NORMS,
    "scalar": "layer_scalar", "gated.fc": "per_layer_input_gate", "gated.proj": "per_layer_projection",
    "gated.norm": "post_per_layer_input_norm",
}  # fmt: skip
_BESIDE: dict[str, Any] = {
    "mlp.gate.weight": "router.proj.weight",
    "mlp.norm_gate.weight": "router.scale",
    "mlp.gate.expert_scales": "router.per_expert_scale",
    "mlp.norm_experts": "pre_feedforward_layernorm_2",
    "mlp.norm_post_experts": "post_feedforward_layernorm_2",
    "mlp.norm_post_shared": "post_feedforward_layernorm_1",
    **{
        f"mlp.shared_experts.{one.removeprefix('mlp.')}": where
        for one, where in LLAMA_BLOCK.items()
        if one.startswith("mlp.")
    },
    **_stacked("fc_1", "gate_up_proj", 0),
    **_stacked("fc_2", "gate_up_proj", 1),
    **_stacked("proj", "down_proj", None),
}
_ENDS: dict[str, Any] = {
    **LLAMA_ENDS,
    "transformer.inputs.table": "embed_tokens_per_layer",
    "transformer.inputs.proj": "per_layer_model_projection",
    "transformer.inputs.norm": "per_layer_projection_norm",
}


def _names(config: ModelConfig) -> Names:
    """Files may have keys and values of blocks that read those of another one."""
    readers = [str(i) for i, block in enumerate(spec_of(config).blocks) if block.cache_of is not None]
    unused = (
        re.compile(rf"layers\.({'|'.join(readers)})\.self_attn\.(k_proj|v_proj|k_norm)\.weight") if readers else None
    )
    return Names({**_BLOCK, **(_BESIDE if config.experts_beside_mlp else {})}, _ENDS, unused=unused)


def _stacked_gguf(ours: str, module: str, half: int | None) -> dict[str, Any]:
    return {f"mlp.experts.{{i}}.{ours}": Held((module,), half, is_stacked=True)}


_GGUF_NAMES = names(
    {
        "scalar": "layer_output_scale.weight",
        "gated.fc": "inp_gate",
        "gated.proj": "proj",
        "gated.norm": "post_norm",
        "mlp.norm_gate.weight": "ffn_gate_inp.scale",
        "mlp.gate.expert_scales": "ffn_down_exps.scale",
        "mlp.norm_experts": "pre_ffw_norm_2",
        "mlp.norm_post_experts": "post_ffw_norm_2",
        "mlp.norm_post_shared": "post_ffw_norm_1",
        **{
            f"mlp.shared_experts.{ours}": f"ffn_{theirs}"
            for ours, theirs in (("fc_1", "gate"), ("fc_2", "up"), ("proj", "down"))
        },
        **_stacked_gguf("fc_1", "ffn_gate_up_exps", 0),
        **_stacked_gguf("fc_2", "ffn_gate_up_exps", 1),
        **_stacked_gguf("proj", "ffn_down_exps", None),
    },
    {
        "transformer.inputs.table": "per_layer_token_embd",
        "transformer.inputs.proj": "per_layer_model_proj",
        "transformer.inputs.norm": "per_layer_proj_norm",
    },
)
_ROPE_FACTORS = "rope_freqs.weight"
_NO_TURN = 1e29  # a frequency over this is as good as zero


def _first_block(fields: Fields) -> Fields:
    """The first block has a window, and heads of another size than those without."""
    firsts = {name: _of_blocks(fields, name)[0] for name in ("attention.head_count_kv", "feed_forward_length")}
    sizes = {f"attention.{what}_length": fields.size(f"attention.{what}_length_swa") for what in ("key", "value")}
    return fields.replaced({**firsts, **sizes})


def _of_blocks(fields: Fields, name: str) -> list[int]:
    value, n = fields.need(name), fields.size("block_count")
    found = [int(one) for one in value] if isinstance(value, np.ndarray) else [fields.size(name)] * n
    if len(found) != n:
        raise ValueError(f"{fields.arch}.{name} has {len(found)} numbers for {n} blocks")
    return found


def _read_gguf(fields: Fields, hf: Json) -> Json:
    indices, n_groups = (
        _of_blocks(fields, "attention.sliding_window_pattern"),
        _of_blocks(fields, "attention.head_count_kv"),
    )
    widths, n_shared = _of_blocks(fields, "feed_forward_length"), fields.count("attention.shared_kv_layers")
    far = [i for i, is_near in enumerate(indices) if not is_near]
    is_wide = bool(n_shared) and widths[-1] == 2 * widths[0]
    first_wide = len(widths) - n_shared
    if widths != [widths[0] * (1 + (is_wide and i >= first_wide)) for i in range(len(widths))]:
        raise ValueError(f"{fields.arch}.feed_forward_length says {len(set(widths))} widths, which is not supported")
    if {n for n, is_near in zip(n_groups, indices, strict=True) if is_near} != {n_groups[0]}:
        raise ValueError(
            f"{fields.arch}.attention.head_count_kv differs among blocks with a window, which is not supported"
        )
    factors = fields.numbers(_ROPE_FACTORS) if _ROPE_FACTORS in fields.shapes else np.ones(1, np.float32)
    turned = factors < _NO_TURN
    if not (factors[turned] == 1).all() or not turned[: turned.sum()].all():
        raise ValueError(f"{_ROPE_FACTORS} scales in a way that is not supported")
    own = {"head_dim": fields.size("attention.key_length")}
    found: Json = {
        **rms_eps(fields, hf), "layer_types": ["sliding_attention" if one else "full_attention" for one in indices],
        "sliding_window": fields.size("attention.sliding_window"), "num_kv_shared_layers": n_shared,
        "hidden_size_per_layer_input": fields.count("embedding_length_per_layer_input"), "use_double_wide_mlp": is_wide,
        "final_logit_softcapping": float(fields.get("final_logit_softcapping", 30.0)),
        "attention_k_eq_v": bool(far) and f"blk.{far[0]}.attn_v.weight" not in fields.shapes,
        "per_layer_config": {str(i): {**own, "num_key_value_heads": n_groups[i]} for i in far},
        "rope_parameters": {
            "sliding_attention": {"rope_theta": float(fields.get("rope.freq_base_swa", 10000.0))},
            "full_attention": {
                "rope_theta": float(fields.get("rope.freq_base", 1e6)), "partial_rotary_factor": float(turned.mean()),
            },
        },
    }  # fmt: skip
    if not fields.get("expert_count"):
        return found
    names_of = {"num_experts": "expert_count", "top_k_experts": "expert_used_count"}
    width = {"enable_moe_block": True, "moe_intermediate_size": fields.size("expert_feed_forward_length")}
    return {**found, **width, **{word: fields.size(name) for word, name in names_of.items()}}


_LARGE: Json = {
    "model_type": "gemma4_text", "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
_SMALL: Json = {
    "model_type": "gemma4_text", "num_attention_heads": 8, "sliding_window": 512, "final_logit_softcapping": 30.0,
}  # fmt: skip
_PUBLISHED = {
    "google/gemma-4-E2B": {
        **_SMALL, "num_hidden_layers": 35, "hidden_size": 1536, "intermediate_size": 6144, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    },
    "google/gemma-4-E4B": {
        **_SMALL, "num_hidden_layers": 42, "hidden_size": 2560, "intermediate_size": 10240, "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    },
    "google/gemma-4-26B-A4B": {
        **_LARGE, "num_hidden_layers": 30, "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "google/gemma-4-31B": {
        **_LARGE, "num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    },
}  # fmt: skip
_GGUF = Gguf("gemma4", _read_gguf, _GGUF_NAMES, sized=_first_block)

FAMILIES = (
    Family(
        "gemma4_text", "Gemma4ForCausalLM", _read, _write, _names, defaults=_DEFAULTS, name_word="Gemma", has_one_matrix=True,
        gguf=_GGUF, published=_PUBLISHED,
    ),
)  # fmt: skip
