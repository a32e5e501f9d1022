"""A ModelSpec of the plain form: the one place that knows what the fields of a ModelConfig mean."""

from __future__ import annotations

import functools
import math

from mdi.model.spec import (
    Activation,
    Alibi,
    Attention,
    BlockSpec,
    Dense,
    Ends,
    Experts,
    LatentAttention,
    Mixer,
    Mlp,
    ModelSpec,
    Norm,
    Rotary,
    Router,
)
from mdi.spec.model import ModelConfig


@functools.lru_cache(maxsize=16)
def spec_of(config: ModelConfig) -> ModelSpec:
    """The model of a configuration.

    Raises:
        ValueError: there is no such model.
    """
    blocks: dict[BlockSpec, BlockSpec] = {}
    made = [_block(config, i) for i in range(config.n_layer)]
    norm = _norm(config)
    return ModelSpec(
        name=config.name,
        width=config.n_embd,
        n_vocab=config.vocab_size,
        n_rows=config.padded_vocab_size,
        max_length=config.block_size,
        ends=Ends(
            embedding_factor=config.n_embd**0.5 if config.scale_embeddings else None,
            n_positions=config.block_size if config.learned_positions else 0,
            embedding_norm=norm if config.embedding_norm else None,
            final_norm=None if config.norm_after_residual else norm,
            head_bias=config.lm_head_bias,
            softcap=config.final_logit_softcapping,
        ),
        blocks=tuple(blocks.setdefault(one, one) for one in made),
    )


def _block(config: ModelConfig, index: int) -> BlockSpec:
    if config.shared_attention_norm and not config.parallel_residual:
        raise ValueError("a norm that attention and MLP share, without parallel residuals")
    norm, is_shared = _norm(config), config.shared_attention_norm
    return BlockSpec(
        mixer=_mixer(config, index),
        mlp=_mlp(config, index),
        residual="parallel" if config.parallel_residual else "behind" if config.norm_after_residual else "sequential",
        norm_1=norm if config.norm_1 else None,
        norm_2=norm if config.norm_2 and not is_shared else None,
        post_attention_norm=norm if config.post_attention_norm else None,
        post_mlp_norm=norm if config.post_mlp_norm else None,
        norm_is_shared=is_shared,
    )


def _norm(config: ModelConfig) -> Norm:
    kind, has_weight = config.norm_class_name, bool(config.norm_has_weight)
    if kind == "RMSNorm":
        return Norm("rms", config.norm_eps, unit_offset=bool(config.norm_unit_offset))
    if kind != "LayerNorm":
        raise ValueError(f"norms of the class {kind!r}")
    return Norm("layer", config.norm_eps, has_weight=has_weight, has_bias=has_weight)


def _mixer(config: ModelConfig, index: int) -> Mixer:
    window = config.sliding_window_size
    if window is not None and config.sliding_window_indices is not None and not config.sliding_window_indices[index]:
        window = None
    softcap, norm = config.attention_logit_softcapping, _norm(config)
    if latent := config.latent_attention:
        return LatentAttention(
            n_head=config.n_head,
            q_rank=latent["q_lora_rank"],
            kv_rank=latent["kv_lora_rank"],
            rope_size=latent["qk_rope_head_dim"],
            nope_size=latent["qk_nope_head_dim"],
            value_size=latent["v_head_dim"],
            scale=_scale(config, latent["qk_rope_head_dim"] + latent["qk_nope_head_dim"]),
            norm_eps=config.norm_eps,
            positions=_rotary(config, index),
            a_bias=config.attn_bias,
            bias=config.bias,
            window=window,
            softcap=softcap,
        )
    positions: Rotary | Alibi | None = None
    if config.alibi:
        positions = Alibi(config.n_head, is_rounded=config.alibi == "falcon")
    elif config.rope_n_elem:
        positions = _rotary(config, index)
    return Attention(
        n_head=config.n_head,
        n_groups=config.n_query_groups,
        head_size=config.head_size,
        scale=_scale(config, config.head_size),
        window=window,
        positions=positions,
        softcap=softcap,
        qkv_bias=config.bias or config.attn_bias if config.qkv_bias is None else config.qkv_bias,
        bias=config.bias,
        qk_norm=norm if config.norm_qk else None,
        qk_norm_over_all=config.norm_qk and config.norm_qk_type == "olmo2",
        has_sinks=config.attention_sinks,
    )


def _rotary(config: ModelConfig, index: int) -> Rotary:
    """Blocks with a 1 in rope_indices have a base of their own, and no scaling but `condense`."""
    near = config.rope_local_base_freq is not None and config.rope_indices is not None and config.rope_indices[index]
    base = config.rope_local_base_freq if near else config.rope_base
    assert base is not None
    scaling = None if near else config.rope_adjustments
    return Rotary(config.rope_n_elem, base, config.rope_condense_ratio, config.rope_interleave, scaling or None)


def _scale(config: ModelConfig, size: int) -> float:
    """The factor of scores of heads of this size. litgpt's YaRN, which is DeepSeek's, has one more."""
    adjustments, factor = config.rope_adjustments or {}, 1.0
    if "rope_type" not in adjustments and adjustments.get("mscale_all_dim") and adjustments.get("factor", 0) > 1:
        factor = (0.1 * adjustments["mscale_all_dim"] * math.log(adjustments["factor"]) + 1.0) ** 2
    return factor / math.sqrt(config.attention_scores_scalar or size)


_GATED: dict[str, Activation | None] = {"LLaMAMLP": "silu", "GemmaMLP": None, "LLaMAMoE": "silu"}
_PLAIN: dict[str, Activation | None] = {"GptNeoxMLP": None, "ReluMLP": "relu"}


def _mlp(config: ModelConfig, index: int) -> Mlp:
    kind = config.mlp_class_name
    if kind not in (*_GATED, *_PLAIN):
        raise ValueError(f"MLPs of the class {kind!r}")
    if kind != "LLaMAMoE" or index < (config.first_k_dense_replace or 0):
        return _dense(config, config.intermediate_size)
    width, shared = config.moe_intermediate_size, None
    if config.n_shared_expert:
        if width is None:
            raise ValueError("n_shared_expert without moe_intermediate_size")
        shared = _dense(config, width * config.n_shared_expert)
    return Experts(
        n=config.n_expert,
        n_used=config.n_expert_per_token,
        expert=_dense(config, width or config.intermediate_size),
        router=_router(config),
        shared=shared,
    )


def _dense(config: ModelConfig, width: int) -> Dense:
    kind = config.mlp_class_name
    activation = (_GATED | _PLAIN)[kind] or ("gelu_tanh" if config.gelu_approximate == "tanh" else "gelu")
    if config.glu_limit:
        activation = "clamped_glu"
    return Dense(width, activation, kind in _GATED, config.bias, config.glu_limit)


def _router(config: ModelConfig) -> Router:
    is_sigmoid, groups = config.sigmoid_router or bool(config.n_expert_groups), config.n_expert_groups or 1
    return Router(
        kind="sigmoid" if is_sigmoid else "softmax",
        is_normed=config.norm_topk_prob or not is_sigmoid,
        scale=config.routed_scaling_factor,
        has_bias=config.router_bias,
        n_groups=groups,
        n_used_groups=(config.n_topk_groups or 1) if groups > 1 else 1,
        n_scores_per_group=(config.n_topk_scores_per_group or 0) if groups > 1 else 0,
    )
