"""Closing the ring, link by link.

The starter connects to its next node, which connects to its own next one before it answers, and so on until the last
connects to the starter. So the answer that reaches the starter means that every link is open, and errors on the way come
back to it (docs/protocol.md, "Closing the ring"). A node that waits for an answer sends PINGs to the node before it, which
distinguishes a waiting node from a frozen one.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from mdi.cancel import REPORT_S, Cancel
from mdi.errors import AccessError, Code, MdiError, NodeLostError, RingError, WireError
from mdi.net.hello import CannotConnectError, Fault, Hello, call, shut_down_by
from mdi.net.link import JOIN_S, PING_INTERVAL_S
from mdi.net.listener import RingListener
from mdi.net.reconnect import Dialer, Waiter
from mdi.net.ring import Seat, TcpRing
from mdi.net.wire import HANDSHAKE_LIMITS, Allocate, Frame, FrameCodec, FrameType, Limits, read_frame, send_frame

CONNECT_S = 8.0
ANSWER_S = 30.0

logger = logging.getLogger("mdi")


def close_starter_ring(
    listener: RingListener,
    seat: Seat,
    capacity: int,
    limits: Limits,
    timeout_s: float = ANSWER_S,
    allocate: Allocate | None = None,
    cancel: Cancel | None = None,
) -> TcpRing:
    """Form the ring, as its starter.

    Args:
        capacity: frames in flight, at most.
        allocate: makes the buffers that frames are received into, see BufferPool.
        cancel: ends the wait for other nodes, with its error.

    Raises:
        NodeLostError, RingError: a link could not be made; the message names it.
    """
    cancel = cancel or Cancel()
    expectation = listener.expect(seat.epoch, seat.prev_hello, answer=seat.hello)
    sock_out: socket.socket | None = None
    try:
        cancel.check()
        sock_out, codec_out = _connect(seat, cancel)
        with shut_down_by(cancel, sock_out):
            answer = _read_answer(sock_out, seat, timeout_s, codec_out)
        with cancel.waking(expectation.wake):
            sock_in = expectation.wait(CONNECT_S)
        if sock_in is None:
            cancel.check()
            raise NodeLostError(seat.prev_name, f"{seat.prev_name} did not connect to {seat.name}")
        assert expectation.caller is not None
        reconnects = Waiter(seat, limits, listener, expectation.caller), Dialer(seat, limits, answer.process)
        codecs = expectation.codec, codec_out
        return TcpRing(seat, sock_in, sock_out, capacity, limits, allocate, codecs, reconnects=reconnects)
    except BaseException:
        if sock_out is not None:
            sock_out.close()
        raise
    finally:
        listener.forget(expectation)


def join_ring(
    sock_in: socket.socket,
    seat: Seat,
    capacity: int,
    limits: Limits,
    timeout_s: float = ANSWER_S,
    allocate: Allocate | None = None,
    codec_in: FrameCodec | None = None,
    arrivals: threading.Condition | None = None,
    listener: RingListener | None = None,
    caller: Hello | None = None,
    cancel: Cancel | None = None,
) -> TcpRing:
    """Take one's place in the ring, as a secondary whose previous node has just connected: connect on, then answer it.

    Args:
        codec_in, caller: codec and HELLO of the connection that it made, see Expectation.
        arrivals: see TcpRing.
        listener: where it can call again if its connection breaks; without, it is lost then.
        cancel: ends the wait for the next node; the previous node then hears why.

    Raises:
        RingError: the next node cannot be reached or refuses; the previous node knows it, and both sockets are closed.
    """
    sock_out: socket.socket | None = None
    cancel = cancel or Cancel()
    codec_in = codec_in or FrameCodec(HANDSHAKE_LIMITS)
    try:
        with _signs_of_life(sock_in, seat.epoch, codec_in):
            sock_out, codec_out = _connect(seat, cancel)
            with shut_down_by(cancel, sock_out):
                answer = _read_answer(sock_out, seat, timeout_s, codec_out)
        send_frame(sock_in, seat.hello, codec_in)
        again = None if listener is None or caller is None else Waiter(seat, limits, listener, caller)
        reconnects = again, Dialer(seat, limits, answer.process)
        codecs = codec_in, codec_out
        return TcpRing(seat, sock_in, sock_out, capacity, limits, allocate, codecs, arrivals, reconnects)
    except (MdiError, OSError) as e:
        node, code = e.node if isinstance(e, NodeLostError) else "", e.code if isinstance(e, MdiError) else Code.RING
        fault = Fault(node, str(e), seat.name, code)
        with contextlib.suppress(OSError):
            send_frame(sock_in, Frame.message(FrameType.ERROR, seat.epoch, fault.to_bytes()), codec_in)
        sock_in.close()
        if sock_out is not None:
            sock_out.close()
        if isinstance(e, OSError):
            raise RingError(f"{seat.prev_name} left while the ring was formed: {e}") from None
        raise


def _connect(seat: Seat, cancel: Cancel) -> tuple[socket.socket, FrameCodec]:
    """The connection to the next node, HELLO said."""
    where = f"{seat.next_name} at {seat.next_addr}:{seat.next_port}"
    try:
        return call((seat.next_addr, seat.next_port), seat.hello, seat.keys, CONNECT_S, cancel)
    except CannotConnectError as e:
        raise NodeLostError(
            seat.next_name, f"{seat.name} cannot reach the ring port of {where}: {e}. Check addr, port_in and firewall"
        ) from None
    except OSError as e:
        raise NodeLostError(seat.next_name, f"{where} closed the connection: {e}") from None
    except (AccessError, WireError) as e:
        raise NodeLostError(seat.next_name, f"{seat.name} and {where} could not connect: {e}", e.code) from None


@contextlib.contextmanager
def _signs_of_life(sock: socket.socket, epoch: int, codec: FrameCodec) -> Iterator[None]:
    """PINGs to the previous node meanwhile; connecting, too, may take several seconds."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(OSError):  # it went away: the answer will find out
            while not over.wait(PING_INTERVAL_S):
                send_frame(sock, Frame(FrameType.PING, epoch), codec)

    thread = threading.Thread(target=run, name="ring-join", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)


def _read_answer(sock: socket.socket, seat: Seat, timeout_s: float, codec: FrameCodec) -> Hello:
    """Wait for the next node's HELLO, which says that the ring is closed from there to the starter.

    The farther a node is from the starter, the shorter it waits, so that its report arrives before the other nodes' waits
    ends.
    """
    frame = _await_frame(sock, seat, timeout_s * (1 - seat.index / (2 * seat.n_nodes)), codec)
    if frame is None:
        raise NodeLostError(seat.next_name, f"{seat.next_name} closed the connection in the handshake")
    if frame.type is FrameType.ERROR:
        fault = Fault.from_bytes(frame.payload)
        node = fault.node or seat.next_name
        raise NodeLostError(
            node, fault.message if node in fault.message else f"{node} says: {fault.message}", fault.code
        )
    if frame.type is not FrameType.HELLO or frame.epoch != seat.epoch:
        raise NodeLostError(seat.next_name, f"{seat.next_name} answered with a {frame.type.name} frame")
    try:
        return Hello.from_bytes(frame.payload)
    except WireError as e:
        raise NodeLostError(seat.next_name, f"{seat.next_name} answered with {e}", e.code) from None


def _await_frame(sock: socket.socket, seat: Seat, timeout_s: float, codec: FrameCodec) -> Frame | None:
    """The next frame that is not a PING; None if the connection is closed. NodeLostError for everything else."""
    name = seat.next_name
    silence_s = seat.silence_s
    begin = heard = time.monotonic()
    is_reported = False
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            left_s = min(begin + timeout_s, heard + silence_s) - now
            if left_s <= 0:
                silent = f"did not answer within {now - begin:.0f} s"
                if now - begin < timeout_s:
                    silent = (
                        f"is frozen or cut off: nothing was heard of it for {silence_s:.0f} s while the ring was closed"
                    )
                raise NodeLostError(name, f"{name} {silent}")
            if not is_reported and now - begin > REPORT_S:
                logger.info("%s waits for %s to join the ring (up to %.0f s)", seat.name, name, timeout_s)
                is_reported = True
            if not selector.select(min(left_s, REPORT_S / 4)):
                continue
            sock.settimeout(left_s)
            try:
                frame = read_frame(sock, codec)
            except TimeoutError:
                continue
            except (OSError, WireError) as e:
                raise NodeLostError(name, f"{name} broke off the handshake: {e}") from None
            if frame is None or frame.type is not FrameType.PING or frame.epoch != seat.epoch:
                return frame
            heard = time.monotonic()
