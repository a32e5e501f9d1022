"""A node that dials out is reached at ports of the relay, by whoever could reach it directly; nobody else can dial in."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.discovery.dial_out import DialOut
from mdi.discovery.relay import Relay
from mdi.discovery.tunnel import close
from mdi.security.challenge import CHALLENGE_BYTES
from mdi.security.keys import KeyFile
from waiting import until

DEADLINE_S = 60.0


class Echo:
    """Sends back what it gets, then says good-bye."""

    def __init__(self, last: bytes) -> None:
        self._last = last
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                while data := sock.recv(65536):
                    sock.sendall(data)
                sock.sendall(self._last)

    def close(self) -> None:
        close(self._listener)
        self._thread.join()


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return key_file(tmp_path / "cluster.key")


@pytest.fixture
def relay(keys: KeyFile) -> Iterator[Relay]:
    made = Relay("127.0.0.1", 0, keys)
    yield made
    made.close()


@contextlib.contextmanager
def dialled(relay: Relay, keys: KeyFile) -> Iterator[DialOut]:
    control, ring = Echo(b"control"), Echo(b"ring")
    ports = {"control": ("127.0.0.1", control.port), "ring": ("127.0.0.1", ring.port)}
    node = DialOut(("127.0.0.1", relay.port), keys, "board", "ab" * 8, ports)
    try:
        yield node
    finally:
        node.close()
        control.close()
        ring.close()


def exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        got = bytearray()
        while piece := sock.recv(65536):
            got += piece
        sender.join()
        return bytes(got)


def test_both_ports_are_reached_through_the_relay(relay: Relay, keys: KeyFile) -> None:
    data = secrets.token_bytes(3_000_000)
    with dialled(relay, keys):
        until(lambda: bool(relay.nodes()))
        (node,) = relay.nodes()
        assert (node.name, node.process) == ("board", "ab" * 8)
        for _ in range(3):
            assert exchange(node.port, data) == data + b"control"
            assert exchange(node.ring_port, b"") == b"ring"
    until(lambda: not relay.nodes())


def test_a_node_that_dials_again_takes_its_own_place(relay: Relay, keys: KeyFile) -> None:
    with dialled(relay, keys):
        until(lambda: bool(relay.nodes()))
        with dialled(relay, keys):
            until(lambda: bool(relay.nodes()) and exchange_works(relay))
            assert len(relay.nodes()) == 1


def exchange_works(relay: Relay) -> bool:
    try:
        return exchange(relay.nodes()[0].port, b"x") == b"xcontrol"
    except (OSError, IndexError):
        return False


def test_strangers_cannot_dial_in(relay: Relay, tmp_path: Path) -> None:
    other = key_file(tmp_path / "other.key")
    with dialled(relay, other):
        with socket.create_connection(("127.0.0.1", relay.port), DEADLINE_S) as sock:
            sock.sendall(secrets.token_bytes(CHALLENGE_BYTES))
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        assert relay.nodes() == []
