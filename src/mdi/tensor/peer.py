"""A node's connection to one other node of its group.

Messages are numbered. Each node keeps those that the other one may lack, and sends them again over a connection that replaces a
broken one.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

from mdi.errors import NodeLostError, WireError
from mdi.net.connection import Connection, Reconnect
from mdi.net.sealing import TAG_BYTES, SealedSession

HEAD = struct.Struct("<II")  # number of the message between these two nodes, bytes that follow
N_IN_VAIN = 20  # connections, one after the other, that brought neither side a message

Buffer = bytes | bytearray | memoryview


class Peer:
    """The connection to one node of the group. The computing thread sends and receives, any other may replace the socket.

    Args:
        sock: connected, handshake done; the peer owns it from here.
        session: encrypts what goes over it; None: nothing is encrypted.
        again: makes another connection when this one breaks; None: the node is lost then.
        is_caller: whether this node makes it, and does not wait for the other's call.
    """

    def __init__(
        self, name: str, sock: socket.socket, session: SealedSession | None = None, again: Reconnect | None = None,
        is_caller: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.sock, self._session = name, sock, session
        sock.setblocking(False)
        self.again, self.is_caller = again, is_caller
        self.on_break: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._broken: str | None = None  # why the connection is of no use
        self._lost: NodeLostError | None = None
        self._n_in_vain = 0
        self._n_sent = self._n_read = self._n_taken = 0
        self._kept: deque[tuple[int, Buffer]] = deque()  # what the other node may lack
        self._n_before = 0  # messages that were sent before the present sum
        self._out: list[memoryview] = []
        self._in = bytearray(1 << 14)
        self._view = memoryview(self._in)
        self._wanted = self._got = 0
        self.n_reconnected = 0

    @property
    def fd(self) -> int:
        return self.sock.fileno()

    # Sending

    def begin_send(self, data: Buffer) -> bool:
        """Send as much as there is place for; whether that was all.

        Args:
            data: must not change until it is all sent or, if the connection can be replaced, until the sum after the next one.
        """
        with self._lock:
            if self.again is not None:
                self._kept.append((self._n_sent, data))
            if self._broken is None:
                self._queue(self._n_sent, data)
            self._n_sent += 1
            return self._send_on()

    def send_on(self) -> bool:
        with self._lock:
            return self._send_on()

    @property
    def is_behind(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def _queue(self, number: int, data: Buffer) -> None:
        body = memoryview(data).cast("B") if self._session is None else memoryview(self._session.seal(bytes(data)))
        self._out += [memoryview(HEAD.pack(number & 0xFFFFFFFF, body.nbytes)), body]

    def _send_on(self) -> bool:
        if self._broken is not None:
            return self._is_repairable()
        if not self._out:
            return True
        try:
            sent = self.sock.sendmsg(self._out)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            return self._break(str(e))
        while self._out and sent >= self._out[0].nbytes:
            sent -= self._out.pop(0).nbytes
        if self._out:
            self._out[0] = self._out[0][sent:]
        return not self._out

    # Receiving

    def begin_receive(self, n_bytes: int) -> None:
        """From now on `receive_on` reads a message of so many bytes."""
        with self._lock:
            self._wanted = HEAD.size + n_bytes + (0 if self._session is None else TAG_BYTES)
            self._got = 0
            if len(self._in) < self._wanted:
                self._in = bytearray(self._wanted)
            self._view = memoryview(self._in)[: self._wanted]

    def receive_on(self) -> memoryview | None:
        """Read what has come; the message once it is there, which is good until the next one is.

        Raises:
            WireError: it is not the one that was awaited. NodeLostError: the node is lost.
        """
        with self._lock:
            if self._broken is not None:
                self._is_repairable()
                return None
            try:
                n = self.sock.recv_into(self._view[self._got :] if self._got else self._view)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as e:
                self._break(str(e))
                return None
            if n == 0:
                self._break("it closed the connection")
                return None
            self._got += n
            return self._message() if self._got == self._wanted else None

    def _message(self) -> memoryview:
        body = self._view[HEAD.size :]
        if HEAD.unpack_from(self._view) != (self._n_read & 0xFFFFFFFF, body.nbytes):
            raise WireError(f"{self.name} sent an unexpected message")
        self._n_read += 1
        self._n_in_vain = 0
        if self._session is None:
            return body
        opened = bytearray(body.nbytes - TAG_BYTES)
        self._session.open(body, opened)
        return memoryview(opened)

    # Another connection

    def next_sum(self) -> None:
        """A sum begins, which needs all nodes: so the last one is over for this node, and every node had begun that one and had
        therefore read all messages from before it."""
        if self.again is None:
            return
        with self._lock:
            while self._kept and self._kept[0][0] < self._n_before:
                self._kept.popleft()
            self._n_before = self._n_sent

    @property
    def n_kept(self) -> int:
        """Messages that could be sent again."""
        return len(self._kept)

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    @property
    def is_lost(self) -> bool:
        """Whether the connection will not be replaced."""
        return self._lost is not None

    @property
    def is_hopeless(self) -> bool:
        """Whether connections break without bringing a message."""
        return self._n_in_vain >= N_IN_VAIN

    def abandon(self, why: str) -> None:
        """From any thread: the connection is of no use, or the other node says so."""
        with self._lock:
            self._break(why)

    def _break(self, why: str) -> bool:
        if self.again is None:
            raise self.lost(why)
        if self._broken is None:
            self._broken, self._out = why, []
            with contextlib.suppress(OSError):  # the other node notices, too
                self.sock.shutdown(socket.SHUT_RDWR)
            self.on_break()
        return False

    def _is_repairable(self) -> bool:
        """False; raises NodeLostError if the connection will not be replaced."""
        if self._lost is not None:
            raise self._lost
        return False

    @property
    def received(self) -> int | None:
        """Number of the last message that came, if one did."""
        return self._n_read - 1 if self._n_read else None

    def replace(self, connection: Connection) -> None:
        """Go on over another connection: send again what the other node lacks. WireError if it lacks what is not kept."""
        with self._lock:
            first = 0 if connection.received is None else connection.received + 1
            due = [(number, data) for number, data in self._kept if number >= first]
            if self._n_sent - first != len(due):
                connection.sock.close()
                raise WireError(f"it has {first} of {self._n_sent} messages, and {len(self._kept)} are kept")
            self._n_in_vain = 0 if first > self._n_taken else self._n_in_vain + 1
            self._n_taken = first
            self.sock.close()
            self.sock, self._session = connection.sock, connection.codec.session
            self.sock.setblocking(False)
            self._got, self._out, self._broken = 0, [], None
            for number, data in due:
                self._queue(number, data)
            self.n_reconnected += 1
            self._send_on()

    def give_up(self, why: str) -> None:
        """There will be no other connection: the node is lost."""
        with self._lock:
            self._lost = self.lost(f"{self._broken or 'its connection broke'}; {why}")

    def lost(self, why: str) -> NodeLostError:
        return NodeLostError(self.name, f"{self.name} is lost: {why}")

    def close(self) -> None:
        self.sock.close()
