"""Folders that transformers 5 wrote give its logits at every position, over one node and over three."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from litgpt.config import Config
from safetensors.torch import load_file, save_file

from mdi.checkpoint.convert import convert
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import open_source
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError
from mdi.kernels import library
from mdi.spec.cluster import standalone
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.torch_stage import StarterStage
from references.test_references import generated
from references.write_logits import CASES, version
from secondaries import cluster_of, secondaries
from tiny_checkpoint import tokenizer

LOGITS = Path(__file__).parents[2] / ".venv-references" / "logits"
TOLERANCE = 2e-4  # of logits up to ten or so: float32 sums of a hundred terms, in another order
FRAMES = (20, 1, 1, 37)  # rows, again and again


def _is_written() -> bool:
    written = LOGITS / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


pytestmark = [
    pytest.mark.skipif(not _is_written(), reason="no models of transformers: make references"),
    pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}"),
]


def folder_of(name: str, tmp_path: Path) -> tuple[Path, list[int], np.ndarray]:
    """A copy of the model's folder with a tokenizer, the ids of the text, and transformers' logits (ids, vocabulary)."""
    folder = tmp_path / "hf" / name
    shutil.copytree(LOGITS / name, folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder, json.loads((folder / "ids.json").read_text(encoding="utf-8")), np.load(folder / "logits.npy")


def stages_of(
    source: WeightSource, bounds: list[int], max_length: int, cache_type: str = "float32"
) -> list[KernelStage]:
    stages = []
    for node, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        parts = stage_parts(start, stop, starter=node == 0)
        stage = KernelStage(source.config_dict, start, stop, Resident(parts, source.weights), cache_type=cache_type)
        stage.prepare(max_length)
        stages.append(stage)
    return stages


def logits_of(stages: list[KernelStage], ids: list[int]) -> np.ndarray:
    """At every position, from frames of several lengths."""
    found, start = [], 0
    while start < len(ids):
        n = min(FRAMES[len(found) % len(FRAMES)], len(ids) - start)
        slices = [(7, start, n)]
        x = stages[0].embed(np.array(ids[start : start + n]), slices)
        for stage in stages:
            x = stage(x, slices)
        found.append(stages[0].head(x))
        start += n
    return np.concatenate(found)


def same(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    best = np.sort(expected, axis=1)[:, -2:]
    is_clear = best[:, 1] - best[:, 0] > 2 * tolerance
    assert is_clear.mean() > 0.9
    assert np.abs(found - expected).max() < tolerance
    assert np.array_equal(found.argmax(1)[is_clear], expected.argmax(1)[is_clear])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = open_source(folder)
    n_layer = int(source.config_dict["n_layer"])
    same(logits_of(stages_of(source, [0, n_layer], len(ids)), ids), expected)
    same(logits_of(stages_of(source, [0, 1, 2, n_layer], len(ids)), ids), expected)
    made = tmp_path / "made"
    made.mkdir()
    convert(folder, target=made, progress=False)
    again = open_source(made)
    assert again.config_dict == source.config_dict
    same(logits_of(stages_of(again, [0, n_layer], len(ids)), ids), expected)


N_TOKENS = 6


@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_three_continues_a_text_as_one_node_and_as_transformers_begins(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    prompt = ids[:-N_TOKENS]  # scaling may depend on how long the text becomes
    alone = generated(standalone(), folder, prompt, N_TOKENS)
    row = expected[len(prompt) - 1].astype(np.float64)
    assert alone[0][0] == row.argmax()
    assert alone[1][0] == pytest.approx(row.max() - np.log(np.exp(row - row.max()).sum()) - row.max(), abs=TOLERANCE)
    with secondaries(2, tmp_path) as nodes:
        assert generated(cluster_of(nodes), folder, prompt, N_TOKENS) == alone


@pytest.mark.parametrize(("name", "prefix"), [("bloom", "transformer."), ("gpt2", "transformer."), ("opt", "model.")])
def test_official_names_without_their_prefix_and_in_pickles(name: str, prefix: str, tmp_path: Path) -> None:
    """As the first files on the hub have them, with buffers that follow from the settings."""
    folder, ids, expected = folder_of(name, tmp_path)
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    assert len(tensors) > 30 and not any(key.startswith(prefix) for key in tensors)
    if name == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as refused:
        open_source(folder)
    assert refused.value.code == "unsafe"
    made = tmp_path / "made"
    made.mkdir()
    convert(folder, target=made, progress=False)
    n_layer = int(open_source(made).config_dict["n_layer"])
    same(logits_of(stages_of(open_source(made), [0, n_layer], len(ids)), ids), expected)
    (folder / "pytorch_model.bin").unlink()
    save_file(tensors, folder / "model.safetensors")
    same(logits_of(stages_of(open_source(folder), [0, n_layer], len(ids)), ids), expected)


@pytest.mark.parametrize("name", ["yarn", "longrope-long", "dynamic"])
def test_torch_has_the_same_positions(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = open_source(folder)
    n_layer = int(source.config_dict["n_layer"])
    stage = StarterStage(Config(**source.config_dict), n_layer)
    stage.load(stage_parts(0, n_layer, starter=True), source.tensors, torch.device("cpu"), torch.float32)
    stage.prepare(len(ids), torch.device("cpu"), torch.float32)
    slices = [(0, 0, len(ids))]
    same(stage.head(stage(stage.embed(torch.tensor(ids), slices), slices)).numpy(), expected)
