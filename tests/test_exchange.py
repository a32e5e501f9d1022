"""Answers that never end, by bytes or by size: the client gives them up at its deadline."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.control import client as control_client
from mdi.control.client import ControlClient
from mdi.control.signing import body_hash
from mdi.errors import ControlError
from mdi.net.message import ANSWER_LIMIT_BYTES
from mdi.spec.cluster import NodeConfig

PATIENCE_S = 20.0  # of a server that would go on for ever, so that a client without a deadline fails instead of hanging

Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def served(talk: Talk) -> Iterator[tuple[ControlClient, threading.Event]]:
    """A server that answers one connection; the event is set when its client went away before it was done."""
    was_left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)

        def run() -> None:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(PATIENCE_S)
                sock.recv(65536)
                try:
                    talk(sock)
                except OSError:
                    was_left.set()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield ControlClient(NodeConfig("secondary0", "127.0.0.1", server.getsockname()[1], 0)), was_left
        finally:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive()


def dribble(head: bytes) -> Talk:
    def talk(sock: socket.socket) -> None:
        sock.sendall(head)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            sock.sendall(b" ")
            time.sleep(0.02)

    return talk


DRIBBLED = {
    "nothing before": b"",
    "a status line": b"HTTP/1.1 200 ",
    "headers": b"HTTP/1.1 200 OK\r\nX-Filler:",
    "a body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
    "a body without a length": b"HTTP/1.1 200 OK\r\n\r\n",
}


@pytest.mark.parametrize("head", DRIBBLED.values(), ids=DRIBBLED)
def test_an_answer_that_is_dribbled_is_given_up(head: bytes) -> None:
    with served(dribble(head)) as (client, was_left), pytest.raises(ControlError) as caught:
        client.status(timeout_s=0.4)
    assert (caught.value.problem, caught.value.status) == ("silent", None)
    assert was_left.is_set()


def test_interim_answers_without_end_are_given_up() -> None:
    def talk(sock: socket.socket) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.02)

    with served(talk) as (client, was_left), pytest.raises(ControlError) as caught:
        client.status(timeout_s=0.4)
    assert caught.value.problem == "silent" and was_left.is_set()


@pytest.mark.parametrize("status", [b"200 OK", b"302 Found\r\nLocation: /elsewhere"])
@pytest.mark.parametrize("head", [b"Content-Length: 1000000000000", b"X: y", b"Transfer-Encoding: chunked"])
def test_no_more_of_an_answer_is_read_than_a_node_could_say(head: bytes, status: bytes) -> None:
    piece = b" " * (1 << 20)
    n_sent = 0

    def talk(sock: socket.socket) -> None:
        nonlocal n_sent
        sock.sendall(b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n\r\n")
        while n_sent < 16 * ANSWER_LIMIT_BYTES:
            sock.sendall(b"100000\r\n" + piece + b"\r\n" if b"chunked" in head else piece)
            n_sent += len(piece)

    with served(talk) as (client, was_left), pytest.raises(ControlError) as caught:
        client.status(timeout_s=PATIENCE_S)
    assert caught.value.problem == "stranger" and was_left.is_set()
    assert n_sent < 8 * ANSWER_LIMIT_BYTES, "what the system's buffers hold beside what was read"


def test_an_answer_that_is_cut_off() -> None:
    with served(lambda sock: sock.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"state": "IDLE"}')) as (
        client,
        _,
    ):
        with pytest.raises(ControlError) as caught:
            client.status()
        assert caught.value.problem == "closed"


def test_an_answer_is_not_unpacked() -> None:
    """A few bytes could become gigabytes."""
    packed = gzip.compress(b'{"state": "IDLE"}')
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    with served(lambda sock: sock.sendall(head + packed)) as (client, _), pytest.raises(ControlError) as caught:
        client.status()
    assert caught.value.problem == "stranger"


def test_a_node_that_is_sent_to_another_one_stays_where_it_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.1)
        moved = f"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:{other.getsockname()[1]}/\r\nContent-Length: 2\r\n\r\n{{}}"
        with served(lambda sock: sock.sendall(moved.encode())) as (client, _), pytest.raises(ControlError) as caught:
            client.status()
        assert caught.value.status == 307
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.parametrize("addr", ["::1", "localhost", "LocalHost"])
def test_addresses_of_all_kinds(addr: str) -> None:
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    got: list[bytes] = []
    with socket.create_server(("localhost" if family is socket.AF_INET else "::1", 0), family=family) as server:
        server.settimeout(PATIENCE_S)

        def run() -> None:
            sock, _ = server.accept()
            with sock:
                got.append(sock.recv(65536))
                sock.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"state": "IDLE"}')

        thread = threading.Thread(target=run)
        thread.start()
        port = server.getsockname()[1]
        assert ControlClient(NodeConfig("secondary0", addr, port, 0)).status() == {"state": "IDLE"}
        thread.join()
    assert got[0].startswith(b"GET / HTTP/1.1\r\n") and f":{port}\r\n".encode() in got[0]


def test_what_is_signed_is_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target that the library writes in another way, too."""
    signed: list[tuple[object, ...]] = []
    monkeypatch.setattr(control_client, "sign_request", lambda *args: signed.append(args) or "00")
    got: list[bytes] = []

    def talk(sock: socket.socket) -> None:
        sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while piece := sock.recv(65536):
                got.append(piece)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)

        def run() -> None:
            sock, _ = server.accept()
            with sock:
                talk(sock)

        thread = threading.Thread(target=run)
        thread.start()
        client = ControlClient(NodeConfig("a", "127.0.0.1", server.getsockname()[1], 0), key_file(tmp_path / "key"))
        client.nonces.keep("12")
        with pytest.raises(ControlError, check=lambda e: e.code == "key"):
            client.request("PUT", "/a b?x=\u00e9", 5.0, b'{"run": "\xff"}')
        thread.join()
    head, _, body = b"".join(got).partition(b"\r\n\r\n")
    method, target = head.split()[:2]
    assert signed[0][1:4] == (method.decode(), target.decode(), body_hash(body)) and target == b"/a%20b?x=%C3%A9"
