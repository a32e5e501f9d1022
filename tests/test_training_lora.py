"""Adapters: what they train, and that merged weights compute what the adapted model computes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from litgpt.lora import merge_lora_weights
from litgpt.model import GPT

from families import FAMILIES, VOCAB, config_of, model_of, prompt
from mdi.checkpoint.adapters import AdapterName, weights_hash
from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.errors import CheckpointError, UsageError
from mdi_training.loop import Trainer
from mdi_training.lora import add_adapters, load_base, merged_weights, trained_weights
from mdi_training.new_model import load_shape
from mdi_training.training_settings import LORA_TARGETS, LoraSettings, TrainingSettings
from mdi_training.windows import Windows
from tiny_training import losses, make_dataset, make_shape, train

EVERYTHING = LoraSettings(r=3, alpha=8, dropout=0.2, targets=LORA_TARGETS)


def adapted(family: str, settings: LoraSettings) -> GPT:
    """A family's tiny model with adapters that do something."""
    model = add_adapters(config_of(family), settings, seed=1)
    load_base(model, model_of(family).state_dict())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.2, generator=generator)
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([prompt(30, 1), prompt(30, 2)]))
    return found


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek-v3-shape"])
def test_merged_equals_unmerged(family: str) -> None:
    model = adapted(family, EVERYTHING)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    unmerged = logits(model)
    merged = GPT(config_of(family)).eval()
    merged.load_state_dict(merged_weights(model), strict=True)
    torch.testing.assert_close(logits(merged), unmerged, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(logits(model_of(family)), unmerged, atol=0.05), "the adapters change something"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "and stay apart"
    merge_lora_weights(model)
    assert torch.equal(logits(model), logits(merged)), "as litgpt itself merges"


def test_fresh_adapters_change_nothing() -> None:
    model = add_adapters(config_of("Llama-3.1-8B"), LoraSettings(r=2), seed=0)
    load_base(model, model_of("Llama-3.1-8B").state_dict())
    assert torch.equal(logits(model.eval()), logits(model_of("Llama-3.1-8B")))


@pytest.mark.parametrize("target", LORA_TARGETS)
def test_only_the_adapters_of_the_targets_are_trained(target: str) -> None:
    family = "Llama-3.1-8B"
    model = add_adapters(config_of(family), LoraSettings(r=2, dropout=0.0, targets=(target,)), seed=0)
    load_base(model, model_of(family).state_dict())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.randint(0, VOCAB, (500,), generator=torch.Generator().manual_seed(0)).numpy().astype("uint16")
    settings = TrainingSettings(sequence_length=16, batch_size=2, grad_acc_steps=1, lr=1e-2)
    trainer = Trainer(model, Windows(ids, 16, 0), Windows(ids, 16, 0), settings)
    for _ in range(2):
        trainer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(trained_weights(model)) and changed and all("lora_" in name for name in changed)
    where = {"projection": "attn.proj", "mlp": ".mlp.", "head": "lm_head"}.get(target, "attn.qkv")
    assert all(where in name for name in changed)
    # Within the joint matrix of queries, keys and values, only the rows of the target move.
    n_rows = {"query": 6 * 8, "key": 2 * 8, "value": 2 * 8}.get(target)
    if n_rows is not None:
        name = "transformer.h.0.attn.qkv.weight"
        moved = (merged_weights(model)[name] != model_of(family).state_dict()[name]).any(dim=1)
        assert 0 < int(moved.sum()) <= n_rows


def test_fine_tuning_learns_and_writes_ordinary_checkpoints(tmp_path: Path) -> None:
    """The base knows one grammar's text, the adapters learn another's tokens without touching the base."""
    dataset = make_dataset(tmp_path / "data")
    base = make_shape(tmp_path / "base")
    assert train(base, dataset, "--max-iters", 10, "--save-dtype", "float16") == 0
    kept = (base / "lit_model.pth").read_bytes()
    (base / "prompt_style.yaml").write_text("class_path: litgpt.prompts.NoPrompt\n")
    flags = ("--init", "finetune", "--lora-r", 8, "--lora-targets", "query,key,value,projection,mlp,head")
    assert train(base, dataset, *flags, "--max-iters", 40, "--ckpt-interval", 20) == 0
    out = base / "finetuned"
    rows = losses(out)
    assert float(rows[-1]["val_loss"]) < float(losses(base)[-1]["val_loss"]) - 0.3
    assert (base / "lit_model.pth").read_bytes() == kept
    for folder in (out, out / "last"):
        model = GPT(load_shape(folder))
        model.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True), strict=True)
        assert (folder / "prompt_style.yaml").exists() and (folder / "tokenizer.json").exists()
        adapters = torch.load(folder / "lit_model.pth.lora", weights_only=True)["model"]
        assert adapters and all("lora_" in name for name in adapters)
    # Adapters alone stand in the state, not the base that they belong to.
    state = torch.load(out / "train_state.pth", weights_only=True)
    assert set(state["weights"]) == set(adapters)


def test_what_was_trained_is_served_as_an_adapter(tmp_path: Path) -> None:
    """In PEFT's form: beside its base it is what the merged weights are, and belongs to no other."""
    dataset = make_dataset(tmp_path / "data")
    base = make_shape(tmp_path / "base")
    assert train(base, dataset, "--max-iters", 5) == 0
    flags = ("--init", "finetune", "--lora-r", 3, "--lora-alpha", 5, "--max-iters", 10, "--ckpt-interval", 10)
    for targets in ("query,key,value,projection,mlp", "key"):
        out = tmp_path / targets
        assert train(base, dataset, *flags, "--lora-targets", targets, "--out", out) == 0
        source, merged = open_source(base), torch.load(out / "lit_model.pth", weights_only=True)
        adapter = open_adapter(AdapterName("a", out / "adapter"), 1, source.config, partial(weights_hash, source))
        for block in range(2):
            found = {name: source.array(name).astype("float64") for name in source.part_specs(f"block.{block}")}
            for name, a in adapter.arrays(block).items():
                if name.endswith(".a"):
                    layer, _, first, _ = name.rsplit(".", 3)
                    b = adapter.arrays(block)[f"{name[:-1]}b"]
                    found[f"{layer}.weight"][int(first) : int(first) + b.shape[1]] += b.T @ a
            for name, weight in found.items():
                assert np.abs(weight - merged[name].float().numpy()).max() < 1e-5, name
        with pytest.raises(CheckpointError, check=lambda e: e.code == "adapter"):
            open_adapter(AdapterName("a", out / "adapter"), 1, source.config, lambda: "other")
    assert train(base, dataset, *flags, "--lora-targets", "head", "--out", tmp_path / "head") == 0
    assert not (tmp_path / "head" / "adapter").exists()


def test_full_fine_tuning_of_a_tied_checkpoint_of_another_type(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    base = make_shape(tmp_path / "base")
    state = GPT(load_shape(base)).bfloat16().state_dict()
    del state["lm_head.weight"]
    torch.save(state, base / "lit_model.pth")
    assert train(base, dataset, "--init", "huggingface", "--max-iters", 5, "--out", tmp_path / "out") == 0
    found = torch.load(tmp_path / "out" / "lit_model.pth", weights_only=True)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32} and "lm_head.weight" in found


def test_another_tokenizer_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_dataset(tmp_path / "data")
    base = make_shape(tmp_path / "base")
    assert train(base, dataset, "--max-iters", 2) == 0
    assert train(base, dataset, "--init", "finetune", "--max-iters", 2) == 0
    assert "another tokenizer" not in caplog.text
    (base / "tokenizer.json").write_text("{}")
    shutil.rmtree(base / "finetuned")
    assert train(base, dataset, "--init", "finetune", "--max-iters", 2) == 0
    assert "another tokenizer" in caplog.text


def test_latent_attention_has_no_adapters() -> None:
    with pytest.raises(UsageError) as caught:
        add_adapters(config_of("deepseek-v3-shape"), EVERYTHING, seed=0)
    assert caught.value.code == "flags"
