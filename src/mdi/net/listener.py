"""The ring port of a node. It is open for the node's whole life and accepts only the right neighbour.

One thread, `ring-accept`, reads the first frames of all connections without waiting for any single one. So a stranger,
silent or not, only costs a place among the pending connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mdi.errors import AccessError, MdiError, RingError, UsageError, WireError
from mdi.net.hello import Fault, Hello, answer_to
from mdi.net.keys import KeyFile
from mdi.net.link import JOIN_S, ReconnectingNode
from mdi.net.wire import (
    HANDSHAKE_LIMITS,
    HEADER_BYTES,
    Frame,
    FrameCodec,
    FrameType,
    Header,
    SealedCodec,
    send_frame,
    tune,
)

N_TOLD = 10
QUIET_S = 60.0

logger = logging.getLogger("mdi")


class DropLog:
    """Reports the first few drops one by one, then each doubling of their number. Starts again after a quiet minute.

    Args:
        name: of the node.
        clock: seconds, rising.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._n = 0
        self._last = clock()

    def tell(self, peer: str, why: str) -> None:
        now = self._clock()
        if now - self._last > QUIET_S:
            self._n = 0
        self._last = now
        self._n += 1
        if self._n <= N_TOLD:
            logger.info("%s: dropped a connection from %s: %s", self._name, peer, why)
        elif self._n % N_TOLD == 0 and (self._n // N_TOLD).bit_count() == 1:
            logger.info("%s: dropped %d connections; the last was from %s: %s", self._name, self._n, peer, why)
        else:
            logger.debug("%s: dropped a connection from %s: %s", self._name, peer, why)


HELLO_DEADLINE_S = 5.0
N_PENDING_LIMIT = 64
ACCEPT_AGAIN_S = 0.5  # after an error: what could not be accepted stays there, and would keep this thread busy

OnMessage = Callable[
    [socket.socket, FrameCodec, Frame, str], None
]  # its last argument is the caller's address and port


def open_socket(addr: str, port: int, what: str) -> socket.socket:
    """A listening TCP socket on addr:port (port 0: any free one); UsageError says why not."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as e:
        raise UsageError(f"cannot find the address {addr!r} of the {what}: {e}") from None
    try:
        if os.name == "posix":  # elsewhere the option lets two processes share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and socket.has_dualstack_ipv6():  # "::" is all addresses, those of IPv4 too
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(128)  # a crowd of strangers must not fill the queue that the neighbour waits in
    except OSError as e:
        sock.close()
        raise UsageError(
            f"cannot listen on {addr}:{port} ({what}): {e.strerror or e}. Is another node running there, or is this "
            "not an address of this machine? Choose another port, or set `bind`, in the nodes file"
        ) from None
    return sock


@dataclass(eq=False)
class Expectation:
    """The neighbour that a ring waits for.

    Attributes:
        caller: its HELLO, once it has called, with its process.
        codec: what all further frames of its connection go through.
    """

    epoch: int
    hello: Hello
    answer: Frame | None
    accepted: queue.Queue[socket.socket | None] = field(default_factory=lambda: queue.Queue(2))
    caller: Hello | None = None
    codec: FrameCodec = field(default_factory=lambda: FrameCodec(HANDSHAKE_LIMITS))
    withdrawn: bool = False

    def wait(self, timeout_s: float) -> socket.socket | None:
        """The neighbour's connection, HELLO read; None after `timeout_s`, or when the expectation was withdrawn."""
        try:
            return self.accepted.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Let `wait` return None now, once."""
        with contextlib.suppress(queue.Full):
            self.accepted.put_nowait(None)


@dataclass
class _Pending:
    """A connection that has not said its HELLO. `data` is what has come of the header, and then, of what follows it."""

    sock: socket.socket
    peer: str
    deadline: float
    codec: FrameCodec = field(default_factory=lambda: FrameCodec(HANDSHAKE_LIMITS))
    header: Header | None = None
    data: bytearray = field(default_factory=bytearray)

    @property
    def n_missing(self) -> int:
        """Bytes up to the end of the header, or of the frame. Never read more: what follows the HELLO belongs to the link."""
        n_bytes = HEADER_BYTES if self.header is None else self.codec.body_bytes(self.header)
        return n_bytes - len(self.data)

    def take(self) -> Frame | None:
        """The frame, once it is complete. WireError if it is not a frame."""
        if self.header is None and self.n_missing == 0:
            self.header = self.codec.header(self.data)
            self.data.clear()
        if self.header is None or self.n_missing:
            return None
        whole = memoryview(bytes(self.data))
        n_read = 0

        def read(view: memoryview) -> None:
            nonlocal n_read
            view[:] = whole[n_read : n_read + len(view)]
            n_read += len(view)

        frame = self.codec.body(self.header, read, lambda n_bytes: memoryview(bytearray(n_bytes)))
        self.header = None
        self.data.clear()
        return frame


class RingListener:
    """Owns the ring port. `expect` names a neighbour for each ring that will be closed; all other callers are dropped.

    Args:
        keys: of the cluster. If there are some, a caller without one of them is dropped before its HELLO is read.
        hello_s: how long a caller may be silent before it has sent its HELLO.
        accept_again_s: pause after a connection that the system could not accept.

    Attributes:
        on_message: gets each connection whose first frame is a MESSAGE, and must not block; without, they are refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        keys: KeyFile | None = None,
        hello_s: float = HELLO_DEADLINE_S,
        accept_again_s: float = ACCEPT_AGAIN_S,
    ) -> None:
        self._hello_s, self._accept_again_s = hello_s, accept_again_s
        self._sock = sock
        self._name = name
        self.keys = keys
        self._drops = DropLog(name)
        self.on_message: OnMessage | None = None
        self._sock.setblocking(False)
        self._lock = threading.Lock()
        self._expected: list[Expectation] = []
        self._returning: list[ReconnectingNode] = []
        self._waker, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._closing = False
        self._accept_at: float | None = None  # while the port is not looked at
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="ring-accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._sock.getsockname()[1]
        return port

    def expect(self, epoch: int, hello: Hello, answer: Frame | None = None) -> Expectation:
        """From now on, also accept the one connection with `hello` for run `epoch`.

        Args:
            answer: sent back at once if given; otherwise the thread that takes the connection answers.
        """
        expectation = Expectation(epoch, hello, answer)
        with self._lock:
            self._expected.append(expectation)
        return expectation

    def forget(self, expectation: Expectation) -> None:
        """Withdraw an expectation. Closes a connection that was not taken, and wakes a waiting thread."""
        with self._lock:
            if expectation in self._expected:
                self._expected.remove(expectation)
            expectation.withdrawn = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (sock := expectation.accepted.get_nowait()) is not None:
                    sock.close()
        expectation.accepted.put(None)

    def expect_again(self, returning: ReconnectingNode) -> None:
        """From now on, hand it each connection that its caller makes again, as the same process and for the same run."""
        with self._lock:
            self._returning.append(returning)

    def forget_again(self, returning: ReconnectingNode) -> None:
        with self._lock:
            if returning in self._returning:
                self._returning.remove(returning)

    def close(self) -> None:
        """Harmless if repeated."""
        if self._closing:
            return
        self._closing = True
        self._waker.send(b"x")
        self._thread.join(JOIN_S)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Pending):
                key.data.sock.close()
        self._selector.close()
        for sock in (self._sock, self._waker, self._wake):
            sock.close()

    def _run(self) -> None:
        while not self._closing:
            if self._accept_at is not None and self._accept_at <= time.monotonic():
                self._accept_at = None
                self._selector.register(self._sock, selectors.EVENT_READ, None)
            for key, _ in self._selector.select(self._next_deadline()):
                if key.fileobj is self._sock:
                    self._accept()
                elif isinstance(key.data, _Pending):
                    self._read(key.data)
            self._drop_late()

    def pending(self) -> list[_Pending]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Pending)]

    def _next_deadline(self) -> float | None:
        deadlines = [p.deadline for p in self.pending()]
        if self._accept_at is not None:
            deadlines.append(self._accept_at)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return  # it went away again
        except OSError as e:
            logger.debug("%s cannot accept connections: %s", self._name, e)
            self._selector.unregister(self._sock)
            self._accept_at = time.monotonic() + self._accept_again_s
            return
        sock.setblocking(False)
        pending = self.pending()
        if len(pending) >= N_PENDING_LIMIT:  # the oldest one has had the most time for its HELLO
            self._drop(min(pending, key=lambda p: p.deadline), "too many connections wait here")
        entry = _Pending(sock, f"{address[0]}:{address[1]}", time.monotonic() + self._hello_s)
        self._selector.register(sock, selectors.EVENT_READ, entry)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for pending in self.pending():
            if pending.deadline <= now:
                self._drop(pending, f"it said nothing for {self._hello_s:.0f} s")

    def _drop(self, pending: _Pending, why: str, is_reported: bool = True) -> None:
        if is_reported:
            self._drops.tell(pending.peer, why)
        with contextlib.suppress(KeyError):  # it was let in, but broke off before it got its answer
            self._selector.unregister(pending.sock)
        pending.sock.close()

    def _read(self, pending: _Pending) -> None:
        try:
            data = pending.sock.recv(pending.n_missing)
            if not data:
                return self._drop(pending, "it closed again")
            pending.data += data
            frame = pending.take()
            if frame is not None:
                self._hear(pending, frame)
        except (BlockingIOError, InterruptedError):
            return
        except AccessError as e:
            self._refuse(pending, 0, e)
        except (OSError, WireError) as e:
            self._drop(pending, str(e))
        except Exception as e:  # no thread or no memory is left, say: the port stays open for the others
            logger.debug("%s cannot take a connection", self._name, exc_info=True)
            self._drop(pending, f"{type(e).__name__}: {e}")

    def _hear(self, pending: _Pending, frame: Frame) -> None:
        """A challenge first, where this node has a key; then the HELLO."""
        if frame.type is FrameType.CHALLENGE and self.keys is None:
            raise AccessError(f"{self._name} has no cluster key, and its caller has one: start both with --key FILE")
        if self.keys is None or isinstance(pending.codec, SealedCodec):
            return self._admit(pending, frame)
        if frame.type is not FrameType.CHALLENGE:
            raise AccessError(f"{self._name} has a cluster key, and its caller has none: start both with --key FILE")
        answer, session = answer_to(bytes(frame.payload), self.keys.keys)
        send_frame(pending.sock, Frame.message(FrameType.CHALLENGE, 0, answer))
        pending.codec = SealedCodec(session, HANDSHAKE_LIMITS)

    def _refuse(self, pending: _Pending, epoch: int, error: MdiError, is_reported: bool = True) -> None:
        """Tell it why, in a frame, and let it go."""
        with contextlib.suppress(OSError):
            fault = Fault("", str(error), self._name, error.code)
            send_frame(pending.sock, Frame.message(FrameType.ERROR, epoch, fault.to_bytes()), pending.codec)
        self._drop(pending, str(error), is_reported)

    def _admit(self, pending: _Pending, frame: Frame) -> None:
        if frame.type is FrameType.MESSAGE and self.on_message is not None:
            return self.on_message(self._let_in(pending), pending.codec, frame, pending.peer)
        if frame.type is not FrameType.HELLO:
            raise WireError(f"a {frame.type.name} frame where a HELLO was expected")
        hello = Hello.from_bytes(frame.payload)
        try:
            if hello.reconnect:
                returning = self._match_again(frame.epoch, hello)
                return returning.take(self._let_in(pending), pending.codec, hello)
            expectation = self._match(frame.epoch, hello)
        except RingError as e:
            # A caller that only tests whether this port can be reached (control.reach) is not reported.
            return self._refuse(pending, frame.epoch, e, is_reported=not hello.extensions.get("question"))
        self._let_in(pending)
        expectation.codec = pending.codec
        if expectation.answer is not None:
            send_frame(pending.sock, expectation.answer, pending.codec)
        with self._lock:
            if expectation.withdrawn:  # between the match and now
                pending.sock.close()
            else:
                expectation.accepted.put(pending.sock)

    def _let_in(self, pending: _Pending) -> socket.socket:
        self._selector.unregister(pending.sock)
        pending.sock.setblocking(True)
        tune(pending.sock)
        return pending.sock

    def _match_again(self, epoch: int, hello: Hello) -> ReconnectingNode:
        with self._lock:
            of_run = [one for one in self._returning if one.epoch == epoch and one.caller.index == hello.index]
        if not of_run:
            raise RingError(f"{self._name} does not know run {epoch:016x}")
        for one in of_run:
            ours = one.caller
            if (ours.name, ours.process, ours.placement) == (hello.name, hello.process, hello.placement):
                return one
        raise RingError(f"{self._name} was connected to another process of its neighbour")

    def _match(self, epoch: int, hello: Hello) -> Expectation:
        with self._lock:
            of_run = [expected for expected in self._expected if expected.epoch == epoch]
            if not of_run:
                raise RingError(f"{self._name} does not know run {epoch:016x}")
            place = (hello.index, hello.n_nodes)
            fitting = [one for one in of_run if (one.hello.index, one.hello.n_nodes) == place]
            expected = next((one for one in fitting if one.caller is None), (fitting or of_run)[0])
            if expected.caller is not None:
                raise RingError(f"{self._name} already has its neighbour for this run")
            ours, theirs = expected.hello, hello
            if (ours.index, ours.n_nodes) != place:
                raise RingError(
                    f"{self._name} expects node {ours.index} of {ours.n_nodes} here, "
                    f"not node {theirs.index} of {theirs.n_nodes}"
                )
            if ours.placement != theirs.placement:
                raise RingError(f"{self._name} and its neighbour disagree about the model or its cut")
            if ours.wire != theirs.wire:
                raise RingError(
                    f"{self._name} expects rows in the wire format {ours.wire!r}, its neighbour sends {theirs.wire[:40]!r}"
                )
            expected.caller = hello
            return expected
