"""The control port among strangers: who is silent or slow makes room, the starter has a place, an end waits for nobody."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import mdi.control.client
import mdi.control.server
from mdi.control.client import ControlClient
from mdi.control.server import N_CONNECTIONS, N_OF_OWNER, N_PER_ADDRESS, ConnectionWorkers, ControlServer, StatusOnly
from mdi.net.message import DeadlineSocket
from mdi.spec.cluster import NodeConfig

DEADLINE_S = 30.0
BODY = b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n{"


class Idle(StatusOnly):
    def status(self, run: str | None) -> dict[str, Any]:
        return {"state": "IDLE"}


@pytest.fixture
def server() -> Iterator[ControlServer]:
    one = ControlServer(Idle(), "127.0.0.1", 0, "secondary0")
    yield one
    one.close()


def connect(stack: contextlib.ExitStack, server: ControlServer, data: bytes = b"") -> socket.socket:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
    sock.sendall(data)
    return sock


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\nX-Slow: ", BODY, b"PUT /echo HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
def test_three_hundred_slow_strangers(server: ControlServer, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdi.control.client, "CONNECT_S", DEADLINE_S)
    client = ControlClient(NodeConfig("secondary0", "127.0.0.1", server.port, 0))
    with contextlib.ExitStack() as stack:
        for i in range(300):
            connect(stack, server, data)
            if i % 100 == 99:
                assert client.status(timeout_s=DEADLINE_S)["state"] == "IDLE"


def dribble(sock: socket.socket) -> bool:
    """Whether the server ended it; one that waits for every byte would never."""
    end = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < end:
            sock.sendall(b" ")
            time.sleep(0.02)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nX-Slow: ", BODY])
def test_a_request_that_is_dribbled_is_ended(
    server: ControlServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mdi.control.server, "REQUEST_S", 0.3)
    with contextlib.ExitStack() as stack:
        assert dribble(connect(stack, server, data))


def test_an_end_does_not_wait_for_strangers() -> None:
    before = set(threading.enumerate())
    server = ControlServer(Idle(), "127.0.0.1", 0, "secondary0")
    leaving = threading.Event()
    with contextlib.ExitStack() as stack:
        socks = [connect(stack, server, BODY) for _ in range(60)]

        def dribble_all() -> None:
            while not leaving.wait(0.05):
                for sock in socks:
                    with contextlib.suppress(OSError):
                        sock.sendall(b" ")

        threads = [threading.Thread(target=dribble_all), threading.Thread(target=server.close, daemon=True)]
        for thread in threads:
            thread.start()
        threads[1].join(DEADLINE_S)
        has_ended = not threads[1].is_alive()
        leaving.set()
        threads[0].join(DEADLINE_S)
    assert has_ended
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread.name


class Connection:
    """As cheroot has it: its thread is in `communicate` until the other side goes, or the connection is dropped."""

    def __init__(self, addr: str, workers: ConnectionWorkers, is_heard: bool = False) -> None:
        near, self.far = socket.socketpair()
        self.socket = DeadlineSocket.around(near)
        self.remote_addr = addr
        self._workers, self._is_heard = workers, is_heard
        self.is_served = threading.Event()
        self.is_over = threading.Event()

    def communicate(self) -> None:
        if self._is_heard:
            self._workers.heard()
        self.is_served.set()
        self.socket.recv_into(bytearray(1))

    def close(self) -> None:
        self.socket.close()
        self.far.close()
        self.is_over.set()


class Crowd:
    def __init__(self, workers: ConnectionWorkers) -> None:
        self._workers = workers
        self.all: list[Connection] = []

    def come(self, addr: str, n: int = 1, is_heard: bool = False) -> list[Connection]:
        found = [Connection(addr, self._workers, is_heard) for _ in range(n)]
        for one in found:
            self._workers.put(one)
            assert one.is_over.is_set() or one.is_served.wait(DEADLINE_S)
        self.all += found
        return found


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    workers = ConnectionWorkers()
    one = Crowd(workers)
    yield one
    workers.stop(0.1)
    for connection in one.all:
        assert connection.is_over.wait(DEADLINE_S)


def addresses(n: int) -> list[str]:
    return [f"192.168.{i // 250}.{1 + i % 250}" for i in range(n)]


def test_the_oldest_makes_way_and_never_what_is_being_answered(crowd: Crowd) -> None:
    (answered,) = crowd.come("10.0.0.1", is_heard=True)
    strangers = [crowd.come(addr)[0] for addr in addresses(N_CONNECTIONS + 9)]
    for one in strangers[:10]:
        assert one.is_over.wait(DEADLINE_S)
    assert not answered.is_over.is_set() and not any(one.is_over.is_set() for one in strangers[10:])


def test_one_address_has_so_many_places(crowd: Crowd) -> None:
    first = crowd.come("10.0.0.1", 3)
    crowded = crowd.come("10.0.0.2", N_PER_ADDRESS + 5)
    for one in crowded[:5]:
        assert one.is_over.wait(DEADLINE_S)
    assert not any(one.is_over.is_set() for one in [*first, *crowded[5:]])
    assert not any(one.is_over.is_set() for addr in ("127.0.0.1", "::1") for one in crowd.come(addr, N_PER_ADDRESS + 5))


def test_the_starter_of_the_run_has_a_place(crowd: Crowd) -> None:
    """Even where every place is taken by requests that are being answered."""
    crowd._workers.own("10.0.0.1")
    taken = [crowd.come(addr, is_heard=True)[0] for addr in addresses(N_CONNECTIONS)]
    (refused,) = crowd.come("10.0.0.9")
    assert refused.is_over.is_set()
    ours = crowd.come("10.0.0.1", min(N_PER_ADDRESS, N_OF_OWNER))
    assert not any(one.is_over.is_set() for one in [*taken, *ours])


def test_strangers_do_not_take_the_starter_s_place(crowd: Crowd) -> None:
    crowd._workers.own("10.0.0.1")
    ours = crowd.come("10.0.0.1", 5)
    strangers = [crowd.come(addr)[0] for addr in addresses(N_CONNECTIONS)]
    for one in strangers[:5]:
        assert one.is_over.wait(DEADLINE_S)
    assert not any(one.is_over.is_set() for one in ours)
