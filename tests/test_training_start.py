"""Where a run begins: a shape by name, file or folder, a checkpoint here or on the hub; and how the learning rate goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT

from hub_server import HubModel, HubServer
from mdi.errors import CheckpointError, UsageError
from mdi_training.new_model import config_file, fit_vocabulary, load_shape, new_model, parse_shape
from mdi_training.schedule import learning_rate
from tiny_checkpoint import plain, write_checkpoint
from tiny_training import SHAPE, grammar_text, losses, make_dataset, make_shape, prepare, train

FLAGS = ("--max-iters", 2, "--sequence-length", 16, "--batch-size", 2)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"))


def test_a_shape_by_litgpts_name_with_the_vocabulary_of_the_data(tmp_path: Path, dataset: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert train(folder, dataset, "--config", "pythia-14m", "--fit-vocab", *FLAGS) == 0
    found = load_shape(folder)
    named = Config.from_name("pythia-14m")
    assert found.vocab_size == 286 and found.padded_vocab_size == 384  # pythia pads to multiples of 128
    same = {key for key, value in asdict(named).items() if getattr(found, key) == value}
    assert set(asdict(named)) - same == {"vocab_size", "padded_vocab_size"}
    GPT(found).load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True), strict=True)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_shape_from_a_file_or_a_folder(tmp_path: Path, dataset: Path, kind: str) -> None:
    source = make_shape(tmp_path / "shape", n_layer=3)
    config = source / "model_config.yaml" if kind == "file" else source
    assert train(tmp_path / "new", dataset, "--config", config, *FLAGS) == 0
    assert load_shape(tmp_path / "new").n_layer == 3
    assert not (source / "lit_model.pth").exists()
    assert train(source, dataset, "--out", tmp_path / "elsewhere", *FLAGS) == 0
    assert (tmp_path / "elsewhere" / "model_config.yaml").exists() and not (source / "lit_model.pth").exists()


def test_a_shape_that_nobody_knows(tmp_path: Path, dataset: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "m", dataset, "--config", "pythia-14")
    assert caught.value.code == "missing" and "pythia-14m" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "m", dataset, "--config", tmp_path / "none.yaml")
    assert caught.value.code == "missing"
    with pytest.raises(UsageError) as caught:
        train(make_shape(tmp_path / "small", vocab_size=64, padded_vocab_size=64), dataset)
    assert caught.value.code == "vocabulary"


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Gemma-3-1b-it", "Mixtral-8x7B-v0.1", "phi-2", "Qwen3-0.6B"])
def test_a_shape_comes_back_from_its_file(name: str) -> None:
    config = Config.from_name(name)
    assert plain(asdict(parse_shape(config_file(config), Path("x")))) == plain(asdict(config))
    fitted = fit_vocabulary(config, 1000)
    assert fitted.vocab_size == 1000 and 1000 <= fitted.padded_vocab_size < 2000


def test_a_checkpoint_of_the_hub_is_fine_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    (tmp_path / "text.txt").write_text(grammar_text(200))
    assert prepare(tmp_path / "text.txt", "--tokenizer", source, "--out", tmp_path / "data") == 0
    for name in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "checkpoints"))
    with HubServer({"org/tiny": HubModel(files, gated=True)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        flags = ("--init", "hf", "--hf-token", "hf_good", *FLAGS)
        assert train(Path("org/tiny"), tmp_path / "data", *flags, "--lr", 1e-4, "--min-lr", 0) == 0
    out = tmp_path / "checkpoints" / "org" / "tiny" / "finetuned"
    before, after = (torch.load(f / "lit_model.pth", weights_only=True) for f in (source, out))
    assert before.keys() == after.keys()
    assert all(0 < (after[name] - before[name]).abs().max() < 0.01 for name in before), "moved, and not far"
    assert (out / "tokenizer.json").read_bytes() == files["tokenizer.json"]


def test_schedules(tmp_path: Path, dataset: Path) -> None:
    given = dict(peak=1.0, floor=0.1, n_warmup=2, n_steps=12)
    linear = [learning_rate(i, **given, schedule="linear") for i in range(14)]  # type: ignore[arg-type]
    assert linear[:3] == [0.5, 1.0, 1.0] and linear[11:] == [pytest.approx(0.1)] * 3
    assert {round(a - b, 9) for a, b in zip(linear[2:11], linear[3:12], strict=True)} == {0.1}
    constant = [learning_rate(i, **given, schedule="constant") for i in range(14)]  # type: ignore[arg-type]
    assert constant == [0.5] + [1.0] * 13
    folder = make_shape(tmp_path / "m")
    flags = ("--max-iters", 5, "--warmup-iters", 0, "--log-interval", 1, "--schedule", "linear", "--decay-iters", 3)
    assert train(folder, dataset, *flags, "--lr", 0.01, "--min-lr", 0.002) == 0
    assert [float(row["lr"]) for row in losses(folder)] == pytest.approx([0.01, 0.006, 0.002, 0.002, 0.002])


def test_first_weights_are_small_where_they_write_into_the_stream() -> None:
    model = new_model(Config(**{**SHAPE, "n_layer": 8}), seed=0)
    deviation = {name: weight.std().item() for name, weight in model.named_parameters() if weight.dim() == 2}
    for name, found in deviation.items():
        expected = 0.02 / 4 if name.endswith("proj.weight") else 0.02
        assert found == pytest.approx(expected, rel=0.1), name
