"""A node that leaves memory of its machine to others: what it tells, plans with and drops."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import mdi.node.spare_memory
from mdi.cli import secondary
from mdi.node.secondary import SecondaryNode
from mdi.node.spare_memory import SpareMemory
from mdi.spec.cluster import NodeConfig
from mdi.spec.options import Options
from secondaries import secondary as started
from waiting import until

SPARE = 1 << 20


def test_what_no_run_uses_is_dropped_while_too_little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdi.node.spare_memory, "LOOK_S", 0.01)
    free, asked, dropped = [SPARE], threading.Semaphore(0), threading.Event()

    def free_bytes(device: str) -> int:
        asked.release()
        return free[0]

    def drop() -> bool:
        dropped.set()
        return True

    memory = SpareMemory("secondary0", "cpu", SPARE, free_bytes, drop)
    memory.start()
    try:
        for _ in range(3):
            assert asked.acquire(timeout=60)
        assert not dropped.is_set(), "as much is free as is to be"
        free[0] -= 1
        assert dropped.wait(60)
    finally:
        memory.close()
        memory.close()


def test_a_node_that_leaves_nothing_to_others_tells_nothing_of_it(tmp_path: Path) -> None:
    with started(0, tmp_path) as node:
        assert "spare_bytes" not in node.status(None)["memory"]
        assert not [one for one in threading.enumerate() if one.name == "spare-memory"]


def test_a_run_plans_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(0, tmp_path, spare_bytes=SPARE, free_bytes=lambda device: 7) as node:
        monkeypatch.setattr(node.profiler, "available_bytes", lambda device: SPARE + 9)
        memory = node.status(None)["memory"]
        assert (memory["available_bytes"], memory["free_bytes"], memory["spare_bytes"]) == (9, 7, SPARE)
        monkeypatch.setattr(node.profiler, "available_bytes", lambda device: SPARE - 9)
        assert node.status(None)["memory"]["available_bytes"] == 0


@pytest.mark.parametrize("model", [None, "a-model"])
def test_the_flag_is_that_of_the_node_or_of_its_place_in_a_swarm(
    tmp_path: Path, model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    @contextlib.contextmanager
    def during(node: SecondaryNode) -> Iterator[None]:
        told.append(node.status(None)["memory"].get("spare_bytes"))
        node.turns.close()
        yield

    monkeypatch.setattr("mdi.node.swarm_member.SwarmMember.start", lambda self: None)
    options = Options(spare_memory=SPARE, stand_with=model, cache_dir=tmp_path, no_announce=True, device="cpu")
    config = NodeConfig("secondary0", "127.0.0.1", 0, 0)
    thread = threading.Thread(target=secondary.serve, args=(options, config), kwargs={"during": during})
    thread.start()
    until(lambda: not thread.is_alive())
    assert told == [SPARE if model is None else None]
