"""The test tool itself: what passes, passes whole and in order; what is broken, both sides see."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from faulty_links import BACK, FRONT, FaultyLink, Network, Pace

DEADLINE_S = 60.0


@pytest.fixture
def network() -> Iterator[Network]:
    one = Network()
    yield one
    one.close()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server((BACK, 0)) as sock:
        sock.settimeout(DEADLINE_S)
        yield sock


def connect(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection((FRONT, server.getsockname()[1]), DEADLINE_S)
    theirs, _ = server.accept()
    theirs.settimeout(DEADLINE_S)
    return ours, theirs


def read(sock: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes and (piece := sock.recv(n_bytes - len(data))):
        data += piece
    return data


@pytest.mark.parametrize("pace", [Pace(), Pace(0.01, 2e6)], ids=["plain", "slow"])
def test_what_passes_is_whole_and_in_order(network: Network, server: socket.socket, pace: Pace) -> None:
    link = network.link(server.getsockname()[1], pace)
    ours, theirs = connect(server)
    with ours, theirs:
        data = bytes(range(256)) * 1000
        thread = threading.Thread(target=ours.sendall, args=(data,))
        thread.start()
        assert read(theirs, len(data)) == data
        thread.join(DEADLINE_S)
        theirs.sendall(b"back")
        assert read(ours, 4) == b"back"
        ours.shutdown(socket.SHUT_WR)
        assert theirs.recv(1) == b""
        theirs.sendall(b"still open this way")
        assert read(ours, 19) == b"still open this way"
        assert (link.n_bytes, link.n_connections) == (len(data), 1)


def is_reset(sock: socket.socket) -> bool:
    try:
        while sock.recv(1000):
            pass
    except ConnectionError:
        return True
    return False


def test_a_reset_is_seen_on_both_sides(network: Network, server: socket.socket) -> None:
    link = network.link(server.getsockname()[1])
    ours, theirs = connect(server)
    with ours, theirs:
        ours.sendall(b"x")
        assert read(theirs, 1) == b"x"
        link.reset()
        assert is_reset(ours) and is_reset(theirs)
    ours, theirs = connect(server)
    with ours, theirs:
        ours.sendall(b"again")
        assert read(theirs, 5) == b"again"


def test_a_cut_lets_so_many_bytes_through(network: Network, server: socket.socket) -> None:
    link: FaultyLink = network.link(server.getsockname()[1])
    ours, theirs = connect(server)
    with ours, theirs:
        link.cut_after(10)
        ours.sendall(b"0123456")
        assert read(theirs, 7) == b"0123456"
        ours.sendall(b"789abc")
        assert is_reset(ours)
        assert link.n_bytes == 10


def test_what_is_frozen_comes_later(network: Network, server: socket.socket) -> None:
    link = network.link(server.getsockname()[1])
    ours, theirs = connect(server)
    with ours, theirs:
        link.freeze()
        ours.sendall(b"late")
        theirs.settimeout(0.2)
        with pytest.raises(TimeoutError):
            theirs.recv(1)
        link.thaw()
        theirs.settimeout(DEADLINE_S)
        assert read(theirs, 4) == b"late"


def test_a_port_where_nobody_listens_is_told(network: Network, server: socket.socket) -> None:
    network.link(server.getsockname()[1])
    server.close()
    with socket.socket() as ours, pytest.raises(ConnectionError):
        ours.settimeout(DEADLINE_S)
        ours.connect((FRONT, server_port(network)))
        ours.recv(1)


def server_port(network: Network) -> int:
    return network.links[0].port
