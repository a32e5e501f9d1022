"""From a Hugging Face config.json to a ModelConfig: one derived for its architecture, or litgpt's own for a name.

Knows no weights. What an architecture can be set to but litgpt cannot do is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

from mdi.checkpoint.folder import model_name as model_folder_name
from mdi.checkpoint.litgpt_module import litgpt_module
from mdi.checkpoint.shapes import full_config
from mdi.errors import CheckpointError
from mdi.spec.model import ModelConfig
from mdi.spec.settings_file import parse_json

Json = dict[str, Any]

_ROPE_KINDS = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
_LLAMA_LIKE: Json = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "parallel_residual": False,
    "bias": False,
    "rotary_percentage": 1.0,
}
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
# What the architecture's own defaults say: the language part of a larger model leaves them out of the file.
_GEMMA3_DEFAULTS: Json = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_local_base_freq": 10_000,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def derive(hf: Json) -> Json:
    """litgpt's settings, without a name, for a model_type of `DERIVED`.

    Raises:
        KeyError: a field that the architecture needs is not there.
        TypeError, ValueError, AttributeError: one cannot be understood, or is set to what litgpt cannot do.
    """
    kind = hf["model_type"]
    hf = {_RENAMED.get(kind, {}).get(key, key): value for key, value in hf.items() if value is not None}
    hf = {**_DEFAULTS.get(kind, {}), **hf}
    return {**_sizes(hf), **_rope(hf), **DERIVED[kind](hf)}


def _sizes(hf: Json) -> Json:
    """Settings that all architectures have, whatever litgpt's default is."""
    n_embd, n_head = hf["hidden_size"], hf["num_attention_heads"]
    sizes = {
        "n_layer": hf["num_hidden_layers"],
        "n_embd": n_embd,
        "n_head": n_head,
        "n_query_groups": hf.get("num_key_value_heads") or n_head,
        "intermediate_size": hf["intermediate_size"] if "intermediate_size" in hf else 4 * n_embd,
        "vocab_size": hf["vocab_size"],
        "padded_vocab_size": hf["vocab_size"],
        "block_size": hf["max_position_embeddings"],
    }
    if hf.get("head_dim"):
        sizes["head_size"] = hf["head_dim"]
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        raise ValueError(f"not all of its sizes are whole numbers: {sizes}")
    if "head_size" not in sizes:
        if n_embd % n_head:
            raise ValueError(f"it has no head_dim, and hidden_size {n_embd} is no multiple of the {n_head} heads")
        sizes["head_size"] = n_embd // n_head
    return sizes


def _rope(hf: Json) -> Json:
    parameters = hf.get("rope_parameters") or {}  # transformers 5 has all in one place
    scaling = hf.get("rope_scaling") or parameters
    result: Json = {"rope_base": _whole(parameters.get("rope_theta") or hf.get("rope_theta") or 10000)}
    kind, longest = _rope_type(scaling), hf["max_position_embeddings"]
    original = hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or longest
    if kind == "linear":
        result["rope_condense_ratio"] = scaling["factor"]
    elif kind == "llama3":
        result["rope_adjustments"] = {
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_seq_len": original,
        }
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


# What transformers reads besides the factor and the length.
_ROPE_FIELDS = {
    "yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
}


def _rope_type(scaling: Json) -> str:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):  # as Phi 3 called it first
        kind = "longrope"
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope scaling of the type {kind!r} is not supported, only {', '.join(_ROPE_KINDS)}")
    return str(kind)


def _whole(base: Any) -> Any:
    return int(base) if int(base) == base else base


def _refuse(hf: Json, **allowed: Any) -> None:
    """Settings that litgpt does not have, unless they are at the value at which they do nothing."""
    for key, values in allowed.items():
        if hf.get(key) is not None and hf[key] not in values:
            only = f", only {' or '.join(map(repr, values))} is supported" if values else ", which is not supported"
            raise ValueError(f"{key} is {hf[key]!r}{only}")


def _llama(hf: Json) -> Json:
    _refuse(hf, attention_bias=(False,), mlp_bias=(False,), hidden_act=("silu", "swish"))
    return {**_LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"]}


def _mistral(hf: Json) -> Json:
    window = hf.get("sliding_window")
    return {**_llama(hf), **({"sliding_window_size": window} if window else {})}


def _mixtral(hf: Json) -> Json:
    experts = {"n_expert": hf["num_local_experts"], "n_expert_per_token": hf["num_experts_per_tok"]}
    return {**_mistral(hf), "mlp_class_name": "LLaMAMoE", **experts}


def _qwen2(hf: Json) -> Json:
    _refuse(hf, use_sliding_window=(False,))
    return {**_llama(hf), "attn_bias": True}


def _qwen3(hf: Json) -> Json:
    _refuse(hf, use_sliding_window=(False,))
    return {**_llama(hf), "norm_qk": True}


def _qwen3_moe(hf: Json) -> Json:
    # litgpt's router weighs the chosen experts only, which is norm_topk_prob; transformers' default is without
    if hf.get("norm_topk_prob") is not True:
        raise ValueError("norm_topk_prob is not true, which is not supported")
    _refuse(hf, decoder_sparse_step=(1,), mlp_only_layers=([],))
    return {
        **_qwen3(hf),
        "mlp_class_name": "LLaMAMoE",
        "moe_intermediate_size": hf["moe_intermediate_size"],
        "n_expert": hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],  # transformers 5 calls it so
        "n_expert_per_token": hf["num_experts_per_tok"],
    }


_SIGMOIDS: Json = {"mlp_class_name": "LLaMAMoE", "sigmoid_router": True, "norm_topk_prob": True}


def _glm4_moe(hf: Json) -> Json:
    _refuse(hf, n_group=(1,), topk_group=(1,), norm_topk_prob=(True,), hidden_act=("silu", "swish"))
    return {
        **_LLAMA_LIKE,
        **_SIGMOIDS,
        "norm_eps": hf["rms_norm_eps"],
        "attn_bias": bool(hf.get("attention_bias")),
        "norm_qk": bool(hf.get("use_qk_norm")),
        "rotary_percentage": _rotary(hf, 0.5),
        "first_k_dense_replace": hf["first_k_dense_replace"],
        "moe_intermediate_size": hf["moe_intermediate_size"],
        "n_expert": hf["n_routed_experts"],
        "n_expert_per_token": hf["num_experts_per_tok"],
        "n_shared_expert": hf["n_shared_experts"],
        "routed_scaling_factor": float(hf["routed_scaling_factor"]),
    }


def _minimax_m2(hf: Json) -> Json:
    _refuse(hf, scoring_func=("sigmoid",), use_routing_bias=(True,), use_qk_norm=(True,), qk_norm_type=("per_layer",))
    _refuse(hf, hidden_act=("silu", "swish"), shared_intermediate_size=(0,), sliding_window=())
    if set(hf.get("attn_type_list") or [1]) != {1}:
        raise ValueError("attn_type_list has other attention than full one, which is not supported")
    rotated = hf["rotary_dim"] / hf["head_dim"] if "rotary_dim" in hf else 1.0  # as released, and as written again
    return {
        **_LLAMA_LIKE,
        **_SIGMOIDS,
        "norm_eps": hf["rms_norm_eps"],
        "norm_qk": True,
        "norm_qk_type": "olmo2",
        "rotary_percentage": _rotary(hf, rotated),
        "n_expert": hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"],
        "n_expert_per_token": hf["num_experts_per_tok"],
    }


def _gpt_oss(hf: Json) -> Json:
    _refuse(hf, attention_bias=(True,), hidden_act=("silu",), swiglu_alpha=(1.702,))
    return {
        **_LLAMA_LIKE,
        "bias": True,
        "norm_eps": hf["rms_norm_eps"],
        "mlp_class_name": "LLaMAMoE",
        "n_expert": hf["num_local_experts"],
        "n_expert_per_token": hf["num_experts_per_tok"],
        "router_bias": True,
        "glu_limit": hf.get("swiglu_limit", 7.0),
        "attention_sinks": True,
        "sliding_window_size": hf["sliding_window"],
        "sliding_window_indices": _windows(hf, 2),
    }


def _gemma(hf: Json) -> Json:
    _refuse(hf, attention_bias=(False,))
    # the first Gemma's config.json says "gelu", and means its tanh form
    _refuse(hf, hidden_act=("gelu", "gelu_pytorch_tanh"), hidden_activation=("gelu_pytorch_tanh",))
    own = {"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "scale_embeddings": True}
    return {**_LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "head_size": hf["head_dim"], **own}


def _gemma2(hf: Json) -> Json:
    return {
        **_gemma(hf),
        "post_attention_norm": True,
        "post_mlp_norm": True,
        "attention_scores_scalar": hf["query_pre_attn_scalar"],
        "attention_logit_softcapping": hf["attn_logit_softcapping"],
        "final_logit_softcapping": hf["final_logit_softcapping"],
        "sliding_window_size": hf["sliding_window"],
        "sliding_window_indices": _windows(hf, 2),
    }


def _gemma3(hf: Json) -> Json:
    _refuse(hf, attn_logit_softcapping=(), final_logit_softcapping=(), use_bidirectional_attention=(False,))
    windows = _windows(hf, hf["sliding_window_pattern"])
    parameters = hf.get("rope_parameters") or {}
    far = parameters.get("full_attention") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf["rope_theta"]}
    near = parameters.get("sliding_attention") or {"rope_theta": hf["rope_local_base_freq"]}
    kind = _rope_type(far)
    if kind not in ("default", "linear") or _rope_type(near) != "default":
        raise ValueError(f"rope scaling of the type {kind!r} is not supported for this architecture")
    return {
        **_gemma(hf),
        "norm_qk": True,
        "post_attention_norm": True,
        "post_mlp_norm": True,
        "attention_scores_scalar": hf["query_pre_attn_scalar"],
        "sliding_window_size": hf["sliding_window"],
        "sliding_window_indices": windows,
        "rope_base": _whole(far["rope_theta"]),
        "rope_condense_ratio": 1,
        "rope_adjustments": {"factor": far["factor"]} if kind == "linear" else None,
        "rope_local_base_freq": _whole(near["rope_theta"]),
        "rope_indices": list(windows),
    }


def _windows(hf: Json, pattern: int) -> list[int]:
    """1 for a layer with a sliding window, 0 for one without: every `pattern`-th is without, if the file does not say."""
    layers: list[str] = hf.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(hf["num_hidden_layers"])
    ]
    if set(layers) - {"sliding_attention", "full_attention"} or len(layers) != hf["num_hidden_layers"]:
        raise ValueError("layer_types does not say sliding_attention or full_attention for each layer")
    return [int(layer == "sliding_attention") for layer in layers]


def _olmo(hf: Json) -> Json:
    _refuse(hf, attention_bias=(False,), hidden_act=("silu", "swish"), clip_qkv=())
    return {**_LLAMA_LIKE, "norm_class_name": "LayerNorm", "norm_eps": 1e-5}  # its norms have no weights


def _olmo2(hf: Json) -> Json:
    own = {"norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True}
    return {**_llama(hf), "norm_qk": True, "norm_qk_type": "olmo2", **own}


def _stablelm(hf: Json) -> Json:
    _refuse(hf, use_qkv_bias=(False,), qk_layernorm=(False,), use_parallel_residual=(False,))
    _refuse(hf, hidden_act=("silu", "swish"))
    own = {"norm_class_name": "LayerNorm", "norm_eps": hf["layer_norm_eps"], "rotary_percentage": _rotary(hf, 0.25)}
    return {**_LLAMA_LIKE, **own}


def _gpt_neox(hf: Json) -> Json:
    _refuse(hf, hidden_act=("gelu", *_TANH), attention_bias=(True,))
    parameters = hf.get("rope_parameters") or {}
    return {
        "norm_eps": hf["layer_norm_eps"],
        "parallel_residual": hf.get("use_parallel_residual", True),
        "rotary_percentage": _rotary(hf, hf.get("rotary_pct", 0.25)),
        "rope_base": _whole(parameters.get("rope_theta") or hf.get("rotary_emb_base") or hf.get("rope_theta") or 10000),
        "gelu_approximate": "tanh" if hf.get("hidden_act") in _TANH else "none",
    }


def _phi(hf: Json) -> Json:
    _refuse(hf, hidden_act=_TANH, qk_layernorm=(False,))
    return {
        "norm_eps": hf["layer_norm_eps"],
        "rotary_percentage": _rotary(hf, 0.5),
        "shared_attention_norm": True,
        "lm_head_bias": True,
        "gelu_approximate": "tanh",
    }


def _phi3(hf: Json) -> Json:
    return {**_mistral(hf), "rotary_percentage": _rotary(hf, 1.0)}


def _falcon(hf: Json) -> Json:
    _refuse(hf, activation=("gelu",), apply_residual_connection_post_layernorm=(False,))
    is_new = bool(hf.get("new_decoder_architecture"))
    is_parallel = is_new or bool(hf.get("parallel_attn", True))
    one_query_group = 1 if hf.get("multi_query", True) else hf["num_attention_heads"]
    positions = {**_NOT_ROTARY, "alibi": "falcon"} if hf.get("alibi") else {"rotary_percentage": 1.0}
    return {
        "norm_eps": hf["layer_norm_epsilon"],
        "bias": bool(hf.get("bias", False)),
        "intermediate_size": hf.get("ffn_hidden_size") or 4 * hf["hidden_size"],
        "n_query_groups": (hf.get("num_kv_heads") or hf["num_attention_heads"]) if is_new else one_query_group,
        "parallel_residual": is_parallel,
        "shared_attention_norm": is_parallel and (not is_new or hf.get("num_ln_in_parallel_attn") == 1),
        **positions,
    }


_NOT_ROTARY: Json = {"rotary_percentage": 0.0}
_BEHIND_EACH_OTHER: Json = {**_NOT_ROTARY, "parallel_residual": False, "bias": True}


def _bloom(hf: Json) -> Json:
    _refuse(hf, apply_residual_connection_post_layernorm=(False,))
    own = {"gelu_approximate": "tanh", "alibi": "bloom", "embedding_norm": True}
    return {**_BEHIND_EACH_OTHER, "norm_eps": hf["layer_norm_epsilon"], **own}


def _gpt2(hf: Json) -> Json:
    _refuse(hf, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    own = {"norm_eps": hf["layer_norm_epsilon"], "learned_positions": True}
    return {**_BEHIND_EACH_OTHER, **own, **_activation(hf, "gelu_new")}


def _opt(hf: Json) -> Json:
    _refuse(hf, word_embed_proj_dim=(hf["hidden_size"],), layer_norm_elementwise_affine=(True,))
    _refuse(hf, _remove_final_layer_norm=(False,))
    own = {"norm_eps": 1e-5, "learned_positions": True, "bias": hf.get("enable_bias", True)}
    if not hf.get("do_layer_norm_before", True):  # norms behind the sums, as in the first transformers
        behind = {"norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True}
        own |= {**behind, "norm_after_residual": True}
    return {**_BEHIND_EACH_OTHER, **own, **_activation(hf, "relu")}


def _activation(hf: Json, default: str) -> Json:
    """Of MLPs with two layers."""
    kind = hf.get("activation_function", default)
    _refuse(hf, activation_function=("relu", "gelu", *_TANH))
    if kind == "relu":
        return {"mlp_class_name": "ReluMLP"}
    return {"gelu_approximate": "tanh" if kind in _TANH else "none"}


def _rotary(hf: Json, default: float) -> Any:
    """The share of a head that is rotated."""
    found = (hf.get("rope_parameters") or {}).get("partial_rotary_factor") or hf.get("partial_rotary_factor")
    return found or default


_DEFAULTS: dict[str, Json] = {
    "glm4v_moe_text": {"attention_bias": True},
    "gemma3_text": _GEMMA3_DEFAULTS,
    "falcon": {"max_position_embeddings": 2048},
    "bloom": {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5},  # any length would do
    "gpt2": {"max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5},
}
# What other families call otherwise.
_RENAMED: dict[str, dict[str, str]] = {
    "bloom": {
        "n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_inner": "intermediate_size", "seq_length": "max_position_embeddings",
    },
    "gpt2": {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
    },
    "opt": {"ffn_dim": "intermediate_size"},
}  # fmt: skip
DERIVED: dict[Any, Callable[[Json], Json]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "glm4v_moe_text": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "stablelm": _stablelm,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
    "phi3": _phi3,
    "falcon": _falcon,
    "bloom": _bloom,
    "gpt2": _gpt2,
    "opt": _opt,
}


# config.json's name for what litgpt's Config calls otherwise; a named Config must agree with those that are given
_SAME = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "head_dim": "head_size",
    "intermediate_size": "intermediate_size",
}
_GEMMAS = ("gemma", "gemma2", "gemma3_text")  # one is added to the weights of their norms
# What says where a token is, and which others it sees.
_POSITIONS = (
    "rope_base", "rope_condense_ratio", "rope_adjustments", "rope_interleave", "rope_local_base_freq", "rope_indices",
    "rotary_percentage", "sliding_window_size", "sliding_window_indices",
)  # fmt: skip
# In what a named Config may differ from the derived one, because it changes no number that is computed: names, and lengths.
_FREE = ("name", "hf_config", "padding_multiple", "vocab_size", "padded_vocab_size", "block_size")


def read_hf_config(path: Path, is_whole: bool = False) -> Json:
    """config.json; of a model that also sees or hears, its language part unless `is_whole`. Raises CheckpointError."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        data = parse_json(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        hint = (
            " (it begins as a web page does: was an error downloaded in its place?)"
            if text[:200].lstrip().startswith("<")
            else ""
        )
        raise CheckpointError(f"cannot read {path}: {e}{hint}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    language = data.get("text_config")
    found = language if isinstance(language, dict) and not is_whole else data
    if not isinstance(found.get("model_type", ""), (str, NoneType)):
        raise CheckpointError(f"{path}: model_type: expected a word, found {_short(found['model_type'])}")
    return found


def n_predicting(hf: Json) -> int:
    """Blocks behind the model's own that predict several tokens (MTP), by config.json; nothing here computes them."""
    found = next((hf[key] for key in ("num_nextn_predict_layers", "num_mtp_modules") if hf.get(key) is not None), 0)
    return found if type(found) is int else 0


def choose_config(directory: Path, model_name: str | None = None) -> ModelConfig:
    """The configuration of a Hugging Face directory.

    Args:
        directory: with config.json.
        model_name: a name that litgpt knows; None derives the Config, and takes that of the directory's name in litgpt's table
            only where nothing can be derived of the model_type.

    Raises:
        CheckpointError: no such name, a name that contradicts config.json, or an architecture that is not supported.
    """
    where = directory / "config.json"
    hf = read_hf_config(where)
    name = model_folder_name(directory)
    candidates = [model_name] if model_name else [name, f"{directory.absolute().parent.name}/{name}"]
    config = next(filter(None, map(_named, candidates)), None)
    if model_name is None and hf.get("model_type") in DERIVED:
        # prompt styles go by litgpt's names
        return derive_config(hf, config.name if config else name, where)
    if config is not None:
        _check_agreement(hf, config, where)
        return config
    if model_name:
        raise CheckpointError(f"litgpt knows no model named {model_name!r}; without --model-name config.json is used")
    return derive_config(hf, name, where)


def _named(name: str) -> ModelConfig | None:
    """The entry of a model in litgpt's table; None if it is not there, or litgpt is not installed."""
    try:
        return full_config(asdict(litgpt_module("config").Config.from_name(name)), name)
    except (ValueError, ModuleNotFoundError):
        return None


def derive_config(hf: Json, name: str, where: Path) -> ModelConfig:
    """The configuration for what config.json describes; see `choose_config`."""
    model_type = hf.get("model_type")
    if model_type not in DERIVED:
        raise CheckpointError(
            f"{where}: no litgpt model is named {name!r}, and of model_type {model_type!r} its settings cannot be derived "
            f"(only of {', '.join(DERIVED)}); give the litgpt name of the model with --model-name"
        )
    try:
        settings = derive(hf)
    except KeyError as e:
        raise CheckpointError(f"{where} lacks the field {e.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise CheckpointError(f"{where} cannot be understood: {e}") from None
    settings["name"] = _safe_name(name, str(model_type))
    settings["norm_unit_offset"], settings["norm_has_weight"] = model_type in _GEMMAS, model_type != "olmo"
    return full_config(settings, str(where))


def _check_agreement(hf: Json, config: ModelConfig, where: Path) -> None:
    for theirs, ours in _SAME.items():
        found, expected = hf.get(theirs), getattr(config, ours)
        if theirs == "intermediate_size" and config.mlp_class_name == "LLaMAMoE":
            continue  # of experts or of dense layers, depending on the family
        if found is not None and found != expected:
            raise CheckpointError(
                f"{where}: {theirs} is {found!r}, but {ours} of the litgpt model {config.name!r} is {expected!r}: "
                "give the right --model-name"
            )
    if hf.get("model_type") not in DERIVED:
        return
    derived = derive_config(hf, config.name, where)
    if differing := _differing(derived, config, [key for key in vars(config) if key not in _FREE]):
        raise CheckpointError(
            f"{where} has other settings than the litgpt model {config.name!r}: {', '.join(differing)}; without "
            "--model-name config.json is used"
        )


def other_positions(config: ModelConfig, where: Path) -> list[str]:
    """In words, the settings of positions of a checkpoint that are not those of its config.json; none if that says nothing.

    Args:
        config: of the checkpoint.
        where: of config.json.
    """
    try:
        hf = read_hf_config(where)
        derived = derive_config(hf, config.name, where) if hf.get("model_type") in DERIVED else config
    except CheckpointError:  # it is not read for anything else
        return []
    return _differing(config, derived, _POSITIONS)


def _differing(config: ModelConfig, expected: ModelConfig, keys: Iterable[str]) -> list[str]:
    return [
        f"{key} is {_short(found)}, not {_short(other)}"
        for key in keys
        if (found := getattr(config, key)) != (other := getattr(expected, key))
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _safe_name(name: str, model_type: str) -> str:
    """The directory's name, such that litgpt sees a Gemma or an OLMo in it just if it is one."""
    for word, model_types in (("Gemma", _GEMMAS), ("OLMo", ("olmo", "olmo2"))):
        if model_type in model_types and word not in name:
            name = f"{word}-{name}"
        if model_type not in model_types:
            name = name.replace(word, word.lower())
    return name
