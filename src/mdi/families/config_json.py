"""Words of config.json that many families share, in both directions. What a family can be set to but nothing here computes is
refused, not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdi.model.plain import ModelConfig
from mdi.spec.limits import LIMITS

Json = dict[str, Any]

LLAMA_LIKE: Json = {
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "parallel_residual": False, "bias": False,
    "rotary_percentage": 1.0,
}  # fmt: skip
NOT_ROTARY: Json = {"rotary_percentage": 0.0}
BEHIND_EACH_OTHER: Json = {**NOT_ROTARY, "parallel_residual": False, "bias": True}
SIGMOIDS: Json = {"mlp_class_name": "LLaMAMoE", "sigmoid_router": True, "norm_topk_prob": True}
TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
SILU = ("silu", "swish")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE_KINDS = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
# What transformers reads besides the factor and the length.
_ROPE_FIELDS = {
    "yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
}


def sizes(hf: Json) -> Json:
    """Settings that all families have, whatever litgpt's default is."""
    n_embd, n_head = hf["hidden_size"], hf["num_attention_heads"]
    found = {
        "n_layer": hf["num_hidden_layers"], "n_embd": n_embd, "n_head": n_head,
        "n_query_groups": hf.get("num_key_value_heads") or n_head,
        "intermediate_size": hf["intermediate_size"] if "intermediate_size" in hf else 4 * n_embd,
        **dict.fromkeys(("vocab_size", "padded_vocab_size"), hf["vocab_size"]), "block_size": hf["max_position_embeddings"],
    }  # fmt: skip
    # of latent attention, whose head_dim is what is rotated, if it is there
    own = (hf.get("qk_nope_head_dim") or 0) + (hf.get("qk_rope_head_dim") or 0)
    if head_size := own or hf.get("head_dim"):
        found["head_size"] = head_size
    if any(type(size) is not int or size < 1 for size in found.values()):
        raise ValueError(f"not all of its sizes are whole numbers: {found}")
    if found["n_layer"] > LIMITS["n_layer"]:  # lists of this length are made before all is checked
        raise ValueError(f"num_hidden_layers is {found['n_layer']}; at most {LIMITS['n_layer']} are supported")
    if "head_size" not in found:
        if n_embd % n_head:
            raise ValueError(f"it has no head_dim, and hidden_size {n_embd} is no multiple of the {n_head} heads")
        found["head_size"] = n_embd // n_head
    return found


def rope(hf: Json) -> Json:
    parameters = hf.get("rope_parameters") or {}  # transformers 5 has all in one place
    scaling = hf.get("rope_scaling") or parameters
    result: Json = {"rope_base": whole(parameters.get("rope_theta") or hf.get("rope_theta") or 10000)}
    kind, longest = rope_type(scaling), hf["max_position_embeddings"]
    original = hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or longest
    if kind == "linear":
        result["rope_condense_ratio"] = scaling["factor"]
    elif kind == "llama3":
        result["rope_adjustments"] = {key: scaling[key] for key in _LLAMA3} | {"original_max_seq_len": original}
    elif kind == "dynamic":  # the length that it was trained with is this one, whatever else the file says
        factor = scaling["factor"]
        result["rope_adjustments"] = {"rope_type": kind, "factor": factor, "max_position_embeddings": longest}
        result["block_size"] = int(factor * longest)
    elif kind in ("yarn", "longrope"):
        factor = scaling.get("factor") or longest / original
        fields = {key: scaling[key] for key in _ROPE_FIELDS[kind] if scaling.get(key) is not None}
        own = {"factor": factor, "original_max_position_embeddings": original}
        result["rope_adjustments"] = {"rope_type": kind, **own, **fields}
        result["block_size"] = max(longest, int(factor * original))  # many files name the length before
    return result


def rope_type(scaling: Json) -> str:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):  # as Phi 3 called it first
        kind = "longrope"
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope scaling of the type {kind!r} is not supported, only {', '.join(_ROPE_KINDS)}")
    return str(kind)


def whole(base: Any) -> Any:
    return int(base) if int(base) == base else base


def rotated_share(hf: Json, default: float) -> Any:
    """The share of a head that is rotated."""
    found = (hf.get("rope_parameters") or {}).get("partial_rotary_factor") or hf.get("partial_rotary_factor")
    return found or default


def refuse(hf: Json, **allowed: Any) -> None:
    """Settings that nothing here computes, unless they are at the value at which they do nothing."""
    for key, values in allowed.items():
        if hf.get(key) is not None and hf[key] not in values:
            only = f", only {' or '.join(map(repr, values))} is supported" if values else ", which is not supported"
            raise ValueError(f"{key} is {hf[key]!r}{only}")


def windows(hf: Json, pattern: int) -> list[int]:
    """1 for a layer with a sliding window, 0 for one without: every `pattern`-th is without, if the file does not say."""
    layers: list[str] = hf.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(hf["num_hidden_layers"])
    ]
    if set(layers) - {"sliding_attention", "full_attention"} or len(layers) != hf["num_hidden_layers"]:
        raise ValueError("layer_types does not say sliding_attention or full_attention for each layer")
    return [int(layer == "sliding_attention") for layer in layers]


def layer_types(config: ModelConfig) -> list[str]:
    """The reverse of `windows`."""
    return ["sliding_attention" if is_near else "full_attention" for is_near in config.sliding_window_indices or ()]


def plain_mlp(hf: Json, default: str) -> Json:
    """Of MLPs with two layers."""
    kind = hf.get("activation_function", default)
    refuse(hf, activation_function=("relu", "gelu", *TANH))
    if kind == "relu":
        return {"mlp_class_name": "ReluMLP"}
    return {"gelu_approximate": "tanh" if kind in TANH else "none"}


def activation(config: ModelConfig) -> str:
    """The reverse of `plain_mlp`."""
    if config.mlp_class_name == "ReluMLP":
        return "relu"
    return "gelu_new" if config.gelu_approximate == "tanh" else "gelu"


def gelu(config: ModelConfig) -> str:
    return "gelu_pytorch_tanh" if config.gelu_approximate == "tanh" else "gelu"


def said(hf: Json, table: Mapping[str, str]) -> Json:
    """Settings that config.json has under other words, which `table` has before ours."""
    return {ours: hf[theirs] for theirs, ours in table.items()}


# What config.json of BLOOM, Falcon, GPT-2 and OPT calls otherwise, or lacks.
NOT_THERE = ("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act")


def words(
    config: ModelConfig, *tables: Mapping[str, str], eps: str = "rms_norm_eps", lacks: tuple[str, ...] = ()
) -> Json:
    """What most families' config.json has, without what it `lacks`; the reverse of `sizes`, `rope` and, of tables, `said`.

    Args:
        eps: what it calls that of the norms.
    """
    found = {
        "num_hidden_layers": config.n_layer, "hidden_size": config.n_embd, "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_query_groups, "head_dim": config.head_size,
        "intermediate_size": config.intermediate_size, "vocab_size": config.padded_vocab_size,
        "max_position_embeddings": config.block_size, "rope_theta": config.rope_base, "hidden_act": "silu",
        eps: config.norm_eps, **_rope_words(config),
    }  # fmt: skip
    own = {theirs: getattr(config, ours) for table in tables for theirs, ours in table.items()}
    return {**{key: value for key, value in found.items() if key not in lacks}, **own}


def _rope_words(config: ModelConfig) -> Json:
    scaling = config.rope_adjustments
    if scaling and "rope_type" in scaling:
        longest = scaling.get("max_position_embeddings") if scaling["rope_type"] == "dynamic" else None
        return {"rope_scaling": scaling, **({"max_position_embeddings": longest} if longest else {})}
    if scaling and "low_freq_factor" in scaling:
        own = {key: scaling[key] for key in _LLAMA3} | {
            "original_max_position_embeddings": scaling["original_max_seq_len"]
        }
        return {"rope_scaling": {"rope_type": "llama3", **own}}
    factor = scaling["factor"] if scaling else config.rope_condense_ratio
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}
