"""The protocol between a relay and its node: short sealed JSON messages, then the bytes of one connection."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from typing import Any

from mdi.errors import WireError
from mdi.net.challenge import CHALLENGE_BYTES, Caller, answer_to
from mdi.net.message import DeadlineSocket
from mdi.net.sealing import TAG_BYTES, SealedSession
from mdi.net.wire import tune

MEET_S = 10.0  # for all messages up to the first one of a session
ENDING_S = 15.0  # without a byte, after which a connection is over whose other direction has ended
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, tries
PING_S = 5.0
SILENCE_S = 20.0  # without a message, after which the other side counts as gone
MESSAGE_LIMIT_BYTES = 1024
PIECE_BYTES = 64 << 10


class Tunnel:
    """One connection between relay and node. Both have proved that they have the key.

    Raises (all methods):
        OSError: the connection is broken or silent. WireError, AccessError: the other side is none of ours.
    """

    def __init__(self, sock: DeadlineSocket, session: SealedSession) -> None:
        self.sock = sock
        self._session = session
        self._lock = threading.Lock()

    @classmethod
    def dial(cls, addr: str, port: int, keys: tuple[bytes, ...]) -> Tunnel:
        sock = DeadlineSocket.around(socket.create_connection((addr, port), MEET_S))
        try:
            sock.read_within(MEET_S)
            caller = Caller(keys)
            sock.sendall(caller.call)
            session = caller.session(_read(sock, CHALLENGE_BYTES))
            sock.read_each_within(SILENCE_S)
            return cls(sock, session)
        except BaseException:
            sock.close()
            raise

    @classmethod
    def answer(cls, sock: DeadlineSocket, keys: tuple[bytes, ...]) -> tuple[Tunnel, dict[str, str]]:
        """The tunnel of a caller, and its first message: all within MEET_S, however slowly its bytes come."""
        sock.settimeout(MEET_S)
        sock.read_within(MEET_S)
        answer, session = answer_to(_read(sock, CHALLENGE_BYTES), keys)
        sock.sendall(answer)
        tunnel = cls(sock, session)
        message = tunnel.receive()
        sock.read_each_within(SILENCE_S)
        return tunnel, message

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
    """Carry bytes both ways until both sides have ended; closes both.

    A side that goes without a word is found by the system's keep-alive; one that does not end with the other, after ENDING_S.
    """
    is_ending = threading.Event()
    for sock in (one, other):
        sock.settimeout(None)
        tune(sock)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    back = threading.Thread(target=_carry, args=(other, one, is_ending), name="tunnel", daemon=True)
    back.start()
    _carry(one, other, is_ending)
    back.join()
    close(one)
    close(other)


def wake(sock: socket.socket) -> None:
    """End a connection whose thread closes the socket then."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def close(sock: socket.socket) -> None:
    """Also wakes a thread that waits for the socket."""
    wake(sock)
    sock.close()


def _carry(source: socket.socket, target: socket.socket, is_ending: threading.Event) -> None:
    piece = bytearray(PIECE_BYTES)
    try:
        with selectors.DefaultSelector() as readable:
            readable.register(source, selectors.EVENT_READ)
            while True:
                if not readable.select(ENDING_S):
                    if is_ending.is_set():
                        raise TimeoutError
                elif n := source.recv_into(piece):
                    target.sendall(memoryview(piece)[:n])
                else:
                    break
        target.shutdown(socket.SHUT_WR)
    except (OSError, ValueError):  # a broken link is reported to both ends; ValueError: it is closed already
        close(source)
        close(target)
    finally:
        is_ending.set()


def _read(sock: socket.socket, n_bytes: int) -> bytes:
    """Only recv_into keeps the deadline of a DeadlineSocket."""
    data = bytearray(n_bytes)
    n_read = 0
    while n_read < n_bytes:
        n = sock.recv_into(memoryview(data)[n_read:])
        if not n:
            raise ConnectionError("the other side has closed the connection")
        n_read += n
    return bytes(data)
