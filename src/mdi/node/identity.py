"""Everything that the numbers of a run depend on: equal identities and equal prompts give equal ids."""

from __future__ import annotations

import hashlib
import json

from mdi.machine.computing import Computing
from mdi.node.options import StarterOptions
from mdi.node.starter_weights import StarterWeights


def identity_of(weights: StarterWeights, computing: Computing, options: StarterOptions, max_length: int) -> str:
    """Hash of the model and the options. Only one block of the weights is hashed; it identifies the others."""
    known = [
        weights.config_hash, weights.dtype, weights.spec(f"block.{weights.n_layer - 1}").sha256, computing.dtype,
        computing.kv_dtype, computing.quantize, options.quantize_head, options.wire_dtype, max_length,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
