"""One link of the ring: a TCP connection between neighbours with two threads, replaced if it breaks.

The thread `ring-send` sends frames from a bounded channel, the thread `ring-recv` receives them. Neither computes, so a node
whose stage takes long for a frame still sends PINGs and still receives STOP and ERROR, which overtake the channels. Links move
buffers and do not use tensors.

A broken connection is replaced (`mdi.net.reconnect`) as long as the neighbour lives. Frames are numbered without gaps, and no
more than the ring's capacity are in flight. So the neighbour can lack only the last frames, which the link keeps, and it
recognises a repeated frame by its number.
"""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from mdi.errors import WireError
from mdi.net.hello import Hello
from mdi.net.wire import (
    SILENCE_S,
    Allocate,
    BufferPool,
    CutOffError,
    Frame,
    FrameCodec,
    FrameType,
    read_frame,
    send_frame,
)


class NodeStillAbsentError(Exception):
    """The neighbour cannot be connected with again: it is lost. The words say why."""


@dataclass(eq=False)
class Connection:
    """A connected socket whose handshake is done.

    Attributes:
        codec: for its frames from here on.
        received: number of the last BATCH frame that the neighbour had before, if it had any.
    """

    sock: socket.socket
    codec: FrameCodec
    received: int | None = None


class Reconnect(Protocol):
    """Makes the next connection with the same neighbour, see `mdi.net.reconnect`.

    Attributes:
        on_call: called from any thread when the neighbour connects again; its broken connection may look intact from here.
    """

    on_call: Callable[[], None]

    def connect(self, received: int | None, until: float) -> Connection:
        """The link's receiving thread calls it, and reads nothing meanwhile.

        Args:
            received: number of the last BATCH frame that came from the neighbour, if one did.
            until: time.monotonic() at which the neighbour is lost.

        Raises:
            NodeStillAbsentError: it is lost, or `stop` was called.
        """

    def stop(self) -> None:
        """End a `connect` that is under way, and let no other begin. From any thread, as often as one likes."""


class ReconnectingNode(Protocol):
    """Receives the further calls of a neighbour from the listener.

    Attributes:
        epoch: of the ring.
        caller: its HELLO when the ring was closed.
    """

    epoch: int
    caller: Hello

    def take(self, sock: socket.socket, codec: FrameCodec, hello: Hello) -> None:
        """It has called; the connection belongs to the receiver from here on."""


T = TypeVar("T")


class Channel(Generic[T]):
    """FIFO of at most `capacity` items.

    `queue.Queue` has no portable way to wake a waiting reader for good, nor to pass the waiting items by; both are what
    the end of a run needs.

    Args:
        changed: notified of everything that happens here. Several channels may share one, so that one thread reads them all.
        on_space: called, from the thread of the reader, when a full channel has a free place again.
    """

    def __init__(
        self, capacity: int, changed: threading.Condition | None = None, on_space: Callable[[], None] | None = None
    ) -> None:
        self.capacity = capacity
        self._items: deque[T] = deque()
        self.changed = threading.Condition() if changed is None else changed
        self._on_space = on_space
        self._closed = False
        self._woken = False
        self.wait_s = 0.0  # time that get() spent waiting; written by the reader's thread only

    def put(self, item: T) -> bool:
        """Append, waiting while the channel is full. False if it is closed: the item was not taken."""
        with self.changed:
            self.changed.wait_for(lambda: self._closed or len(self._items) < self.capacity)
            if self._closed:
                return False
            self._items.append(item)
            self.changed.notify_all()
            return True

    def put_first(self, item: T) -> bool:
        """Put an item before all others, whatever the capacity. False if the channel is closed."""
        with self.changed:
            if self._closed:
                return False
            self._items.appendleft(item)
            self.changed.notify_all()
            return True

    def get(self, timeout_s: float | None = None) -> T | None:
        """The next item; None when the channel is closed, after `wake`, or after `timeout_s` without an item."""
        begin = time.perf_counter()
        with self.changed:
            self.changed.wait_for(lambda: self._closed or self._woken or bool(self._items), timeout_s)
            self.wait_s += time.perf_counter() - begin
            self._woken = False
            if self._closed or not self._items:
                return None
            item = self._items.popleft()
            self.changed.notify_all()
            was_full = len(self._items) == self.capacity - 1
        if was_full and self._on_space is not None:  # outside of the lock: the callee may use this channel
            self._on_space()
        return item

    def poll(self) -> T | None:
        """The next item; None if there is none. Never waits."""
        with self.changed:
            if not self._items:
                return None
            item = self._items.popleft()
            self.changed.notify_all()
            return item

    def wake(self) -> None:
        """Let get() return without waiting once, be it with None; takes no room, however often it is called."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def close(self) -> None:
        """Drop the queue and wake all threads; from now on get() gives None and put() False."""
        with self.changed:
            self._closed = True
            self._items.clear()
            self.changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def n_items(self) -> int:
        """How many are queued. Takes no lock."""
        return len(self._items)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read. Takes no lock."""
        return not self._items

    @property
    def is_full(self) -> bool:
        """Whether `put` would wait. Takes no lock."""
        return not self._closed and len(self._items) >= self.capacity


STUCK_S = 60.0  # without a finished block: a frame of 64 rows takes a small board 30 s
STUCK_BLOCKS = 20  # the same in blocks, of the longest time that one took

_LIMIT, _SEEN = struct.Struct("<d"), struct.Struct("<dQd")


class Work(NamedTuple):
    """Of a node's computing thread: blocks that it has finished, of all rings; and, while a frame is in hand, seconds without
    another one after which it is stuck.

    A thread that waits for a page of a dying disk cannot be woken, while the threads of the links go on. So a PING carries
    both, and the neighbours notice a computing thread that never returns.
    """

    n_finished: int = 0
    limit_s: float | None = None


class Seen(NamedTuple):
    """The last BATCH frame that has come over a link: its number, and how long ago."""

    number: int
    ago_s: float


def ping(epoch: int, work: Work, seen: Seen | None = None) -> Frame:
    """The PING that says so."""
    if seen is not None:
        payload = _SEEN.pack(math.nan if work.limit_s is None else work.limit_s, *seen)
    else:
        payload = b"" if work.limit_s is None else _LIMIT.pack(work.limit_s)
    n_rows = 1 if payload else 0
    return Frame(FrameType.PING, epoch, work.n_finished, n_rows=n_rows, n_cols=len(payload), payload=payload)


def work_in(frame: Frame) -> Work:
    """Read the progress in a PING. A PING without it counts as one of a node that has no frame in hand."""
    is_known = len(frame.payload) in (_LIMIT.size, _SEEN.size)
    limit_s = _LIMIT.unpack_from(frame.payload)[0] if is_known else math.nan
    return Work(frame.number, limit_s if limit_s > 0 else None)


def seen_in(frame: Frame) -> Seen | None:
    """Read the last frame that the sender of a PING has seen."""
    if len(frame.payload) != _SEEN.size:
        return None
    _, number, ago_s = _SEEN.unpack(frame.payload)
    return Seen(number, ago_s) if 0 <= ago_s < math.inf else None


class Watch:
    """Follows what a node says of its computing. Pure: the time is given to it."""

    def __init__(self) -> None:
        self._n_finished: int | None = None
        self._since = 0.0

    def stuck_s(self, work: Work, now: float) -> float | None:
        """For how long it has not finished a block, if that is too long."""
        if work.limit_s is None or work.n_finished != self._n_finished:
            self._n_finished, self._since = work.n_finished, now
            return None
        passed = now - self._since
        return passed if passed > work.limit_s else None


PING_INTERVAL_S = 1.0  # less if a shorter silence counts as dead
PINGS_PER_SILENCE = 6
N_WAYS, N_BEGUN = 5, 64  # of the last PINGs, whose median counts; of the last frames
N_IN_VAIN, N_SILENT = 20, 2  # connections, one after the other, that brought neither side a frame: broken, silent
JOIN_S = 10.0


class LinkObserver(Protocol):
    """Called with each frame that has rows, by the threads of a link: it must be quick and must not raise."""

    def sent(self, frame: Frame, begin_s: float, end_s: float) -> None:
        """From `begin_s` to `end_s` (time.perf_counter) the frame was written to the socket."""

    def arrived(self, frame: Frame) -> None:
        """The frame has just been read, whole."""


class Link:
    """A duplex connection to one neighbour.

    Args:
        sock: connected, handshake done; the link owns it from here.
        epoch: run id; frames of another run end the link.
        codec: of this connection from here on.
        capacity: BATCH frames that may wait to be sent, and that are kept to be sent again.
        inbox: where BATCH frames go; must hold as many as can be in flight, so that the thread never waits there. None if
            this neighbour sends none.
        on_last: called from a thread of the link with the STOP or ERROR frame that ends the run.
        on_lost: called once, from a thread of the link, with the reason when the neighbour is lost.
        on_stuck: called likewise when the neighbour lives but does not compute any more; see `Work`.
        allocate: see BufferPool.
        on_notice: called from a thread of the link with each NOTICE.
        on_space: called from a thread of the link when `is_full` is over.
        reconnect: makes another connection when one breaks; without, the neighbour is lost then.
        silence_s: longest silence of the neighbour. After half of it the connection is replaced.

    Attributes:
        work: what PINGs say of this node's computing.
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
        reconnect: Reconnect | None = None,
        silence_s: float = SILENCE_S,
        on_stuck: Callable[[str], None] = lambda reason: None,
    ) -> None:
        first = Connection(sock, codec)
        self.connection: Connection | None = first
        self._sockets = [sock]
        self._changed = threading.Condition()  # of connection and of what ends the waiting for one
        self.reconnect = reconnect
        self._silence_s = silence_s
        self._timeout_s = self._silence_s / (2 if reconnect else 1)
        self._ping_s = min(PING_INTERVAL_S, self._silence_s / PINGS_PER_SILENCE)
        self._epoch = epoch
        self.outbox: Channel[Frame] = Channel(capacity, on_space=on_space)
        self.sent_frames: deque[Frame] = deque(maxlen=capacity if reconnect else 0)
        self._notices: list[Frame] = []  # no numbers say whether they have come; twice does no harm
        self._received: int | None = None
        self._received_s = 0.0  # time.perf_counter()
        self._begun: deque[tuple[int, float]] = deque(
            maxlen=capacity + 1
        )  # of the last frames: when they began to leave
        self._ways: deque[float] = deque(maxlen=N_WAYS)
        self._taken: int | None = None  # number of the last frame that the neighbour is known to have
        self._inbox = inbox
        self.on_last = on_last
        self._on_lost, self._on_stuck = on_lost, on_stuck
        self.work: Callable[[], Work] = Work
        self._watch = Watch()
        self._on_notice = on_notice
        self._ending = False
        self.is_closing = False
        self._is_lost = False
        self._n_in_vain = 0
        self.pool = BufferPool((inbox.capacity if inbox is not None else 0) + 2, allocate or bytearray)
        self.send_s = 0.0
        self.bytes_sent = 0
        self.n_frames = 0
        self.n_reconnected = 0
        self.observer: LinkObserver | None = None
        sock.settimeout(self._timeout_s)
        self.sender = threading.Thread(target=self._send, args=(first,), name="ring-send", daemon=True)
        self.receiver = threading.Thread(target=self._receive, args=(first,), name="ring-recv", daemon=True)
        self.sender.start()
        self.receiver.start()

    def put(self, frame: Frame) -> bool:
        """Queue a frame; False if the link is closed or lost."""
        return self.outbox.put(frame)

    @property
    def is_full(self) -> bool:
        """Whether `put` would wait."""
        return self.outbox.is_full

    @property
    def way_s(self) -> float | None:
        """How long a frame takes to the neighbour, and a PING back, by the last PINGs; None before there are some."""
        ways = list(self._ways)
        return statistics.median(ways) if len(ways) == N_WAYS else None

    def put_notice(self, frame: Frame) -> None:
        """Send a NOTICE before whatever is queued."""
        self.outbox.put_first(frame)

    def put_last(self, frame: Frame) -> None:
        """Send a STOP or ERROR before the queue, and nothing after it. Sends nothing while there is no connection."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self.outbox.put_first(frame)

    def interrupt(self) -> None:
        """Leave the present connection for another one: the neighbour has called again, having found it broken."""
        connection = self.connection
        if connection is not None:
            self._break(connection)

    def close(self, flush_s: float = 0.0) -> None:
        """End the threads and close the socket; a STOP or ERROR that is queued gets `flush_s` to leave."""
        if flush_s and self._ending and threading.current_thread() is not self.sender:
            self.sender.join(flush_s)
        with self._changed:
            self.is_closing = True
            self._changed.notify_all()
        if self.reconnect is not None:
            self.reconnect.stop()
        self.outbox.close()
        self._shut(*self._sockets)
        for thread in (self.sender, self.receiver):
            if threading.current_thread() is not thread:
                thread.join(JOIN_S)
        for sock in self._sockets:
            sock.close()

    # The sending thread

    def _send(self, connection: Connection | None) -> None:
        try:
            while not self.outbox.closed:
                frame = self.outbox.get(self._ping_s)
                if frame is None and self.outbox.closed:
                    return
                if frame is not None and frame.type is FrameType.BATCH:
                    self.sent_frames.append(frame)
                elif frame is not None and frame.type is FrameType.NOTICE:
                    self._notices.append(frame)
                last, connection = connection, self._connected()
                if connection is None:
                    return
                if connection is not last:
                    self._close_before(connection)
                    due = self._lacking(connection, frame)
                else:
                    due = [frame or ping(self._epoch, self.work(), self._seen())]
                if self._send_over(connection, due):
                    return
        finally:
            self.outbox.close()

    def _connected(self) -> Connection | None:
        """The connection, once there is one; None if there will not be any."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.connection is not None or self.is_closing or self._ending or self._is_lost
            )
            return self.connection

    def _lacking(self, connection: Connection, frame: Frame | None) -> list[Frame]:
        """Frames to send again over a new connection: the neighbour may not have had them; a STOP or ERROR comes last."""
        due = [one for one in self.sent_frames if connection.received is None or one.number > connection.received]
        last = [frame] if frame is not None and frame.type in (FrameType.STOP, FrameType.ERROR) else []
        return [*due, *self._notices, *last]

    def _close_before(self, connection: Connection) -> None:
        """Called here, because only this thread may still use an older socket."""
        while self._sockets[0] is not connection.sock:
            self._sockets.pop(0).close()

    def _send_over(self, connection: Connection, frames: Sequence[Frame]) -> bool:
        """Whether this was the last that is to be sent. If the connection breaks, the other thread makes a new one."""
        try:
            for frame in frames:
                begin = time.perf_counter()
                if frame.type is FrameType.BATCH:
                    self._begun.append((frame.number, begin))
                self.bytes_sent += send_frame(connection.sock, frame, connection.codec, is_patient=True)
                if frame.type is FrameType.BATCH:
                    end = time.perf_counter()
                    self.send_s += end - begin
                    self.n_frames += 1
                    if self.observer is not None:
                        self.observer.sent(frame, begin, end)
                elif frame.type in (FrameType.STOP, FrameType.ERROR):
                    connection.sock.shutdown(socket.SHUT_WR)
                    return True
        except OSError:
            self._break(connection)
            return self._ending  # what ends the run does not wait for another connection
        return False

    # The receiving thread

    def _receive(self, connection: Connection | None) -> None:
        while connection is not None:
            until = None
            try:
                if self._read(connection):
                    return
                reason = "it closed the connection"
            except TimeoutError:
                reason = f"nothing was heard for {self._silence_s:.0f} s"
                until = time.monotonic() + self._silence_s - self._timeout_s
            except (OSError, CutOffError) as e:
                reason = f"the connection broke: {e}"
            except WireError as e:
                return self._lost(str(e))
            self._break(connection)
            connection = self._connect_again(reason, until)

    def _read(self, connection: Connection) -> bool:
        """Take frames. Returns whether the run is over; False if the neighbour closed the connection."""
        while (frame := read_frame(connection.sock, connection.codec, self.pool)) is not None:
            self._n_in_vain = 0
            if frame.epoch != self._epoch:
                raise WireError(f"a frame of run {frame.epoch:016x}, expected run {self._epoch:016x}")
            if frame.type in (FrameType.STOP, FrameType.ERROR):
                self.on_last(frame)
                self._drain(connection.sock)
                return True
            if frame.type is FrameType.BATCH and self._inbox is not None:
                if self._is_new(frame) and not self._inbox.put(frame):
                    return True
            elif frame.type is FrameType.NOTICE:
                self._on_notice(frame)
            elif frame.type is FrameType.PING:
                self._hear_ping(frame)
            else:
                raise WireError(f"a {frame.type.name} frame in the middle of a run")
        return False

    def _hear_ping(self, frame: Frame) -> None:
        if (seen := seen_in(frame)) is not None:
            begun = next((begin for number, begin in list(self._begun) if number == seen.number), None)
            if begun is not None:
                self._ways.append(max(0.0, time.perf_counter() - begun - seen.ago_s))
        stuck_s = self._watch.stuck_s(work_in(frame), time.monotonic())
        self.pool.give_back(frame.payload)
        if stuck_s is not None:
            self._on_stuck(
                f"it lives, but has not finished a block for {stuck_s:.0f} s: check its disk, and start it again"
            )

    def _seen(self) -> Seen | None:
        return None if self._received is None else Seen(self._received, time.perf_counter() - self._received_s)

    def _is_new(self, frame: Frame) -> bool:
        """Whether the frame has not come over an earlier connection; WireError if one before it has not come at all."""
        if self._received is not None:
            if frame.number <= self._received:
                self.pool.give_back(frame.payload)
                return False
            if frame.number > self._received + 1:
                raise WireError(f"frame {frame.number} came after frame {self._received}")
        self._received_s = time.perf_counter()
        self._received = frame.number
        if self.observer is not None:
            self.observer.arrived(frame)
        return True

    def _connect_again(self, reason: str, until: float | None) -> Connection | None:
        """The next connection; None if the run ends or the neighbour is lost, for this `reason`."""
        self._n_in_vain += 1
        is_hopeless = self._n_in_vain >= (N_IN_VAIN if until is None else N_SILENT)
        if self.reconnect is None or self._ending or self.is_closing or is_hopeless:
            self._lost(reason)
            return None
        try:
            connection = self.reconnect.connect(
                self._received, time.monotonic() + self._silence_s if until is None else until
            )
        except NodeStillAbsentError as e:
            self._lost(reason if until is not None else f"{reason}; {e}")
            return None
        connection.sock.settimeout(self._timeout_s)
        self.n_reconnected += 1
        if connection.received != self._taken:
            self._n_in_vain, self._taken = 0, connection.received
        with self._changed:
            self._sockets.append(connection.sock)
            self.connection = connection
            if self.is_closing:
                self._shut(connection.sock)
            self._changed.notify_all()
        self.outbox.wake()  # the kept frames leave at once
        return connection

    @staticmethod
    def _drain(sock: socket.socket) -> None:
        """Read the rest: closing a socket with unread bytes may discard what it has sent."""
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass

    def _lost(self, reason: str) -> None:
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()
        if not self.is_closing:
            self._on_lost(reason)

    # Both

    def _break(self, connection: Connection) -> None:
        """The connection is of no use any more; both threads notice."""
        with self._changed:
            if self.connection is connection:
                self.connection = None
        self._shut(connection.sock)

    @staticmethod
    def _shut(*socks: socket.socket) -> None:
        for sock in socks:
            with contextlib.suppress(OSError):  # the peer was faster
                sock.shutdown(socket.SHUT_RDWR)
