"""The ring as one node sees it: frames come in from the previous node and go out to the next. See `handshake` for how it
is closed."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass
from typing import Protocol

from mdi.errors import NodeLostError, RingEndedError, RingError
from mdi.net.channel import Channel
from mdi.net.hello import Fault, Hello
from mdi.net.link import JOIN_S, SILENCE_S, Allocate, ReceiveLink, SendLink
from mdi.net.wire import Frame, Kind, Limits

FLUSH_S = 2.0
# After a failed send, how long to wait for the report that comes round the ring and knows more.
REPORT_S = SILENCE_S + 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """A node's place in the ring of one run; `wire` is what its rows travel as (net.wire.WIRE_DTYPES)."""

    epoch: int
    index: int
    names: tuple[str, ...]
    placement: str
    next_addr: str
    next_port: int
    wire: str = "auto"

    @property
    def n_nodes(self) -> int:
        return len(self.names)

    @property
    def name(self) -> str:
        return self.names[self.index]

    @property
    def prev_name(self) -> str:
        return self.names[self.index - 1]

    @property
    def next_name(self) -> str:
        return self.names[(self.index + 1) % self.n_nodes]

    @property
    def prev_hello(self) -> Hello:
        return self._hello((self.index - 1) % self.n_nodes)

    @property
    def hello(self) -> Frame:
        return Frame.message(Kind.HELLO, self.epoch, self._hello(self.index).to_bytes())

    def _hello(self, index: int) -> Hello:
        return Hello(index, self.n_nodes, self.placement, {} if self.wire == "auto" else {"wire": self.wire})


class Ring(Protocol):
    """What the engine loops need of a ring. `capacity` is how many frames it holds: no more may be in flight."""

    @property
    def epoch(self) -> int: ...

    @property
    def n_nodes(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    def send(self, frame: Frame) -> None:
        """Hand a frame to the next node; does nothing once the ring is over (recv tells)."""

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        """The next frame; None after `wake`, or after `timeout_s`.

        Raises:
            RingEndedError: the ring was ended in good order.
            NodeLostError, RingError: it broke.
        """

    def release(self, frame: Frame) -> None:
        """Give a received frame's buffer back; its payload must not be read any more."""

    def wake(self) -> None:
        """Let a waiting recv() return None once."""


class LoopbackRing:
    """The ring of a single node: what it sends comes back, by reference. `capacity`: frames in flight at most."""

    def __init__(self, capacity: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self.n_nodes = 1
        self.capacity = capacity
        self.inbox: Channel[Frame] = Channel(capacity + 1)
        self.send_s = 0.0
        self.bytes_sent = 0
        self.n_frames = 0

    def send(self, frame: Frame) -> None:
        self.n_frames += 1
        self.inbox.put(frame)

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        frame = self.inbox.get(timeout_s)
        if frame is None and self.inbox.closed:
            raise RingEndedError("the ring was ended")
        return frame

    def release(self, frame: Frame) -> None:
        pass  # the payload belongs to a tensor

    def wake(self) -> None:
        self.inbox.wake()

    def stop(self, reason: str) -> None:
        self.inbox.close()

    def fail(self, fault: Fault) -> None:
        self.inbox.close()

    def close(self) -> None:
        self.inbox.close()


class TcpRing:
    """The two links of a node among others, and what happens when one of them ends."""

    def __init__(
        self,
        seat: Seat,
        sock_in: socket.socket,
        sock_out: socket.socket,
        capacity: int,
        limits: Limits,
        allocate: Allocate | None = None,
    ) -> None:
        self._seat = seat
        self.capacity = capacity
        self._fault: Fault | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._report_timer: threading.Timer | None = None
        self.inbox: Channel[Frame] = Channel(capacity + 1)
        self._out = SendLink(sock_out, seat.epoch, capacity + 1, self._next_lost)
        self._in = ReceiveLink(sock_in, seat.epoch, limits, self.inbox, self._last_frame, self._prev_lost, allocate)

    @property
    def send_s(self) -> float:
        return self._out.send_s

    @property
    def bytes_sent(self) -> int:
        return self._out.bytes_sent

    @property
    def n_frames(self) -> int:
        return self._out.n_frames

    @property
    def epoch(self) -> int:
        return self._seat.epoch

    @property
    def n_nodes(self) -> int:
        return self._seat.n_nodes

    def send(self, frame: Frame) -> None:
        self._out.put(frame)

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        frame = self.inbox.get(timeout_s)
        if frame is None and self._over.is_set():
            raise RingEndedError("the ring was ended") if self._fault is None else _error_of(self._fault)
        return frame

    def release(self, frame: Frame) -> None:
        self._in.pool.give_back(frame.payload)

    def wake(self) -> None:
        self.inbox.wake()

    def stop(self, reason: str) -> None:
        """End the run in good order, here and on every node; what a fault has ended stays ended by it."""
        with self._lock:
            if self._fault is not None:  # its ERROR may still wait to be sent, and a STOP would take its place
                return
        self._out.put_last(Frame.message(Kind.STOP, self._seat.epoch, reason.encode()[:1000]))
        self._end(None)

    def fail(self, fault: Fault) -> None:
        """End the run here, and tell the nodes downstream why."""
        self._out.put_last(Frame.message(Kind.ERROR, self._seat.epoch, fault.to_bytes()))
        self._end(fault)

    def wait_end(self, timeout_s: float) -> bool:
        """Wait for the run's end; False after `timeout_s`."""
        return self._over.wait(timeout_s)

    def close(self) -> None:
        """Close both links; every thread of the ring has ended when this returns."""
        flush_s = FLUSH_S if self._over.is_set() else 0.0  # a STOP or ERROR may still be on its way out
        self._end(None)
        with self._lock:  # after the end no other timer is started
            timer = self._report_timer
        if timer is not None:
            timer.cancel()
            timer.join(JOIN_S)
        self._out.close(flush_s)
        self._in.close()

    def _end(self, fault: Fault | None) -> None:
        with self._lock:
            if not self._over.is_set():
                self._fault = fault
                self._over.set()
        self.inbox.close()

    def _last_frame(self, frame: Frame) -> None:
        if self._seat.index != 0:  # the starter began the STOP, or is the one an ERROR is meant for
            self._out.put_last(frame)
        self._end(Fault.from_bytes(frame.payload) if frame.kind is Kind.ERROR else None)

    def _prev_lost(self, reason: str) -> None:
        if self._over.is_set():
            return
        node = self._seat.prev_name
        logger.debug("%s lost its previous node %s: %s", self._seat.name, node, reason)
        self.fail(Fault(node, reason, self._seat.name))

    def _next_lost(self, reason: str) -> None:
        # The node after the lost one notices as well, and its report comes round the ring, where it is still whole.
        # Only if nothing comes (the ring is broken in two places) is this node's own view the best there is.
        with self._lock:
            if self._over.is_set():
                return
            fault = Fault(self._seat.next_name, f"sending to it failed: {reason}", self._seat.name)
            self._report_timer = threading.Timer(REPORT_S, self._end, (fault,))
            self._report_timer.name = "ring-report"
            self._report_timer.daemon = True
            self._report_timer.start()


def _error_of(fault: Fault) -> RingError:
    if fault.node:
        noticed = f" (noticed by {fault.reporter})" if fault.reporter and fault.reporter != fault.node else ""
        return NodeLostError(fault.node, f"{fault.node} is lost: {fault.message}{noticed}", fault.code)
    return RingError(fault.message)
