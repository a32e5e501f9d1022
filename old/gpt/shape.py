"""The shapes of the two earlier stages of the work, and how they were cut.

GPT-2's architecture (Radford et al. 2019, section 2.3) is litgpt's block with LayerNorm, tanh-GELU and no rotary embedding,
plus a learned embedding of positions. Numbers are from the MDI-LLM thesis, sections 3.3 and 3.4, tables I to III, V and VI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from litgpt.config import Config

from mdi.errors import CheckpointError, Code
from mdi.spec.settings_file import check_counts

GPT2_CONTEXT, GPT2_VOCAB = 1024, 50257

# name -> (n_layer, n_embd, n_head); thesis, table I
GPT2_SIZES = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}

NANO_BLOCKS = (7, 9, 12)
NANO_CONTEXT, NANO_EMBD, NANO_HEADS = 128, 384, 6

# (n_layer, n_nodes) -> blocks per node. Tables II and III: the last of several nodes holds the head.
NANO_CUTS = {(7, 2): (3, 4), (9, 2): (4, 5), (12, 2): (5, 7), (7, 3): (1, 3, 3), (9, 3): (2, 4, 3), (12, 3): (3, 5, 4)}

# Tables V and VI: the starter holds the head.
GPT2_CUTS = {
    (12, 2): (5, 7),
    (24, 2): (10, 14),
    (36, 2): (16, 20),
    (48, 2): (22, 26),
    (12, 3): (2, 5, 5),
    (24, 3): (4, 10, 10),
    (36, 3): (10, 13, 13),
    (48, 3): (14, 17, 17),
}


@dataclass
class GPTConfig(Config):
    """litgpt's Config for a model with learned positions.

    Attributes:
        qkv_bias: whether the projections to query, key and value have a bias: GPT-2's do, NanoGPT's do not.
        dropout: in training, of what each half of a block adds.
    """

    qkv_bias: bool = True
    dropout: float = 0.0


def config_of(fields: Any, where: str) -> GPTConfig:
    """A config from its plain form, which came from a file or another node. Raises CheckpointError."""
    try:
        check_counts(fields, where)
        config = GPTConfig(**fields)
        for key in ("n_layer", "n_embd", "n_head", "block_size", "padded_vocab_size"):
            value = getattr(config, key)
            if type(value) is not int or value < 1:
                raise ValueError(f"{key}: expected a whole number from 1 on, found {value!r}")
        return config
    except (TypeError, ValueError, AssertionError, AttributeError, ZeroDivisionError) as e:
        raise CheckpointError(
            f"{where} does not describe a GPT with learned positions: {' '.join(str(e).split())}", code=Code.SHAPE
        ) from None


def _config(name: str, **fields: Any) -> GPTConfig:
    return GPTConfig(
        name=name,
        padded_vocab_size=fields["vocab_size"],
        norm_class_name="LayerNorm",
        norm_eps=1e-5,
        mlp_class_name="GptNeoxMLP",
        gelu_approximate="tanh",
        intermediate_size=4 * fields["n_embd"],
        rotary_percentage=0.0,
        parallel_residual=False,
        bias=True,
        **fields,
    )


def gpt2_config(
    name: str, n_layer: int, n_embd: int, n_head: int, vocab_size: int = GPT2_VOCAB, context: int = GPT2_CONTEXT
) -> GPTConfig:
    return _config(name, n_layer=n_layer, n_embd=n_embd, n_head=n_head, vocab_size=vocab_size, block_size=context)


def nano_config(
    n_layer: int,
    vocab_size: int,
    n_embd: int = NANO_EMBD,
    n_head: int = NANO_HEADS,
    context: int = NANO_CONTEXT,
    dropout: float = 0.0,
) -> GPTConfig:
    """No bias for query, key and value, but one for the head, as the thesis' parameter counts say."""
    return _config(
        f"nanogpt-{n_layer}",
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        vocab_size=vocab_size,
        block_size=context,
        lm_head_bias=True,
        qkv_bias=False,
        dropout=dropout,
    )
