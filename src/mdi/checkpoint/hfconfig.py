"""From a Hugging Face config.json to a litgpt Config: the one of that name, or one derived for the common architectures.

Knows no weights. What an architecture can be set to but litgpt cannot do is refused, not ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mdi.checkpoint.shapes import full_config
from mdi.errors import CheckpointError

Json = dict[str, Any]

# config.json's name for what litgpt's Config calls otherwise; a named Config must agree with those that are given
_SAME = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "head_dim": "head_size",
    "intermediate_size": "intermediate_size",
}
_LLAMA_LIKE: Json = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "parallel_residual": False,
    "bias": False,
    "rotary_percentage": 1.0,
}


def read_hf_config(path: Path) -> Json:
    """config.json; of a model that also sees or hears, its language part. Raises CheckpointError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"cannot read {path}: {e}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    text = data.get("text_config")
    return text if isinstance(text, dict) else data


def choose_config(directory: Path, model_name: str | None) -> tuple[Json, str | None]:
    """The litgpt Config for a Hugging Face directory, and the model_type that it was derived from, if it was.

    Args:
        directory: with config.json.
        model_name: a name that litgpt knows, or None for the directory's name, then config.json.

    Raises:
        CheckpointError: no such name, a name that contradicts config.json, or an architecture that is not supported.
    """
    from litgpt.config import Config

    where = directory / "config.json"
    hf = read_hf_config(where)
    name = directory.absolute().name
    for candidate in [model_name] if model_name else [name, f"{directory.absolute().parent.name}/{name}"]:
        try:
            config = full_config(asdict(Config.from_name(candidate)), candidate)
        except ValueError:
            continue
        _check_agreement(hf, config, where)
        return config, None
    if model_name:
        raise CheckpointError(f"litgpt knows no model named {model_name!r}; without --model-name config.json is used")
    return derive_config(hf, name, where), str(hf.get("model_type"))


def derive_config(hf: Json, name: str, where: Path) -> Json:
    """A litgpt Config for what config.json describes; see `choose_config`."""
    kind = hf.get("model_type")
    if kind not in _DERIVE:
        raise CheckpointError(
            f"{where}: no litgpt model is named {name!r}, and of model_type {kind!r} its settings cannot be derived "
            f"(only of {', '.join(_DERIVE)}); give the litgpt name of the model with --model-name"
        )
    try:
        settings = {**_sizes(hf), **_rope(hf, where), **_DERIVE[kind](hf)}
    except KeyError as e:
        raise CheckpointError(f"{where} lacks the field {e.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(f"{where} cannot be understood: {e}") from None
    settings["name"] = _safe_name(name, str(kind))
    return full_config(settings, str(where))


def _check_agreement(hf: Json, config: Json, where: Path) -> None:
    for theirs, ours in _SAME.items():
        found, expected = hf.get(theirs), config[ours]
        if theirs == "intermediate_size" and config["mlp_class_name"] == "LLaMAMoE":
            continue  # of experts or of dense layers, depending on the family
        if found is not None and found != expected:
            raise CheckpointError(
                f"{where}: {theirs} is {found!r}, but {ours} of the litgpt model {config['name']!r} is {expected!r}: "
                "give the right --model-name"
            )


def _safe_name(name: str, kind: str) -> str:
    """The directory's name, such that litgpt sees a Gemma or an OLMo in it just if it is one."""
    for word, kinds in (("Gemma", ("gemma", "gemma2")), ("OLMo", ("olmo2",))):
        if kind in kinds and word not in name:
            name = f"{word}-{name}"
        if kind not in kinds:
            name = name.replace(word, word.lower())
    return name


def _sizes(hf: Json) -> Json:
    """What all architectures have, whatever litgpt's default is."""
    sizes = {
        "n_layer": hf["num_hidden_layers"],
        "n_embd": hf["hidden_size"],
        "n_head": hf["num_attention_heads"],
        "n_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head_size": hf.get("head_dim"),
        "intermediate_size": hf["intermediate_size"],
        "vocab_size": hf["vocab_size"],
        "padded_vocab_size": hf["vocab_size"],
        "block_size": hf["max_position_embeddings"],
    }
    if any(type(size) is not int or size < 1 for key, size in sizes.items() if key != "head_size"):
        raise ValueError(f"not all of its sizes are whole numbers: {sizes}")
    return sizes


def _rope(hf: Json, where: Path) -> Json:
    parameters = hf.get("rope_parameters") or {}  # transformers 5 has all in one place
    scaling = hf.get("rope_scaling") or parameters
    result: Json = {"rope_base": int(parameters.get("rope_theta") or hf.get("rope_theta") or 10000)}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "linear":
        result["rope_condense_ratio"] = scaling["factor"]
    elif kind == "llama3":
        result["rope_adjustments"] = {
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_seq_len": scaling["original_max_position_embeddings"],
        }
    elif kind != "default":
        raise CheckpointError(f"{where}: rope scaling of the type {kind!r} is not supported")
    return result


def _refuse(hf: Json, **allowed: Any) -> None:
    """Settings that litgpt does not have, unless they are at the value at which they do nothing."""
    for key, values in allowed.items():
        if hf.get(key) is not None and hf[key] not in values:
            raise ValueError(f"{key} is {hf[key]!r}, only {' or '.join(map(repr, values))} is supported")


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
        "n_expert": hf["num_experts"],
        "n_expert_per_token": hf["num_experts_per_tok"],
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
        "sliding_window_indices": [1 - i % 2 for i in range(hf["num_hidden_layers"])],
    }


def _olmo2(hf: Json) -> Json:
    own = {"norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True}
    return {**_llama(hf), "norm_qk": True, "norm_qk_type": "olmo2", **own}


def _gpt_neox(hf: Json) -> Json:
    _refuse(hf, hidden_act=("gelu",), attention_bias=(True,))
    parameters = hf.get("rope_parameters") or {}
    return {
        "norm_eps": hf["layer_norm_eps"],
        "parallel_residual": hf.get("use_parallel_residual", True),
        "rotary_percentage": parameters.get("partial_rotary_factor") or hf.get("rotary_pct", 0.25),
        "rope_base": int(parameters.get("rope_theta") or hf.get("rotary_emb_base") or hf.get("rope_theta") or 10000),
    }


def _phi(hf: Json) -> Json:
    _refuse(hf, hidden_act=("gelu_new",), qk_layernorm=(False,))
    parameters = hf.get("rope_parameters") or {}
    return {
        "norm_eps": hf["layer_norm_eps"],
        "rotary_percentage": parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor", 0.5),
        "shared_attention_norm": True,
        "lm_head_bias": True,
        "gelu_approximate": "tanh",
    }


_DERIVE: dict[Any, Callable[[Json], Json]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "olmo2": _olmo2,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
}
