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

from mdi.discovery.announcement import NAME_LIMIT, Announcement
from mdi.discovery.tunnel import MEET_S, PING_S, Tunnel, close, join
from mdi.errors import AccessError, MdiError, WireError
from mdi.net.listener import open_socket
from mdi.security.keys import KeyFile

N_NODES, N_WAITING, N_MEETING = 256, 64, 64
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
        self._meeting = threading.BoundedSemaphore(N_MEETING)
        self._listener = open_socket(addr, port, "the port that nodes dial")
        self.port: int = self._listener.getsockname()[1]
        self._is_closed = False
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def nodes(self) -> list[Announcement]:
        """The nodes that have connected, as if each were at ports of this machine."""
        with self._lock:
            return [node.announcement for node in self._nodes.values()]

    def close(self) -> None:
        self._is_closed = True
        close(self._listener)
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._meeting.acquire(blocking=False):
                close(sock)
                continue
            threading.Thread(target=self._meet, args=(sock,), name="relay", daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            tunnel = Tunnel.answer(sock, self._keys.keys)
            message = tunnel.receive()
        except (OSError, AccessError, WireError) as e:
            logger.debug("relay: %s", e)
            close(sock)
            return
        finally:
            self._meeting.release()
        if "stream" in message:
            self._join(message, sock)
        else:
            self._serve(message, tunnel)

    def _join(self, message: dict[str, str], sock: socket.socket) -> None:
        with self._lock:
            node = self._nodes.get(message.get("process", ""))
        client = node.take(message["stream"]) if node is not None else None
        if client is None:
            close(sock)
        else:
            join(client, sock)

    def _serve(self, message: dict[str, str], tunnel: Tunnel) -> None:
        name, process = message.get("name", "")[:NAME_LIMIT], message.get("process", "")[:NAME_LIMIT]
        try:
            node = _DialledNode(self._addr, name, process, tunnel)
        except MdiError as e:
            logger.warning("%s has connected to --dial-port, but %s", name, e)
            tunnel.close()
            return
        with self._lock:
            is_taken = len(self._nodes) < N_NODES and not self._is_closed
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


class _DialledNode:
    def __init__(self, addr: str, name: str, process: str, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[socket.socket, float]] = {}
        self._closed = threading.Event()
        self._listeners = {which: open_socket(addr, 0, f"a port for {name}") for which in PORTS}
        ports = [sock.getsockname()[1] for sock in self._listeners.values()]
        self.announcement = Announcement(name, addr, ports[0], ports[1], process, "", "")
        for which, sock in self._listeners.items():
            threading.Thread(target=self._accept, args=(which, sock), name="relay", daemon=True).start()
        threading.Thread(target=self._ping, name="relay", daemon=True).start()

    def take(self, number: str) -> socket.socket | None:
        """The connection for which the node was asked to dial; None if it has been given up."""
        with self._lock:
            return self._waiting.pop(number, (None, 0.0))[0]

    def sweep(self) -> None:
        """Give up connections for which the node did not dial."""
        end = time.monotonic() - MEET_S
        with self._lock:
            late = [number for number, (_, since) in self._waiting.items() if since < end]
            for number in late:
                close(self._waiting.pop(number)[0])

    def close(self) -> None:
        self._closed.set()
        self._tunnel.close()
        for sock in self._listeners.values():
            close(sock)
        with self._lock:
            for sock, _ in self._waiting.values():
                close(sock)
            self._waiting.clear()

    def _accept(self, which: str, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                client, _ = listener.accept()
                number = secrets.token_hex(8)
                with self._lock:
                    is_full = len(self._waiting) >= N_WAITING
                    if not is_full:
                        self._waiting[number] = (client, time.monotonic())
                if is_full:
                    close(client)
                else:
                    self._tunnel.send({"open": number, "port": which})
            except OSError:
                return

    def _ping(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.wait(PING_S):
                self._tunnel.send({"ping": ""})
