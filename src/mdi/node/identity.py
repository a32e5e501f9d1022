"""What the numbers of a run depend on: two runs with the same identity and the same prompts give the same ids."""

from __future__ import annotations

import hashlib
import json

from mdi.node.format_choice import Numbers
from mdi.node.options import StarterOptions
from mdi.node.starter_weights import StarterWeights


def identity_of(weights: StarterWeights, numbers: Numbers, options: StarterOptions, max_length: int) -> str:
    """Hash of the model and of the options. Of the weights, one block is hashed: others belong to it."""
    known = [
        weights.config_hash, weights.dtype, weights.spec(f"block.{weights.n_layer - 1}").sha256, numbers.dtype,
        numbers.kv_dtype, numbers.quantize, options.quantize_head, options.wire_dtype, max_length,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
