"""One link of the ring: one TCP connection between neighbours, both ways, with two threads.

The thread `ring-send` owns what goes out and a bounded channel of it, the thread `ring-recv` what comes in. Neither
computes, so a stage that takes long for a frame still gives signs of life (PING) and still hears STOP and ERROR, which pass
the channels by. Links move buffers; they know no tensors.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mdi.errors import WireError
from mdi.net.channel import Channel
from mdi.net.codec import HEADER_BYTES, PLAIN, FrameCodec
from mdi.net.wire import Frame, FrameType

PING_INTERVAL_S = 1.0
SILENCE_S = 6.0  # a neighbour that is heard nothing of for so long is taken for dead
JOIN_S = 10.0
# Each byte is a sign of life, but a frame must end: no link that a ring can use is slower than this.
PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 10_000


Allocate = Callable[[int], Any]


class Observer(Protocol):
    """Is told of each frame with rows, by the threads of a link: it must be quick, and must not raise."""

    def sent(self, frame: Frame, begin_s: float, end_s: float) -> None:
        """From `begin_s` to `end_s` (time.perf_counter) the frame was written to the socket."""

    def arrived(self, frame: Frame) -> None:
        """The frame has just been read, whole."""


class BufferPool:
    """Receive buffers that are used again: a decoding frame comes a thousand times with the same size.

    Args:
        n_kept: buffers that wait to be used again, at most.
        allocate: makes a writable buffer of so many bytes, whose len() they are; page-locked memory for a GPU, say.
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
    """Write one frame, header and payload in one system call where there is one for it; returns the bytes written.

    Args:
        is_patient: go on when the socket's own timeout passes: a peer that takes nothing may be busy, and says so by PINGs.
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
        WireError: it closed in the middle of one, or what it sent is no frame that `codec` accepts.
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
            raise WireError(f"the connection was closed {len(view) - done} bytes before the end of a frame")
        done += n
        now = time.monotonic()
        if deadline is None:  # the clock runs from the first byte on: before it, silence is what is measured
            deadline = now + PATIENCE_S + len(view) / SLOWEST_BYTES_PER_S
        if now > deadline and done < len(view):
            raise WireError(f"a frame came in so slowly that {len(view) - done} of {len(view)} bytes are still missing")
    return True


class Link:
    """The connection to one neighbour.

    Args:
        sock: connected, handshake done; the link owns it from here.
        epoch: run id; frames of another run end the link.
        codec: of this connection from here on.
        capacity: BATCH frames that may wait to be sent.
        inbox: where BATCH frames go; must hold as many as can be in flight, so that the thread never waits there. None if
            this neighbour sends none.
        on_last: called from a thread of the link with the STOP or ERROR frame that ends the run.
        on_lost: called once, from a thread of the link, with the reason when the neighbour is lost.
        allocate: see BufferPool.
        on_notice: called from a thread of the link with each NOTICE.
        on_space: called from a thread of the link when `is_full` is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        epoch: int,
        codec: FrameCodec,
        capacity: int,
        inbox: Channel[Frame] | None,
        on_last: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        allocate: Allocate | None = None,
        on_notice: Callable[[Frame], None] = lambda frame: None,
        on_space: Callable[[], None] | None = None,
    ) -> None:
        self._sock = sock
        self._epoch = epoch
        self._codec = codec
        self._outbox: Channel[Frame] = Channel(capacity, on_space=on_space)
        self._inbox = inbox
        self._on_last = on_last
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._ending = False
        self._closing = False
        self._telling = threading.Lock()
        self._is_told = False
        self.pool = BufferPool((inbox.capacity if inbox is not None else 0) + 2, allocate or bytearray)
        self.observer: Observer | None = None
        self.send_s = 0.0
        self.bytes_sent = 0
        self.n_frames = 0
        sock.settimeout(SILENCE_S)
        self._sender = threading.Thread(target=self._send, name="ring-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name="ring-recv", daemon=True)
        self._sender.start()
        self._receiver.start()

    def put(self, frame: Frame) -> bool:
        """Queue a frame; False if the link is closed or lost."""
        return self._outbox.put(frame)

    @property
    def is_full(self) -> bool:
        """Whether `put` would wait."""
        return self._outbox.is_full

    def put_notice(self, frame: Frame) -> None:
        """Send a NOTICE before whatever is queued."""
        self._outbox.put_first(frame)

    def put_last(self, frame: Frame) -> None:
        """Send a STOP or ERROR before whatever is queued, and nothing after it."""
        self._ending = True
        self._outbox.put_first(frame)

    def close(self, flush_s: float = 0.0) -> None:
        """End the threads and close the socket; a STOP or ERROR that is queued gets `flush_s` to leave."""
        if flush_s and self._ending and threading.current_thread() is not self._sender:
            self._sender.join(flush_s)
        self._closing = True
        self._outbox.close()
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._sender, self._receiver):
            if threading.current_thread() is not thread:
                thread.join(JOIN_S)
        self._sock.close()

    def _send(self) -> None:
        try:
            while not self._outbox.closed:
                frame = self._outbox.get(PING_INTERVAL_S)
                if frame is None:
                    if self._outbox.closed:
                        return
                    frame = Frame(FrameType.PING, self._epoch)
                begin = time.perf_counter()
                self.bytes_sent += send_frame(self._sock, frame, self._codec, is_patient=True)
                if frame.type is FrameType.BATCH:
                    end = time.perf_counter()
                    self.send_s += end - begin
                    self.n_frames += 1
                    if self.observer is not None:
                        self.observer.sent(frame, begin, end)
                elif frame.type in (FrameType.STOP, FrameType.ERROR):
                    self._sock.shutdown(socket.SHUT_WR)
                    return
        except OSError as e:
            self._lost(f"sending to it failed: {e}")
        finally:
            self._outbox.close()

    def _receive(self) -> None:
        try:
            while (frame := read_frame(self._sock, self._codec, self.pool)) is not None:
                if frame.epoch != self._epoch:
                    raise WireError(f"a frame of run {frame.epoch:016x}, expected run {self._epoch:016x}")
                if frame.type in (FrameType.STOP, FrameType.ERROR):
                    self._on_last(frame)
                    return self._drain()
                if frame.type is FrameType.BATCH and self._inbox is not None:
                    if self.observer is not None:
                        self.observer.arrived(frame)
                    if not self._inbox.put(frame):
                        return
                elif frame.type is FrameType.NOTICE:
                    self._on_notice(frame)
                elif frame.type is not FrameType.PING:
                    raise WireError(f"a {frame.type.name} frame in the middle of a run")
            self._lost("it closed the connection")
        except TimeoutError:
            self._lost(f"nothing was heard for {SILENCE_S:.0f} s")
        except OSError as e:
            self._lost(f"the connection broke: {e}")
        except WireError as e:
            self._lost(str(e))

    def _drain(self) -> None:
        """Read what still comes: a socket that is closed with bytes unread may take back what it has sent."""
        with contextlib.suppress(OSError):
            while self._sock.recv(1 << 16):
                pass

    def _lost(self, reason: str) -> None:
        with self._telling:
            is_first, self._is_told = not self._is_told, True
        if is_first and not self._closing:
            self._on_lost(reason)
