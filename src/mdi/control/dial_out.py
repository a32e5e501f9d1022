"""The node's side of a relay: it connects to the starter's machine, and once more for each connection to the node."""

from __future__ import annotations

import logging
import socket
import threading

from mdi.cancel import Periodic
from mdi.control.tunnel import MEET_S, Tunnel, join
from mdi.errors import MdiError
from mdi.net.keys import KeyFile

AGAIN_S = 3.0
N_STREAMS = 64

logger = logging.getLogger("mdi")


class DialOut:
    """Keeps this node reachable through the relay at an address, until `close`.

    Args:
        relay: address and port.
        own: address and ports of this node, by the names in mdi.control.relay.PORTS.
    """

    def __init__(
        self, relay: tuple[str, int], keys: KeyFile, name: str, process: str, own: dict[str, tuple[str, int]]
    ) -> None:
        self._relay, self._keys, self._name, self._process, self._own = relay, keys, name, process, own
        self._closed = threading.Event()
        self._streams = threading.BoundedSemaphore(N_STREAMS)
        self._tunnel: Tunnel | None = None
        self._thread = threading.Thread(target=self._run, name="dial-out", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._tunnel is not None:
            self._tunnel.close()
        self._thread.join()

    def _run(self) -> None:
        (addr, port), due = self._relay, Periodic()
        where = f"{addr}:{port}"
        is_reported = False
        while not self._closed.is_set():
            try:
                self._tunnel = tunnel = Tunnel.dial(*self._relay, self._keys.keys)
                tunnel.send({"name": self._name, "process": self._process})
                logger.info("%s is reached through %s", self._name, where)
                is_reported = False
                self._serve(tunnel)
            except (OSError, MdiError) as e:
                if not self._closed.is_set() and not is_reported and due.is_due():
                    is_reported = True
                    logger.info("%s cannot connect to %s yet (%s): it tries again", self._name, where, e)
            finally:
                if self._tunnel is not None:
                    self._tunnel.close()
            self._closed.wait(AGAIN_S)

    def _serve(self, tunnel: Tunnel) -> None:
        while not self._closed.is_set():
            message = tunnel.receive()
            if "open" not in message:
                tunnel.send(message)
            elif message.get("port") in self._own and self._streams.acquire(blocking=False):
                threading.Thread(
                    target=self._stream, args=(message["open"], message["port"]), name="dial-out", daemon=True
                ).start()

    def _stream(self, number: str, port: str) -> None:
        try:
            own = socket.create_connection(self._own[port], MEET_S)
            try:
                tunnel = Tunnel.dial(*self._relay, self._keys.keys)
                tunnel.send({"stream": number, "process": self._process})
            except BaseException:
                own.close()
                raise
            join(own, tunnel.sock)
        except (OSError, MdiError) as e:
            logger.debug("a connection through the relay: %s", e)
        finally:
            self._streams.release()
