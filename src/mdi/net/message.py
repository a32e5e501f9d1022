"""Messages on the ring's port: a question of one node to another, the bytes that belong to it, and its answers.

A connection carries one message. Its frames have the message's id, which the caller drew, as their epoch:

    caller                                        node that is asked
    MESSAGE  the opening: JSON, at most 4096 bytes
                                                  MESSAGE {"go": true}, if it wants the bytes that the opening announces
    DATA     the bytes, in pieces
                                                  MESSAGE {"push": ...}, PING: how far it is, in messages that stay open
    PING     the caller is still there
                                                  MESSAGE {"answer": ...} or {"error", "code", "status"}, the last one

With a cluster key, both sides meet before the opening (`mdi.net.hello`), and all frames are sealed: a recorded opening
cannot be played again. Without a key, nodes listen on loopback only, unless they were started with --insecure.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from mdi.errors import AccessError, Code, ControlError, MdiError, UsageError, WireError
from mdi.net.hello import SAME_KEY, Fault, meet
from mdi.net.keys import KeyFile
from mdi.net.wire import CutOffError, Frame, FrameCodec, FrameType, Limits, read_frame, send_frame, tune

ANSWER_LIMIT_BYTES = 4 << 20
PIECE_BYTES = 1 << 18
ANSWER_LIMITS = Limits(max_rows=1, max_cols=ANSWER_LIMIT_BYTES, max_slices=0, max_payload_bytes=ANSWER_LIMIT_BYTES)
DATA_LIMITS = Limits(max_rows=1, max_cols=PIECE_BYTES, max_slices=0, max_payload_bytes=PIECE_BYTES)
PIECE_S = 10.0  # for a piece to come or to leave, on the side that is asked
DRAIN_S = 2.0  # for bytes that are on their way to a node that has refused them: closing at once would lose its answer

# No route, or one that forbids it: Linux tells of a blackhole as an invalid argument.
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EINVAL, errno.EACCES, errno.EPERM)


class DeadlineSocket(socket.socket):
    """A socket with one deadline for all its reads. A timeout alone begins again with every byte, so a peer that sends one
    byte a second could block this side for ever. Takes the place of a socket that is read by `read_frame`, or through a file
    object, as `http.client` and cheroot do.
    """

    _deadline: float | None = None

    @classmethod
    def around(cls, sock: socket.socket) -> DeadlineSocket:
        """The same connection; `sock` must not be used any more."""
        return cls(fileno=sock.detach())

    def read_within(self, seconds: float) -> None:
        """Set a deadline for all reads together; after it, reads raise TimeoutError."""
        self._deadline = time.monotonic() + seconds

    def read_each_within(self, seconds: float) -> None:
        """Set a timeout for each single read."""
        self._deadline = None
        self.settimeout(seconds)

    def recv_into(self, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self.settimeout(left)
        return super().recv_into(*args, **kwargs)

    def is_readable(self, seconds: float = 0.0) -> bool:
        """Whether bytes, or the end of the connection, come within a time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def wake(self) -> None:
        """End the connection; the thread that waits for it closes the socket then."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class ExchangeError(Exception):
    """There is no usable answer.

    Attributes:
        problem: why, as a key of `mdi.control.reach.PROBLEMS`.
    """

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class BrokenOffError(Exception):
    """The bytes of a message do not come as its opening says."""


def problem_of(error: Exception) -> str:
    """The network's failure, as a key of `mdi.control.reach.PROBLEMS`."""
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return "timeout"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "name"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, OSError) and error.errno in _NO_WAY:
        return "unreachable"
    return "closed"


def connect(addr: str, port: int, connect_s: float) -> DeadlineSocket:
    """Raises ExchangeError."""
    try:
        plain = socket.create_connection((addr, port), connect_s)
    except TimeoutError:
        raise ExchangeError("timeout", "no answer in time") from None
    except (OSError, ValueError, OverflowError) as e:  # ValueError: a name that no resolver takes
        problem = problem_of(e) if isinstance(e, OSError) else "name"
        raise ExchangeError(problem, getattr(e, "strerror", None) or str(e)[:200]) from None
    sock = DeadlineSocket.around(plain)
    with contextlib.suppress(OSError):
        tune(sock)
    return sock


class Message:
    """The caller's side of a message; its connection ends with its `with`.

    Args:
        opening: what is asked, with the number of bytes that belong to it.
        connect_s: for the connection.
        answer_s: for the meeting before the opening.

    Raises (all methods):
        ExchangeError: there is no connection, or no usable answer in time.
        AccessError: the other side does not have the same cluster key.
    """

    def __init__(
        self, addr: str, port: int, opening: dict[str, Any], keys: KeyFile | None, connect_s: float, answer_s: float
    ) -> None:  # fmt: skip
        self.number = secrets.randbits(64)
        self.sock = connect(addr, port, connect_s)
        try:
            with _explained():
                self.sock.read_within(answer_s)
                self.codec = meet(self.sock, keys)
                self._send(FrameType.MESSAGE, json.dumps(opening).encode(), answer_s)
            self.codec.limits = ANSWER_LIMITS
        except BaseException:
            self.sock.close()
            raise

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, pieces: bytes | Iterable[bytes | memoryview], timeout_s: float) -> None:
        """Send the bytes that belong to it; ends early if the node answers in the middle of them.

        Args:
            pieces: of any size; an error of the iterable passes through.
            timeout_s: for each piece to leave.
        """
        for piece in [pieces] if isinstance(pieces, bytes) else pieces:
            view = memoryview(piece).cast("B")
            for begin in range(0, len(view), PIECE_BYTES):
                if self.sock.is_readable():
                    return
                try:
                    with _explained():
                        self._send(FrameType.DATA, view[begin : begin + PIECE_BYTES], timeout_s)
                except ExchangeError as e:
                    if e.problem == "closed":  # its last answer, if there is one, is worth more than the broken pipe
                        return
                    raise

    def sign(self) -> None:
        """Say that the caller is still there. A connection that is broken is left to `read`."""
        with contextlib.suppress(OSError):
            send_frame(self.sock, Frame(FrameType.PING, self.number), self.codec)

    def read(self, timeout_s: float) -> dict[str, Any]:
        """The next answer; {} for a sign of life."""
        self.sock.read_within(timeout_s)
        with _explained():
            frame = read_frame(self.sock, self.codec)
            if frame is None:
                raise ExchangeError("closed", "it closed the connection without an answer")
            if frame.type is FrameType.ERROR:
                fault = Fault.from_bytes(frame.payload)
                if fault.code is Code.KEY:
                    raise AccessError(f"it has a cluster key, and this node has none: {SAME_KEY}")
                raise ExchangeError("stranger", fault.message)
            if frame.type not in (FrameType.MESSAGE, FrameType.PING) or frame.epoch != self.number:
                raise WireError(f"a {frame.type.name} frame of {frame.epoch:016x}")
        if frame.type is FrameType.PING:
            return {}
        try:
            answer = json.loads(bytes(frame.payload))
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not answer:
            raise ExchangeError("stranger", "its answer is not a JSON object")
        return answer

    def receive(self, n_bytes: int, timeout_s: float) -> bytearray:
        """Bytes that belong to the answer.

        Args:
            timeout_s: for each piece.
        """
        found, n_read = bytearray(n_bytes), 0
        before, self.codec.limits = self.codec.limits, DATA_LIMITS
        while n_read < n_bytes:
            self.sock.read_within(timeout_s)
            with _explained():
                frame = read_frame(self.sock, self.codec)
                n = 0 if frame is None else len(frame.payload)
                is_data = frame is not None and frame.type is FrameType.DATA and frame.epoch == self.number
                if frame is None or not is_data or not 0 < n <= n_bytes - n_read:
                    raise WireError(f"something else came than the last {n_bytes - n_read} bytes of the answer")
            found[n_read : n_read + n] = frame.payload
            n_read += n
        self.codec.limits = before
        return found

    def _send(self, frame_type: FrameType, data: bytes | memoryview, timeout_s: float) -> None:
        self.sock.settimeout(timeout_s)
        send_frame(self.sock, Frame(frame_type, self.number, n_rows=1, n_cols=len(data), payload=data), self.codec)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns what goes wrong on the way into an ExchangeError."""
    try:
        yield
    except TimeoutError:
        raise ExchangeError("silent", "no answer in time") from None
    except CutOffError as e:
        raise ExchangeError("closed", str(e)) from None
    except WireError as e:
        raise ExchangeError("stranger", f"it does not answer as a node: {str(e)[:200]}") from None
    except OSError as e:
        raise ExchangeError(problem_of(e), e.strerror or str(e)) from None


class Asked:
    """The side that is asked: a message whose opening has come. Used by one thread.

    Args:
        codec: what all further frames of the connection go through.
        number: the message's id.
        addr: of the caller.

    Attributes:
        n_bytes: that the opening announces.
    """

    def __init__(self, sock: socket.socket, codec: FrameCodec, number: int, addr: str) -> None:
        self.sock = DeadlineSocket.around(sock)
        self.addr, self.n_bytes = addr, 0
        self.codec, self.number = codec, number
        self.codec.limits = DATA_LIMITS
        self.sock.read_each_within(PIECE_S)
        self._n_read, self._rest = 0, memoryview(b"")
        self._has_asked = False

    def read(self, n_bytes: int) -> bytes:
        """At most so many of its bytes; b"" when there are no more.

        Raises:
            BrokenOffError: they do not come, or something else comes.
        """
        if not self._rest and self._n_read < self.n_bytes:
            try:
                if not self._has_asked:
                    self._has_asked = True
                    self.push(go=True)
                frame = read_frame(self.sock, self.codec)
            except (OSError, WireError) as e:
                raise BrokenOffError(str(e)) from None
            n = 0 if frame is None else len(frame.payload)
            if frame is None or frame.type is not FrameType.DATA or frame.epoch != self.number:
                raise BrokenOffError("something else came than the bytes of this message")
            if not 0 < n <= self.n_bytes - self._n_read:
                raise BrokenOffError(f"{n} bytes, where {self.n_bytes - self._n_read} were to come")
            self._n_read += n
            self._rest = memoryview(frame.payload)
        piece, self._rest = bytes(self._rest[:n_bytes]), self._rest[n_bytes:]
        return piece

    def give(self, data: memoryview) -> None:
        """Send bytes that belong to the answer. Raises OSError."""
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            self.sock.settimeout(PIECE_S)
            send_frame(
                self.sock, Frame(FrameType.DATA, self.number, 0, "bytes", 1, len(piece), payload=piece), self.codec
            )

    def push(self, **content: Any) -> None:
        """Send an answer that others follow; without content, a sign of life. Raises OSError."""
        data = json.dumps(content).encode() if content else b""
        self.sock.settimeout(PIECE_S)
        send_frame(
            self.sock, Frame.message(FrameType.MESSAGE if content else FrameType.PING, self.number, data), self.codec
        )

    def is_signed(self) -> bool | None:
        """Whether the caller has sent a sign of life since the last call; None if it has left."""
        found = False
        while self.sock.is_readable():
            try:
                frame = read_frame(self.sock, self.codec)
            except (OSError, WireError):
                return None
            if frame is None or frame.type is not FrameType.PING or frame.epoch != self.number:
                return None
            found = True
        return found

    def answer(self, **content: Any) -> None:
        """Send the last answer and close; a caller that has left is no error."""
        with contextlib.suppress(OSError):
            self.push(**content)
            self.sock.shutdown(socket.SHUT_WR)
            self.sock.read_within(DRAIN_S)
            rest = bytearray(PIECE_BYTES)
            while self.sock.recv_into(rest):
                pass
        self.sock.close()

    def refuse(self, error: Exception) -> None:
        """Answer with an error, with the status that it would have over HTTP."""
        known = error if isinstance(error, MdiError) else ControlError(f"it failed: {type(error).__name__}: {error}")
        if isinstance(error, BrokenOffError):
            known = ControlError(f"the message was cut off: {error}", 400)
        self.answer(error=str(known), code=known.code, status=status_of(known))


def status_of(error: MdiError) -> int:
    """The HTTP status of an error."""
    found = error.status if isinstance(error, ControlError) else None
    return found or (401 if isinstance(error, AccessError) else 400 if isinstance(error, UsageError) else 500)
