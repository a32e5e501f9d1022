"""The caller's side of a new connection: with a key, both sides prove that they have it before a HELLO."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator

from mdi.cancel import Cancel
from mdi.errors import AccessError, MdiError, WireError
from mdi.net.challenge import Caller
from mdi.net.hello import Fault
from mdi.net.keys import KeyFile
from mdi.net.wire import (
    HANDSHAKE,
    HANDSHAKE_LIMITS,
    Frame,
    FrameCodec,
    FrameType,
    SealedCodec,
    read_frame,
    send_frame,
    tune,
)

_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", 0))
SAME_KEY = "start both nodes with the same file: --key FILE"


def call(
    address: tuple[str, int], hello: Frame, keys: KeyFile | None, timeout_s: float, cancel: Cancel | None = None
) -> tuple[socket.socket, FrameCodec]:
    """A connection to a node's ring port, HELLO said, and what all further frames go through.

    Args:
        timeout_s: of connecting, and of each operation afterwards.
        cancel: its end ends this at once, with its error; only looking up a name is not interrupted.

    Raises:
        CannotConnectError: nothing answers there.
        AccessError, WireError, OSError: see `meet`.
    """
    cancel = cancel or Cancel()
    try:
        sock = connected(address, timeout_s, cancel)
    except (OSError, UnicodeError) as e:
        raise CannotConnectError(str(e), isinstance(e, ConnectionRefusedError)) from None
    try:
        with shut_down_by(cancel, sock):
            tune(sock)
            codec = meet(sock, keys)
            send_frame(sock, hello, codec)
    except BaseException:
        sock.close()
        raise
    return sock, codec


def connected(address: tuple[str, int], timeout_s: float, cancel: Cancel) -> socket.socket:
    """As socket.create_connection, with a `Cancel` that ends the wait: each address of a name is tried.

    Raises:
        OSError, UnicodeError: of the last address, or of the name.
    """
    failure = OSError("the name has no address")
    deadline = time.monotonic() + timeout_s
    for family, kind, protocol, _, found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        cancel.check()
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as e:  # for example no IPv6 here
            failure = e
            continue
        try:
            sock.setblocking(False)
            code = sock.connect_ex(found)
            if code in _UNDER_WAY:
                code = _outcome(sock, deadline, cancel)
            if not code:
                sock.settimeout(timeout_s)
                return sock
            failure = OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise failure


def _outcome(sock: socket.socket, deadline: float, cancel: Cancel) -> int:
    """The error code of a connection that is being made; 0 when it is there."""
    ours, theirs = socket.socketpair()

    def wake() -> None:
        with contextlib.suppress(OSError):  # the wait has ended
            theirs.send(b"x")

    with ours, theirs, selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        selector.register(ours, selectors.EVENT_READ)
        with cancel.waking(wake):
            ready = selector.select(cancel.left_s(max(0.0, deadline - time.monotonic())))
    cancel.check()
    if not ready:
        raise TimeoutError("timed out")
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@contextlib.contextmanager
def shut_down_by(cancel: Cancel, sock: socket.socket) -> Iterator[None]:
    """Within: the end of `cancel` shuts a socket down; its error replaces that of the socket."""

    def wake() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    try:
        with cancel.waking(wake):
            yield
    except (MdiError, OSError):
        cancel.check()
        raise


class CannotConnectError(Exception):
    """The connection failed; `is_refused`: the machine answered that nothing listens."""

    def __init__(self, reason: str, is_refused: bool) -> None:
        super().__init__(reason)
        self.is_refused = is_refused


def meet(sock: socket.socket, keys: KeyFile | None) -> FrameCodec:
    """The codec of a connection that was just made.

    Raises:
        AccessError: the other side does not have the same cluster key.
        WireError: it speaks another protocol. OSError: the socket's own errors.
    """
    if keys is None:
        return FrameCodec(HANDSHAKE_LIMITS)
    caller = Caller(keys.keys)
    send_frame(sock, Frame.message(FrameType.CHALLENGE, 0, caller.call))
    frame = read_frame(sock, HANDSHAKE)
    if frame is None or (frame.type is FrameType.ERROR and Fault.from_bytes(frame.payload).code == AccessError.code):
        raise AccessError(f"it does not have the same cluster key as this node: {SAME_KEY}")
    if frame.type is not FrameType.CHALLENGE:
        raise WireError(f"it answered a challenge with a {frame.type.name} frame")
    return SealedCodec(caller.session(bytes(frame.payload)), HANDSHAKE_LIMITS)
