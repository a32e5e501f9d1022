"""Rows that an adapter has learned, and that stand before the rows of a text: their names, shapes and limits.

A text with such an adapter begins with n *virtual* positions, and its first token has position n. In a part "adapter.<i>"
(`mdi.checkpoint.adapters`) are

    transformer.h.<i>.<adapter>.prompt         float32 (n, n_embd): the n first rows before block 0; before another block
                                               what is added to them (deep prompts)
    transformer.h.<i>.<adapter>.prefix_key     float32 (n, query groups * head_size): keys of the n first positions, as
                                               attention sees them, without a rotation (prefixes, in all blocks)
    transformer.h.<i>.<adapter>.prefix_value   the same: their values

Sources: Lester et al. 2021 (prompts); Liu et al. 2021, P-Tuning v2 (deep prompts); Li and Liang 2021 (prefixes).
"""

from __future__ import annotations

import re

from mdi.spec.model import ModelConfig

MOST_VIRTUAL = 1 << 12  # rows of a prompt or prefix
PROMPT_TENSOR, PREFIX_KEY, PREFIX_VALUE = "prompt", "prefix_key", "prefix_value"
STORED_ROWS = re.compile(r"transformer\.h\.(\d+)\.([1-9]\d*)\.(prompt|prefix_key|prefix_value)")


def stored_name(block: int, number: int, what: str) -> str:
    """Of a tensor of adapter `number` in a part."""
    return f"transformer.h.{block}.{number}.{what}"


def row_widths(config: ModelConfig) -> dict[str, int]:
    """Numbers in a row of each kind."""
    width = config.n_query_groups * config.head_size
    return {PROMPT_TENSOR: config.n_embd, PREFIX_KEY: width, PREFIX_VALUE: width}


def why_no_rows(is_prefix: bool, config: ModelConfig) -> str | None:
    """What a model has that such rows cannot stand before, behind the model's name; None: they can."""
    if not is_prefix and (config.scale_embeddings or config.embedding_norm or config.learned_positions):
        verb = "multiplies" if config.scale_embeddings else "norms" if config.embedding_norm else "adds positions to"
        return f"{verb} its embeddings, so that rows before them have no one form in other programs"
    if config.latent_attention:
        return "has latent attention, which the kernels do not compute"
    if is_prefix and any(config.sliding_window_indices or ()):
        return "has attention in windows, which see no prefix"
    return None
