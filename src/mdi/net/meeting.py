"""The caller's side of a new connection: with a key, both sides prove that they have it before a HELLO."""

from __future__ import annotations

import socket

from mdi.errors import AccessError, WireError
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

SAME_KEY = "start both nodes with the same file: --key FILE"


def call(
    address: tuple[str, int], hello: Frame, keys: KeyFile | None, timeout_s: float
) -> tuple[socket.socket, FrameCodec]:
    """A connection to a node's ring port, HELLO said, and what all further frames go through.

    Args:
        timeout_s: of connecting, and of each operation afterwards.

    Raises:
        CannotConnectError: nothing answers there.
        AccessError, WireError, OSError: see `meet`.
    """
    try:
        sock = socket.create_connection(address, timeout_s)
    except (OSError, UnicodeError) as e:
        raise CannotConnectError(str(e), isinstance(e, ConnectionRefusedError)) from None
    try:
        tune(sock)
        codec = meet(sock, keys)
        send_frame(sock, hello, codec)
    except BaseException:
        sock.close()
        raise
    return sock, codec


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
