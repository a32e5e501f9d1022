"""Connections between all nodes of a group for their sums. The computing thread reads and writes them.

Every message has a length that both sides know. Sockets do not block: a node that must both send and receive does what can be
done, so that two nodes never wait for each other to read. A waiting node polls for a moment if cores are free, and sleeps
otherwise; while it sleeps, it still notices the end of the run.

Connections without encryption are lent to the kernels, which do the sums between the halves of blocks themselves
(kernels/csrc/exchange.cpp). They give them back at the end of a frame, when another thread asks for one, and when they cannot
go on: the same sum then goes on here.

Messages are numbered. Each node keeps those that the other one may lack. Another thread (`Reconnects`) replaces a broken
connection, so that nobody waits for a node that computes, and they are sent again.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from mdi.cancel import Cancel
from mdi.errors import EngineError, MdiError, NodeLostError, WireError
from mdi.kernels.exchange import MdiLine, MdiMesh
from mdi.net.keys import TAG_BYTES, SealedSession
from mdi.net.link import JOIN_S, Connection, NodeStillAbsentError, Reconnect
from mdi.net.reconnect import CALL_S

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
        self._lock = threading.Lock()  # of all that follows; held while the connection is lent
        self._asking = threading.Lock()
        self.line = MdiLine(fd=-1)
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

    @property
    def is_sealed(self) -> bool:
        return self._session is not None

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
        self._drop(sent)
        return not self._out

    def _drop(self, sent: int) -> None:
        while self._out and sent >= self._out[0].nbytes:
            sent -= self._out.pop(0).nbytes
        if self._out:
            self._out[0] = self._out[0][sent:]

    # Receiving

    def begin_receive(self, n_bytes: int) -> None:
        """From now on `receive_on` reads a message of so many bytes."""
        with self._lock:
            self._begin_receive(n_bytes)

    def _begin_receive(self, n_bytes: int) -> None:
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
            if self._got == self._wanted:  # the kernels have read it
                return self._message()
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

    # In the kernels

    def lend(self, n_bytes: int) -> None:
        """Until `take_back`, the kernels may exchange messages of so many bytes, and no other thread uses the connection."""
        self._lock.acquire()
        self._begin_receive(n_bytes)
        line = self.line
        line.fd = -1 if self._broken is not None or self._out else self.sock.fileno()
        line.n_sent, line.n_read = self._n_sent & 0xFFFFFFFF, self._n_read & 0xFFFFFFFF
        line.place = address_of(self._in)

    def take_back(self, n_begun: int, last: Sequence[memoryview], has_begun: bool) -> None:
        """The kernels do not use the connection any more.

        Args:
            n_begun: sums that they have begun; `last` is what was sent in the last ones.
            has_begun: the last sum has not ended.
        """
        first = self._n_sent + n_begun - len(last)
        if self.again is not None:
            if n_begun > len(last):
                self._kept.clear()
            for number, data in enumerate(last, first):
                self._next_sum(number)
                self._kept.append((number, data))
        self._n_sent += n_begun
        if n_read := (self.line.n_read - self._n_read) & 0xFFFFFFFF:
            self._n_read += n_read
            self._n_in_vain = 0
        if has_begun:
            self._got = self.line.got
            self._queue(self._n_sent - 1, last[-1])
            self._drop(self.line.sent)
        self._lock.release()

    @contextlib.contextmanager
    def _asked_for(self) -> Iterator[None]:
        """Another thread than the computing one uses the connection; the kernels give it back for that."""
        with self._asking:
            self.line.n_asking += 1
        try:
            with self._lock:
                yield
        finally:
            with self._asking:
                self.line.n_asking -= 1

    # Another connection

    def next_sum(self) -> None:
        """A sum begins, which needs all nodes: so the last one is over for this node, and every node had begun that one and had
        therefore read all messages from before it."""
        if self.again is None:
            return
        with self._lock:
            self._next_sum(self._n_sent)

    def _next_sum(self, n_sent: int) -> None:
        while self._kept and self._kept[0][0] < self._n_before:
            self._kept.popleft()
        self._n_before = n_sent

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
        with self._asked_for():
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
        with self._asked_for():
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
        with self._asked_for():
            self._lost = self.lost(f"{self._broken or 'its connection broke'}; {why}")

    def lost(self, why: str) -> NodeLostError:
        return NodeLostError(self.name, f"{self.name} is lost: {why}")

    def close(self) -> None:
        with self._asked_for():
            self.sock.close()


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


SLEEP_S = 0.05  # after which a sleeping node checks whether the run is over
BROKEN_SLEEP_S = 0.002  # the same while a connection is being replaced
STALL_S = 300.0  # a node that lives computes its part of a frame's block in less
VERDICT_S = 8.0  # by then the ring names the lost node
N_TIMES = 4096  # of sums, that are kept
N_LENT = 512  # sums that the kernels do before they give the connections back
BUSY_S = 0.002  # how long a node looks for a message before it sleeps, where cores are free


class Tally:
    """Time and bytes of a node's sums: how many, in all, and the last ones."""

    def __init__(self) -> None:
        self.n_sums, self.reduce_s, self.bytes_sent = 0, 0.0, 0
        self.spans: deque[tuple[float, float]] = deque(maxlen=N_TIMES)  # of the last sums, by time.perf_counter

    def count(self, begin: float, end: float) -> None:
        self.n_sums += 1
        self.reduce_s += end - begin
        self.spans.append((begin, end))

    @property
    def median_s(self) -> float:
        """Of the last sums; 0 without any."""
        return statistics.median([end - begin for begin, end in self.spans.copy()] or (0.0,))


class Mesh:
    """The connections of one node.

    Args:
        peers: by rank; this node's own place holds None.
        is_busy: look for messages for a moment before sleeping: for nodes that have cores to themselves.
        cancel: the end of the run; looked at now and then while this node sleeps, and when a connection broke.
    """

    def __init__(
        self, rank: int, peers: Sequence[Peer | None], is_busy: bool = False,
        cancel: Cancel | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, len(peers)
        self._peers = list(peers)
        self._busy_s = BUSY_S if is_busy else 0.0
        self.cancel = cancel
        self.on_close: Callable[[], None] = lambda: None
        self.tally = Tally()
        self._copies: deque[list[bytearray]] = deque(([], []))  # what was sent in the last sum and in this one
        self._spare: list[bytearray] = []
        self._sent = [bytearray(), bytearray()]  # by the kernels, in turns
        self._spans = (ctypes.c_double * (2 * N_LENT))()
        lines = [ctypes.pointer(MdiLine(fd=-1) if peer is None else peer.line) for peer in self._peers]
        self._lines = (ctypes.POINTER(MdiLine) * self.size)(*lines)
        self._lent = MdiMesh(
            self._lines, self.size, rank, busy_ns=int(1e9 * self._busy_s), sleep_ms=int(1000 * SLEEP_S),
            spans=self._spans, n_spans=N_LENT,
        )  # fmt: skip

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
        with self._verdict():
            return self._swap(sends, receives)

    @contextlib.contextmanager
    def _verdict(self) -> Iterator[None]:
        try:
            yield
        except NodeLostError:
            if self.cancel is not None:
                self.cancel.wait(
                    VERDICT_S
                )  # the ring names the lost node; other nodes close their connections because of it
            raise

    def _swap(self, sends: Iterable[tuple[int, Buffer]], receives: Iterable[tuple[int, int]]) -> dict[int, memoryview]:
        begin = time.perf_counter()
        arriving = []
        for rank, n_bytes in receives:
            peer = self.peer(rank)
            peer.begin_receive(n_bytes)
            arriving.append((rank, peer))
        leaving = []
        for rank, data in self._lasting(list(sends)):
            peer = self.peer(rank)
            self.tally.bytes_sent += memoryview(data).nbytes
            if not peer.begin_send(data):
                leaving.append(peer)
        return self._go_on(begin, arriving, leaving)

    def _go_on(self, begin: float, arriving: list[tuple[int, Peer]], leaving: list[Peer]) -> dict[int, memoryview]:
        found: dict[int, memoryview] = {}
        while arriving or leaving:
            before = len(arriving), len(leaving)
            for entry in arriving[:]:
                if (message := entry[1].receive_on()) is not None:
                    arriving.remove(entry)
                    found[entry[0]] = message
            for peer in leaving[:]:
                if peer.send_on():
                    leaving.remove(peer)
            if before == (len(arriving), len(leaving)) and time.perf_counter() - begin >= self._busy_s:
                self._sleep(begin, [peer for _, peer in arriving], leaving)
        return found

    def _lasting(self, sends: Sequence[tuple[int, Buffer]]) -> Sequence[tuple[int, Buffer]]:
        """The bytes to send, copied once where it may have to be sent again: the caller then changes the array."""
        if not sends or self.peer(sends[0][0]).again is None:
            return sends
        if len(sends) == 1:
            return [(sends[0][0], self._copy(sends[0][1]))]
        copies = {id(data): data for _, data in sends}
        copies = {key: self._copy(data) for key, data in copies.items()}
        return [(rank, copies[id(data)]) for rank, data in sends]

    def _copy(self, sent: Buffer) -> Buffer:
        """In memory that was used before: new memory would cost more than the copy."""
        data = memoryview(sent).cast("B")
        buffer = self._spare.pop() if self._spare else bytearray()
        if len(buffer) < data.nbytes:
            buffer = bytearray(data.nbytes)
        self._copies[-1].append(buffer)
        copy = memoryview(buffer)[: data.nbytes]
        copy[:] = data
        return copy

    def _sleep(self, begin: float, arriving: Sequence[Peer], leaving: Sequence[Peer]) -> None:
        """Until something can be read or sent, or for a moment."""
        poll, sleep_s = select.poll(), SLEEP_S
        for peer in {*arriving, *leaving}:
            if peer.is_broken:
                sleep_s = BROKEN_SLEEP_S
            else:
                events = (select.POLLIN if peer in arriving else 0) | (select.POLLOUT if peer in leaving else 0)
                poll.register(peer.fd, events)
        if not poll.poll(1000 * sleep_s):
            if self.cancel is not None:
                self.cancel.check()
            if time.perf_counter() - begin > STALL_S:
                raise EngineError(f"nothing came from {', '.join(peer.name for peer in arriving)} for {STALL_S:.0f} s")

    def next_sum(self) -> None:
        for peer in self.others:
            peer.next_sum()
        self._next_copies()

    def _next_copies(self) -> None:
        self._spare += self._copies.popleft()
        self._copies.append([])

    @contextlib.contextmanager
    def lent(self, n_bytes: int) -> Iterator[MdiMesh]:
        """The connections as the kernels take them, for sums of so many bytes. If they give up in a sum, `end_sum` is next."""
        lent, others = self._lent, self.others
        for place, memory in enumerate(self._sent):
            if len(memory) < n_bytes:  # the old one may have to be sent again
                self._sent[place] = bytearray(n_bytes)
            lent.out[place] = address_of(self._sent[place])
        before, lent.n_done, lent.has_begun = lent.n_begun, 0, 0
        for peer in others:
            peer.lend(n_bytes)
        try:
            yield lent
        finally:
            n_begun = lent.n_begun - before
            last = [memoryview(self._sent[n % 2])[:n_bytes] for n in range(before, lent.n_begun)[-2:]]
            for peer in others:
                peer.take_back(n_begun, last, bool(lent.has_begun))
            for _ in last:
                self._next_copies()
            self.tally.bytes_sent += n_begun * n_bytes * len(others)
            for i in range(lent.n_done):
                self.tally.count(self._spans[2 * i], self._spans[2 * i + 1])

    @property
    def is_in_sum(self) -> bool:
        """Whether the kernels have begun a sum that `end_sum` must end."""
        return bool(self._lent.has_begun)

    def end_sum(self) -> dict[int, memoryview]:
        """Go on with the sum that the kernels have begun; gives and raises as `swap`. It counts, whatever its end is."""
        self._lent.has_begun = 0
        begin = self._spans[2 * self._lent.n_done]
        peers = [(rank, peer) for rank, peer in enumerate(self._peers) if peer is not None]
        try:
            with self._verdict():
                return self._go_on(begin, peers, [peer for _, peer in peers])
        finally:
            self.tally.count(begin, time.perf_counter())

    @property
    def is_sealed(self) -> bool:
        return any(peer.is_sealed for peer in self.others)

    @property
    def others(self) -> list[Peer]:
        return [peer for peer in self._peers if peer is not None]

    def close(self) -> None:
        self.on_close()
        for peer in self.others:
            peer.close()


# A node that ends closes its connections, and word of the end may still be on its way round the ring.
GRACE_S = 0.05
LOOK_S = 0.2  # while a call is awaited


class Reconnects:
    """Watches the connections of a mesh. The thread sleeps until one breaks.

    Args:
        silence_s: a node that cannot be connected with again for so long is lost.
        adopt: prepares each new socket.
    """

    def __init__(self, mesh: Mesh, silence_s: float, adopt: Callable[[socket.socket], None]) -> None:
        self._mesh, self._silence_s, self._adopt = mesh, silence_s, adopt
        self._since: dict[Peer, float] = {}  # of broken connections, when that was noticed
        self._called: set[Peer] = set()
        self._waker, self._wake = socket.socketpair()
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        self._is_closing = False
        for peer in mesh.others:
            assert peer.again is not None
            peer.on_break = self._wake_up
            peer.again.on_call = lambda peer=peer: self._hear(peer)  # type: ignore[misc]
        mesh.on_close = self.close
        self._thread = threading.Thread(target=self._run, name="group-links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Replace nothing any more; harmless if repeated."""
        if self._is_closing:
            return
        self._is_closing = True
        for peer in self._mesh.others:
            assert peer.again is not None
            peer.again.stop()
        self._wake_up()
        self._thread.join(JOIN_S)
        for sock in (self._waker, self._wake):
            sock.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is full, so that the thread wakes up anyway
            self._waker.send(b"x")

    def _hear(self, peer: Peer) -> None:
        """The listener's thread: a node has called, having found its connection broken, which may look intact from here."""
        self._called.add(peer)
        peer.abandon("it connected again")
        self._wake_up()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._sleep()
                for peer in self._mesh.others:
                    if peer.is_broken and not peer.is_lost and not self._is_closing:
                        self._mend(peer)
        except MdiError:
            return  # the run is over: the ring told so

    def _sleep(self) -> None:
        """Until a connection breaks, or a new one takes more of what is sent again."""
        poll, peers = select.poll(), {}
        poll.register(self._wake, select.POLLIN)
        for peer in self._mesh.others:
            if not peer.is_broken:
                peers[peer.fd] = peer
                late = select.POLLOUT if peer.is_behind else 0
                poll.register(peer.fd, getattr(select, "POLLRDHUP", 0) | late)
        for fd, event in poll.poll(1000 * LOOK_S if self._since else None):
            if fd == self._wake.fileno():
                with contextlib.suppress(OSError):
                    self._wake.recv(4096)
            elif event & ~select.POLLOUT:
                peers[fd].abandon("it closed the connection")
            else:
                peers[fd].send_on()

    def _mend(self, peer: Peer) -> None:
        """Replace the connection, or give the node up. Raises what ended the run."""
        if self._mesh.cancel is not None:
            self._mesh.cancel.wait(0.0 if peer in self._since else GRACE_S)
        again, now = peer.again, time.monotonic()
        since = self._since.setdefault(peer, now)
        assert again is not None
        if not peer.is_caller and peer not in self._called:
            if now > since + self._silence_s:
                self._lose(peer, "it did not connect again")
            return
        self._called.discard(peer)
        try:
            if peer.is_hopeless:
                raise NodeStillAbsentError("new connections break as well")
            connection = again.connect(peer.received, now + (self._silence_s if peer.is_caller else CALL_S))
            try:
                self._adopt(connection.sock)
            except OSError as e:  # it is broken already: there will be another one
                connection.sock.close()
                if now > since + self._silence_s:
                    self._lose(peer, str(e))
                return
            peer.replace(connection)
            del self._since[peer]
        except (NodeStillAbsentError, WireError) as e:
            if peer.is_caller or isinstance(e, WireError) or peer.is_hopeless:
                self._lose(peer, str(e))

    def _lose(self, peer: Peer, why: str) -> None:
        self._since.pop(peer, None)
        peer.give_up(why)
