"""The models themselves: how many parameters, and whether GPT-2 is GPT-2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from gpt_models import REFERENCE, reference_logits, tiny_nano, write_nano
from safetensors.torch import load_file, save_file

from gpt.model import PositionGPT, n_parameters, random_model
from gpt.shape import GPT2_CUTS, GPT2_SIZES, NANO_BLOCKS, NANO_CUTS, gpt2_config, nano_config
from gpt.weights import GPTConfig, open_gpt2, open_nano
from mdi.errors import CheckpointError


@pytest.mark.parametrize(("n_layer", "count"), [(7, 12_438_977), (9, 15_985_601), (12, 21_305_537)])
def test_parameters_of_nanogpt_are_those_of_the_thesis(n_layer: int, count: int) -> None:
    assert n_parameters(nano_config(n_layer, 65)) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_parameters_of_gpt2_with_positions(name: str, count: int) -> None:
    """What Hugging Face counts for these models: tied, and with the embedding of positions."""
    config = gpt2_config(name, *GPT2_SIZES[name])
    assert n_parameters(config) + config.block_size * config.n_embd == count


def test_the_cuts_cover_all_blocks() -> None:
    for cuts, layers in ((NANO_CUTS, NANO_BLOCKS), (GPT2_CUTS, [size[0] for size in GPT2_SIZES.values()])):
        assert cuts.keys() == {(n, nodes) for n in layers for nodes in (2, 3)}
        for (n_layer, n_nodes), counts in cuts.items():
            assert sum(counts) == n_layer and len(counts) == n_nodes and min(counts) > 0


def model_of(folder: Path) -> PositionGPT:
    source = open_gpt2(folder)
    model = PositionGPT(GPTConfig(**source.config.plain())).eval()
    model.load_state_dict({name: source.tensor(name) for name in source.specs}, strict=True)
    source.close()
    return model


@torch.no_grad()
def difference(folder: Path) -> float:
    ids, expected = reference_logits()
    return float((model_of(folder)(ids) - expected).abs().max())


def copy_of_reference(folder: Path) -> Path:
    shutil.copytree(REFERENCE, folder)
    return folder


def test_logits_are_those_of_transformers() -> None:
    assert difference(REFERENCE) < 1e-4


def test_logits_from_a_pickle_with_bare_names_and_masks(tmp_path: Path) -> None:
    """The form of OpenAI's first upload: no prefix, and the causal masks among the weights."""
    folder = copy_of_reference(tmp_path / "bin")
    state = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 48, 48) for i in range(5)}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert difference(folder) < 1e-4


def test_logits_from_shards(tmp_path: Path) -> None:
    folder = copy_of_reference(tmp_path / "shards")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    listed = {}
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name] for name in part}, folder / f"model-{i}.safetensors")
        listed |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert difference(folder) < 1e-4


def test_a_pickle_that_could_run_code_is_refused(tmp_path: Path) -> None:
    folder = copy_of_reference(tmp_path / "evil")
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as e:
        open_gpt2(folder)
    assert e.value.code == "weights"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "llama"}, "shape"),
        ({"activation_function": "relu"}, "shape"),
        ({"scale_attn_by_inverse_layer_idx": True}, "shape"),
        ({"n_layer": 0}, "shape"),
        ({"n_head": 5}, "shape"),
        ({"n_layer": 6}, "tensor"),
        ({"n_embd": 64}, "tensor"),
        ({"layer_norm_epsilon": "small"}, "shape"),
    ],
)
def test_a_gpt2_directory_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object], code: str) -> None:
    folder = copy_of_reference(tmp_path / "odd")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(CheckpointError) as caught:
        open_gpt2(folder)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = copy_of_reference(tmp_path / "out")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../model.safetensors"}}')
    with pytest.raises(CheckpointError) as caught:
        open_gpt2(folder)
    assert caught.value.code == "unsafe"


@pytest.mark.parametrize("content", [b"- a list", b"n_layer: many", b"\xff", b"no_such_setting: 1"])
def test_a_nano_config_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_nano(tmp_path / "nano", tiny_nano())
    (folder / "model_config.yaml").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_nano(folder)
    assert caught.value.code in ("shape", "weights")
    assert "\n" not in str(caught.value)


def test_dropout_thins_in_training_only() -> None:
    model = random_model(nano_config(2, 11, n_embd=24, n_head=3, context=8, dropout=0.5), seed=0)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), model(ids))
        assert not torch.equal(model.train()(ids), model(ids))
