"""The protocol between a relay and its node: short sealed JSON messages, then the bytes of one connection."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from mdi.errors import WireError
from mdi.security.challenge import CHALLENGE_BYTES, Caller, answer_to
from mdi.security.session import TAG_BYTES, SealedSession

MEET_S = 10.0
PING_S = 5.0
SILENCE_S = 20.0  # without a message, after which the other side counts as gone
MESSAGE_LIMIT_BYTES = 1024
PIECE_BYTES = 64 << 10


class Tunnel:
    """One connection between relay and node. Both have proved that they have the key.

    Raises (all methods):
        OSError: the connection is broken or silent. WireError, AccessError: the other side is none of ours.
    """

    def __init__(self, sock: socket.socket, session: SealedSession) -> None:
        self.sock = sock
        self._session = session
        self._lock = threading.Lock()

    @classmethod
    def dial(cls, addr: str, port: int, keys: tuple[bytes, ...]) -> Tunnel:
        sock = socket.create_connection((addr, port), MEET_S)
        try:
            caller = Caller(keys)
            sock.sendall(caller.call)
            return cls(_ready(sock), caller.session(_read(sock, CHALLENGE_BYTES)))
        except BaseException:
            sock.close()
            raise

    @classmethod
    def answer(cls, sock: socket.socket, keys: tuple[bytes, ...]) -> Tunnel:
        sock.settimeout(MEET_S)
        answer, session = answer_to(_read(sock, CHALLENGE_BYTES), keys)
        sock.sendall(answer)
        return cls(_ready(sock), session)

    def send(self, message: dict[str, str]) -> None:
        with self._lock:
            sealed = self._session.seal(json.dumps(message).encode())
            self.sock.sendall(len(sealed).to_bytes(2, "little") + sealed)

    def receive(self) -> dict[str, str]:
        n_bytes = int.from_bytes(_read(self.sock, 2), "little")
        if not TAG_BYTES < n_bytes <= MESSAGE_LIMIT_BYTES:
            raise WireError(f"a message of {n_bytes} bytes")
        data = bytearray(n_bytes - TAG_BYTES)
        self._session.open(_read(self.sock, n_bytes), data)
        try:
            message: Any = json.loads(data)
        except ValueError:
            message = None
        if not isinstance(message, dict) or not all(isinstance(value, str) for value in message.values()):
            raise WireError("a message that cannot be read")
        return message

    def close(self) -> None:
        close(self.sock)


def join(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways until both sides have ended; closes both."""
    for sock in (one, other):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_carry, args=(other, one), name="tunnel", daemon=True)
    back.start()
    _carry(one, other)
    back.join()
    close(one)
    close(other)


def close(sock: socket.socket) -> None:
    """Also wakes a thread that waits for the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    piece = bytearray(PIECE_BYTES)
    try:
        while n := source.recv_into(piece):
            target.sendall(memoryview(piece)[:n])
        target.shutdown(socket.SHUT_WR)
    except OSError:  # a broken link is reported to both ends
        close(source)
        close(target)


def _ready(sock: socket.socket) -> socket.socket:
    sock.settimeout(SILENCE_S)
    return sock


def _read(sock: socket.socket, n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes:
        piece = sock.recv(n_bytes - len(data))
        if not piece:
            raise ConnectionError("the other side has closed the connection")
        data += piece
    return bytes(data)
