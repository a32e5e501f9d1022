"""Chunks in a weight format: calibration finds what stands out, a chunk holds what loading would make, and nodes run on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdi.checkpoint import encoded
from mdi.checkpoint.chunks import find_chunk, write_chunks
from mdi.checkpoint.source import ChunkFile, LitCheckpoint
from mdi.checkpoint.tensors import spec_of
from mdi.cli import launch
from mdi.compress.calibration import FILE, find_outliers, kept_outliers
from mdi.compress.sample_text import SAMPLE_TEXT
from mdi.compress.source import QuantizedSource
from mdi.errors import CheckpointError
from mdi.model.formats import FORMATS, encode
from mdi.model.int4 import INT4_BLOCK
from tiny_checkpoint import encode as encode_text
from tiny_checkpoint import tiny_gpt, write_checkpoint

IDS = encode_text(SAMPLE_TEXT)[:64]
ALONE = ["--nodes-config", str(Path(__file__).parents[1] / "src/settings_distr/standalone.json")]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A checkpoint in which column 5 of the second block's MLP input, and 9 of its output layer, are large."""
    gpt = tiny_gpt(seed=4)
    state = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    state["transformer.h.1.norm_2.weight"][5] *= 40
    state["transformer.h.1.mlp.fc_2.weight"][9] *= 60
    other = type(gpt)(gpt.config)
    other.load_state_dict(state)
    return write_checkpoint(tmp_path / "planted", gpt=other)


def test_calibration_finds_the_columns_that_are_large(planted: Path) -> None:
    found = find_outliers(LitCheckpoint(planted), IDS)
    assert found["transformer.h.1.mlp.fc_1.weight"] == found["transformer.h.1.mlp.fc_2.weight"] == [5]
    assert 9 in found["transformer.h.1.mlp.proj.weight"]
    assert all(len(columns) <= 3 for columns in found.values())


def test_calibration_is_remembered_until_weights_or_text_change(planted: Path) -> None:
    calls = []
    source = LitCheckpoint(planted)

    def count(done: int, total: int) -> None:
        calls.append(done)

    first, label = kept_outliers(source, planted, IDS, count)
    n_calls = len(calls)
    assert n_calls == 5
    assert kept_outliers(source, planted, IDS, count) == (first, label) and len(calls) == n_calls
    assert kept_outliers(source, planted, IDS[:-1], count)[1] != label and len(calls) == 2 * n_calls
    (planted / FILE).write_text("[1, 2")
    assert kept_outliers(source, planted, IDS, count) == (first, label)


@pytest.mark.parametrize("name", FORMATS)
def test_a_chunk_holds_the_encoded_weights(name: str, planted: Path) -> None:
    plain = LitCheckpoint(planted)
    outliers, label = kept_outliers(plain, planted, IDS)
    source = QuantizedSource(plain, name, name, outliers, label)
    paths = write_chunks(source, planted, (2, 3))
    assert paths[0] == find_chunk(planted, 2, "starter", name)
    tensors = {k: t for path in paths for k, t in load_file(path).items()}
    weight = "transformer.h.1.mlp.fc_2.weight"
    expected = encode(plain.tensor(weight), name, torch.tensor(outliers[weight]))
    for suffix, tensor in expected.items():
        assert torch.equal(tensors[weight.removesuffix("weight") + suffix], tensor)
    chunk = ChunkFile(paths[1])
    assert (chunk.quantize, chunk.quantize_head, chunk.dtype) == (name, name, plain.dtype)
    for part in chunk.part_names():
        chunk.verify_part(part)
    plain_bytes = sum(spec.n_bytes for spec in plain.specs.values())
    stored_bytes = sum(spec.n_bytes for spec in source.specs.values())
    # The model is so small that norms, scales and blocks of 256 that are not full weigh much.
    assert stored_bytes < plain_bytes * {"fp16": 0.6, "int8": 0.4, "int4": 0.9}[name]
    before = [path.stat().st_mtime_ns for path in paths]
    again = QuantizedSource(LitCheckpoint(planted), name, name, outliers, label)
    assert [path.stat().st_mtime_ns for path in write_chunks(again, planted, (2, 3))] == before


def prepare(folder: Path, *flags: str) -> int:
    return launch("prepare-model", [str(folder), *flags])


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> list[list[int]]:
    capsys.readouterr()
    assert (
        launch(
            "starter", [*ALONE, *flags, "--prompt", "Who are you?", "--n-tokens", "12", "--temperature", "0", "--json"]
        )
        == 0
    )
    return [sample["token_ids"] for sample in json.loads(capsys.readouterr().out)["samples"]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_node_generates_from_chunks_as_from_the_checkpoint(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "m")
    loaded = generated(capsys, "--ckpt", str(folder), "--quantize", name)
    assert prepare(folder, "--n-nodes", "1", "--quantize", name) == 0
    stored = generated(capsys, "--chunk", str(find_chunk(folder, 1, "starter", name)))
    found = generated(capsys, "--ckpt", str(folder), "--quantize", name)
    assert stored == found
    if (
        json.loads((folder / FILE).read_text())["columns"] == {}
    ):  # else calibration kept columns that weights do not show
        assert stored == loaded


def test_a_chunk_in_another_format_than_the_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "m")
    assert prepare(folder, "--n-nodes", "1", "--quantize", "int8") == 0
    chunk = str(find_chunk(folder, 1, "starter", "int8"))
    assert launch("starter", [*ALONE, "--chunk", chunk, "--quantize", "int4", "--prompt", "x"]) == 2
    assert "are stored in int8 already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantize", "int8"], "--n-nodes"),
        (["--n-nodes", "2", "--calibration", "x.txt"], "--quantize"),
        (["--n-nodes", "2", "--quantize", "int8", "--calibration", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_flags_that_do_not_fit(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert prepare(folder, *flags) == 2
    assert message in capsys.readouterr().err


def test_tensors_that_do_not_make_up_a_format_are_refused(planted: Path) -> None:
    source = QuantizedSource(LitCheckpoint(planted), "int8", "int8", {}, "none")
    path = write_chunks(source, planted, (5,))[0]
    metadata = {"mdi_manifest": ChunkFile(path).manifest.to_json()}
    good = load_file(path)
    name = "transformer.h.0.attn.proj.weight"
    for change in (
        {name + "_scale": None},
        {name + "_scale": torch.zeros(3)},
        {name: good[name][:-1]},
        {name: good[name].to(torch.uint8)},
        {"transformer.h.0.attn.proj.outliers": torch.zeros(2, dtype=torch.int32)},
        {"transformer.h.0.norm_1.weight": torch.zeros(good["transformer.h.0.norm_1.weight"].shape, dtype=torch.int8)},
    ):
        tensors = {k: t.contiguous() for k, t in {**good, **change}.items() if t is not None}
        save_file(tensors, path, metadata)
        with pytest.raises(CheckpointError, match=r"transformer\.h\.0"):
            ChunkFile(path)


def test_the_two_places_that_know_the_formats_agree() -> None:
    weight = torch.randn(6, 300)
    for name in FORMATS:
        found = {key: spec_of(tensor) for key, tensor in encode(weight, name, torch.tensor([1, 2])).items()}
        assert found == encoded.encoded_specs(name, (6, 300), 2)
    assert encoded.INT4_BLOCK == INT4_BLOCK
