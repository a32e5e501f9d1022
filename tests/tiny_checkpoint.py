"""A tiny random LitGPT checkpoint with a tokenizer, made where a test wants it; always the same one.

It has the shape of Llama 3 (grouped queries, scaled RoPE) and knows no words: what it generates is noise, but always the
same noise. Nothing here is read from the project.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from litgpt.config import Config
from litgpt.model import GPT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from families import config_of, greedy, random_gpt

CONTEXT = 512
VOCAB = 320
END = "<|end|>"
TEXT = (
    "The ring is closed link by link. The starter sends a frame, the next node computes and sends it on, and the last "
    "one brings it home. Every node keeps a cache for each sequence. Who are you? Where have you been all the time?\n"
)


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with VOCAB ids at most, the last merges learned from TEXT."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return made


def tiny_config(**changes: Any) -> Config:
    fields = asdict(config_of("Llama-3.1-8B", block_size=CONTEXT, vocab_size=VOCAB, padded_vocab_size=VOCAB))
    return Config(**{**fields, "name": "tiny-random", "hf_config": {}, **changes})


@functools.cache
def tiny_gpt(seed: int = 4, n_layer: int = 5) -> GPT:
    """The model of `write_checkpoint(seed=seed, n_layer=n_layer)`, for the reference."""
    return random_gpt(tiny_config(n_layer=n_layer), seed)


def write_checkpoint(
    folder: Path, seed: int = 4, gpt: GPT | None = None, *, with_end: bool = True, **changes: Any
) -> Path:
    """Write lit_model.pth, model_config.yaml and the tokenizer into `folder`; returns it.

    Args:
        seed: of the weights.
        gpt: a model of one's own instead.
        with_end: whether the tokenizer names the token that ends a text; without, a text only ends by its length.
        changes: fields of the config that are to differ from the tiny one's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if gpt is None:
        gpt = random_gpt(tiny_config(**changes), seed)
    torch.save(gpt.state_dict(), folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(plain(asdict(gpt.config))), encoding="utf-8")
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": END} if with_end else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text).ids
    return ids


@functools.cache
def reference(text: str, n_tokens: int, seed: int = 4, n_layer: int = 5) -> tuple[int, ...]:
    """What the tiny model generates greedily after `text`: litgpt's own uncached GPT, EOS and what follows cut off."""
    prompt = encode(text)
    ids = greedy(tiny_gpt(seed, n_layer), prompt, min(n_tokens, CONTEXT - len(prompt)))
    end = tokenizer().token_to_id(END)
    return tuple(ids[: ids.index(end)] if end in ids else ids)


def plain(value: Any) -> Any:
    """Tuples as lists, as YAML's safe form wants them."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
