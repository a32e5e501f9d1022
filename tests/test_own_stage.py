"""The starter's own stage: loaded once for all rings of a run, and only what is new of another cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdi.cancel import Cancel
from mdi.errors import NoMemoryError
from mdi.node.own_stage import OwnStage
from mdi.node.starter_weights import StarterWeights
from mdi.run.choice import starter_computing
from mdi.spec.options import StarterOptions
from mdi.stages.kernel_stage import KernelStage
from mdi.stages.model_family import ModelFamily
from mdi.stages.store import StageStore
from tiny_checkpoint import write_checkpoint


def test_another_ring_loads_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = ModelFamily(), StarterOptions(ckpt=write_checkpoint(tmp_path / "tiny"), device="cpu")
    weights = StarterWeights(options.ckpt, None, 2, "2,3", None)
    loaded: list[str] = []
    source_of = StarterWeights.source_of
    monkeypatch.setattr(StarterWeights, "source_of", lambda self, part: (loaded.append(part), source_of(self, part))[1])
    try:
        computing = starter_computing(family, weights, options)
        own = OwnStage("starter", family, family.config(weights.config), options)

        def load(max_length: int) -> KernelStage:
            loaded.clear()
            own.load(weights, computing, 2, max_length, 1, None, Cancel())
            assert isinstance(own.loaded, KernelStage) and own.loaded.max_length >= max_length
            return own.loaded

        first = load(40)
        assert sorted(loaded) == ["block.0", "block.1", "embedding", "head"]
        assert load(40) is first and load(30) is first and load(80) is first and not loaded
        kept = first.weights["block.1"]
        weights.cut_anew((3, 2))
        second = load(80)
        assert second is not first and loaded == ["block.2"]
        assert second.weights["block.1"] is kept
        own.check_memory(weights, computing, 2)
    finally:
        weights.close()


def test_the_stage_of_the_next_ring_is_loaded_while_the_present_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options = ModelFamily(), StarterOptions(ckpt=write_checkpoint(tmp_path / "tiny"), device="cpu")
    weights, store = StarterWeights(options.ckpt, None, 2, "2,3", None), StageStore()
    loaded: list[str] = []
    source_of = StarterWeights.source_of
    monkeypatch.setattr(StarterWeights, "source_of", lambda self, part: (loaded.append(part), source_of(self, part))[1])
    try:
        computing = starter_computing(family, weights, options)
        own = OwnStage("starter", family, family.config(weights.config), options, store)

        def load(step: Callable[..., None]) -> None:
            loaded.clear()
            step(weights, computing, 2, 40, 1, None, Cancel())

        load(own.load)
        first: Any = own.loaded
        limit = own.grant("cpu", 1 << 20, 0).limit_bytes
        weights.cut_anew((3, 2))
        load(own.load_next)
        assert own.loaded is first and loaded == ["block.2"] and len(store.listed) == 2
        own.check_memory(weights, computing, 2)
        load(own.load)
        second: Any = own.loaded
        assert second is not first and not loaded and len(store.listed) == 1, "the first is gone"
        assert second.weights["block.1"] is not None
        assert own.grant("cpu", 1 << 20, 0).limit_bytes == limit, "the user's limit is that of one stage"

        weights.cut_anew((4, 1))
        load(own.load_next)
        own.drop_next()
        assert own.loaded is second and [held.stage for held in store.listed] == [second]
        store.available = lambda device: 1000
        with pytest.raises(NoMemoryError):
            load(own.load_next)
        assert own.loaded is second and [held.stage for held in store.listed] == [second]
        own.close()
        assert not store.listed
    finally:
        weights.close()
