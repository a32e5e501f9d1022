"""The starter's search: who is announced is asked, and only who answers with the key is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_keys import key_file
from mdi.config import NodeConfig
from mdi.control.server import ControlServer, StatusOnly
from mdi.discovery import gather
from mdi.discovery.announcement import Announcement
from mdi.discovery.gather import FoundNode, Gathering, cluster_of
from mdi.errors import ControlError
from mdi.security.keys import KeyFile

LONG_S = 60.0


class Waiting(StatusOnly):
    def __init__(self, process: str) -> None:
        self._process = process

    def status(self, run: str | None) -> dict[str, Any]:
        return {"name": "board", "version": "9", "state": "IDLE", "process": self._process}


@contextlib.contextmanager
def node(process: str, keys: KeyFile, announced_process: str | None = None) -> Iterator[Announcement]:
    server = ControlServer(Waiting(process), "127.0.0.1", 0, "board", keys)
    try:
        yield Announcement.of("board", "127.0.0.1", server.port, 5088, announced_process or process, keys.first)
    finally:
        server.close()


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return key_file(tmp_path / "cluster.key")


def test_all_that_are_wanted_make_a_cluster(keys: KeyFile) -> None:
    come: list[FoundNode] = []
    with node("a", keys) as first, node("b", keys) as second:
        found = Gathering([lambda: [first], lambda: [second, first]], keys, come.append).wait(2, LONG_S)
    assert {n.announcement for n in found} == {first, second} and len(come) == 2
    cluster = cluster_of(found, NodeConfig("starter", "127.0.0.1", 1, 2), keys)
    assert cluster.n_nodes == 3
    assert {(n.addr, n.port, n.port_in) for n in cluster.secondaries} == {
        ("127.0.0.1", n.port, n.ring_port) for n in (first, second)
    }


def test_without_a_number_it_takes_who_is_there(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "SETTLE_S", 0.0)
    with node("a", keys) as only:
        assert [n.announcement for n in Gathering([lambda: [only]], keys).wait(None, LONG_S)] == [only]


def test_who_does_not_prove_that_it_has_the_key_is_nobody(keys: KeyFile, tmp_path: Path) -> None:
    other = key_file(tmp_path / "other.key")
    with node("a", other) as stranger, node("b", keys, announced_process="c") as liar:
        gathering = Gathering([lambda: [stranger, liar]], keys)
        assert not gathering.look() and not gathering.nodes


def test_too_few_are_named(keys: KeyFile) -> None:
    with node("a", keys) as only, pytest.raises(ControlError, match=f"board at 127.0.0.1:{only.port}"):
        Gathering([lambda: [only]], keys).wait(2, 0.0)


def test_who_has_gone_is_forgotten(keys: KeyFile) -> None:
    there: list[Announcement] = []
    gathering = Gathering([lambda: there], keys)
    with node("a", keys) as only:
        there.append(only)
        assert gathering.look() and len(gathering.nodes) == 1
        there.clear()
        assert not gathering.look() and not gathering.nodes
