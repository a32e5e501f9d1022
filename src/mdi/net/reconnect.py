"""Replaces a broken connection while both nodes live.

The node that sends the rows calls again (`Dialer`), the other one waits for the call (`Waiter`). Both must be the same
processes as before: a restarted one has no caches and counts as lost. The answer says which frame came last, so that the
caller can send the missing ones again; if both send, the call says it as well. With a key, both sides prove again that they
have it, and get new session keys.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from mdi.errors import AccessError, WireError
from mdi.net.hello import CannotConnectError, Fault, Hello, call
from mdi.net.link import Connection, NodeStillAbsentError
from mdi.net.listener import RingListener
from mdi.net.ring import Seat
from mdi.net.wire import Frame, FrameCodec, FrameType, Limits, read_frame, send_frame

CALL_S = 2.0  # of connecting, and of a challenge
PAUSE_S = 0.1

logger = logging.getLogger("mdi")


class _RefusedError(Exception):
    """Nothing listens there, or the node refuses this one."""


class Dialer:
    """Calls the next node again.

    Args:
        limits: of accepted frames.
        process: that it named when the ring was closed.
    """

    def __init__(self, seat: Seat, limits: Limits, process: str) -> None:
        self._seat = seat
        self._limits = limits
        self.process = process
        self.on_call: Callable[[], None] = lambda: None
        self.n_calls = 0
        self._stopped = threading.Event()
        self._sock: socket.socket | None = None

    def connect(self, received: int | None, until: float) -> Connection:
        refused_since: float | None = None
        while not self._stopped.is_set():
            begin = time.monotonic()
            try:
                connection = self._call(received, until)
                logger.info("%s is connected to %s again", self._seat.name, self._seat.next_name)
                return connection
            except _RefusedError as e:
                why = str(e)
                refused_since = begin if refused_since is None else refused_since
                if time.monotonic() > refused_since + self._seat.refused_s:
                    raise NodeStillAbsentError(why) from None
            except (OSError, WireError, AccessError, CannotConnectError) as e:
                why, refused_since = str(e), None
            if time.monotonic() > until:
                raise NodeStillAbsentError(f"it cannot be connected again: {why}")
            self._stopped.wait(PAUSE_S)
        raise NodeStillAbsentError("the ring was closed")

    def stop(self) -> None:
        self._stopped.set()
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _call(self, received: int | None, until: float) -> Connection:
        seat = self._seat
        self.n_calls += 1
        left_s = max(PAUSE_S, until - time.monotonic())
        try:
            address = seat.next_addr, seat.next_port
            hello = seat.hello_with(reconnect=self.n_calls, received=received)
            sock, codec = call(address, hello, seat.keys, min(CALL_S, left_s))
        except CannotConnectError as e:
            if e.is_refused:
                raise _RefusedError(f"nothing listens on its ring port: {e}") from None
            raise
        except ConnectionError as e:  # what forwards its port may take the connection before it knows
            raise _RefusedError(f"it closes each connection: {e}") from None
        self._sock = sock
        try:
            if self._stopped.is_set():
                raise NodeStillAbsentError("the ring was closed")
            # A stopped node may still continue and find this call, so the answer gets all the remaining time.
            sock.settimeout(max(PAUSE_S, until - time.monotonic()))
            hello_back = self._answer(read_frame(sock, codec))
        except ConnectionError as e:
            sock.close()
            raise _RefusedError(f"it closes each connection: {e}") from None
        except BaseException:
            sock.close()
            raise
        finally:
            self._sock = None
        codec.limits = self._limits
        return Connection(sock, codec, hello_back.received)

    def _answer(self, frame: Frame | None) -> Hello:
        if frame is None:
            raise _RefusedError("it closes each connection")
        if frame.type is FrameType.ERROR:
            raise _RefusedError(Fault.from_bytes(frame.payload).message)
        if frame.type is not FrameType.HELLO or frame.epoch != self._seat.epoch:
            raise WireError(f"it answered with a {frame.type.name} frame")
        hello = Hello.from_bytes(frame.payload)
        if hello.process != self.process:
            raise NodeStillAbsentError("it was started again")
        return hello


class Waiter:
    """Waits until the previous node calls again. Call `stop` in the end, so that the listener forgets it.

    Args:
        caller: the node's HELLO when the ring was closed.

    Attributes:
        on_call: see Reconnect.
    """

    def __init__(self, seat: Seat, limits: Limits, listener: RingListener, caller: Hello) -> None:
        self.epoch = seat.epoch
        self.caller = caller
        self.on_call: Callable[[], None] = lambda: None
        self._seat = seat
        self._limits = limits
        self._listener = listener
        self._changed = threading.Condition()
        self._found: Connection | None = None
        self.n_calls = 0
        self._stopped = False
        listener.expect_again(self)

    def take(self, sock: socket.socket, codec: FrameCodec, hello: Hello) -> None:
        """The listener calls this when the node has called. If calls arrive out of order, the one that was made last counts."""
        self.on_call()
        codec.limits = self._limits
        with self._changed:
            if self._stopped or hello.reconnect <= self.n_calls:
                sock.close()
                return
            self._drop()
            self._found, self.n_calls = Connection(sock, codec, hello.received), hello.reconnect
            self._changed.notify_all()

    def connect(self, received: int | None, until: float) -> Connection:
        while True:
            with self._changed:
                left_s = max(0.0, until - time.monotonic())
                self._changed.wait_for(lambda: self._stopped or self._found is not None, left_s)
                found, self._found = self._found, None
            if found is None:
                raise NodeStillAbsentError("the ring was closed" if self._stopped else "it did not connect again")
            try:
                found.sock.settimeout(CALL_S)
                send_frame(found.sock, self._seat.hello_with(received=received), found.codec)
            except OSError:
                found.sock.close()
                continue
            logger.info("%s is connected to %s again", self._seat.name, self._seat.prev_name)
            return found

    def stop(self) -> None:
        self._listener.forget_again(self)
        with self._changed:
            self._stopped = True
            self._drop()
            self._changed.notify_all()

    def _drop(self) -> None:
        if self._found is not None:
            self._found.sock.close()
            self._found = None
