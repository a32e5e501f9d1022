"""The starter's side of nodes that cannot be reached, for example behind a router: they connect to the starter.

Each gets two ports of this machine, which stand for its control port and its ring port: a connection to one of them makes the
node dial again, and the two connections are joined. What travels there is protected between its ends as on any other way.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from mdi.control.announcement import NAME_LIMIT, Announcement
from mdi.control.connection_workers import is_here
from mdi.control.tunnel import MEET_S, PING_S, Tunnel, close, join, wake
from mdi.errors import AccessError, MdiError, WireError
from mdi.net.keys import KeyFile
from mdi.net.listener import open_socket
from mdi.net.message import DeadlineSocket

N_NODES, N_WAITING, N_MEETING = 256, 64, 64
N_PER_ADDRESS = 16  # connections to one node from one address elsewhere: the node cannot tell them apart
N_FROM_ELSEWHERE = 32  # in all: a node has N_STREAMS, and its starter, on this machine, needs some
ACCEPT_AGAIN_S = 0.5  # after an error, such as too many open files
PORTS = ("control", "ring")

logger = logging.getLogger("mdi")


class Relay:
    """Takes nodes that dial in, until `close`.

    Args:
        addr, port: where they do; 0 is any free port.

    Raises:
        UsageError: the port cannot be opened.
    """

    def __init__(self, addr: str, port: int, keys: KeyFile) -> None:
        self._addr, self._keys = addr, keys
        self._lock = threading.Lock()
        self._nodes: dict[str, _DialledNode] = {}  # by process
        self._meeting: dict[socket.socket, None] = {}  # the oldest first
        self._listener = open_socket(addr, port, "the port that nodes dial")
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def nodes(self) -> list[Announcement]:
        """The nodes that have connected, as if each were at ports of this machine."""
        with self._lock:
            return [node.announcement for node in self._nodes.values()]

    def close(self) -> None:
        self._closed.set()
        close(self._listener)
        with self._lock:
            nodes = list(self._nodes.values())
            for sock in self._meeting:
                wake(sock)
        for node in nodes:
            node.close()

    def _accept(self) -> None:
        for plain, _ in accepted(self._listener, self._closed):
            sock = DeadlineSocket.around(plain)
            with self._lock:
                if len(self._meeting) >= N_MEETING:  # the oldest one has had the most time for its meeting
                    oldest = next(iter(self._meeting))
                    del self._meeting[oldest]
                    wake(oldest)
                self._meeting[sock] = None
            threading.Thread(target=self._meet, args=(sock,), name="relay", daemon=True).start()

    def _meet(self, sock: DeadlineSocket) -> None:
        try:
            tunnel, message = Tunnel.answer(sock, self._keys.keys)
        except (OSError, AccessError, WireError) as e:
            logger.debug("relay: %s", e)
            close(sock)
            return
        finally:
            with self._lock:
                self._meeting.pop(sock, None)
        if "stream" in message:
            self._join(message, sock)
        else:
            self._serve(message, tunnel)

    def _join(self, message: dict[str, str], sock: socket.socket) -> None:
        with self._lock:
            node = self._nodes.get(message.get("process", ""))
        client = node.take(message["stream"]) if node is not None else None
        if node is None or client is None:
            close(sock)
            return
        try:
            join(client.sock, sock)
        finally:
            node.forget(client)

    def _serve(self, message: dict[str, str], tunnel: Tunnel) -> None:
        name, process = message.get("name", "")[:NAME_LIMIT], message.get("process", "")[:NAME_LIMIT]
        try:
            node = _DialledNode(self._addr, name, process, tunnel)
        except MdiError as e:
            logger.warning("%s has connected to --dial-port, but %s", name, e)
            tunnel.close()
            return
        with self._lock:
            is_taken = len(self._nodes) < N_NODES and not self._closed.is_set()
            old = self._nodes.pop(process, None)
            if is_taken:
                self._nodes[process] = node
        if old is not None:
            old.close()
        try:
            while is_taken:
                tunnel.receive()
                node.sweep()
        except (OSError, WireError) as e:
            logger.debug("%s is gone: %s", name, e)
        finally:
            node.close()
            with self._lock:
                if self._nodes.get(process) is node:
                    del self._nodes[process]


def accepted(
    listener: socket.socket, closed: threading.Event, pause_s: float = ACCEPT_AGAIN_S
) -> Iterator[tuple[socket.socket, str]]:
    """Connections and where they come from, until it is closed. An error (no file is left, say) is waited for to pass."""
    while not closed.is_set():
        try:
            sock, address = listener.accept()
        except OSError as e:
            if not closed.wait(pause_s):
                logger.debug("relay: %s", e)
            continue
        yield sock, address[0]


@dataclass(eq=False)
class _Client:
    """A connection to a node, and, as long as it waits for the node to dial, since when."""

    sock: socket.socket
    addr: str
    since: float = field(default_factory=time.monotonic)


class _DialledNode:
    def __init__(self, addr: str, name: str, process: str, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._lock = threading.Lock()
        self._addr = addr
        self._waiting: dict[str, _Client] = {}
        self._from_elsewhere: list[_Client] = []  # waiting or served
        self._closed = threading.Event()
        self._listeners = {which: open_socket(addr, 0, f"a port for {name}") for which in PORTS}
        ports = [sock.getsockname()[1] for sock in self._listeners.values()]
        self.announcement = Announcement(name, addr, ports[0], ports[1], process, "", "")
        for which, sock in self._listeners.items():
            threading.Thread(target=self._accept, args=(which, sock), name="relay", daemon=True).start()
        threading.Thread(target=self._ping, name="relay", daemon=True).start()

    def take(self, number: str) -> _Client | None:
        """The connection for which the node was asked to dial; None if it has been given up."""
        with self._lock:
            return self._waiting.pop(number, None)

    def forget(self, client: _Client) -> None:
        """It is over."""
        with self._lock:
            if client in self._from_elsewhere:
                self._from_elsewhere.remove(client)

    def sweep(self) -> None:
        """Give up connections for which the node did not dial."""
        end = time.monotonic() - MEET_S
        with self._lock:
            late = [number for number, client in self._waiting.items() if client.since < end]
            given_up = [self._waiting.pop(number) for number in late]
        for client in given_up:
            close(client.sock)
            self.forget(client)

    def close(self) -> None:
        self._closed.set()
        self._tunnel.close()
        for sock in self._listeners.values():
            close(sock)
        with self._lock:
            for client in self._waiting.values():
                close(client.sock)
            self._waiting.clear()

    def _accept(self, which: str, listener: socket.socket) -> None:
        for sock, addr in accepted(listener, self._closed):
            client, number = _Client(sock, addr), secrets.token_hex(8)
            with self._lock:
                is_welcome = self._has_place(client)
                if is_welcome:
                    self._waiting[number] = client
            if not is_welcome:
                close(sock)
                continue
            try:
                self._tunnel.send({"open": number, "port": which})
            except OSError:  # the node is gone; so is this, in a moment
                return

    def _has_place(self, client: _Client) -> bool:
        """At the node all have the node's own address, so its limits for strangers have to be kept here."""
        if len(self._waiting) >= N_WAITING:
            return False
        if client.addr == self._addr or is_here(client.addr):
            return True
        n_alike = sum(one.addr == client.addr for one in self._from_elsewhere)
        if n_alike >= N_PER_ADDRESS or len(self._from_elsewhere) >= N_FROM_ELSEWHERE:
            return False
        self._from_elsewhere.append(client)
        return True

    def _ping(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.wait(PING_S):
                self._tunnel.send({"ping": ""})
