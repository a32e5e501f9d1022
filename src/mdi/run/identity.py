"""Everything that the numbers of a run depend on: equal identities and equal prompts give equal ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mdi.host.computing import Computing
from mdi.host.device import why_not_kernels
from mdi.spec.extent import Extent
from mdi.spec.model import ModelConfig
from mdi.spec.options import StarterOptions
from mdi.stages.side import Base
from mdi.stages.starter_weights import StarterWeights

IN_KERNELS = ("fused", "plain")  # classes of library.arithmetic() whose bits depend on no batch, cut or processor


def identity_of(weights: StarterWeights, computing: Computing, options: StarterOptions, extent: Extent) -> str:
    """Hash of the model and the options. Only one block of the weights is hashed; it identifies the others."""
    model = weights.model
    known = [
        model.config_hash, model.dtype, weights.spec(f"block.{weights.n_layer - 1}").sha256, computing.dtype,
        computing.cache_type(extent.kv_dtype), computing.quantize, options.quantize_head, options.wire_dtype,
        extent.max_length,
        *(one.sha256 for one in weights.adapters),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def base_of(weights: StarterWeights) -> Base:
    """The model as what is trained for it knows it."""
    last = weights.spec(f"block.{weights.n_layer - 1}").sha256
    model = weights.model
    return Base(model.name, model.config_hash, last, model.format or model.dtype)


def numbers_of(
    blocks: Sequence[tuple[int, int]], names: Sequence[str], shares: Sequence[Any], arithmetic: Mapping[str, str],
    computing: Computing, options: StarterOptions, epoch: int, config: ModelConfig | None,
) -> str:  # fmt: skip
    """Hash of what the bits of a ring's rows depend on besides `identity_of`: two rings with the same one give the same ids.

    The kernels give the same bits for any cut of the model. Nodes that compute blocks together do so only with the same shares,
    rounded links only between the same blocks. Torch is trusted in float32, where the same node has a block. Other devices and
    sums that torch.distributed makes are not: such a ring has the hash of no other one.

    Args:
        blocks, names, shares, arithmetic: of the ring's nodes; `StarterWeights.share_of`, `setup.arithmetic_of`.
        epoch: of the ring.
        config: as in `why_not_kernels`. A node may have kernels and still have to compute this model in torch.
    """
    is_in_torch = why_not_kernels(config, "cpu", options.dtype) is not None
    is_rounded = options.wire_dtype != "auto" and len(names) > 1
    held: dict[int, list[Any]] = {}
    for place, (name, (start, stop), share) in enumerate(zip(names, blocks, shares, strict=True)):
        found: Any = arithmetic.get(name, "")
        if is_in_torch and found in IN_KERNELS:
            found = "torch"
        if found not in IN_KERNELS:
            found = [found, name if found == "torch" and computing.format == "float32" else epoch]
        for block in range(start, stop):
            held.setdefault(block, []).append([share, found, is_rounded and place > 0 and block == start])
    # A hot spare computes as its node does, or its place would give other bits.
    known = [sorted({json.dumps(one): one for one in held[block]}.items()) for block in sorted(held)]
    return hashlib.sha256(json.dumps([is_rounded, known]).encode()).hexdigest()
