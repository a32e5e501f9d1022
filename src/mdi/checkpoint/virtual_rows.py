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

from mdi.model.spec import Attention, DeltaNet, LatentAttention, ModelSpec

MOST_VIRTUAL = 1 << 12  # rows of a prompt or prefix
PROMPT_TENSOR, PREFIX_KEY, PREFIX_VALUE = "prompt", "prefix_key", "prefix_value"
STORED_ROWS = re.compile(r"transformer\.h\.(\d+)\.([1-9]\d*)\.(prompt|prefix_key|prefix_value)")


def stored_name(block: int, number: int, what: str) -> str:
    """Of a tensor of adapter `number` in a part."""
    return f"transformer.h.{block}.{number}.{what}"


def row_widths(spec: ModelSpec) -> dict[str, int]:
    """Numbers in a row of each kind."""
    mixer = spec.blocks[0].mixer
    width = mixer.n_groups * mixer.head_size if isinstance(mixer, Attention) else 0
    return {PROMPT_TENSOR: spec.width, PREFIX_KEY: width, PREFIX_VALUE: width}


def why_no_rows(is_prefix: bool, spec: ModelSpec) -> str | None:
    """What a model has that such rows cannot stand before, behind the model's name; None: they can."""
    ends = spec.ends
    if not is_prefix and (ends.embedding_factor is not None or ends.embedding_norm or ends.n_positions):
        verb = "norms" if ends.embedding_norm else "adds positions to"
        verb = verb if ends.embedding_factor is None else "multiplies"
        return f"{verb} its embeddings, so that rows before them have no one form in other programs"
    if any(isinstance(one.mixer, LatentAttention) for one in spec.kinds):
        return "has latent attention, before which such rows are not computed"
    if is_prefix and any(isinstance(one.mixer, DeltaNet) for one in spec.kinds):
        return "has gated delta nets, whose states no prefix has"
    if is_prefix and spec.has_window:
        return "has attention in windows, which see no prefix"
    if is_prefix and any(one.cache_of is not None for one in spec.kinds):
        return "has blocks that read the keys and values of others, and have no prefix of their own"
    return None
