"""Tiny models of the two earlier kinds, made where a test wants them, and rings of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpt.model import PositionGPT
from gpt.shape import GPTConfig, gpt2_config, nano_config
from gpt.tokens import character_vocabulary
from gpt.weights import nano_config_file

TEXT = "The ring is closed link by link.\nThe starter sends a frame, and the last one brings it home. Who are you?\n"
REFERENCE = Path(__file__).parent / "gpt2_reference"
CONTEXT = 16  # short, so that the tests' texts outgrow it


def tiny_nano(n_layer: int = 5, seed: int = 1) -> PositionGPT:
    vocabulary = character_vocabulary([TEXT])
    return lively(nano_config(n_layer, vocabulary.size, n_embd=24, n_head=3, context=CONTEXT), seed, tied=True)


def lively(config: GPTConfig, seed: int, tied: bool) -> PositionGPT:
    """Random weights that keep logits apart, with no norm or bias at its default."""
    generator = torch.Generator().manual_seed(seed)
    model = PositionGPT(config, tied).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and name.endswith("weight"):
            weight.uniform_(0.5, 1.5, generator=generator)
        else:
            # What the blocks add must outweigh the token itself: tied, it would only ever say itself again.
            std = 0.1 if weight.dim() == 1 else 0.2 if "wte" in name else 0.4 if "wpe" in name else 0.8
            weight.normal_(0, std, generator=generator)
    return model


def write_nano(folder: Path, model: PositionGPT) -> Path:
    """A checkpoint as nanoGPT/train.py leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "lit_model.pth")
    for name, content in character_vocabulary([TEXT]).files().items():
        (folder / name).write_bytes(content)
    (folder / "model_config.yaml").write_bytes(nano_config_file(model.config))
    return folder


def gpt2_of_reference() -> GPTConfig:
    fields = json.loads((REFERENCE / "config.json").read_text())
    config = gpt2_config("reference", fields["n_layer"], fields["n_embd"], fields["n_head"], fields["vocab_size"],
                         fields["n_positions"])  # fmt: skip
    config.norm_eps = fields["layer_norm_epsilon"]
    return config


def reference_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (3, 48), and the logits (3, 48, 97) that transformers computed for them."""
    found = load_file(REFERENCE / "expected.safetensors")
    return found["ids"], found["logits"]


def write_gpt2(folder: Path) -> Path:
    """The reference with the two files of a tokenizer of bytes, in GPT-2's own form, for its 97 ids."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((REFERENCE / name).read_bytes())
    characters = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]  # GPT-2 writes a space and a line end as these
    vocab = {c: i for i, c in enumerate(characters)} | {"<|endoftext|>": 96}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder


def check_refusal(capsys: pytest.CaptureFixture[str], words: str) -> None:
    """One line of error, with these words."""
    told = capsys.readouterr().err.strip()
    assert words in told and told.startswith("error: ") and "\n" not in told
