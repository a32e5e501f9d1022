"""Frames over a socket: written with one system call, read into reused buffers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from mdi.errors import WireError
from mdi.net.codec import HEADER_BYTES, PLAIN, FrameCodec
from mdi.net.wire import Frame

# Each byte is a sign of life, but a frame must end: no link that a ring can use is slower than this.
PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 10_000

Allocate = Callable[[int], Any]


class CutOffError(WireError):
    """The connection was closed in the middle of a frame."""


class BufferPool:
    """Receive buffers that are used again: a decoding frame comes a thousand times with the same size.

    Args:
        n_kept: buffers that wait to be used again, at most.
        allocate: makes a writable buffer whose len() is its bytes; for a GPU, page-locked memory.
    """

    def __init__(self, n_kept: int, allocate: Allocate = bytearray) -> None:
        self._n_kept = n_kept
        self._allocate = allocate
        self._type: type = type(allocate(0))
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> memoryview:
        if n_bytes == 0:
            return memoryview(b"")  # a PING must not use up a buffer
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= n_bytes:
                    return memoryview(self._free.pop(i))[:n_bytes]
        return memoryview(self._allocate(max(n_bytes, 4096)))[:n_bytes]

    def give_back(self, view: bytes | bytearray | memoryview) -> None:
        """Return a view that `take` gave; nothing may read it any more."""
        buffer = view.obj if isinstance(view, memoryview) else view
        if not isinstance(buffer, self._type):
            return
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=len)  # the smallest that fits is found first; the largest are the ones to keep
            if len(self._free) > self._n_kept:
                del self._free[0]


def tune(sock: socket.socket) -> None:
    """Options of every ring socket: a decoding frame is small and must not wait for the next one."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send_frame(sock: socket.socket, frame: Frame, codec: FrameCodec = PLAIN, is_patient: bool = False) -> int:
    """Write one frame, header and payload in one system call if the system has one; returns the bytes written.

    Args:
        is_patient: continue after the socket's own timeout: a busy peer may take nothing, but it sends PINGs.
    """
    first, second = codec.parts(frame)
    head, payload = memoryview(first), memoryview(second).cast("B") if len(second) else memoryview(b"")
    sent, n_bytes = 0, len(head) + payload.nbytes
    while sent < n_bytes:
        try:
            if sent >= len(head):
                sent += sock.send(payload[sent - len(head) :])
            elif hasattr(sock, "sendmsg"):
                sent += sock.sendmsg([head[sent:], payload])
            else:  # Windows
                sent += sock.send(head[sent:])
        except TimeoutError:
            if not is_patient:
                raise
    return n_bytes


def read_frame(sock: socket.socket, codec: FrameCodec, pool: BufferPool | None = None) -> Frame | None:
    """Read one frame; None if the peer closed the connection between two frames.

    Raises:
        CutOffError: it closed in the middle of one.
        WireError: the bytes are not a frame that `codec` accepts.
        OSError: the socket's own errors, TimeoutError among them.
    """
    head = bytearray(HEADER_BYTES)
    if not _read_exactly(sock, memoryview(head), may_end=True):
        return None
    take = pool.take if pool else lambda n_bytes: memoryview(bytearray(n_bytes))
    return codec.body(codec.header(head), lambda view: _read_exactly(sock, view), take)


def _read_exactly(sock: socket.socket, view: memoryview, may_end: bool = False) -> bool:
    done = 0
    deadline = None
    while done < len(view):
        n = sock.recv_into(view[done:])
        if n == 0:
            if may_end and done == 0:
                return False
            raise CutOffError(f"the connection was closed {len(view) - done} bytes before the end of a frame")
        done += n
        now = time.monotonic()
        if deadline is None:  # the deadline begins with the first byte; before that, the limit of silence applies
            deadline = now + PATIENCE_S + len(view) / SLOWEST_BYTES_PER_S
        if now > deadline and done < len(view):
            raise WireError(f"a frame was too slow: {len(view) - done} of {len(view)} bytes are still missing")
    return True
