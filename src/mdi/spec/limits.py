"""Bounds of what files and messages may say, and the memory that rows kept for a replay may fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Some way beyond what exists: 126 blocks, 512 experts, rows of 20,000 numbers, vocabularies of 262,144, ten million positions.
LIMITS = {
    "n_layer": 1 << 10,
    "n_expert": 1 << 10,
    "n_embd": 1 << 17,
    "n_head": 1 << 14,
    "n_query_groups": 1 << 14,
    "head_size": 1 << 14,
    "far_head_size": 1 << 14,
    "far_query_groups": 1 << 14,
    "n_shared_kv": 1 << 10,
    "shared_kv_mlp": 1 << 4,
    "block_inputs": 1 << 14,
    "intermediate_size": 1 << 18,
    "moe_intermediate_size": 1 << 18,
    "n_shared_expert": 1 << 10,
    "q_lora_rank": 1 << 14,
    "kv_lora_rank": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "qk_nope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "vocab_size": 1 << 22,
    "padded_vocab_size": 1 << 22,
    "padding_multiple": 1 << 16,
    "block_size": 1 << 27,
    "sliding_window_size": 1 << 27,
}
# What is built as many times as two numbers say, or is as wide.
PRODUCT_LIMITS = {
    ("n_layer", "n_expert"): 1 << 15,
    ("n_head", "head_size"): 1 << 18,
    ("n_head", "far_head_size"): 1 << 18,
    ("n_layer", "block_inputs"): 1 << 18,
    ("n_head", "qk_rope_head_dim"): 1 << 18,
    ("n_head", "qk_nope_head_dim"): 1 << 18,
    ("n_head", "v_head_dim"): 1 << 18,
    ("moe_intermediate_size", "n_shared_expert"): 1 << 18,
}
DEFAULT_LIMIT = 1 << 31  # of any other count in it


def excess(config: Mapping[str, Any]) -> str:
    """The first number of a model's plain configuration that is not a valid count, or is too large; "" if none is."""
    latent = config.get("latent_attention")
    numbers = {**(latent if isinstance(latent, Mapping) else {}), **config}
    for key, value in numbers.items():
        if value is None or (key not in LIMITS and type(value) is not int):
            continue
        limit = LIMITS.get(key, DEFAULT_LIMIT)
        if type(value) is not int or not 0 <= value <= limit:
            return f"{str(key)[:40]}: expected a whole number from 0 to {limit}, found {repr(value)[:40]}"
    for (first, second), limit in PRODUCT_LIMITS.items():
        a, b = numbers.get(first) or 1, numbers.get(second) or 1
        if a * b > limit:
            return f"{first} times {second} is {a * b}; at most {limit} is supported"
    return ""


REPLAY_BYTES = 64_000_000  # default
ROW_VALUE_BYTES = 4  # of a row's values, at most
