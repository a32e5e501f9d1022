"""Nodes generate from packed chunks what they generate from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mdi.checkpoint.chunks import find_chunk
from mdi.cli import launch
from mdi.kernels import library
from mdi.kernels.weight_formats import LAYOUTS
from tiny_checkpoint import reference, write_checkpoint

PROMPT = "Who are you?"
N_TOKENS = 12


def prepare(folder: Path, *flags: str) -> int:
    return launch("prepare-model", [str(folder), *flags])


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> list[int]:
    capsys.readouterr()
    run = ["--prompt", PROMPT, "--n-tokens", str(N_TOKENS), "--temperature", "0", "--json"]
    assert launch("sample", [*flags, *run]) == 0
    ids: list[int] = json.loads(capsys.readouterr().out)["samples"][0]["token_ids"]
    return ids


def test_the_default_chunks_give_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "m")
    assert prepare(folder, "--n-nodes", "1") == 0
    found = generated(capsys, "--chunk", str(find_chunk(folder, 1, "starter")))
    assert found[-N_TOKENS:] == list(reference(PROMPT, N_TOKENS))


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "mxfp4"])
def test_a_node_generates_the_same_from_a_chunk_by_name_and_from_the_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "m")
    assert prepare(folder, "--n-nodes", "1", "--quantize", name) == 0
    stored = generated(capsys, "--chunk", str(find_chunk(folder, 1, "starter", name)))
    assert stored == generated(capsys, "--ckpt", str(folder), "--quantize", name)


@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
def test_caches_in_int8_nearly_give_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(write_checkpoint(tmp_path / "m"))
    assert generated(capsys, "--ckpt", folder, "--kv-dtype", "bfloat16")
    found = generated(capsys, "--ckpt", folder, "--kv-dtype", "int8")
    assert found[-N_TOKENS:][:4] == list(reference(PROMPT, N_TOKENS))[:4]
    assert launch("sample", ["--ckpt", folder, "--kv-dtype", "int8", "--dtype", "bfloat16", "--prompt", "x"]) == 2
    assert "--kv-dtype int8" in capsys.readouterr().err


def test_a_chunk_in_another_format_than_the_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "m")
    assert prepare(folder, "--n-nodes", "1", "--quantize", "int8") == 0
    chunk = str(find_chunk(folder, 1, "starter", "int8"))
    assert launch("sample", ["--chunk", chunk, "--quantize", "int4", "--prompt", "x"]) == 2
    assert "are stored in int8 already" in capsys.readouterr().err


def test_a_format_needs_a_number_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(write_checkpoint(tmp_path / "m"), "--quantize", "int8") == 2
    assert "--n-nodes" in capsys.readouterr().err


def test_every_format_has_a_folder_but_the_weights_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    for name in LAYOUTS:
        assert prepare(folder, "--n-nodes", "2", "--quantize", name) == 0
        assert find_chunk(folder, 2, "secondary0", None if name == "float32" else name).is_file()
    assert len(list((folder / "chunks").iterdir())) == len(LAYOUTS)
