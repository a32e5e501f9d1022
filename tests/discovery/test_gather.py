"""The starter's search: who is announced is asked, and only who answers with the key is taken."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster_keys import key_file
from mdi.cancel import Cancel, CancelledError
from mdi.cli import discover
from mdi.cli.discover import inviting
from mdi.control import discovery as gather
from mdi.control.discovery import Announcement, FoundNode, Gathering, Guests, cluster_of
from mdi.control.messages import COMPILING
from mdi.control.server import ControlServer, StatusOnly
from mdi.errors import ControlError
from mdi.net.invitation import GuestNode
from mdi.net.keys import KeyFile
from mdi.spec.cluster import NodeConfig
from mdi.terminal import reporting
from waiting import until

LONG_S = 60.0


class Waiting(StatusOnly):
    def __init__(self, process: str, states: Sequence[str] = ("IDLE",)) -> None:
        self._process = process
        self._states = list(states)

    def status(self, run: str | None) -> dict[str, Any]:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return {"name": "board", "version": "9", "state": state, "process": self._process}


@contextlib.contextmanager
def node(
    process: str, keys: KeyFile, announced_process: str | None = None, states: Sequence[str] = ("IDLE",)
) -> Iterator[Announcement]:
    server = ControlServer(Waiting(process, states), "127.0.0.1", 0, "board", keys)
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


def guest(found: Announcement) -> GuestNode:
    return GuestNode(found.name, found.addr, found.port, found.ring_port)


def test_who_has_joined_is_found_without_an_announcement(keys: KeyFile, tmp_path: Path) -> None:
    guests = Guests(tmp_path / "nodes")
    with node("a", keys) as only:
        guests.add(guest(only), "127.0.0.1")
        (found,) = Gathering([guests.nodes], keys).wait(1, LONG_S)
    assert found.announcement.process == "a"
    assert (found.config("x").addr, found.config("x").port, found.config("x").port_in) == (
        "127.0.0.1", only.port, only.ring_port,
    )  # fmt: skip


def test_the_address_that_a_request_came_from_is_tried_too(tmp_path: Path) -> None:
    guests = Guests(tmp_path / "nodes")
    guests.add(GuestNode("board", "10.0.0.7", 8088, 5088), "192.0.2.7")
    assert [found.addr for found in guests.nodes()] == ["10.0.0.7", "192.0.2.7"]


def test_a_node_that_has_joined_and_is_announced_is_one_node(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gather, "AGAIN_S", 0.0)
    come: list[FoundNode] = []
    there: list[Announcement] = []
    with node("a", keys) as only:
        guests = Guests(tmp_path / "nodes")
        gathering = Gathering([lambda: there, guests.nodes], keys, come.append)
        guests.add(guest(only), "127.0.0.1")
        assert gathering.look()
        there.append(only)
        assert not gathering.look() and not gathering.look()
        assert len(gathering.nodes) == len(come) == 1


def test_a_node_that_is_somewhere_else_is_found_there(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address has changed, or that of the relay that it dials."""
    monkeypatch.setattr(gather, "AGAIN_S", 0.0)
    there: list[Announcement] = []
    with node("a", keys) as first, node("a", keys) as second:
        gathering = Gathering([lambda: there], keys)
        for place in (first, second):
            there[:] = [place]
            gathering.look()
            assert [one.announcement.where for one in gathering.nodes] == [place.where]


def test_a_node_that_compiles_counts_and_is_told_again_when_it_is_done(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "AGAIN_S", 0.0)
    come: list[str] = []
    with node("a", keys, states=[COMPILING, COMPILING, "IDLE"]) as only:
        gathering = Gathering([lambda: [only]], keys, lambda found: come.append(found.status["state"]))
        assert gathering.look() and len(gathering.nodes) == 1
        for _ in range(3):
            assert not gathering.look()
        assert come == [COMPILING, "IDLE"] and not gathering.nodes[0].is_compiling


def test_the_line_for_other_machines_stays_in_sight(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is shown again, and in the place of what else would say every few seconds that somebody waits."""
    monkeypatch.setattr(discover, "REPEAT_S", 0.01)
    caplog.set_level("INFO", "mdi")
    starter = NodeConfig("starter", "127.0.0.1", 0, 0)
    looking = reporting(lambda: "looking for the nodes", 0.001, 0.001)
    with looking, inviting(starter, keys, 2, Guests(tmp_path / "nodes"), socket.socket()):
        until(lambda: sum("mdi join 127.0.0.1:" in line for line in caplog.messages) >= 2)
        told = list(caplog.messages)
    first = next(i for i, line in enumerate(told) if "mdi join" in line)
    assert not any("looking for" in line for line in told[first:])
    assert "on each of the other 2 machines:  mdi join" in capsys.readouterr().err


def test_it_says_whom_it_waits_for_and_only_what_is_new(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gather, "REPORT_S", 0.0)
    lines: list[str] = []
    guests = Guests(tmp_path / "nodes")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    guests.add(GuestNode("gone", "127.0.0.1", port, 5088), "127.0.0.1")
    with node("a", keys) as only, pytest.raises(ControlError) as caught:
        Gathering([lambda: [only], guests.nodes], keys).wait(2, 1.0, tell=lines.append)
    assert [line.split()[:4] for line in lines if "nodes" in line] == [["2", "of", "3", "nodes"]]
    assert len(lines) == 2 and f"gone at 127.0.0.1:{port}" in lines[1]
    assert f"gone at 127.0.0.1:{port}" in str(caught.value)


def test_who_has_gone_is_forgotten(keys: KeyFile) -> None:
    there: list[Announcement] = []
    gathering = Gathering([lambda: there], keys)
    with node("a", keys) as only:
        there.append(only)
        assert gathering.look() and len(gathering.nodes) == 1
        there.clear()
        assert not gathering.look() and not gathering.nodes


def test_boards_that_join_at_once_are_all_kept(tmp_path: Path) -> None:
    guests = Guests(tmp_path / "nodes")
    nodes = [GuestNode(f"n{i}", f"192.0.2.{i}", 8088, 5088) for i in range(8)]
    threads = [threading.Thread(target=guests.add, args=(node, node.addr)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {found.addr for found in Guests(tmp_path / "nodes").nodes()} == {node.addr for node in nodes}


def test_a_file_that_cannot_be_written_refuses_no_board(tmp_path: Path) -> None:
    guests = Guests(tmp_path / "missing" / "nodes")
    guests.add(GuestNode("n", "192.0.2.1", 8088, 5088), "192.0.2.1")
    assert [found.addr for found in guests.nodes()] == ["192.0.2.1"]


@pytest.mark.parametrize("wait", [Gathering.wait, Gathering.within], ids=["for nodes", "for a time"])
def test_a_search_ends_with_its_cancel(tmp_path: Path, wait: Any) -> None:
    cancel, looked = Cancel(), threading.Event()

    def source() -> list[Announcement]:
        looked.set()
        return []

    gathering, ended = Gathering([source], key_file(tmp_path / "cluster.key")), []

    def search() -> None:
        arguments = (2, 10**6) if wait is Gathering.wait else (10**6,)
        with pytest.raises(CancelledError):
            wait(gathering, *arguments, cancel=cancel)
        ended.append(True)

    thread = threading.Thread(target=search)
    thread.start()
    assert looked.wait(60)
    cancel.cancel()
    thread.join(30)
    assert ended and not thread.is_alive()
