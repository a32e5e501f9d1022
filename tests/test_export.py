"""prepare_model --export hf: what was written is read again as the same model, by us and by transformers' names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mdi.checkpoint.convert import convert
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.source import LitCheckpoint
from mdi.cli import launch
from mdi.errors import CheckpointError
from mdi.families.registry import written
from tiny_models import HF_KINDS, hf_state, tiny_lit, tiny_state, write_lit


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in HF_KINDS), ("pythia-14m", {"rotary_percentage": 1.0})]
)
def test_there_and_back(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    config, state = tiny_state(family, **changes)
    if family.startswith("Gemma"):
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    first = LitCheckpoint(write_lit(tmp_path / "lit", config, state))
    out = tmp_path / "my-model"
    export_hf(first, first.path, out)
    kind = json.loads((out / "config.json").read_text())["model_type"]
    # Phi 3 without a partial rotation computes what Mistral does, and is written so
    is_phi3 = HF_KINDS[family][0] == "phi3"
    assert kind == ("mistral" if is_phi3 else HF_KINDS[family][0])
    found = {name: t for shard in out.glob("*.safetensors") for name, t in load_file(shard).items()}
    expected = hf_state(config, state)
    if family.startswith("Gemma"):
        expected.pop("lm_head.weight", None)
    if not is_phi3:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    convert(out, progress=False)
    again = LitCheckpoint(out)
    differing = {k for k, v in vars(again.config).items() if v != getattr(first.config, k)}
    assert differing <= {"name", "hf_config", "padding_multiple", "vocab_size"}
    for name in first.specs:
        assert torch.equal(again.tensor(name), state[name])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = tiny_lit(tmp_path / "lit")
    out = tmp_path / "hf"
    assert launch("prepare-model", [str(directory), "--export", "hf", "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert (out / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert all((out / shard).is_file() for shard in index["weight_map"].values())
    assert launch("prepare-model", [str(directory), "--export", "hf", "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_model_that_transformers_does_not_have(tmp_path: Path) -> None:
    directory, _ = tiny_lit(tmp_path / "lit")
    config = yaml.safe_load((directory / "model_config.yaml").read_text())
    for change in ({"norm_qk": True, "post_mlp_norm": True}, {"scale_embeddings": True}, {"bias": True}):
        with pytest.raises(CheckpointError) as e:
            written(replace(LitCheckpoint(directory).config, **change))
        assert any(key in str(e.value) for key in change)
    assert config["name"]


def test_a_gemma_whose_head_was_trained_apart(tmp_path: Path) -> None:
    source = LitCheckpoint(tiny_lit(tmp_path / "lit", "Gemma-2b")[0])
    with pytest.raises(CheckpointError) as e:
        export_hf(source, source.path, tmp_path / "out")
    assert "head" in str(e.value)
    assert not (tmp_path / "out").exists()
