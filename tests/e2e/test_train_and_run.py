"""From a text to a ring: prepare_data, train, prepare_model, and two nodes that generate what litgpt's own model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer

from families import greedy
from mdi.cli import launch
from mdi_training.new_model import load_shape
from processes import Spawn
from tiny_training import argv_of, make_dataset, make_shape


@pytest.mark.slow
@pytest.mark.parametrize("which", [".", "last", "finetuned"])
def test_a_trained_checkpoint_goes_straight_into_a_ring(spawn: Spawn, tmp_path: Path, which: str) -> None:
    dataset, ckpt = make_dataset(tmp_path / "data"), make_shape(tmp_path / "mine", n_layer=4)
    assert launch("train", argv_of(ckpt, dataset, "--max-iters", 30, "--save-dtype", "float32")) == 0
    assert (ckpt / "losses.png").stat().st_size > 10_000, "the curve is drawn"
    if which == "finetuned":
        more = ("--init", "finetune", "--lora-r", 4, "--max-iters", 10, "--lora-targets", "query,mlp,head")
        assert launch("train", argv_of(ckpt, dataset, *more)) == 0
    folder = ckpt / which
    assert launch("prepare-model", [str(folder), "--n-nodes", "2"]) == 0
    assert (folder / "chunks" / "2nodes" / "model_secondary0.safetensors").is_file()

    model = GPT(load_shape(folder)).eval()
    model.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True))
    prompt = "Anna:\nAnna"
    # fmt: off
    ring = spawn(
        "local_ring", "--nodes", 2, "--ckpt", folder, "--prompt", prompt, "--n-samples", 1, "--n-tokens", 16,
        "--temperature", 0, "--prompt-style", "none", "--dtype", "float32", "--json", env={"TMPDIR": str(tmp_path)},
    )
    # fmt: on
    assert ring.wait() == 0, ring.story()
    found = json.loads(ring.out)["samples"][0]["token_ids"]
    expected = greedy(model, Tokenizer(folder).encode(prompt).tolist(), 16)
    assert len(found) == 16 and found == expected
