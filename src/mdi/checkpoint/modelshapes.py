"""Computes names and shapes of the tensors of litgpt's GPT for a Config, without building it and without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BLOCKS = "transformer.h."

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

_GATED = ("LLaMAMLP", "GemmaMLP")


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Shape of every tensor, by its name.

    Args:
        config: a whole litgpt Config as a plain dict; see mdi.limits for how large its numbers may be.

    Raises:
        ValueError, KeyError, TypeError: litgpt cannot build such a model.
    """
    n_embd, vocabulary = config["n_embd"], config["padded_vocab_size"]
    shapes = {
        **_linear("lm_head", n_embd, vocabulary, config["lm_head_bias"]),
        "transformer.wte.weight": (vocabulary, n_embd),
        **_norm(config, "transformer.ln_f", n_embd),
    }
    n_dense = config["first_k_dense_replace"] or 0  # the first blocks may have no experts
    kinds = {is_dense: dict(_block(config, is_dense)) for is_dense in (True, False)}
    for i in range(config["n_layer"]):
        shapes.update({f"{BLOCKS}{i}.{name}": shape for name, shape in kinds[i < n_dense].items()})
    if strange := next((name for name, shape in shapes.items() if any(type(n) is not int for n in shape)), None):
        raise ValueError(f"the shape of {strange} would be {shapes[strange]}")
    return shapes


def _block(config: Mapping[str, Any], is_dense: bool) -> Iterator[tuple[str, Shape]]:
    """Of one block, by the names within it."""
    n_embd = config["n_embd"]
    if config["shared_attention_norm"] and not config["parallel_residual"]:
        raise ValueError("a norm that attention and MLP share, without parallel residuals")
    norms = {
        "norm_1": config["norm_1"],
        "post_attention_norm": config["post_attention_norm"],
        "norm_2": config["norm_2"] and not config["shared_attention_norm"],
        "post_mlp_norm": config["post_mlp_norm"],
    }
    for name, is_there in norms.items():
        yield from (_norm(config, name, n_embd) if is_there else {}).items()
    yield from (_latent_attention(config) if config["latent_attention"] else _attention(config)).items()
    kind = config["mlp_class_name"]
    if kind == "LLaMAMoE" and not is_dense:
        yield from _experts(config)
    else:
        gated = kind in _GATED or is_dense
        yield from _mlp(config, "mlp", config["intermediate_size"], gated=gated).items()
    if kind not in (*_GATED, "LLaMAMoE", "GptNeoxMLP"):
        raise ValueError(f"MLPs of the class {kind!r}")


def _attention(config: Mapping[str, Any]) -> Shapes:
    size, n_head, n_groups = config["head_size"], config["n_head"], config["n_query_groups"]
    shapes = {
        **_linear("attn.qkv", config["n_embd"], (n_head + 2 * n_groups) * size, config["bias"] or config["attn_bias"]),
        **_linear("attn.proj", n_head * size, config["n_embd"], config["bias"]),
    }
    if config["norm_qk"]:
        over_all = config["norm_qk_type"] == "olmo2"
        shapes.update(_norm(config, "attn.norm_q", size * (n_head if over_all else 1)))
        shapes.update(_norm(config, "attn.norm_k", size * (n_groups if over_all else 1)))
    return shapes


def _latent_attention(config: Mapping[str, Any]) -> Shapes:
    latent, n_embd, n_head, bias = config["latent_attention"], config["n_embd"], config["n_head"], config["bias"]
    q_rank, kv_rank, rope = latent["q_lora_rank"], latent["kv_lora_rank"], latent["qk_rope_head_dim"]
    nope, value = latent["qk_nope_head_dim"], latent["v_head_dim"]
    return {
        **_linear("attn.q_a_proj", n_embd, q_rank, config["attn_bias"]),
        "attn.q_a_norm.weight": (q_rank,),
        **_linear("attn.q_b_proj", q_rank, n_head * (rope + nope), bias),
        **_linear("attn.kv_a_proj_with_mqa", n_embd, kv_rank + rope, config["attn_bias"]),
        "attn.kv_a_norm.weight": (kv_rank,),
        **_linear("attn.kv_b_proj", kv_rank, config["n_query_groups"] * (nope + value), bias),
        **_linear("attn.proj", n_head * value, n_embd, bias),
    }


def _experts(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    n_expert, width = config["n_expert"], config["moe_intermediate_size"] or config["intermediate_size"]
    yield "mlp.gate.weight", (n_expert, config["n_embd"])
    if config["n_expert_groups"]:
        yield "mlp.gate.e_score_correction_bias", (n_expert,)
    for i in range(n_expert):
        yield from _mlp(config, f"mlp.experts.{i}", width, gated=True).items()
    if config["n_shared_expert"]:
        shared = config["moe_intermediate_size"] * config["n_shared_expert"]
        yield from _mlp(config, "mlp.shared_experts", shared, gated=True).items()


def _mlp(config: Mapping[str, Any], path: str, width: int, *, gated: bool) -> Shapes:
    n_embd, bias = config["n_embd"], config["bias"]
    into = ("fc_1", "fc_2") if gated else ("fc",)
    shapes = {name: shape for fc in into for name, shape in _linear(f"{path}.{fc}", n_embd, width, bias).items()}
    return {**shapes, **_linear(f"{path}.proj", width, n_embd, bias)}


def _linear(path: str, n_in: int, n_out: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{path}.weight": (n_out, n_in)}
    if bias:
        shapes[f"{path}.bias"] = (n_out,)
    return shapes


def _norm(config: Mapping[str, Any], path: str, size: int) -> Shapes:
    kind = config["norm_class_name"]
    if kind == "RMSNorm":
        return {f"{path}.weight": (size,)}
    if kind != "LayerNorm":
        raise ValueError(f"norms of the class {kind!r}")
    return {} if "OLMo" in config["name"] else {f"{path}.weight": (size,), f"{path}.bias": (size,)}
