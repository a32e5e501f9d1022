"""Threads for the connections of the control port. If there are too many, the oldest incomplete request is dropped.

Connections come from anybody, and most of what goes wrong with them is silence. So a connection whose request has not come
whole has a deadline, and makes room for a new one when there are too many: the oldest first, because it has had the most
time, and never one from the address of the run's starter while there are others. A pool of threads that serves one after the
other would let a few silent strangers keep the starter out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from typing import Any

from mdi.net.message import DeadlineSocket

N_CONNECTIONS = 96
N_OF_OWNER = 32  # places more, for the address of the run's starter
N_PER_ADDRESS = 24  # from elsewhere than this machine; a starter has a handful
REQUEST_S = 10  # for a request to come whole; and, of a transfer of weights, for each piece

logger = logging.getLogger(__name__)


class _Worker(threading.Thread):
    """Serves one connection.

    Attributes:
        is_heard: the request has come, or is one that may take long: it is not dropped any more.
    """

    def __init__(self, pool: ConnectionWorkers, connection: Any) -> None:
        super().__init__(name="control-request", daemon=True)
        self.connection = connection
        self.addr: str = connection.remote_addr
        self.is_heard = False
        self._pool = pool

    def run(self) -> None:
        try:
            self.connection.communicate()
        except Exception:  # nothing that a client can do ends the server
            logger.debug("a request from %s failed", self.addr, exc_info=True)
        finally:
            with contextlib.suppress(OSError):
                self.connection.close()
            self._pool.leave(self)

    def drop(self) -> None:
        """Wake the thread: the connection is at its end."""
        with contextlib.suppress(OSError):
            self.connection.socket.shutdown(socket.SHUT_RDWR)


class ConnectionWorkers:
    """In the place of the pool of threads of a cheroot server, which calls `start`, `put` and `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[_Worker, None] = {}  # in the order in which they came
        self._owner: str | None = None

    def start(self) -> None:
        pass

    def put(self, connection: Any) -> None:
        """Serve a connection that was accepted; the one that makes room for it may be itself."""
        connection.socket.read_within(REQUEST_S)
        worker = _Worker(self, connection)
        with self._lock:
            dropped = self._to_drop(worker)
            if dropped is not worker:
                self._workers[worker] = None
            if dropped is not None:
                self._workers.pop(dropped, None)
        if dropped is worker:
            connection.close()
            return
        if dropped is not None:
            dropped.drop()
        worker.start()

    def own(self, addr: str) -> None:
        """The starter of the node's run is at this address: strangers do not take its places."""
        self._owner = addr

    def heard(self) -> None:
        """Called in the thread of a complete request, or of one that may take its time."""
        worker = threading.current_thread()
        if isinstance(worker, _Worker):
            worker.is_heard = True
            sock: DeadlineSocket = worker.connection.socket
            sock.read_each_within(REQUEST_S)

    def leave(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.pop(worker, None)

    def stop(self, timeout_s: float) -> None:
        """Wait for answers that are being sent, and for no other connection."""
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            if not worker.is_heard:
                worker.drop()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            if worker.is_alive():
                worker.drop()
                worker.join(0.1)

    def _to_drop(self, new: _Worker) -> _Worker | None:
        """The connection to drop for a new one; None if there is space."""
        from_there = [w for w in self._workers if w.addr == new.addr]
        if len(from_there) >= N_PER_ADDRESS and not is_here(new.addr):
            return next((w for w in from_there if not w.is_heard), new)
        limit = N_CONNECTIONS + (N_OF_OWNER if new.addr == self._owner else 0)
        if len(self._workers) < limit:
            return None
        unheard = [w for w in self._workers if not w.is_heard]
        return next((w for w in unheard if w.addr != self._owner), unheard[0] if unheard else new)


def is_here(addr: str) -> bool:
    """Whether an address is a loopback one."""
    try:
        found = ipaddress.ip_address(addr.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
