"""A node that dials out is reached at ports of the relay, by whoever could reach it directly; nobody else can dial in."""

from __future__ import annotations

import contextlib
import errno
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_keys import key_file
from mdi.control import relay as relay_module
from mdi.control import relay as tunnel_module
from mdi.control.relay import N_MEETING, N_PER_ADDRESS, DialOut, Relay, Tunnel, close, join
from mdi.net.hello import CHALLENGE_BYTES
from mdi.net.keys import KeyFile
from mdi.net.listener import open_socket
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


def test_a_node_that_can_be_reached_is_named_at_its_own_ports(relay: Relay, keys: KeyFile) -> None:
    ports = {"control": ("127.0.0.1", 7001), "ring": ("127.0.0.1", 7002)}
    node = DialOut(("127.0.0.1", relay.port), keys, "board", "ab" * 8, ports, is_reached=True)
    try:
        until(lambda: bool(relay.nodes()))
        (found,) = relay.nodes()
        assert (found.where, found.ring_port, found.process) == ("127.0.0.1:7001", 7002, "ab" * 8)
    finally:
        node.close()
    until(lambda: not relay.nodes())


@pytest.mark.parametrize(
    "place", [{"addr": "nowhere"}, {"addr": "127.0.0.1"}, {"addr": "127.0.0.1", "control": "0", "ring": "9"}]
)
def test_a_node_that_says_unclearly_where_it_is_is_not_taken(
    relay: Relay, keys: KeyFile, place: dict[str, str]
) -> None:
    tunnel = Tunnel.dial("127.0.0.1", relay.port, keys.keys)
    try:
        tunnel.send({"name": "board", "process": "ab" * 8, **place})
        assert is_over(tunnel.sock)
        assert not relay.nodes()
    finally:
        tunnel.close()


def test_the_end_does_not_wait_for_a_relay_that_is_silent(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MEET_S", 600.0)
    monkeypatch.setattr(relay_module, "CLOSE_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        ports = {"control": ("127.0.0.1", 7001), "ring": ("127.0.0.1", 7002)}
        node = DialOut(silent.getsockname(), keys, "board", "ab" * 8, ports)
        with silent.accept()[0] as sock:
            sock.settimeout(DEADLINE_S)
            assert sock.recv(1), "it wants to meet"
            ends = threading.Thread(target=node.close)
            ends.start()
            ends.join(DEADLINE_S)
            assert not ends.is_alive()


def test_a_node_ends_when_its_starter_does_not_come_back(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "GONE_S", 0.0)
    monkeypatch.setattr(relay_module, "AGAIN_S", 0.01)
    relay, gone = Relay("127.0.0.1", 0, keys), queue.Queue[str]()
    ports = {"control": ("127.0.0.1", 7001), "ring": ("127.0.0.1", 7002)}
    node = DialOut(("127.0.0.1", relay.port), keys, "board", "ab" * 8, ports, True, gone.put)
    try:
        until(lambda: bool(relay.nodes()))
        assert gone.empty()
        relay.close()
        assert f"127.0.0.1:{relay.port}" in gone.get(timeout=DEADLINE_S)
    finally:
        relay.close()
        node.close()


def test_a_node_ends_when_its_starter_never_comes(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "AGAIN_S", 0.01)
    gone, nobody = queue.Queue[str](), ("127.0.0.1", 1)
    node = DialOut(nobody, keys, "board", "ab" * 8, {"control": nobody, "ring": nobody}, True, gone.put, first_s=0.05)
    try:
        assert "127.0.0.1:1" in gone.get(timeout=DEADLINE_S)
    finally:
        node.close()


def test_nodes_dial_any_address_of_the_starter(keys: KeyFile) -> None:
    """Its own name is another address for a process of its machine, often 127.0.1.1, than for those elsewhere."""
    relay = Relay("192.0.2.1", 0, keys)
    ports = {"control": ("127.0.0.1", 7001), "ring": ("127.0.0.1", 7002)}
    node = DialOut(("127.0.0.1", relay.port), keys, "board", "ab" * 8, ports, is_reached=True)
    try:
        until(lambda: bool(relay.nodes()))
    finally:
        node.close()
        relay.close()


@contextlib.contextmanager
def connected(port: int, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S, (source, 0)) as sock:
        yield sock


def is_over(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def exchange(port: int, data: bytes) -> bytes:
    def send() -> None:
        with contextlib.suppress(OSError):  # where nobody is behind the port, it is closed meanwhile
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        sender = threading.Thread(target=send)
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


def test_a_node_whose_connection_broke_has_the_same_ports_again(
    relay: Relay, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "AGAIN_S", 0.01)
    with dialled(relay, keys):
        until(relay.nodes)
        before = relay.nodes()
        with dialled(relay, keys):  # the same process: the relay ends the earlier connection
            until(lambda: exchange_works(relay))
            assert relay.nodes() == before
        until(lambda: exchange_works(relay))
        assert relay.nodes() == before


def test_the_ports_of_a_node_that_stays_away_are_given_back(
    relay: Relay, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "PING_S", 0.01)
    monkeypatch.setattr(relay_module, "KEPT_S", 0.02)
    with dialled(relay, keys):
        until(relay.nodes)
        (node,) = relay.nodes()
    until(lambda: not exchange_is_taken(node.port))


def exchange_is_taken(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), DEADLINE_S).close()
    except OSError:
        return False
    return True


def exchange_works(relay: Relay) -> bool:
    try:
        return exchange(relay.nodes()[0].port, b"x") == b"xcontrol"
    except (OSError, IndexError):
        return False


def test_the_oldest_of_many_strangers_makes_way(relay: Relay, keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_module, "MEET_S", 3600.0)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(relay.port)) for _ in range(N_MEETING)]
        for stranger in strangers:
            stranger.sendall(b"\1")
        Tunnel.dial("127.0.0.1", relay.port, keys.keys).close()
        assert strangers[0].recv(1) == b""


def test_a_meeting_has_one_deadline_for_all_its_bytes(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_module, "MEET_S", 0.2)
    with connected(relay.port) as stranger, pytest.raises(ConnectionError):
        for _ in range(CHALLENGE_BYTES - 1):
            stranger.sendall(b"\1")
            threading.Event().wait(0.1)


class WithoutFiles(socket.socket):
    """Has no file for the first connection."""

    has_failed = False

    def accept(self) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_an_error_of_accept_passes(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "open_socket", lambda *where: WithoutFiles(fileno=open_socket(*where).detach()))
    relay = Relay("127.0.0.1", 0, keys)
    try:
        with dialled(relay, keys):
            until(lambda: bool(relay.nodes()))
            assert exchange(relay.nodes()[0].port, b"x") == b"xcontrol"
    finally:
        relay.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="one machine has only one address")
def test_one_address_elsewhere_has_so_many_connections_to_a_node(
    relay: Relay, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's connections reach the node from the relay's address, so that the node cannot count them itself."""
    monkeypatch.setattr(relay_module, "is_here", lambda addr: addr == "127.0.0.1")
    monkeypatch.setattr(tunnel_module, "ENDING_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        server.settimeout(DEADLINE_S)
        own = ("127.0.0.1", server.getsockname()[1])
        node = DialOut(("127.0.0.1", relay.port), keys, "board", "ab" * 8, {"control": own, "ring": own})
        stack.callback(node.close)
        until(lambda: bool(relay.nodes()))
        port = relay.nodes()[0].ring_port
        held = [stack.enter_context(connected(port, "127.0.0.2")) for _ in range(N_PER_ADDRESS)]
        for _ in held:
            stack.enter_context(server.accept()[0])
        with connected(port, "127.0.0.2") as refused:
            assert is_over(refused)
        for addr in ("127.0.0.3", "127.0.0.1"):
            stack.enter_context(connected(port, addr))
            stack.enter_context(server.accept()[0])
        held[0].close()
        server.settimeout(0.2)

        def is_let_in() -> bool:
            with connected(port, "127.0.0.2"):
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    return False
                return True

        until(is_let_in)


def test_a_connection_that_breaks_when_it_is_told_of_is_closed(
    relay: Relay, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[Tunnel] = []
    plainly = Tunnel.send

    def send(tunnel: Tunnel, message: dict[str, str]) -> None:
        if "stream" in message:
            broken.append(tunnel)
            raise ConnectionResetError
        plainly(tunnel, message)

    monkeypatch.setattr(Tunnel, "send", send)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        own = ("127.0.0.1", server.getsockname()[1])
        node = DialOut(("127.0.0.1", relay.port), keys, "board", "ab" * 8, {"control": own, "ring": own})
        stack.callback(node.close)
        until(lambda: bool(relay.nodes()))
        stack.enter_context(connected(relay.nodes()[0].ring_port, "127.0.0.1"))
        until(lambda: bool(broken) and broken[0].sock.fileno() == -1)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), DEADLINE_S)
        return server.accept()[0], near


def test_who_stays_after_the_other_side_has_ended_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_module, "ENDING_S", 0.05)
    (one, near), (two, far) = tcp_pair(), tcp_pair()
    with near, far:
        joining = threading.Thread(target=join, args=(one, two), daemon=True)
        joining.start()
        for _ in range(3):  # silent for long, and both there
            threading.Event().wait(0.1)
            near.sendall(b"x")
            assert far.recv(1) == b"x"
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""
        joining.join(DEADLINE_S)
        assert not joining.is_alive()


def test_strangers_cannot_dial_in(relay: Relay, tmp_path: Path) -> None:
    other = key_file(tmp_path / "other.key")
    with dialled(relay, other):
        with socket.create_connection(("127.0.0.1", relay.port), DEADLINE_S) as sock:
            sock.sendall(secrets.token_bytes(CHALLENGE_BYTES))
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        assert relay.nodes() == []
