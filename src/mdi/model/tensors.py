"""Names and shapes of a model's tensors, from its spec. The names are litgpt's, in which all weights are stored and sent."""

from __future__ import annotations

from collections.abc import Iterator

from mdi.model.spec import (
    Attention,
    BlockSpec,
    DeltaNet,
    Dense,
    Experts,
    Gated,
    LatentAttention,
    Mixer,
    ModelSpec,
    Norm,
)

BLOCKS = "transformer.h."
EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "transformer.ln_f.weight"
POSITIONS = "transformer.wpe.weight"
EMBEDDING_NORM = "transformer.wte_norm"
INPUTS = "transformer.inputs."  # columns that the embedding gives to blocks
INPUT_TABLE = f"{INPUTS}table.weight"
PREDICTING = "mtp."  # within a block: what only those have that predict further tokens
TABLES = (EMBEDDING, INPUT_TABLE)  # of which single rows are read

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def end_tensors(spec: ModelSpec) -> Shapes:
    """Of embedding and head."""
    ends, width = spec.ends, spec.width
    return {
        **_linear("lm_head", width, spec.n_rows, ends.head_bias),
        EMBEDDING: (spec.n_rows, width),
        **({POSITIONS: (ends.n_positions, width)} if ends.n_positions else {}),
        **_norm(ends.embedding_norm, EMBEDDING_NORM, width),
        **_inputs(spec),
        **_norm(ends.final_norm, FINAL_NORM.removesuffix(".weight"), width),
    }


def _inputs(spec: ModelSpec) -> Shapes:
    inputs = spec.ends.inputs
    if inputs is None:
        return {}
    n = spec.n_layer * inputs.width
    return {
        INPUT_TABLE: (spec.n_rows, n),
        **_linear(f"{INPUTS}proj", spec.width, n, False),
        **_norm(inputs.norm, f"{INPUTS}norm", inputs.width),
    }


def block_tensors(block: BlockSpec, width: int) -> Shapes:
    """Of one block, by the names within it."""
    found: Shapes = {}
    for name, norm in block.norms.items():
        found |= _norm(norm, name, width)
    found |= {**_mixer(block.mixer, width), **dict(_mlp(block.mlp, width)), **_gated(block.gated, width)}
    return {**found, "scalar": (1,)} if block.has_scalar else found


def predicting_tensors(spec: ModelSpec) -> Shapes:
    """Of a block that predicts further tokens, besides those of other blocks: it reads a projection of a token's row and a
    row behind the last norm, each normed. It may have a last norm, an embedding and a head of its own (`is_optional`).
    """
    width, norm = spec.width, spec.ends.final_norm
    norms = [_norm(norm, f"{PREDICTING}{name}", width) for name in ("norm_token", "norm_hidden", "norm")]
    return {
        **_linear(f"{PREDICTING}proj", 2 * width, width, False),
        **{name: shape for one in norms for name, shape in one.items()},
        **{f"{PREDICTING}{name}.weight": (spec.n_rows, width) for name in ("wte", "head")},
    }


def is_optional(name: str) -> bool:
    """Whether a block that predicts further tokens may be without a tensor."""
    return name.rpartition(".")[0].endswith(tuple(f".{PREDICTING}{one}" for one in ("norm", "wte", "head")))


def _gated(of: Gated | None, width: int) -> Shapes:
    if of is None:
        return {}
    gate, proj = _linear("gated.fc", width, of.width, False), _linear("gated.proj", of.width, width, False)
    return {**gate, **proj, **_norm(of.norm, "gated.norm", width)}


def _mixer(mixer: Mixer, width: int) -> Shapes:
    if isinstance(mixer, DeltaNet):
        return _delta(mixer, width)
    return _latent(mixer, width) if isinstance(mixer, LatentAttention) else _attention(mixer, width)


def _attention(of: Attention, width: int) -> Shapes:
    size, per_norm = of.head_size, (of.n_head, of.n_groups) if of.qk_norm_over_all else (1, 1)
    return {
        **_linear("attn.qkv", width, sum(of.made) * size, of.qkv_bias),
        **(_linear("attn.out_gate", width, of.n_head * size, False) if of.has_gate else {}),
        **_linear("attn.proj", of.n_head * size, width, of.bias),
        **({"attn.sinks": (of.n_head,)} if of.has_sinks else {}),
        **_norm(of.qk_norm, "attn.norm_q", size * per_norm[0]),
        **_norm(of.qk_norm if of.makes != "nothing" else None, "attn.norm_k", size * per_norm[1]),
    }


def _latent(of: LatentAttention, width: int) -> Shapes:
    n_queries = of.n_head * (of.rope_size + of.nope_size)
    queries = _linear("attn.q_proj", width, n_queries, of.bias)
    if of.q_rank is not None:
        queries = {
            **_linear("attn.q_a_proj", width, of.q_rank, of.a_bias),
            "attn.q_a_norm.weight": (of.q_rank,),
            **_linear("attn.q_b_proj", of.q_rank, n_queries, of.bias),
        }
    return {
        **queries,
        **_linear("attn.kv_a_proj_with_mqa", width, of.kv_rank + of.rope_size, of.a_bias),
        "attn.kv_a_norm.weight": (of.kv_rank,),
        **_linear("attn.kv_b_proj", of.kv_rank, of.n_head * (of.nope_size + of.value_size), of.bias),
        **_linear("attn.proj", of.n_head * of.value_size, width, of.bias),
    }


def _delta(of: DeltaNet, width: int) -> Shapes:
    n_values = of.n_head * of.v_size
    return {
        **_linear("delta.qkv", width, of.n_channels, False),
        **_linear("delta.out_gate", width, n_values, False),
        **_linear("delta.gates", width, 2 * of.n_head, False),  # b of all heads, then a
        "delta.conv.weight": (of.n_channels, 1, of.n_taps),
        "delta.dt_bias": (of.n_head,),
        "delta.A_log": (of.n_head,),
        **_norm(of.norm, "delta.norm", of.v_size),
        **_linear("delta.proj", n_values, width, False),
    }


def _mlp(of: Dense | Experts, width: int) -> Iterator[tuple[str, Shape]]:
    if isinstance(of, Dense):
        yield from _dense(of, "mlp", width).items()
        return
    yield from _linear("mlp.gate", width, of.n, of.router.has_bias).items()
    if of.router.has_correction:
        yield "mlp.gate.e_score_correction_bias", (of.n,)
    if of.router.has_expert_scales:
        yield "mlp.gate.expert_scales", (of.n,)
    for name in ("gate", "experts", "post_experts", "post_shared"):
        yield from _norm(of.own_norm, f"mlp.norm_{name}", width).items()
    for i in range(of.n):
        yield from _dense(of.expert, f"mlp.experts.{i}", width).items()
    if of.shared is not None:
        yield from _dense(of.shared, "mlp.shared_experts", width).items()
        if of.has_shared_gate:
            yield from _linear("mlp.shared_experts.gate", width, 1, False).items()


def _dense(of: Dense, path: str, width: int) -> Shapes:
    found: Shapes = {}
    for name in ("fc_1", "fc_2") if of.is_gated else ("fc",):
        found |= _linear(f"{path}.{name}", width, of.width, of.bias)
    return {**found, **_linear(f"{path}.proj", of.width, width, of.bias)}


def _linear(path: str, n_in: int, n_out: int, bias: bool) -> Shapes:
    return {f"{path}.weight": (n_out, n_in), **({f"{path}.bias": (n_out,)} if bias else {})}


def _norm(norm: Norm | None, path: str, size: int) -> Shapes:
    if norm is None or not norm.has_weight:
        return {}
    return {f"{path}.weight": (size,), **({f"{path}.bias": (size,)} if norm.has_bias else {})}
