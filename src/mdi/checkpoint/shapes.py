"""The shape of a model: its checked configuration, and names and shapes of the tensors that follow from it. Reads no weights,
builds no model, and needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.errors import CheckpointError
from mdi.kernels.weight_formats import EMBEDDING, EMBEDDING_NORM, PLAIN_MLPS, POSITIONS, weight_format
from mdi.spec.model import ModelConfig
from mdi.spec.settings_file import read_yaml

BLOCKS = "transformer.h."

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

_GATED = ("LLaMAMLP", "GemmaMLP")


def shapes_of(config: ModelConfig) -> Shapes:
    """Shape of every tensor, by its name.

    Raises:
        ValueError, KeyError, TypeError: litgpt cannot build such a model.
    """
    n_embd, vocabulary = config.n_embd, config.padded_vocab_size
    shapes = {
        **_linear("lm_head", n_embd, vocabulary, config.lm_head_bias),
        EMBEDDING: (vocabulary, n_embd),
        **({POSITIONS: (config.block_size, n_embd)} if config.learned_positions else {}),
        **(_norm(config, EMBEDDING_NORM, n_embd) if config.embedding_norm else {}),
        **({} if config.norm_after_residual else _norm(config, "transformer.ln_f", n_embd)),
    }
    n_dense = config.first_k_dense_replace or 0  # the first blocks may have no experts
    kinds = {is_dense: dict(_block(config, is_dense)) for is_dense in (True, False)}
    for i in range(config.n_layer):
        shapes.update({f"{BLOCKS}{i}.{name}": shape for name, shape in kinds[i < n_dense].items()})
    if strange := next((name for name, shape in shapes.items() if any(type(n) is not int for n in shape)), None):
        raise ValueError(f"the shape of {strange} would be {shapes[strange]}")
    return shapes


def _block(config: ModelConfig, is_dense: bool) -> Iterator[tuple[str, Shape]]:
    """Of one block, by the names within it."""
    n_embd = config.n_embd
    if config.shared_attention_norm and not config.parallel_residual:
        raise ValueError("a norm that attention and MLP share, without parallel residuals")
    norms = {
        "norm_1": config.norm_1,
        "post_attention_norm": config.post_attention_norm,
        "norm_2": config.norm_2 and not config.shared_attention_norm,
        "post_mlp_norm": config.post_mlp_norm,
    }
    for name, is_there in norms.items():
        yield from (_norm(config, name, n_embd) if is_there else {}).items()
    yield from (_latent_attention(config) if config.latent_attention else _attention(config)).items()
    kind = config.mlp_class_name
    if kind == "LLaMAMoE" and not is_dense:
        yield from _experts(config)
    else:
        gated = kind in _GATED or is_dense
        yield from _mlp(config, "mlp", config.intermediate_size, gated=gated).items()
    if kind not in (*_GATED, "LLaMAMoE", *PLAIN_MLPS):
        raise ValueError(f"MLPs of the class {kind!r}")


def _attention(config: ModelConfig) -> Shapes:
    size, n_head, n_groups = config.head_size, config.n_head, config.n_query_groups
    has_bias = config.bias or config.attn_bias if config.qkv_bias is None else config.qkv_bias
    shapes = {
        **_linear("attn.qkv", config.n_embd, (n_head + 2 * n_groups) * size, has_bias),
        **_linear("attn.proj", n_head * size, config.n_embd, config.bias),
    }
    if config.attention_sinks:
        shapes["attn.sinks"] = (n_head,)
    if config.norm_qk:
        over_all = config.norm_qk_type == "olmo2"
        shapes.update(_norm(config, "attn.norm_q", size * (n_head if over_all else 1)))
        shapes.update(_norm(config, "attn.norm_k", size * (n_groups if over_all else 1)))
    return shapes


def _latent_attention(config: ModelConfig) -> Shapes:
    latent, n_embd, n_head, bias = config.latent_attention, config.n_embd, config.n_head, config.bias
    assert latent is not None
    q_rank, kv_rank, rope = latent["q_lora_rank"], latent["kv_lora_rank"], latent["qk_rope_head_dim"]
    nope, value = latent["qk_nope_head_dim"], latent["v_head_dim"]
    return {
        **_linear("attn.q_a_proj", n_embd, q_rank, config.attn_bias),
        "attn.q_a_norm.weight": (q_rank,),
        **_linear("attn.q_b_proj", q_rank, n_head * (rope + nope), bias),
        **_linear("attn.kv_a_proj_with_mqa", n_embd, kv_rank + rope, config.attn_bias),
        "attn.kv_a_norm.weight": (kv_rank,),
        **_linear("attn.kv_b_proj", kv_rank, config.n_query_groups * (nope + value), bias),
        **_linear("attn.proj", n_head * value, n_embd, bias),
    }


def _experts(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    n_expert, width = config.n_expert, config.moe_intermediate_size or config.intermediate_size
    yield from _linear("mlp.gate", config.n_embd, n_expert, config.router_bias).items()
    if config.n_expert_groups or config.sigmoid_router:
        yield "mlp.gate.e_score_correction_bias", (n_expert,)
    for i in range(n_expert):
        yield from _mlp(config, f"mlp.experts.{i}", width, gated=True).items()
    if config.n_shared_expert:
        if config.moe_intermediate_size is None:
            raise ValueError("n_shared_expert without moe_intermediate_size")
        shared = config.moe_intermediate_size * config.n_shared_expert
        yield from _mlp(config, "mlp.shared_experts", shared, gated=True).items()


def _mlp(config: ModelConfig, path: str, width: int, *, gated: bool) -> Shapes:
    n_embd, bias = config.n_embd, config.bias
    into = ("fc_1", "fc_2") if gated else ("fc",)
    shapes = {name: shape for fc in into for name, shape in _linear(f"{path}.{fc}", n_embd, width, bias).items()}
    return {**shapes, **_linear(f"{path}.proj", width, n_embd, bias)}


def _linear(path: str, n_in: int, n_out: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{path}.weight": (n_out, n_in)}
    if bias:
        shapes[f"{path}.bias"] = (n_out,)
    return shapes


def _norm(config: ModelConfig, path: str, size: int) -> Shapes:
    kind = config.norm_class_name
    if kind == "RMSNorm":
        return {f"{path}.weight": (size,)}
    if kind != "LayerNorm":
        raise ValueError(f"norms of the class {kind!r}")
    return {f"{path}.weight": (size,), f"{path}.bias": (size,)} if config.norm_has_weight else {}


def interleaved_rows(config: ModelConfig) -> np.ndarray:
    """Where the rows of query, key and value are in a matrix that has them group by group; all queries come first."""
    n_groups, per_group, size = (
        config.n_query_groups,
        config.n_head // config.n_query_groups,
        config.head_size,
    )
    rows = np.arange(n_groups * (per_group + 2) * size).reshape(n_groups, per_group + 2, size)
    return np.concatenate([part.reshape(-1) for part in (rows[:, :per_group], rows[:, -2], rows[:, -1])])


def read_config(path: Path) -> ModelConfig:
    """Read a model_config.yaml. Raises CheckpointError."""
    return full_config(read_yaml(path), str(path))


def full_config(plain: Any, where: str) -> ModelConfig:
    """`ModelConfig.of`, but raises CheckpointError, which begins with `where`."""
    try:
        return ModelConfig.of(plain)
    except ValueError as e:
        raise CheckpointError(f"{where}: {e}") from None


def check_tensors(
    config: ModelConfig, specs: Mapping[str, TensorSpec], parts: Iterable[str], where: str, packing: Packing | None = None
) -> None:  # fmt: skip
    """Check that the tensors are just those of these parts of the model.

    Args:
        packing: the formats that they are stored in; None if they are plain.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    names = set(parts)
    wanted = {name: shape for name, shape in model_shapes(config, where).items() if part_of(name) in names}
    known = set(wanted)
    for name, shape in wanted.items():
        if name not in specs:
            raise CheckpointError(f"{where} lacks the tensor {name}, of shape {list(shape)}")
        if packing is not None:
            known |= packing.check(name, shape, specs, where)
        elif specs[name].shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has the shape {list(specs[name].shape)}, expected {list(shape)} by the model's config"
            )
    for name in specs:
        if name not in known:
            raise CheckpointError(f"{where} holds the tensor {name}, which the model's config does not ask for")


def model_shapes(config: ModelConfig, where: str) -> dict[str, Shape]:
    """Shape of every tensor of the model, by its name; nothing is built.

    Raises:
        CheckpointError: litgpt cannot build it.
    """
    return _known(config, where)[0]


def part_shapes(config: ModelConfig, where: str, part: str) -> dict[str, Shape]:
    """As `model_shapes`, of the tensors of one part; nothing for a part that the model does not have."""
    return _known(config, where)[1].get(part, {})


def packed_bytes(config: ModelConfig, where: str, parts: Iterable[str], form: str) -> int:
    """Memory of plain parts when they are packed in a format, and while rows of their widest tensor are packed."""
    found = weight_format(form)
    shapes = {name: shape for part in parts for name, shape in part_shapes(config, where, part).items()}
    whole = sum(found.tensor_bytes(name, shape) for name, shape in shapes.items())
    return round(whole) + found.load_bytes(widest(shapes.values()))


def widest(shapes: Iterable[Shape]) -> int:
    """Numbers in a row of the widest matrix."""
    return max((shape[1] for shape in shapes if len(shape) == 2), default=0)


_Known = tuple[dict[str, Shape], dict[str, dict[str, Shape]]]


def _known(config: ModelConfig, where: str) -> _Known:
    try:
        return _model_shapes(config)
    except (ValueError, KeyError, TypeError, ArithmeticError) as e:
        raise CheckpointError(f"{where} describes no model that litgpt can build: {type(e).__name__}: {e}") from None


@functools.lru_cache(maxsize=4)
def _model_shapes(config: ModelConfig) -> _Known:
    """All shapes, and by part: with many experts, to look through all names for each part takes seconds."""
    shapes = shapes_of(config)
    parts: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        parts.setdefault(part_of(name), {})[name] = shape
    return shapes, parts
