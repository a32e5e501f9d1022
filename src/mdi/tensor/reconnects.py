"""Replaces broken connections between the nodes of a group, as `net.reconnect` does for the links of a ring.

A thread of its own does it, because a node may compute for a long time, or wait for a frame, while another one needs what was
lost with a connection. Of two nodes, the one of the higher rank calls again. It never waits for a node that calls, so that no
circle of nodes waits for each other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

from mdi.errors import MdiError, WireError
from mdi.net.connection import NotBackError
from mdi.net.link import JOIN_S
from mdi.net.reconnect import CALL_S
from mdi.tensor.mesh import Mesh
from mdi.tensor.peer import Peer

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
        self._mesh.check(0.0 if peer in self._since else GRACE_S)
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
                raise NotBackError("new connections break as well")
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
        except (NotBackError, WireError) as e:
            if peer.is_caller or isinstance(e, WireError) or peer.is_hopeless:
                self._lose(peer, str(e))

    def _lose(self, peer: Peer, why: str) -> None:
        self._since.pop(peer, None)
        peer.give_up(why)
