"""Weights that lie in a file: read there, or from a copy, and kept in memory."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import mdi.stages.building as weight_memory
from mdi.kernels.layout import Matrix, pack
from mdi.spec.options import WeightMemory
from mdi.stages.building import WeightPlacer


@pytest.fixture
def mapped(tmp_path: Path) -> dict[str, Matrix | np.ndarray]:
    packed = pack("int8", np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32))
    path = tmp_path / "weights"
    path.write_bytes(packed.data.tobytes())
    data = np.memmap(path, dtype=np.uint8, mode="r")
    return {"layer.weight": Matrix("int8", 64, 256, np.asarray(data)), "norm.weight": np.ones(4, dtype=np.float32)}


def lies_in_file(weights: dict[str, Matrix | np.ndarray], mapped: dict[str, Matrix | np.ndarray]) -> bool:
    one, other = weights["layer.weight"], mapped["layer.weight"]
    assert isinstance(one, Matrix) and isinstance(other, Matrix)
    assert np.array_equal(one.data, other.data) and one.data.ctypes.data % 64 == 0
    return np.may_share_memory(one.data, other.data)


def test_map_and_copy(mapped: dict[str, Matrix | np.ndarray]) -> None:
    assert lies_in_file(WeightPlacer(WeightMemory("map")).place(mapped), mapped)
    copied = WeightPlacer(WeightMemory("copy")).place(mapped)
    assert not lies_in_file(copied, mapped)
    small, stored = copied["norm.weight"], mapped["norm.weight"]
    assert isinstance(small, np.ndarray) and isinstance(stored, np.ndarray)
    assert np.array_equal(small, stored) and not np.may_share_memory(small, stored), "it would keep the file in memory"


@pytest.mark.parametrize("is_slow", [False, True])
def test_auto_decides_once_by_what_it_measures(
    mapped: dict[str, Matrix | np.ndarray], is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(weight_memory, "is_mapping_slow", lambda data: asked.append(data.size) or is_slow)
    placer = WeightPlacer(WeightMemory())
    for _ in range(2):
        assert lies_in_file(placer.place(mapped), mapped) is not is_slow
    assert len(asked) == 1


def test_locked_or_told_once(
    mapped: dict[str, Matrix | np.ndarray], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    seen: list[int] = []
    monkeypatch.setattr(weight_memory, "lock_pages", lambda array: bool(seen.append(array.nbytes)) or len(seen) < 3)
    placer = WeightPlacer(WeightMemory("map"), True, "board")
    placer.place(mapped)
    assert len(seen) == 2 and not caplog.text
    placer.place(mapped)
    placer.place(mapped)
    assert caplog.text.count("board: --mlock") == 1 and len(seen) == 3
