"""Derives the config.json of a model from the metadata of its GGUF file.

Sizes are compared with the tensors that are there, so that a file cannot ask for more than it holds. What llama.cpp
computes otherwise than litgpt is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mdi.checkpoint.gguf import GgufHeader, read_tensor, shown_field
from mdi.checkpoint.hfconfig import Json, derive_config
from mdi.errors import CheckpointError
from mdi.model.plain import ModelConfig

MAX_CONTEXT = 1 << 27
# frequencies that Llama 3.1's scaling leaves between "as it is" and "divided" tell its settings
_ROPE_FACTORS = "rope_freqs.weight"


class _Fields:
    """The metadata of the file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.arch = header.fields.get("general.architecture")

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.fields.get(f"{self.arch}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"it lacks the field {self.arch}.{name}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, np.ndarray) and value.size and bool((value == value[0]).all()):
            value = int(value[0])
        if type(value) is not int or not 0 < value <= MAX_CONTEXT:
            raise ValueError(f"{self.arch}.{name} is {shown_field(value)}: expected one whole number for all blocks")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """A number that may be 0."""
        value = self.get(name, default)
        if type(value) is not int or not 0 <= value <= MAX_CONTEXT:
            raise ValueError(f"{self.arch}.{name} is {shown_field(value)}: expected a whole number")
        return value

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.header.tensors:
            raise ValueError(f"it lacks the tensor {tensor}")
        return self.header.tensors[tensor].shape


def gguf_config(header: GgufHeader) -> ModelConfig:
    """The configuration of the model in a file.

    Raises:
        CheckpointError: an architecture that is not supported, or fields that are missing or contradict the tensors.
    """
    fields = _Fields(header)
    if not isinstance(fields.arch, str) or fields.arch not in _ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: a model of the architecture {shown_field(fields.arch)}, which cannot be read from GGUF (only "
            f"{', '.join(_ARCHITECTURES)})"
        )
    try:
        hf = {**_sizes(fields), **_rope(fields)}
        hf |= _ARCHITECTURES[fields.arch](fields, hf)
    except (ValueError, TypeError, OverflowError) as e:
        raise CheckpointError(f"{header.path} cannot be used: {e}") from None
    name = header.fields.get("general.name")
    name = name[:100] if isinstance(name, str) and name else header.path.stem
    return derive_config(hf, re.sub(r"[^\w.+-]+", "-", name)[:100], header.path)


def _sizes(fields: _Fields) -> Json:
    n_layer, n_embd, n_head = (fields.size(n) for n in ("block_count", "embedding_length", "attention.head_count"))
    n_groups = fields.size("attention.head_count_kv", n_head)
    head_size = fields.size("attention.key_length", max(n_embd // n_head, 1))
    numbers = {int(m[1]) for name in fields.header.tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))}
    if numbers != set(range(len(numbers))) or len(numbers) != n_layer:
        raise ValueError(f"it names {n_layer} blocks, but has tensors of {len(numbers)}")
    n_layer -= fields.count("nextn_predict_layers")  # the last ones predict further tokens, and are left out
    n_vocab, width = fields.shape("token_embd.weight")
    if width != n_embd:
        raise ValueError(f"it names an embedding of width {n_embd}, but its tensor has {width}")
    is_fused = "blk.0.attn_qkv.weight" in fields.header.tensors
    rows = fields.shape(f"blk.0.attn_{'qkv' if is_fused else 'q'}.weight")[0]
    expected = head_size * (n_head + 2 * n_groups if is_fused else n_head)
    if rows != expected or fields.size("attention.value_length", head_size) != head_size:
        raise ValueError(f"its heads ({n_head} and {n_groups}, of {head_size}) do not fit its tensors of {rows} rows")
    return {
        "num_hidden_layers": n_layer,
        "hidden_size": n_embd,
        "num_attention_heads": n_head,
        "num_key_value_heads": n_groups,
        "head_dim": head_size,
        "intermediate_size": fields.size("feed_forward_length"),
        "vocab_size": n_vocab,
        "max_position_embeddings": fields.size("context_length"),
    }


def _rope(fields: _Fields) -> Json:
    hf: Json = {"rope_theta": float(fields.get("rope.freq_base", 10000.0))}
    kind, factors = fields.get("rope.scaling.type", "none"), "rope_factors_long.weight" in fields.header.tensors
    if kind not in ("none", "linear", "yarn", "longrope") or (factors and kind not in ("none", "longrope")):
        raise ValueError(f"rope scaling of the type {shown_field(kind)} is not supported")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    if kind == "linear" and factor not in (0.0, 1.0):
        hf["rope_scaling"] = {"rope_type": "linear", "factor": float(factor)}
    elif factors:
        hf["rope_scaling"] = {
            "rope_type": "longrope",
            "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
            "attention_factor": float(fields.get("rope.scaling.attn_factor", 1.0)),
            **{f"{which}_factor": _numbers(fields, f"rope_factors_{which}.weight") for which in ("short", "long")},
        }
    elif kind == "yarn":
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found = {ours: fields.get(f"rope.scaling.{theirs}") for ours, theirs in names.items()}
        # llama.cpp multiplies what it computes itself with a factor of its own
        factor, original = (
            float(fields.need("rope.scaling.factor")),
            fields.size("rope.scaling.original_context_length"),
        )
        own: Json = {
            "attention_factor": (0.1 * math.log(factor) + 1.0) * float(fields.get("rope.scaling.attn_factor", 1.0))
        }
        own |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        hf["rope_scaling"] = {**own, **{key: float(value) for key, value in found.items() if value is not None}}
    return hf


def _numbers(fields: _Fields, tensor: str) -> list[float]:
    fields.shape(tensor)
    return [float(x) for x in read_tensor(fields.header.tensors[tensor], tensor).reshape(-1)]


def llama3_scaling(factors: np.ndarray, theta: float) -> Json | None:
    """The settings of Llama 3.1's scaling that give these factors, one for each frequency (head_size / 2); None: none.

    Between the two bounds a factor's inverse is a straight line over the frequency, from which the bounds follow. With
    less than two frequencies there, every bound that separates the others will do.

    Raises:
        ValueError: they are not of that kind.
    """
    factors = factors.astype(np.float64)
    frequencies = theta ** (-np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    if (factors == 1).all():
        return None
    blend = (1 / factors - 1 / factor) / max(1 - 1 / factor, 1e-9)
    between = (blend > 1e-4) & (blend < 1 - 1e-4)
    low, high = 1.0, 4.0  # as in all that were published
    if between.sum() >= 2:
        slope, intercept = np.polyfit(frequencies[between], blend[between], 1)
        high = round(float(low - low / intercept), 2)
        original = 2 * math.pi * float(slope) * (high - low)
    elif between.any():
        original = 2 * math.pi * float(((low + (high - low) * blend[between]) / frequencies[between])[0])
    else:
        bounds = frequencies[blend >= 0.5].min(initial=1.0) * frequencies[blend < 0.5].max(initial=0.0)
        original = 2 * math.pi * math.sqrt(low * high / max(float(bounds), 1e-18))
    smooth = np.clip((round(original) * frequencies / (2 * math.pi) - low) / max(high - low, 1e-9), 0, 1)
    if factor <= 1 or not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=2e-3):
        raise ValueError(f"{_ROPE_FACTORS} scales in a way that is not supported")
    bounds_found = {"low_freq_factor": low, "high_freq_factor": high}
    return {
        "rope_type": "llama3",
        "factor": factor,
        **bounds_found,
        "original_max_position_embeddings": round(original),
    }


def _rms(fields: _Fields) -> float:
    return float(fields.need("attention.layer_norm_rms_epsilon"))


def _experts(fields: _Fields, first: int = 0) -> tuple[int, int]:
    """How many there are, in the blocks from `first` on, and how many a row is sent to."""
    n_experts, n_used = fields.size("expert_count"), fields.size("expert_used_count")
    if fields.shape(f"blk.{first}.ffn_gate_exps.weight")[0] != n_experts or n_used > n_experts:
        raise ValueError(f"it says that it has {n_experts} experts, which its tensors do not")
    return n_experts, n_used


def _llama(fields: _Fields, hf: Json) -> Json:
    own: Json = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": _rms(fields)}
    if _ROPE_FACTORS in fields.header.tensors:
        factors = read_tensor(fields.header.tensors[_ROPE_FACTORS], _ROPE_FACTORS).astype(np.float32)
        if len(factors) != hf["head_dim"] // 2:
            raise ValueError(f"{_ROPE_FACTORS} has {len(factors)} numbers for heads of {hf['head_dim']}")
        own["rope_scaling"] = llama3_scaling(factors, hf["rope_theta"])
    if fields.get("expert_count"):
        n_experts, n_used = _experts(fields)
        own |= {"model_type": "mixtral", "num_local_experts": n_experts, "num_experts_per_tok": n_used}
    return own


def _qwen2(fields: _Fields, hf: Json) -> Json:
    return {"model_type": "qwen2", "rms_norm_eps": _rms(fields)}


def _qwen3(fields: _Fields, hf: Json) -> Json:
    return {"model_type": "qwen3", "rms_norm_eps": _rms(fields)}


def _qwen3_moe(fields: _Fields, hf: Json) -> Json:
    n_experts, n_used = _experts(fields)
    return {
        "model_type": "qwen3_moe",
        "rms_norm_eps": _rms(fields),
        "norm_topk_prob": True,
        "num_experts": n_experts,
        "num_experts_per_tok": n_used,
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
    }


def _gpt_oss(fields: _Fields, hf: Json) -> Json:
    n_experts, n_used = _experts(fields)
    own: Json = {
        "model_type": "gpt_oss",
        "rms_norm_eps": _rms(fields),
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_used,
        "sliding_window": fields.size("attention.sliding_window"),
    }
    if (scaling := hf.get("rope_scaling")) is not None:  # the file cannot say it, and llama.cpp truncates
        own["rope_scaling"] = {**scaling, "truncate": False}
    return own


_SIGMOID = 2  # of llama.cpp's functions of routers


def _glm4_moe(fields: _Fields, hf: Json) -> Json:
    _check_router(fields)
    if np.any(fields.get("rope.dimension_sections", 0)):
        raise ValueError("positions of images are not supported")
    n_dense = fields.count("leading_dense_block_count")
    n_experts, n_used = _experts(fields, n_dense)
    return {
        "model_type": "glm4_moe",
        "rms_norm_eps": _rms(fields),
        "attention_bias": "blk.0.attn_q.bias" in fields.header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.header.tensors,
        "partial_rotary_factor": _partial(fields, hf),
        "first_k_dense_replace": n_dense,
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "n_routed_experts": n_experts,
        "num_experts_per_tok": n_used,
        "n_shared_experts": fields.count("expert_shared_count"),
        "n_group": fields.count("expert_group_count", 1) or 1,
        "norm_topk_prob": bool(fields.get("expert_weights_norm", False)),
        "routed_scaling_factor": float(fields.get("expert_weights_scale", 0.0)) or 1.0,
    }


def _minimax_m2(fields: _Fields, hf: Json) -> Json:
    _check_router(fields)
    n_experts, n_used = _experts(fields)
    return {
        "model_type": "minimax_m2",
        "rms_norm_eps": _rms(fields),
        "partial_rotary_factor": _partial(fields, hf),
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_used,
        "intermediate_size": fields.size("expert_feed_forward_length", hf["intermediate_size"]),
    }


def _check_router(fields: _Fields) -> None:
    if fields.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ValueError(f"a router of the kind {shown_field(fields.get('expert_gating_func'))} is not supported")


def _gemma(fields: _Fields, hf: Json) -> Json:
    return {"model_type": "gemma", "rms_norm_eps": _rms(fields)}


def _query_scalar(hf: Json, largest: int) -> int:
    """Of Gemma 2 and 3: not in the file; llama.cpp knows it by the number of blocks of the 27 B models."""
    return int(hf["hidden_size"] // hf["num_attention_heads"] if hf["num_hidden_layers"] == largest else hf["head_dim"])


def _gemma2(fields: _Fields, hf: Json) -> Json:
    return {
        "model_type": "gemma2",
        "rms_norm_eps": _rms(fields),
        "query_pre_attn_scalar": _query_scalar(hf, 46),
        "attn_logit_softcapping": float(fields.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(fields.get("final_logit_softcapping", 30.0)),
        "sliding_window": fields.size("attention.sliding_window", 4096),
    }


def _gemma3(fields: _Fields, hf: Json) -> Json:
    return {
        "model_type": "gemma3_text",
        "rms_norm_eps": _rms(fields),
        "query_pre_attn_scalar": _query_scalar(hf, 62),
        "sliding_window": fields.size("attention.sliding_window"),
        "rope_theta": float(fields.get("rope.freq_base", 1e6)),
        "rope_local_base_freq": float(fields.get("rope.freq_base_swa", 10000.0)),
    }


def _partial(fields: _Fields, hf: Json) -> float:
    """The share of a head that is rotated, such that litgpt's rounding gives the number again."""
    n_rotated, head_size = fields.size("rope.dimension_count", hf["head_dim"]), hf["head_dim"]
    share = n_rotated / head_size
    return share if int(share * head_size) == n_rotated else math.nextafter(share, 1.0)


def _phi2(fields: _Fields, hf: Json) -> Json:
    eps = _layer_norm_eps(fields)
    return {"model_type": "phi", "layer_norm_eps": eps, "partial_rotary_factor": _partial(fields, hf)}


def _phi3(fields: _Fields, hf: Json) -> Json:
    window = fields.get("attention.sliding_window") or None  # 0 is none
    if window is not None:
        window = fields.size("attention.sliding_window")
    own = {"partial_rotary_factor": _partial(fields, hf), "sliding_window": window}
    return {"model_type": "phi3", "rms_norm_eps": _rms(fields), **own}


def _layer_norm_eps(fields: _Fields) -> float:
    return float(fields.need("attention.layer_norm_epsilon"))


def _bloom(fields: _Fields, hf: Json) -> Json:
    return {"model_type": "bloom", "layer_norm_epsilon": _layer_norm_eps(fields)}


def _gpt2(fields: _Fields, hf: Json) -> Json:
    return {"model_type": "gpt2", "layer_norm_epsilon": _layer_norm_eps(fields)}


_ARCHITECTURES: dict[Any, Callable[[_Fields, Json], Json]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi2": _phi2,
    "phi3": _phi3,
    "bloom": _bloom,
    "gpt2": _gpt2,
}
