"""Checkpoints with random weights for the models of the thesis, in bfloat16, written block by block.

Speed and memory do not depend on what the weights say; all of them are computed in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import random_checkpoint
from gpt.shape import GPT2_CONTEXT, GPT2_SIZES, GPT2_VOCAB, nano_config
from gpt.weights import nano_config_file

LLAMAS = {"tiny-llama": "tiny-llama-1.1b", "nano-llama": "nano-llama-304m"}  # shapes
DONE = "complete"  # a file that says that the others are


def make_checkpoint(folder: Path, key: str) -> Path:
    """Write a model if it is not there yet; returns its folder."""
    where = folder / key
    if (where / DONE).is_file():
        return where
    where.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    if key.startswith("nanogpt"):
        _write_nano(where, int(key.rpartition("-")[2]))
    elif key.startswith("gpt2"):
        _write_gpt2(where, *GPT2_SIZES[key])
    else:
        random_checkpoint.make_checkpoint(where, LLAMAS[key])
    random_checkpoint.write_tokenizer(where)
    (where / DONE).touch()
    return where


def _write_nano(where: Path, n_layer: int) -> None:
    from gpt.model import random_model

    config = nano_config(n_layer, vocab_size=65)
    torch.save(random_model(config, seed=1).state_dict(), where / "lit_model.pth")
    (where / "model_config.yaml").write_bytes(nano_config_file(config))


def _write_gpt2(where: Path, n_layer: int, n_embd: int, n_head: int) -> None:
    """Hugging Face's form, a shard for each block."""
    config = {"model_type": "gpt2", "n_layer": n_layer, "n_embd": n_embd, "n_head": n_head, "vocab_size": GPT2_VOCAB,
              "n_positions": GPT2_CONTEXT}  # fmt: skip
    (where / "config.json").write_text(json.dumps(config))
    listed: dict[str, str] = {}
    shards: Iterator[dict[str, torch.Tensor]] = (_gpt2_block(i, n_embd) for i in range(n_layer))
    ends = {
        "wte.weight": _normal(GPT2_VOCAB, n_embd),
        "wpe.weight": _normal(GPT2_CONTEXT, n_embd),
        **_norm("ln_f", n_embd),
    }
    for i, shard in enumerate([ends, *([None] * n_layer)]):
        tensors = shard if shard is not None else next(shards)
        name = f"model-{i:05}.safetensors"
        save_file(tensors, where / name)
        listed |= dict.fromkeys(tensors, name)
    (where / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def _gpt2_block(index: int, n_embd: int) -> dict[str, torch.Tensor]:
    h = f"h.{index}."
    tensors = {**_norm(h + "ln_1", n_embd), **_norm(h + "ln_2", n_embd)}
    sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for name, (rows, columns) in sizes.items():
        tensors[f"{h}{name}.weight"] = _normal(rows * n_embd, columns * n_embd)
        tensors[f"{h}{name}.bias"] = _normal(columns * n_embd)
    return tensors


def _norm(name: str, n_embd: int) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": _ones(n_embd), f"{name}.bias": _normal(n_embd)}


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def _normal(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
