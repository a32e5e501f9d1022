"""Folders that the compressed-tensors package has packed are read as the numbers that it unpacks itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from caches import own_cache
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import open_source
from mdi.kernels import library
from mdi.kernels.layout import Matrix, bf16_from_float32, floats, unpack
from references.test_logits import logits_of, same, stages_of
from references.write_packed import CASES, version
from tiny_checkpoint import tokenizer

PACKED = Path(__file__).parents[2] / ".venv-references" / "packed"
N_LINEAR = 2 * 5  # query, key and value are one here


def _is_written() -> bool:
    written = PACKED / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


pytestmark = pytest.mark.skipif(not _is_written(), reason="no models of compressed-tensors: make references")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_CACHE_DIR", own_cache(tmp_path / "cache"))


def folder_of(name: str, tmp_path: Path) -> Path:
    folder = tmp_path / name
    shutil.copytree(PACKED / name, folder)
    for one in (folder, folder / "plain"):
        tokenizer().save(str(one / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_that_compressed_tensors_unpacks(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    ending = "weight" if name.startswith("fp8") else "weight_packed"
    stored = [key for key in load_file(folder / "model.safetensors") if key.endswith(f"_proj.{ending}")]
    assert len(stored) == 2 * 7
    found, expected = open_source(folder), open_source(folder / "plain")
    assert isinstance(found, HfFolder) and set(found.specs) == set(expected.specs)
    for key in expected.specs:
        numbers, of_them = floats(found.array(key)), expected.array(key)
        if name.endswith("bfloat16"):  # they multiply in this type, and round
            numbers, of_them = bf16_from_float32(numbers), bf16_from_float32(of_them)
        assert np.array_equal(numbers, of_them), key


@pytest.mark.parametrize("name", ["int4-groups-of-32-bfloat16", "int4-groups-of-64-bfloat16"])
def test_int4_is_packed_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    source = open_source(folder_of(name, tmp_path))
    assert source.native == "int4"
    n_found = 0
    for key, spec in source.specs.items():
        if key.startswith("transformer.h.") and len(spec.shape) == 2:
            matrix = source.packed(key, Packing("int4", "int4"))[key]
            assert isinstance(matrix, Matrix) and matrix.format == "int4"
            assert np.array_equal(unpack(matrix), floats(source.array(key)))
            n_found += 1
    assert n_found == N_LINEAR


@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("bfloat16")])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    ids, expected = json.loads((folder / "ids.json").read_text(encoding="utf-8")), np.load(folder / "logits.npy")
    source = open_source(folder)
    same(logits_of(stages_of(source, [0, 2], len(ids)), ids), expected)
