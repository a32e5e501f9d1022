"""Everything that the numbers of a run depend on: equal identities and equal prompts give equal ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdi.host.computing import Computing
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.extent import Extent
from mdi.spec.options import StarterOptions
from mdi.stages.side import Base
from mdi.stages.starter_weights import StarterWeights


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


@dataclass(frozen=True)
class RingArithmetic:
    """What the bits of a ring's rows depend on besides `identity_of`: rings with equal ones give the same ids.

    The kernels give the same bits for any cut of the model. Nodes that compute blocks together do so only with the same shares,
    rounded links only between the same blocks. Torch is trusted in float32, where the same node has a block. Other devices and
    sums that torch.distributed makes are not: such a ring is equal to no other one.

    Attributes:
        is_rounded: whether rows are rounded on the links.
        of_blocks: for each block, how it is computed, in JSON: by one node, or by each member of a group. A hot spare computes
            as its node does, or its place would give other bits.
        is_fixed: whether a row has the same bits in the company of any other rows.
    """

    is_rounded: bool
    of_blocks: tuple[tuple[str, ...], ...]
    is_fixed: bool

    @classmethod
    def of(
        cls, names: Sequence[str], blocks: Sequence[tuple[int, int]], arithmetics: Sequence[Arithmetic], wire_dtype: str,
        epoch: int,
    ) -> RingArithmetic:  # fmt: skip
        """Of the nodes of a ring, the starter first.

        Args:
            epoch: of the ring.
        """
        is_rounded = wire_dtype != "auto" and len(names) > 1
        held: dict[int, set[str]] = {}
        first = arithmetics[0]
        for place, (name, (start, stop), one) in enumerate(zip(names, blocks, arithmetics, strict=True)):
            found: Any = one.unit
            if not one.is_fixed:
                found = [found, name if (found, one.formats.only) == ("torch", "float32") else epoch]
            if replace(one, unit=first.unit, share=first.share) != first:  # the node's own choice
                found = [found, one.formats.of_all, one.kv_dtype]
            for block in range(start, stop):
                how = json.dumps([one.share, found, is_rounded and place > 0 and block == start])
                held.setdefault(block, set()).add(how)
        of_blocks = tuple(tuple(sorted(held[block])) for block in sorted(held))
        return cls(is_rounded, of_blocks, all(one.is_fixed for one in arithmetics))

    @property
    def sha256(self) -> str:
        """As a journal keeps it."""
        known = [[[how, json.loads(how)] for how in block] for block in self.of_blocks]
        return hashlib.sha256(json.dumps([self.is_rounded, known]).encode()).hexdigest()
