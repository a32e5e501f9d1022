"""Checkpoints of named shapes with random weights: speed does not depend on what the weights say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

LLAMA = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "parallel_residual": False, "bias": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-1m": {"n_layer": 3, "n_embd": 128, "n_head": 8, "n_query_groups": 2, "intermediate_size": 384},
    "small-30m": {"n_layer": 8, "n_embd": 512, "n_head": 8, "n_query_groups": 4, "intermediate_size": 1408},
    "nano-llama-304m": {"n_layer": 12, "n_embd": 1024, "n_head": 16, "n_query_groups": 4, "intermediate_size": 5632},
    "tiny-llama-1.1b": {"n_layer": 22, "n_embd": 2048, "n_head": 32, "n_query_groups": 4, "intermediate_size": 5632},
    "llama-2-7b": {"n_layer": 32, "n_embd": 4096, "n_head": 32, "n_query_groups": 32, "intermediate_size": 11008},
    "tiny-3m": {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_query_groups": 8, "intermediate_size": 704},
}
PACKED_ONLY = ("llama-2-7b", "tiny-3m")  # made in packed formats, without plain weights: see random_packed
DTYPE = "bfloat16"  # of plain weights
VOCABULARY = 32000
CONTEXT = 2048
_DONE = "made.json"


def config_of(shape: str) -> Any:
    """litgpt's Config of a shape."""
    from litgpt.config import Config

    return Config(name=shape, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, block_size=CONTEXT,
                  rotary_percentage=1.0, padding_multiple=64, **LLAMA, **SHAPES[shape])  # fmt: skip


def n_weights(shape: str) -> tuple[int, int]:
    """Weights of (all blocks, the head) that a token is multiplied with; of the embedding it reads one row."""
    s = SHAPES[shape]
    n_embd, head_size = s["n_embd"], s["n_embd"] // s["n_head"]
    attention = n_embd * head_size * (2 * s["n_head"] + 2 * s["n_query_groups"])
    return s["n_layer"] * (attention + 3 * n_embd * s["intermediate_size"]), n_embd * VOCABULARY


def make_checkpoint(folder: Path, shape: str) -> None:
    """A LitGPT checkpoint with random bfloat16 weights and a tokenizer of bytes; made once, and kept.

    Every bfloat16 number is a float32 number, so that all systems read the same weights in every format. All of it
    stands in memory while it is made. Shapes in PACKED_ONLY get no weights.
    """
    from litgpt.utils import save_config

    if (folder / _DONE).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = config_of(shape)
    if shape not in PACKED_ONLY:
        _make_weights(folder, config)
    save_config(config, folder)
    write_tokenizer(folder)
    (folder / _DONE).write_text(json.dumps({"shape": shape}))


def _make_weights(folder: Path, config: Any) -> None:
    import torch
    from litgpt.model import GPT

    with torch.device("meta"):
        names = GPT(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, DTYPE)
    weights = {
        name: torch.ones(t.shape, dtype=dtype)
        if t.dim() == 1
        else torch.empty(t.shape, dtype=dtype).normal_(0, 0.02, generator=generator)
        for name, t in names.items()
    }
    torch.save(weights, folder / "lit_model.pth")


def write_tokenizer(folder: Path) -> None:
    """Bytes, and nothing that ends a text: every run has the length that it is asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
