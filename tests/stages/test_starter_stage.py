"""The starter's own stage: loaded once for all rings of a run, and only what is new of another cut."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdi.cancel import Cancel
from mdi.engine.sequence import SamplingParams
from mdi.errors import EngineError, NoMemoryError
from mdi.run.choice import starter_computing
from mdi.run.nodes import GivenNodes, StarterPorts
from mdi.run.run import Run
from mdi.run.supply import StarterSupply
from mdi.spec.cluster import standalone
from mdi.spec.extent import Extent
from mdi.spec.options import StarterOptions
from mdi.stages.kernel_stage import KernelStage
from mdi.stages.model_family import ModelFamily
from mdi.stages.starter_weights import StarterWeights
from mdi.stages.store import Claim, HeldStage, StageStore
from tiny_checkpoint import encode, reference, write_checkpoint


class Counted(StarterWeights):
    """Counts the parts that are read."""

    loaded: list[str]

    def source_of(self, part: str) -> Any:
        self.loaded.append(part)
        return super().source_of(part)


class Starter:
    """A starter over a ring of two nodes; `loaded` are the parts that were read last."""

    def __init__(self, folder: Path) -> None:
        options = StarterOptions(ckpt=write_checkpoint(folder), device="cpu")
        self.weights = Counted(options.ckpt, None, 2, "2,3", None)
        self.weights.loaded = []
        self.computing = starter_computing(ModelFamily(), self.weights, options)
        self.supply = StarterSupply("starter", self.weights, ModelFamily(), options)
        self.store = StageStore()

    def acquire(self, max_length: int, instead_of: HeldStage | None, kv_memory: int | None = None) -> HeldStage:
        self.weights.loaded.clear()
        spec = self.supply.spec(self.computing, Extent(max_length), kv_memory)
        claim = Claim(self.weights.id, self.weights.id, True)
        return self.store.acquire(spec, claim, self.supply, Cancel(), instead_of)

    def check_memory(self, held: HeldStage) -> None:
        self.store.check_memory(self.supply.spec(self.computing, Extent()), held)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    made = Starter(tmp_path / "tiny")
    yield made
    made.weights.close()


def test_another_ring_loads_nothing_again(starter: Starter) -> None:
    first = starter.acquire(40, None)
    stage: Any = first.stage
    assert sorted(starter.weights.loaded) == ["block.0", "block.1", "embedding", "head"] and not first.has_caches
    for length, has_caches in ((40, True), (30, True), (80, False), (80, True)):
        assert starter.acquire(length, first) is first and first.stage is stage and not starter.weights.loaded
        assert stage.max_length == max(length, 40) and first.has_caches is has_caches
    kept = stage.weights["block.1"]
    starter.weights.cut_anew((3, 2))
    second = starter.acquire(80, first)
    assert second is not first and starter.weights.loaded == ["block.2"]
    assert isinstance(second.stage, type(stage)) and second.stage.weights["block.1"] is kept
    assert starter.store.listed == [second] and first.stage is None
    starter.check_memory(second)


def test_the_stage_of_the_next_ring_is_loaded_while_the_present_one_is_used(starter: Starter) -> None:
    store, by_hand = starter.store, 1 << 20
    first = starter.acquire(40, None, by_hand)
    stage, limit = first.stage, store.grant(first).limit_bytes
    starter.weights.cut_anew((3, 2))
    ahead = starter.acquire(40, None, by_hand)
    store.release(ahead, ahead.owner)
    assert first.stage is stage and starter.weights.loaded == ["block.2"] and store.listed == [first, ahead]
    starter.check_memory(first)
    second = starter.acquire(40, first, by_hand)
    assert second is ahead and not starter.weights.loaded and store.listed == [second], "the first is gone"
    assert store.grant(second).limit_bytes == limit, "the user's limit is that of one stage"

    starter.weights.cut_anew((4, 1))
    store.available = lambda device: 1000
    with pytest.raises(NoMemoryError):
        starter.acquire(40, None, by_hand)
    assert second.stage is not None and store.listed == [second]
    store.close()
    assert not store.listed


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_stage_that_raises_is_dropped_and_the_next_run_builds_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """In a process with several runs, as a server: another run keeps its own stage, and goes on."""
    ckpt = write_checkpoint(tmp_path / "tiny")
    options = StarterOptions(ckpt=ckpt, prompt_style="none", device="cpu", dtype="float32")
    ports, failing = StarterPorts(), threading.Event()
    forward: Any = KernelStage.__call__
    dropped: list[weakref.ref[KernelStage]] = []

    def fail(self: KernelStage, *args: Any) -> Any:
        if failing.is_set():
            failing.clear()
            dropped.append(weakref.ref(self))
            raise error("no more of it")
        return forward(self, *args)

    monkeypatch.setattr(KernelStage, "__call__", fail)

    def text(run: Run) -> list[int]:
        sample = run.submit("The ring", encode("The ring"), SamplingParams(6, temperature=0))
        run.read()
        return list(sample.token_ids)

    def another() -> Run:
        return Run(GivenNodes(standalone()), options, 60, n_texts=1, ports=ports)

    files = sorted((path, path.stat().st_size) for path in ckpt.iterdir())
    with contextlib.closing(ports), another() as kept:
        wanted = list(reference("The ring", 6))
        assert text(kept) == wanted
        (held,) = ports.caches.listed
        with pytest.raises(EngineError), another() as broken:
            failing.set()
            text(broken)
        assert ports.caches.listed == [held]
        del broken
        gc.collect()
        assert len(dropped) == 1 and dropped[0]() is None
        assert sorted((path, path.stat().st_size) for path in ckpt.iterdir()) == files
        assert text(kept) == wanted
        with another() as last:
            assert text(last) == wanted
    assert not ports.caches.listed
