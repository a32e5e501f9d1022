"""The numbers of a model that a plan needs, from its litgpt config and a weight format; what computes it on each node."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import Shape, model_shapes
from mdi.host.device import why_not_kernels
from mdi.kernels.page_sizes import cache_shape, windows_of
from mdi.kernels.weight_formats import EMBEDDING, WeightFormat, weight_format
from mdi.placement.model import BlockShape, ModelShape
from mdi.placement.profile import ClusterProfile, NodeProfile
from mdi.spec.cluster import DTYPES
from mdi.spec.model import ModelConfig

_AS_COMPUTED = {4: "float32", 2: "bf16"}  # what caches hold, by the bytes of a value
RUNTIME_BYTES = 20_000_000  # measured (docs/distributing.md): memory of a computing process

_Shapes = Mapping[str, Shape]


def model_shape(config: Mapping[str, Any], format: str, kv_dtype: str = "auto") -> ModelShape:
    """A model's shape.

    Args:
        config: a whole litgpt Config as a plain dict.
        format: a name in `mdi.kernels.weight_formats`; the head is in it as well.
        kv_dtype: number type of caches; "auto" is the computing type.

    Raises:
        CheckpointError: litgpt cannot build such a model.
        UsageError: the format is unknown.
    """
    weight_format(format)
    return _shape(json.dumps(dict(config), sort_keys=True), format, kv_dtype)


@functools.lru_cache(maxsize=16)
def _shape(config_json: str, format: str, kv_dtype: str) -> ModelShape:
    config_dict = json.loads(config_json)
    config = ModelConfig(**config_dict)
    form = weight_format(format)
    kv_dtype = _AS_COMPUTED[form.value_bytes] if kv_dtype == "auto" else kv_dtype
    tensors = model_shapes(config_dict, config.name or "this model")
    of_block: dict[str, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        of_block.setdefault(part_of(name), {})[name] = shape
    head = _bytes({n: s for n, s in tensors.items() if n.startswith(("lm_head.", "transformer.ln_f."))}, form)
    return ModelShape(
        name=str(config.name),
        config_hash=config_hash(config_dict),
        format=format,
        context_length=config.block_size,
        row_bytes=config.n_embd * form.value_bytes,
        blocks=tuple(_block(config, i, of_block[f"block.{i}"], form, kv_dtype) for i in range(config.n_layer)),
        embedding_bytes=_bytes({n: s for n, s in tensors.items() if part_of(n) == "embedding"}, form),
        head_bytes=head,
        head_load_bytes=form.load_bytes(math.prod(tensors["lm_head.weight"])),
        head_macs=math.prod(tensors["lm_head.weight"]),
        n_head=config.n_head,
        vocab_size=config.padded_vocab_size,
        work_row_bytes=_widest(config, tensors) * form.value_bytes,
        table_bytes=4 * (config.n_head if config.alibi else 2 * config.rope_n_elem * (2 if config.rope_local_base_freq else 1)),
        runtime_bytes=RUNTIME_BYTES,
        kv_dtype=kv_dtype,
    )


def _block(config: ModelConfig, i: int, own: _Shapes, form: WeightFormat, kv_dtype: str) -> BlockShape:
    return BlockShape(
        weight_bytes=_bytes(own, form),
        load_bytes=form.load_bytes(sum(map(math.prod, own.values()))),
        macs=round(sum(math.prod(shape) * _used(config, name) for name, shape in own.items() if len(shape) == 2)),
        page_bytes=cache_shape(vars(config)).block_bytes(kv_dtype),
        window=windows_of(vars(config), i, i + 1)[0],
    )


def _bytes(tensors: _Shapes, form: WeightFormat) -> int:
    return round(sum(form.tensor_bytes(name, shape) for name, shape in tensors.items()))


def _used(config: ModelConfig, name: str) -> float:
    """The part of a weight matrix that an average row meets: of experts, as many as a row is sent to."""
    return config.n_expert_per_token / config.n_expert if ".experts." in name else 1.0


def _widest(config: ModelConfig, tensors: _Shapes) -> int:
    """Values that a row has at the same time in a block: in, normed, out, and two of the widest layer."""
    outputs = [shape[0] for name, shape in tensors.items() if name.startswith("transformer.h.") and len(shape) == 2]
    return int(3 * config.n_embd + 2 * max(outputs))


def with_paths(profile: ClusterProfile, config: Mapping[str, Any], config_hash: str, form: str) -> ClusterProfile:
    """The profile with `computed_by` for this model, as far as it is known.

    Args:
        config: litgpt's Config as a plain dict; `config_hash` is its hash.
        form: format of the blocks.
    """

    def path(node: NodeProfile) -> str:
        reason = why_not_kernels(config, node.device, form if form in DTYPES else None)
        is_torch = node.computed_by.startswith("torch")
        if reason is not None:
            return node.computed_by if is_torch else f"torch: {reason}"
        return "" if is_torch and profile.config_hash != config_hash else node.computed_by

    return replace(profile, nodes=tuple(replace(node, computed_by=path(node)) for node in profile.nodes))
