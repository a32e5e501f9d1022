"""`mdi join` on a machine whose network comes late, or gives it another address."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cluster_keys import key_file
from mdi.cancel import Cancel, CancelledError
from mdi.cli import access, join, launch, secondary
from mdi.cli.access import network_address
from mdi.cli.join import followed
from mdi.node.round_robin import RoundRobin
from mdi.spec.cluster import NodeConfig
from mdi.spec.options import Options

DEADLINE_S = 60.0


class Network:
    """The addresses that this machine has one after the other; the last one stays. None: it is in no network."""

    def __init__(self, *addresses: str | None) -> None:
        self._left = list(addresses)
        self.routes = "192.0.2.1", "10.0.0.1"

    def address(self, target: str) -> str | None:
        if target not in self.routes:
            return None
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


def in_network(monkeypatch: pytest.MonkeyPatch, *addresses: str | None) -> Network:
    network = Network(*addresses)
    monkeypatch.setattr(access, "route_address", network.address)
    monkeypatch.setattr(access, "NETWORK_S", 0.01)
    monkeypatch.setattr(join, "ADDRESS_S", 0.01)
    return network


def test_a_board_waits_for_its_network(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    in_network(monkeypatch, None, None, None, "10.0.0.2")
    with caplog.at_level(logging.INFO, "mdi"):
        assert network_address(None, Cancel()) == "10.0.0.2"
    assert len(caplog.records) == 1 and "network" in caplog.text


def test_the_wait_for_a_network_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    in_network(monkeypatch, None)
    with pytest.raises(CancelledError):
        network_address(None, Cancel(0.05))


def test_a_network_without_ipv4_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    in_network(monkeypatch, "fd00::2").routes = (access.ANYBODY_6, "")
    assert network_address(None, Cancel()) == "fd00::2"


class Node:
    """A node of a machine at 10.0.0.2; its ring lasts until `runs.active` is empty."""

    config, is_leaving = NodeConfig("b", "10.0.0.2", 1, 2), False

    def __init__(self) -> None:
        self.turns, self.runs, self.active = RoundRobin(), self, [object()]


@pytest.mark.parametrize("later", [["10.0.0.7"], [None, "10.0.0.2"]], ids=["another", "back"])
def test_an_idle_node_ends_where_its_address_has_changed(
    monkeypatch: pytest.MonkeyPatch, later: list[str | None]
) -> None:
    network = in_network(monkeypatch, "10.0.0.2", "10.0.0.2", *later)
    node: Any = Node()
    moved, looked = threading.Event(), threading.Event()

    def address(target: str) -> str | None:
        found = network.address(target)
        if found == later[-1]:
            looked.set()
        return found

    monkeypatch.setattr(access, "route_address", address)
    with followed(node, None, moved):
        assert looked.wait(DEADLINE_S) and not moved.is_set(), "its ring may still be connected"
        node.active.clear()
        node.turns.run()
    assert moved.is_set()


def test_a_node_whose_address_stays_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    in_network(monkeypatch, "10.0.0.2")
    node: Any = Node()
    node.active.clear()
    moved = threading.Event()
    with followed(node, None, moved):
        assert not moved.wait(0.1)


def test_it_listens_anew_where_its_address_has_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_network(monkeypatch, "127.0.0.2", "127.0.0.3")
    served: list[NodeConfig] = []

    def serve(options: Options, config: NodeConfig, during: Callable[[Any], AbstractContextManager[object]]) -> int:
        served.append(config)
        node: Any = Node()
        node.config = config
        node.active.clear()
        with during(node):
            if len(served) == 1:
                node.turns.run()
        return 0

    monkeypatch.setattr(secondary, "serve", serve)
    assert launch("join", ["--key", str(key_file(tmp_path / "k").path)]) == 0
    assert [config.addr for config in served] == ["127.0.0.2", "127.0.0.3"]
