"""The ring as one node sees it: frames come in from the previous node and go out to the next. See `handshake` for how it
is closed."""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from mdi.errors import Code, NodeLostError, RingEndedError, RingError
from mdi.net.hello import Fault, Hello
from mdi.net.keys import KeyFile
from mdi.net.link import Channel, Link, LinkObserver, Reconnect
from mdi.net.wire import REFUSED_S, SILENCE_S, Allocate, Frame, FrameCodec, FrameType, Limits

FLUSH_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """A node's place in the ring of one run.

    Attributes:
        wire: what its rows travel as (net.wire.WIRE_DTYPES).
        process: a number that this node's process drew.
        keys: of the cluster; if there are some, all frames between its nodes are encrypted.
        silence_s: a neighbour that is silent for so long is lost.
        refused_s: likewise the next node, if nothing listens on its port any more for so long.
    """

    epoch: int
    index: int
    names: tuple[str, ...]
    placement: str
    next_addr: str
    next_port: int
    wire: str = "auto"
    process: str = ""
    keys: KeyFile | None = field(default=None, repr=False)
    silence_s: float = SILENCE_S
    refused_s: float = REFUSED_S

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
        return self.hello_with()

    def hello_with(self, **extensions: int | None) -> Frame:
        """The HELLO of this node, with more to say."""
        hello = self._hello(self.index)
        hello = replace(hello, name=self.name, process=self.process, extensions={**hello.extensions, **extensions})
        return Frame.message(FrameType.HELLO, self.epoch, hello.to_bytes())

    def _hello(self, index: int) -> Hello:
        extensions = {} if self.wire == "auto" else {"wire": self.wire}
        return Hello(index, self.n_nodes, self.placement, extensions=extensions)


class Ring(Protocol):
    """The interface of a ring for the engine's loops. `capacity` is how many frames it holds: no more may be in flight."""

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

    def poll(self) -> Frame | None:
        """The next frame, if there is one and the next node's link takes one more; never waits. Raises as `recv`."""

    def release(self, frame: Frame) -> None:
        """Give a received frame's buffer back; its payload must not be read any more."""

    def wake(self) -> None:
        """Let a waiting recv() return None once."""


class LoopbackRing:
    """The ring of a single node: its frames come back, by reference. `capacity`: most frames in flight."""

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

    def poll(self) -> Frame | None:
        return self.recv(0)

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
    """The links of a node to its two neighbours, and what happens when one of them ends.

    Rows go from the previous node to the next. STOP, ERROR and NOTICE go both ways, so that they reach the nodes on either
    side of a lost one, and no node counts a neighbour that has ended as lost. They stop at the first node that already has
    them, NOTICE at the starter.

    Args:
        codecs: those of `sock_in` and `sock_out` since the handshake.
        reconnects: replace `sock_in` and `sock_out` if they break; None: a broken connection means a lost node.
        arrivals: notified when `poll` may have something new; None if `poll` is not used.
    """

    def __init__(
        self,
        seat: Seat,
        sock_in: socket.socket,
        sock_out: socket.socket,
        capacity: int,
        limits: Limits,
        allocate: Allocate | None = None,
        codecs: tuple[FrameCodec, FrameCodec] | None = None,
        arrivals: threading.Condition | None = None,
        reconnects: tuple[Reconnect | None, Reconnect | None] = (None, None),
    ) -> None:
        self._seat = seat
        self.capacity = capacity
        self._fault: Fault | None = None
        self._leaving: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._arrivals = arrivals
        self.inbox: Channel[Frame] = Channel(capacity + 1, arrivals)
        # A link may be lost before the other one is open: that one gets the report, too.
        with self._lock:
            codec_in, codec_out = codecs or (FrameCodec(), FrameCodec())
            codec_in.limits = codec_out.limits = limits
            again_prev, again_next = reconnects
            self.next_link = self._link(sock_out, codec_out, None, seat.next_name, allocate, again_next)
            self.previous_link = self._link(sock_in, codec_in, self.inbox, seat.prev_name, allocate, again_prev)

    def _link(
        self, sock: socket.socket, codec: FrameCodec, inbox: Channel[Frame] | None, name: str,
        allocate: Allocate | None, reconnect: Reconnect | None,
    ) -> Link:  # fmt: skip
        link = Link(
            sock, self._seat.epoch, codec, self.capacity + 1, inbox, self._last_frame, partial(self._lost, name), allocate,
            on_notice=self._hear_notice, on_space=None if self._arrivals is None else self._wake_senders,
            reconnect=reconnect, silence_s=self._seat.silence_s, on_stuck=partial(self._lost, name, code=Code.STUCK),
        )  # fmt: skip
        if reconnect is not None:
            reconnect.on_call = link.interrupt
        return link

    @property
    def send_s(self) -> float:
        return self.next_link.send_s

    @property
    def n_reconnected(self) -> int:
        """Number of connections that replaced broken ones."""
        return self.next_link.n_reconnected + self.previous_link.n_reconnected

    @property
    def bytes_sent(self) -> int:
        return self.next_link.bytes_sent

    @property
    def n_frames(self) -> int:
        return self.next_link.n_frames

    @property
    def epoch(self) -> int:
        return self._seat.epoch

    @property
    def n_nodes(self) -> int:
        return self._seat.n_nodes

    def send(self, frame: Frame) -> None:
        self.next_link.put(frame)

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        frame = self.inbox.get(timeout_s)
        if frame is None and self._over.is_set():
            raise RingEndedError("the ring was ended") if self._fault is None else _error_of(self._fault)
        return frame

    @property
    def is_pending(self) -> bool:
        """Whether `poll` has something to say: a frame that can be sent on without waiting, or that the ring is over."""
        return self._over.is_set() or not (self.inbox.is_empty or self.next_link.is_full)

    def poll(self) -> Frame | None:
        frame = None if self.next_link.is_full else self.inbox.poll()
        if frame is None and self._over.is_set():
            raise RingEndedError("the ring was ended") if self._fault is None else _error_of(self._fault)
        return frame

    def release(self, frame: Frame) -> None:
        self.previous_link.pool.give_back(frame.payload)

    def wake(self) -> None:
        self.inbox.wake()

    def stop(self, reason: str) -> None:
        """End the run in good order, here and on every node; what has ended it before stays what ended it."""
        if self.end_with(None):
            self._send_last(Frame.message(FrameType.STOP, self._seat.epoch, reason.encode()[:1000]))

    def fail(self, fault: Fault) -> None:
        """End the run here, and tell the other nodes why."""
        if self.end_with(fault):
            self._send_last(Frame.message(FrameType.ERROR, self._seat.epoch, fault.to_bytes()))

    def observe(self, observer: LinkObserver) -> None:
        """Have both links tell of their frames from now on."""
        self.next_link.observer = self.previous_link.observer = observer

    @property
    def fault(self) -> Fault | None:
        """The fault that broke the ring; None while it is whole."""
        return self._fault

    @property
    def leaving(self) -> tuple[str, ...]:
        """Nodes that have said that they are about to leave; `recv` returns None once when there is a new one."""
        return self._leaving

    def announce_leave(self) -> None:
        """Tell the starter that this node will leave; the ring goes on."""
        notice = Fault(self._seat.name, "it was asked to end", self._seat.name, Code.LEAVING)
        self._hear_notice(Frame.message(FrameType.NOTICE, self._seat.epoch, notice.to_bytes()))

    def wait_end(self, timeout_s: float) -> bool:
        """Wait for the run's end; False after `timeout_s`."""
        return self._over.wait(timeout_s)

    def close(self) -> None:
        """Close both links; every thread of the ring has ended when this returns."""
        self.end_with(None)
        deadline = time.monotonic() + FLUSH_S  # a STOP or ERROR may still be on its way out
        for link in (self.next_link, self.previous_link):
            link.close(max(0.0, deadline - time.monotonic()))

    def end_with(self, fault: Fault | None) -> bool:
        """Receive nothing any more, for this reason; None is a good end. Returns whether it was the first to end the ring."""
        with self._lock:
            is_first = not self._over.is_set()
            if is_first:
                self._fault = fault
                self._over.set()
        self.inbox.close()
        return is_first

    def _last_frame(self, frame: Frame) -> None:
        if self.end_with(Fault.from_bytes(frame.payload) if frame.type is FrameType.ERROR else None):
            self._send_last(frame)

    def _hear_notice(self, frame: Frame) -> None:
        node = Fault.from_bytes(frame.payload).node
        with self._lock:
            if node in self._leaving or node not in self._seat.names:
                return
            self._leaving = (*self._leaving, node)
        if self._seat.index == 0:
            return self.inbox.wake()
        for link in (self.next_link, self.previous_link):
            link.put_notice(frame)

    def _wake_senders(self) -> None:
        assert self._arrivals is not None
        with self._arrivals:
            self._arrivals.notify_all()

    def _send_last(self, frame: Frame) -> None:
        for link in (self.next_link, self.previous_link):
            link.put_last(frame)

    def _lost(self, node: str, reason: str, code: Code = Code.LOST) -> None:
        logger.debug("%s lost %s: %s", self._seat.name, node, reason)
        self.fail(Fault(node, reason, self._seat.name, code))


def _error_of(fault: Fault) -> RingError:
    if fault.node:
        noticed = f" (noticed by {fault.reporter})" if fault.reporter and fault.reporter != fault.node else ""
        return NodeLostError(fault.node, f"{fault.node} is lost: {fault.message}{noticed}", fault.code)
    return RingError(fault.message)
