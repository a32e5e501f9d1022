"""The numbers of a model, from its litgpt config and a weight format: what `mdi.partition` computes with."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from litgpt.config import Config

from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.modelshapes import Shape
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import model_shapes
from mdi.kernels.page_sizes import cache_shape, windows_of
from mdi.partition.formats import WeightFormat, weight_format
from mdi.partition.model import BlockShape, ModelShape

# Of these, a format leaves the weights as they are (checkpoint.packing).
KEPT = ("gate", "kv_b_proj")
# Measured, docs/placement.md: what a process takes that computes; what packing a part takes, of the bytes of the plain one.
CACHE_TYPES = {4: "float32", 2: "bf16"}  # by the bytes of a value
RUNTIME_BYTES = 20_000_000
PACKING_SHARE = 0.75

_Shapes = Mapping[str, Shape]


def model_shape(config: Mapping[str, Any], format: str) -> ModelShape:
    """A model's shape.

    Args:
        config: a whole litgpt Config as a plain dict.
        format: a name in `mdi.partition.formats`; the head is in it as well.

    Raises:
        CheckpointError: litgpt cannot build such a model.
        UsageError: there is no such format.
    """
    weight_format(format)
    return _shape(json.dumps(dict(config), sort_keys=True), format)


@functools.lru_cache(maxsize=16)
def _shape(config_json: str, format: str) -> ModelShape:
    config_dict = json.loads(config_json)
    config = Config(**config_dict)
    kind = weight_format(format)
    tensors = model_shapes(config_dict, config.name or "this model")
    of_block: dict[str, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        of_block.setdefault(part_of(name), {})[name] = shape
    head = _bytes({n: s for n, s in tensors.items() if n.startswith(("lm_head.", "transformer.ln_f."))}, kind)
    # An embedding is never in 4 bits: see checkpoint.packing.
    embedding_kind = weight_format("int8") if format == "int4" else kind
    embedding = round(embedding_kind.linear_bytes(*tensors["transformer.wte.weight"]))
    return ModelShape(
        name=str(config.name),
        config_hash=config_hash(config_dict),
        format=format,
        context_length=config.block_size,
        row_bytes=config.n_embd * kind.value_bytes,
        blocks=tuple(_block(config, i, of_block[f"block.{i}"], kind) for i in range(config.n_layer)),
        embedding_bytes=embedding,
        head_bytes=head,
        head_load_bytes=_load_bytes(_values(tensors["lm_head.weight"]), kind),
        head_macs=_values(tensors["lm_head.weight"]),
        n_head=config.n_head,
        vocab_size=config.padded_vocab_size,
        work_row_bytes=_widest(config, tensors) * kind.value_bytes,
        table_bytes=2 * 4 * config.rope_n_elem * (2 if config.rope_local_base_freq else 1),
        runtime_bytes=RUNTIME_BYTES,
    )


def _block(config: Config, i: int, own: _Shapes, kind: WeightFormat) -> BlockShape:
    return BlockShape(
        weight_bytes=_bytes(own, kind),
        load_bytes=_load_bytes(sum(map(_values, own.values())), kind),
        macs=round(sum(_values(shape) * _used(config, name) for name, shape in own.items() if len(shape) == 2)),
        page_bytes=cache_shape(vars(config)).block_bytes(CACHE_TYPES[kind.value_bytes]),
        window=windows_of(vars(config), i, i + 1)[0],
    )


def _load_bytes(n_values: int, kind: WeightFormat) -> int:
    """What a part takes beside the weights that it becomes, while it is loaded.

    A plain one is mapped from its file, and stays there or can be read again. One that is to be packed stands there in plain
    numbers, for it may come from a checkpoint, and is packed beside them.
    """
    is_packed = kind.bits_per_weight < 8 * kind.value_bytes
    return round((1 + PACKING_SHARE) * n_values * kind.value_bytes) if is_packed else 0


def _bytes(tensors: _Shapes, kind: WeightFormat) -> int:
    return round(sum(_tensor_bytes(name, shape, kind) for name, shape in tensors.items()))


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: WeightFormat) -> float:
    if len(shape) == 2 and not name.removesuffix(".weight").endswith(KEPT):
        return kind.linear_bytes(*shape)
    return _values(shape) * kind.value_bytes


def _used(config: Config, name: str) -> float:
    """The part of a weight matrix that an average row meets: of experts, as many as a row is sent to."""
    return config.n_expert_per_token / config.n_expert if ".experts." in name else 1.0


def _widest(config: Config, tensors: _Shapes) -> int:
    """Values that a row has at the same time in a block: in, normed, out, and two of the widest layer."""
    outputs = [shape[0] for name, shape in tensors.items() if name.startswith("transformer.h.") and len(shape) == 2]
    return int(3 * config.n_embd + 2 * max(outputs))


def _values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
