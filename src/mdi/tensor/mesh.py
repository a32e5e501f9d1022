"""Connections between all nodes of a group for their sums. The computing thread reads and writes them.

Every message has a length that both sides know. Sockets do not block: a node that must both send and receive does what can be
done, so that two nodes never wait for each other to read. A waiting node polls for a moment if cores are free, and sleeps
otherwise; while it sleeps, it still notices the end of the run.
"""

from __future__ import annotations

import select
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mdi.errors import EngineError, NodeLostError, WireError
from mdi.security.session import TAG_BYTES, SealedSession

HEAD = struct.Struct("<II")  # number of the message on this connection, bytes that follow
SLEEP_S = 0.05  # after which a sleeping node checks whether the run is over
STALL_S = 300.0  # a node that lives computes its part of a frame's block in less
VERDICT_S = 8.0  # by then the ring names the lost node
N_TIMES = 4096  # of sums, that are kept
BUSY_S = 0.002  # how long a node looks for a message before it sleeps, where cores are free

Buffer = bytes | bytearray | memoryview


class Peer:
    """The connection to one node of the group.

    Args:
        sock: connected, handshake done; the peer owns it from here.
        session: encrypts what goes over it; None: nothing is encrypted.
    """

    def __init__(self, name: str, sock: socket.socket, session: SealedSession | None = None) -> None:
        self.name, self.sock, self._session = name, sock, session
        sock.setblocking(False)
        self.fd = sock.fileno()
        self._n_sent = self._n_read = 0
        self._out: list[memoryview] = []
        self._in = bytearray(1 << 14)
        self._view = memoryview(self._in)
        self._wanted = self._got = 0

    # Sending

    def begin_send(self, data: Buffer) -> bool:
        """Send as much as there is place for; whether that was all. `data` must not change until it is all sent."""
        body = memoryview(data).cast("B") if self._session is None else memoryview(self._session.seal(bytes(data)))
        head = HEAD.pack(self._n_sent & 0xFFFFFFFF, body.nbytes)
        self._n_sent += 1
        self._out = [memoryview(head), body]
        return self.send_on()

    def send_on(self) -> bool:
        try:
            sent = self.sock.sendmsg(self._out)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            raise self.lost(str(e)) from None
        while self._out and sent >= self._out[0].nbytes:
            sent -= self._out.pop(0).nbytes
        if self._out:
            self._out[0] = self._out[0][sent:]
        return not self._out

    # Receiving

    def begin_receive(self, n_bytes: int) -> None:
        """From now on `receive_on` reads a message of so many bytes."""
        self._wanted = HEAD.size + n_bytes + (0 if self._session is None else TAG_BYTES)
        self._got = 0
        if len(self._in) < self._wanted:
            self._in = bytearray(self._wanted)
        self._view = memoryview(self._in)[: self._wanted]

    def receive_on(self) -> bool:
        """Read what has come; whether that is all."""
        try:
            n = self.sock.recv_into(self._view[self._got :] if self._got else self._view)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            raise self.lost(str(e)) from None
        if n == 0:
            raise self.lost("it closed the connection")
        self._got += n
        return self._got == self._wanted

    def message(self) -> memoryview:
        """What was received; it is good until the next message is. WireError if it is not the one that was awaited."""
        body = self._view[HEAD.size :]
        if HEAD.unpack_from(self._view) != (self._n_read & 0xFFFFFFFF, body.nbytes):
            raise WireError(f"{self.name} sent an unexpected message")
        self._n_read += 1
        if self._session is None:
            return body
        opened = bytearray(body.nbytes - TAG_BYTES)
        self._session.open(body, opened)
        return memoryview(opened)

    def lost(self, why: str) -> NodeLostError:
        return NodeLostError(self.name, f"{self.name} is lost: {why}")


class Tally:
    """What a node's sums took: how many, in all, and the last ones."""

    def __init__(self) -> None:
        self.n_sums, self.reduce_s, self.bytes_sent = 0, 0.0, 0
        self._last_s: deque[float] = deque(maxlen=N_TIMES)

    def count(self, seconds: float) -> None:
        self.n_sums += 1
        self.reduce_s += seconds
        self._last_s.append(seconds)

    @property
    def median_s(self) -> float:
        """Of the last sums; 0 without any."""
        return statistics.median(self._last_s.copy() or (0.0,))


class Mesh:
    """The connections of one node.

    Args:
        peers: by rank; this node's own place holds None.
        is_busy: look for messages for a moment before sleeping: for nodes that have cores to themselves.
        check: called now and then while this node sleeps, and when a connection broke; waits up to so many seconds for the
            end of the run, and raises what ended it.
    """

    def __init__(
        self, rank: int, peers: Sequence[Peer | None], is_busy: bool = False,
        check: Callable[[float], None] = lambda wait_s: None,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, len(peers)
        self._peers = list(peers)
        self._busy_s = BUSY_S if is_busy else 0.0
        self.check = check
        self.tally = Tally()

    @property
    def names(self) -> list[str]:
        return [peer.name if peer is not None else "" for peer in self._peers]

    def peer(self, rank: int) -> Peer:
        found = self._peers[rank]
        assert found is not None
        return found

    def swap(self, sends: Iterable[tuple[int, Buffer]], receives: Iterable[tuple[int, int]]) -> dict[int, memoryview]:
        """Send messages and receive others, whichever can be done.

        Args:
            sends: (rank, bytes), at most one for each rank.
            receives: (rank, number of bytes), likewise.

        Returns:
            What came, by rank; good until the next message of that rank.

        Raises:
            RingError: a connection broke, or the run was ended. WireError: another message came. EngineError: nothing came
                for minutes.
        """
        try:
            return self._swap(sends, receives)
        except NodeLostError:
            self.check(VERDICT_S)  # the ring names the lost node; other nodes close their connections because of it
            raise

    def _swap(self, sends: Iterable[tuple[int, Buffer]], receives: Iterable[tuple[int, int]]) -> dict[int, memoryview]:
        begin = time.perf_counter()
        arriving = []
        for rank, n_bytes in receives:
            peer = self.peer(rank)
            peer.begin_receive(n_bytes)
            arriving.append((rank, peer))
        leaving = []
        for rank, data in sends:
            peer = self.peer(rank)
            self.tally.bytes_sent += memoryview(data).nbytes
            if not peer.begin_send(data):
                leaving.append(peer)
        found: dict[int, memoryview] = {}
        while arriving or leaving:
            before = len(arriving), len(leaving)
            for entry in arriving[:]:
                if entry[1].receive_on():
                    arriving.remove(entry)
                    found[entry[0]] = entry[1].message()
            for peer in leaving[:]:
                if peer.send_on():
                    leaving.remove(peer)
            if before == (len(arriving), len(leaving)) and time.perf_counter() - begin >= self._busy_s:
                self._sleep(begin, [peer for _, peer in arriving], leaving)
        return found

    def _sleep(self, begin: float, arriving: Sequence[Peer], leaving: Sequence[Peer]) -> None:
        """Until something can be read or sent."""
        poll = select.poll()
        for peer in arriving:
            poll.register(peer.fd, select.POLLIN)
        for peer in leaving:
            poll.register(peer.fd, select.POLLOUT | (select.POLLIN if peer in arriving else 0))
        while not poll.poll(1000 * SLEEP_S):
            self.check(0.0)
            if time.perf_counter() - begin > STALL_S:
                raise EngineError(f"nothing came from {', '.join(peer.name for peer in arriving)} for {STALL_S:.0f} s")

    def close(self) -> None:
        for peer in self._peers:
            if peer is not None:
                peer.sock.close()
