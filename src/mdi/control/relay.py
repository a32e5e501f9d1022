"""Nodes that cannot be reached, for example behind a router: they connect to a relay on the starter's machine.

Each gets two ports of that machine, which stand for its control port and its ring port: a connection to one of them makes the
node dial again, and the two connections are joined. A node that can be reached says where, and gets no ports: it dials only
to be found. What travels there is protected between its ends as on any other way. A node and its relay exchange short sealed
JSON messages, then the bytes of one connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mdi.cancel import Cancel, Periodic
from mdi.control.discovery import NAME_LIMIT, Announcement
from mdi.control.web_pages import is_here
from mdi.errors import AccessError, MdiError, WireError
from mdi.net.hello import CHALLENGE_BYTES, Caller, answer_to
from mdi.net.keys import TAG_BYTES, KeyFile, SealedSession
from mdi.net.listener import open_socket
from mdi.net.message import DeadlineSocket
from mdi.net.wire import tune
from mdi.units import duration

MEET_S = 10.0  # for all messages up to the first one of a session
ENDING_S = 15.0  # without a byte, after which a connection is over whose other direction has ended
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, tries
PING_S = 5.0
SILENCE_S = 20.0  # without a message, after which the other side counts as gone
MESSAGE_LIMIT_BYTES = 1024
PIECE_BYTES = 64 << 10


class Tunnel:
    """One connection between relay and node. Both have proved that they have the key.

    Raises (all methods):
        OSError: the connection is broken or silent. WireError, AccessError: the other side is none of ours.
    """

    def __init__(self, sock: DeadlineSocket, session: SealedSession) -> None:
        self.sock = sock
        self._session = session
        self._lock = threading.Lock()

    @classmethod
    def dial(cls, addr: str, port: int, keys: tuple[bytes, ...], cancel: Cancel | None = None) -> Tunnel:
        """The end of `cancel` ends the meeting: the connection is broken then."""
        sock = DeadlineSocket.around(socket.create_connection((addr, port), MEET_S))
        try:
            with (cancel or Cancel()).waking(sock.wake):
                sock.read_within(MEET_S)
                caller = Caller(keys)
                sock.sendall(caller.call)
                session = caller.session(_read(sock, CHALLENGE_BYTES))
                sock.read_each_within(SILENCE_S)
                return cls(sock, session)
        except BaseException:
            sock.close()
            raise

    @classmethod
    def answer(cls, sock: DeadlineSocket, keys: tuple[bytes, ...]) -> tuple[Tunnel, dict[str, str]]:
        """The tunnel of a caller, and its first message: all within MEET_S, however slowly its bytes come."""
        sock.settimeout(MEET_S)
        sock.read_within(MEET_S)
        answer, session = answer_to(_read(sock, CHALLENGE_BYTES), keys)
        sock.sendall(answer)
        tunnel = cls(sock, session)
        message = tunnel.receive()
        sock.read_each_within(SILENCE_S)
        return tunnel, message

    def send(self, message: dict[str, str]) -> None:
        with self._lock:
            sealed = self._session.seal(json.dumps(message).encode())
            self.sock.sendall(len(sealed).to_bytes(2, "little") + sealed)

    def receive(self) -> dict[str, str]:
        n_bytes = int.from_bytes(_read(self.sock, 2), "little")
        if not TAG_BYTES < n_bytes <= MESSAGE_LIMIT_BYTES:
            raise WireError(f"a message of {n_bytes} bytes")
        data = bytearray(n_bytes - TAG_BYTES)
        self._session.open(_read(self.sock, n_bytes), data)
        try:
            message: Any = json.loads(data)
        except ValueError:
            message = None
        if not isinstance(message, dict) or not all(isinstance(value, str) for value in message.values()):
            raise WireError("a message that cannot be read")
        return message

    def close(self) -> None:
        close(self.sock)


def join(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways until both sides have ended; closes both.

    A side that goes without a word is found by the system's keep-alive; one that does not end with the other, after ENDING_S.
    """
    is_ending = threading.Event()
    for sock in (one, other):
        sock.settimeout(None)
        tune(sock)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    back = threading.Thread(target=_carry, args=(other, one, is_ending), name="tunnel", daemon=True)
    try:
        back.start()
        _carry(one, other, is_ending)
        back.join()
    except RuntimeError as e:  # no thread can be had at the moment
        logger.debug("a connection through the relay: %s", e)
    close(one)
    close(other)


def wake(sock: socket.socket) -> None:
    """End a connection whose thread closes the socket then."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def close(sock: socket.socket) -> None:
    """Also wakes a thread that waits for the socket."""
    wake(sock)
    sock.close()


def _carry(source: socket.socket, target: socket.socket, is_ending: threading.Event) -> None:
    piece = bytearray(PIECE_BYTES)
    try:
        with selectors.DefaultSelector() as readable:
            readable.register(source, selectors.EVENT_READ)
            while True:
                if not readable.select(ENDING_S):
                    if is_ending.is_set():
                        raise TimeoutError
                elif n := source.recv_into(piece):
                    target.sendall(memoryview(piece)[:n])
                else:
                    break
        target.shutdown(socket.SHUT_WR)
    except (OSError, ValueError):  # a broken link is reported to both ends; ValueError: it is closed already
        close(source)
        close(target)
    finally:
        is_ending.set()


def _read(sock: socket.socket, n_bytes: int) -> bytes:
    """Only recv_into keeps the deadline of a DeadlineSocket."""
    data = bytearray(n_bytes)
    n_read = 0
    while n_read < n_bytes:
        n = sock.recv_into(memoryview(data)[n_read:])
        if not n:
            raise ConnectionError("the other side has closed the connection")
        n_read += n
    return bytes(data)


N_NODES, N_WAITING, N_MEETING = 256, 64, 64
N_PER_ADDRESS = 16  # connections to one node from one address elsewhere: the node cannot tell them apart
N_FROM_ELSEWHERE = 32  # in all: a node has N_STREAMS, and its starter, on this machine, needs some
ACCEPT_AGAIN_S = 0.5  # after an error, such as too many open files
KEPT_S = 15.0  # a node that is away has its ports: it dials again after AGAIN_S
PORTS = ("control", "ring")
ANYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"

logger = logging.getLogger("mdi")


class Relay:
    """Takes nodes that dial in, until `close`.

    Args:
        addr: where ports are opened for them. They dial on all addresses of this machine, because not all reach the same one;
            if this is a loopback address, only there.
        port: that they dial; 0 is any free one.

    Raises:
        UsageError: the port cannot be opened.
    """

    def __init__(self, addr: str, port: int, keys: KeyFile) -> None:
        self._addr, self._keys = addr, keys
        self._lock = threading.Lock()
        self._nodes: dict[str, _DialledNode] = {}  # by process
        self._meeting: dict[socket.socket, None] = {}  # the oldest first
        self._listener = open_socket(addr if is_here(addr) else ANYWHERE, port, "the port that nodes dial")
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def nodes(self) -> list[Announcement]:
        """The nodes that have connected, as if each were at ports of this machine."""
        with self._lock:
            return [node.announcement for node in self._nodes.values() if node.is_there]

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
            try:
                threading.Thread(target=self._meet, args=(sock,), name="relay", daemon=True).start()
            except RuntimeError as e:  # no thread can be had at the moment
                logger.debug("relay: %s", e)
                with self._lock:
                    self._meeting.pop(sock, None)
                close(sock)

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
            node = self._node_of(name, process, _place_of(message))
        except (MdiError, RuntimeError) as e:  # the second: no thread can be had at the moment
            logger.warning("%s has connected to --dial-port, but %s", name, e)
            node = None
        if node is None or not node.attach(tunnel):
            tunnel.close()
            return
        try:
            while True:
                tunnel.receive()
                node.sweep()
        except (OSError, WireError) as e:
            logger.debug("%s is gone: %s", name, e)
        finally:
            node.detach(tunnel)

    def _node_of(self, name: str, process: str, place: tuple[str, int, int] | None) -> _DialledNode | None:
        """A process that dials again within KEPT_S has the ports that it had; None if there are too many. Raises MdiError."""
        with self._lock:
            self._nodes = {one: node for one, node in self._nodes.items() if not node.is_closed}
            before = self._nodes.get(process)
            if before is not None and before.place == place:
                return before
            if self._closed.is_set() or len(self._nodes) >= N_NODES:
                return None
            node = self._nodes[process] = _DialledNode(self._addr, name, process, place)
        if before is not None:
            before.close()
        return node


def _place_of(message: dict[str, str]) -> tuple[str, int, int] | None:
    """Address, control port and ring port of a node that can be reached. Raises WireError."""
    if "addr" not in message:
        return None
    try:
        addr = str(ipaddress.ip_address(message["addr"]))
        control, ring = (int(message[which]) for which in PORTS)
    except (KeyError, ValueError):
        raise WireError("it says unclearly where it is") from None
    if not 0 < min(control, ring) <= max(control, ring) < 65536:
        raise WireError("it says unclearly where it is")
    return addr, control, ring


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
    """A node that has dialled, until it has been away for KEPT_S: others connect to its ports again and again meanwhile.

    Args:
        addr: where ports are opened for it.
        place: its own address, control port and ring port, if it can be reached there.
    """

    def __init__(self, addr: str, name: str, process: str, place: tuple[str, int, int] | None = None) -> None:
        self.place = place
        self._tunnel: Tunnel | None = None
        self._left_at = time.monotonic()
        self._lock = threading.Lock()
        self._addr = addr
        self._waiting: dict[str, _Client] = {}
        self._from_elsewhere: list[_Client] = []  # waiting or served
        self._closed = threading.Event()
        self._listeners: dict[str, socket.socket] = {}
        try:
            for which in PORTS if place is None else ():
                self._listeners[which] = open_socket(addr, 0, f"a port for {name}")
            ports = {which: sock.getsockname()[1] for which, sock in self._listeners.items()}
            addr, control, ring = place or (addr, ports["control"], ports["ring"])
            self.announcement = Announcement(name, addr, control, ring, process, "", "")
            for which, sock in self._listeners.items():
                threading.Thread(target=self._accept, args=(which, sock), name="relay", daemon=True).start()
            threading.Thread(target=self._tend, name="relay", daemon=True).start()
        except BaseException:
            self.close()
            raise

    @property
    def is_there(self) -> bool:
        return self._tunnel is not None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def attach(self, tunnel: Tunnel) -> bool:
        """It has dialled, perhaps again; False if this is closed."""
        with self._lock:
            before, self._tunnel = self._tunnel, tunnel
            is_open = not self.is_closed
        if before is not None:
            wake(before.sock)
        return is_open

    def detach(self, tunnel: Tunnel) -> None:
        """The connection is over: called by the thread that has read from it. Harmless if the node has dialled again."""
        tunnel.close()
        with self._lock:
            if self._tunnel is not tunnel:
                return
            self._tunnel, self._left_at = None, time.monotonic()
        self._drop_waiting()

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
        with self._lock:
            self._closed.set()
            tunnel = self._tunnel
        if tunnel is not None:
            wake(tunnel.sock)
        for sock in self._listeners.values():
            close(sock)
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        with self._lock:
            dropped = list(self._waiting.values())
            self._waiting.clear()
        for client in dropped:
            close(client.sock)
            self.forget(client)

    def _accept(self, which: str, listener: socket.socket) -> None:
        for sock, addr in accepted(listener, self._closed):
            client, number = _Client(sock, addr), secrets.token_hex(8)
            with self._lock:
                tunnel = self._tunnel
                if tunnel is not None and self._has_place(client):
                    self._waiting[number] = client
                else:
                    tunnel = None
            if tunnel is None:
                close(sock)
                continue
            with contextlib.suppress(OSError):  # the node is gone; so are those who wait for it, in a moment
                tunnel.send({"open": number, "port": which})

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

    def _tend(self) -> None:
        while not self._closed.wait(PING_S):
            with self._lock:
                tunnel, left_at = self._tunnel, self._left_at
            if tunnel is None and time.monotonic() - left_at >= KEPT_S:
                return self.close()
            if tunnel is not None:
                with contextlib.suppress(OSError):
                    tunnel.send({"ping": ""})


AGAIN_S = 3.0
CLOSE_S = 2.0  # for a thread that connects to a machine that is switched off, which nothing wakes
GONE_S = 120.0
N_STREAMS = 64


class DialOut:
    """Keeps this node reachable through the relay at an address, until `close`.

    Args:
        relay: address and port.
        own: address and ports of this node, by the names in mdi.control.relay.PORTS.
        is_reached: whether it can be reached there. Then the relay only learns of it.
        gone: called once, with a line for people, if the relay does not come within `first_s`, or does not come back within
            GONE_S.
    """

    def __init__(
        self, relay: tuple[str, int], keys: KeyFile, name: str, process: str, own: dict[str, tuple[str, int]],
        is_reached: bool = False, gone: Callable[[str], None] | None = None, first_s: float = math.inf,
    ) -> None:  # fmt: skip
        self._gone, self._first_s = gone, first_s
        self._first = {"name": name, "process": process}
        if is_reached:
            self._first |= {"addr": own["control"][0], **{which: str(port) for which, (_, port) in own.items()}}
        self._relay, self._keys, self._name, self._process, self._own = relay, keys, name, process, own
        self._closed = threading.Event()
        self._dialling = Cancel()
        self._streams = threading.BoundedSemaphore(N_STREAMS)
        self._tunnel: Tunnel | None = None
        self._thread = threading.Thread(target=self._run, name="dial-out", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._dialling.cancel()
        if self._tunnel is not None:
            self._tunnel.close()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        (addr, port), due = self._relay, Periodic()
        where = f"{addr}:{port}"
        is_reported, left_at = False, None
        begin = time.monotonic()
        while not self._closed.is_set():
            try:
                self._tunnel = tunnel = Tunnel.dial(*self._relay, self._keys.keys, self._dialling)
                tunnel.send(self._first)
                logger.info(
                    "%s is %s %s", self._name, "known at" if "addr" in self._first else "reached through", where
                )
                is_reported = False
                try:
                    self._serve(tunnel)
                finally:
                    left_at = time.monotonic()
            except (OSError, MdiError) as e:
                if not self._closed.is_set() and not is_reported and due.is_due():
                    is_reported = True
                    logger.info("%s cannot connect to %s yet (%s): it tries again", self._name, where, e)
            finally:
                if self._tunnel is not None:
                    self._tunnel.close()
            since, limit_s = (begin, self._first_s) if left_at is None else (left_at, GONE_S)
            if self._gone is not None and time.monotonic() - since >= limit_s:
                what = "nobody has opened" if left_at is None else "nobody has opened again"
                self._gone(f"{what} {where} within {duration(limit_s)}")
                return
            self._closed.wait(AGAIN_S)

    def _serve(self, tunnel: Tunnel) -> None:
        while not self._closed.is_set():
            message = tunnel.receive()
            if "open" not in message:
                tunnel.send(message)
            elif message.get("port") in self._own and self._streams.acquire(blocking=False):
                try:
                    threading.Thread(
                        target=self._stream, args=(message["open"], message["port"]), name="dial-out", daemon=True
                    ).start()
                except RuntimeError as e:  # no thread can be had at the moment
                    logger.debug("a connection through the relay: %s", e)
                    self._streams.release()

    def _stream(self, number: str, port: str) -> None:
        try:
            with contextlib.ExitStack() as opened:
                own = socket.create_connection(self._own[port], MEET_S)
                opened.callback(own.close)
                tunnel = Tunnel.dial(*self._relay, self._keys.keys, self._dialling)
                opened.callback(tunnel.close)
                tunnel.send({"stream": number, "process": self._process})
                opened.pop_all()
            join(own, tunnel.sock)
        except (OSError, MdiError) as e:
            logger.debug("a connection through the relay: %s", e)
        finally:
            self._streams.release()
