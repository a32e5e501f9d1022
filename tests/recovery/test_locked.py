"""--mlock holds wherever a node builds a stage: in groups, on hot spares, after moves, and for the small model that guesses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_hot_spare import spared
from test_joins import generate, is_loading, wait_for

import mdi.stages.building as building
from mdi.run.run import Run
from mdi.spec.options import ParallelOptions, StarterOptions, WeightMemory
from secondaries import cluster_of, secondaries, text_of
from tiny_checkpoint import write_checkpoint


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that each node has locked; the small model is a node of its own."""
    found: dict[str, int] = {}
    of_thread = threading.local()  # nodes build at the same time

    class Placer(building.WeightPlacer):
        def __init__(self, memory: WeightMemory, locks: bool, name: str) -> None:
            assert locks, name
            of_thread.name = name
            super().__init__(memory, locks, name)

    def lock(array: np.ndarray) -> bool:
        found[of_thread.name] = found.get(of_thread.name, 0) + array.nbytes
        return True

    monkeypatch.setattr(building, "WeightPlacer", Placer)
    monkeypatch.setattr(building, "lock_pages", lock)
    return found


OPTIONS = {"mlock": True, "draft": "none"}


@pytest.mark.parametrize("kind", ["a ring", "a group", "a hot spare", "a small model"])
def test_every_stage_is_locked(kind: str, locked: dict[str, int], tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path / "tiny")
    options = dict(OPTIONS)
    if kind == "a group":
        options["parallel"] = ParallelOptions("tensor")
    if kind == "a small model":
        options["draft"] = str(ckpt)
    names = {"starter", "secondary0", "secondary1"} | ({"draft"} if kind == "a small model" else set())
    with secondaries(2, tmp_path) as nodes:
        cluster = spared(nodes) if kind == "a hot spare" else cluster_of(nodes)
        if kind == "a hot spare":
            options["hot_spare"] = ("auto",)
        text_of(cluster, ckpt, **options)
    assert locked.keys() == names and all(locked.values())


def test_blocks_of_a_leaving_node_are_locked_where_they_go(
    locked: dict[str, int], tmp_path: Path, endless: Path
) -> None:
    options = StarterOptions(ckpt=endless, prompt_style="none", device="cpu", placement="even", **OPTIONS)
    before: dict[str, int] = {}

    def look(run: Run, n_tokens: Callable[[], int]) -> None:
        before.update(locked)
        nodes[0].leave()
        wait_for(lambda: run.names == ("starter", "secondary1") and run.loop.running is not None)

    with secondaries(2, tmp_path) as nodes:
        generate(cluster_of(nodes), options, {}, look=look, joins=False)
        wait_for(lambda: not is_loading())
    assert locked["secondary1"] > before["secondary1"] > 0
