"""The beginning of a connection between two nodes: with a key, a challenge to both; then the HELLO of a link.

Both sides prove that they have a cluster key, and derive the keys of their session. Each sends a public value that it drew for
this connection, with a code that only an owner of a cluster key can make: the caller's over its own value, the answer's over
both. The keys of the session follow from the secret that the two values make (X25519), the cluster key, and both messages. So a
recorded connection cannot be played again, nor be read with a key that is stolen later.

The HELLO names the sender, its run and its placement: two nodes that disagree must say so at once, not produce nonsense later.
Unknown extension keys are ignored, so that a later version can add some without a new protocol version.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.errors import AccessError, Code, MdiError, WireError
from mdi.net.keys import KEY_BYTES, KeyFile, SealedSession, has_fast_aes, key_of, mac
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
from mdi.spec.decode import Text, Whole, decode_text
from mdi.terminal import one_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


@dataclass(frozen=True)
class Hello:
    """The first message of a node that connects to the next one; the answer is a HELLO of the other node, or an ERROR.

    Attributes:
        index: place of the sender in the ring, 0 is the starter.
        n_nodes: length of the ring.
        placement: hash of model, cut and ring that all nodes of a run share.
        name, process: the sender's name, and a number that its process drew; its address may change.
        extensions: for later versions; "wire" is the number format of the run's rows, if not "auto" (net.wire.WIRE_DTYPES);
            "reconnect" and "received" are for a connection that replaces a broken one (net.reconnect).
    """

    index: Whole
    n_nodes: Whole
    placement: Text
    name: Text = ""
    process: Text = ""
    extensions: dict[str, Any] = field(default_factory=dict)

    @property
    def wire(self) -> str:
        """Number type of the sender's rows: an entry of WIRE_DTYPES, if it is one of ours."""
        return str(self.extensions.get("wire", "auto"))

    @property
    def reconnect(self) -> int:
        """How often the sender has called again in this run, this call included; 0 in the first handshake."""
        return self._number("reconnect") or 0

    @property
    def received(self) -> int | None:
        """Number of the last BATCH frame that the sender had from the receiver, if it had any."""
        return self._number("received")

    def _number(self, key: str) -> int | None:
        value = self.extensions.get(key)
        return value if type(value) is int and value >= 0 else None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Hello:
        return decode_text(cls, bytes(data), "a HELLO", WireError)


@dataclass(frozen=True)
class Fault:
    """Payload of an ERROR frame: which node failed and how, in words and as a code.

    Attributes:
        node: the node that is lost or failed; "" if it is not known.
        message: one line for a person.
        reporter: the node that noticed.
        code: LOST if the node is silent, else that of its error (see mdi.errors).
    """

    node: str
    message: str
    reporter: str
    code: Code = Code.LOST

    def to_bytes(self) -> bytes:
        # A character takes up to 6 bytes (an escaped control character); the whole must stay under the 4096 that a
        # handshake accepts.
        short = Fault(self.node[:40], self.message[:500], self.reporter[:40], self.code)
        return json.dumps(asdict(short), ensure_ascii=False).encode("utf-8", "replace")

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Fault:
        try:
            fields = json.loads(bytes(data))
            node, message, reporter = (one_line(fields[key]) for key in ("node", "message", "reporter"))
            return cls(node, message, reporter, Code.of(fields["code"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls("", "an error report that cannot be read", "", Code.WIRE)


PUBLIC_BYTES = 32
MAC_BYTES = 32
CHALLENGE_BYTES = 1 + PUBLIC_BYTES + MAC_BYTES  # 1 if the processor computes AES itself; public value; code
_CALL, _ANSWER, _SESSION = "mdi call", "mdi answer", b"mdi session"


class Caller:
    """The side that connects. It sends `call`."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._secret = keys[0]
        self._private = _new_private()
        open_part = bytes([has_fast_aes()]) + public_bytes(self._private)
        self.call = open_part + mac(self._secret, _CALL, open_part)

    def session(self, answer: bytes) -> SealedSession:
        """Raises AccessError if the answer was not made with the same key."""
        open_part = _open_part(answer)
        if key_of(answer[len(open_part) :], (self._secret,), _ANSWER, self.call, open_part) is None:
            raise AccessError("the node there does not have this cluster key")
        mine, theirs = _session_keys(self._private, self._secret, open_part[1:], self.call + answer)
        return SealedSession(mine, theirs, bool(self.call[0] and answer[0]))


def answer_to(call: bytes, keys: tuple[bytes, ...]) -> tuple[bytes, SealedSession]:
    """The answer of the side that was called, and its session. Raises AccessError if the caller has none of these keys."""
    open_part = _open_part(call)
    secret = key_of(call[len(open_part) :], keys, _CALL, open_part)
    if secret is None:
        raise AccessError("it has another cluster key")
    private = _new_private()
    mine = bytes([has_fast_aes()]) + public_bytes(private)
    answer = mine + mac(secret, _ANSWER, call, mine)
    theirs_key, mine_key = _session_keys(private, secret, open_part[1:], call + answer)
    return answer, SealedSession(mine_key, theirs_key, bool(call[0] and answer[0]))


def _new_private() -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def public_bytes(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def shared_key(private: X25519PrivateKey, public: bytes, secret: bytes, info: bytes, n_bytes: int) -> bytes:
    """Key material that only the two sides have. Raises AccessError for a public value that no honest side draws."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise AccessError("an invalid public value") from None
    return HKDF(SHA256(), n_bytes, salt=secret, info=info).derive(shared)


def _session_keys(private: X25519PrivateKey, secret: bytes, public: bytes, messages: bytes) -> tuple[bytes, bytes]:
    """Of the caller's direction, and of the other."""
    made = shared_key(private, public, secret, _SESSION + messages, 2 * KEY_BYTES)
    return made[:KEY_BYTES], made[KEY_BYTES:]


def _open_part(message: bytes) -> bytes:
    if len(message) != CHALLENGE_BYTES or message[0] > 1:
        raise AccessError("a challenge that cannot be read")
    return message[: 1 + PUBLIC_BYTES]


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
    if frame is None or (frame.type is FrameType.ERROR and Fault.from_bytes(frame.payload).code is Code.KEY):
        raise AccessError(f"it does not have the same cluster key as this node: {SAME_KEY}")
    if frame.type is not FrameType.CHALLENGE:
        raise WireError(f"it answered a challenge with a {frame.type.name} frame")
    return SealedCodec(caller.session(bytes(frame.payload)), HANDSHAKE_LIMITS)
