"""Announcements on the local network by multicast DNS (RFC 6762, RFC 6763): this node's own, and its cluster's."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Sequence

from zeroconf import InterfaceChoice, IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from mdi.discovery.announcement import Announcement
from mdi.errors import UsageError
from mdi.security.keys import KeyFile

SERVICE = "_mdi-llm._tcp.local."
N_KEPT = 1024  # announcements that are remembered: strangers must not fill a node
RESOLVE_MS = 3000

logger = logging.getLogger("mdi")


class Announcer:
    """Announces a node until `close`.

    Args:
        interfaces: addresses of this machine to announce on; none are all.

    Raises:
        UsageError: no socket for it can be had.
    """

    def __init__(self, announcement: Announcement, interfaces: Sequence[str] = ()) -> None:
        self._zeroconf = _open(interfaces)
        self._info = ServiceInfo(
            SERVICE,
            f"{announcement.process}.{SERVICE}",
            addresses=[socket.inet_aton(announcement.addr)],
            port=announcement.port,
            properties=announcement.fields(),
            server=f"mdi-{announcement.process}.local.",
        )
        self._zeroconf.register_service(self._info)

    def close(self) -> None:
        self._zeroconf.close()


class Browser:
    """The nodes of a cluster that announce themselves, until `close`."""

    def __init__(self, keys: KeyFile, interfaces: Sequence[str] = ()) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._found: dict[str, Announcement] = {}
        self._zeroconf = _open(interfaces)
        self._to_resolve: queue.Queue[str | None] = queue.Queue(N_KEPT)
        self._resolver = threading.Thread(target=self._resolve_all, name="mdns", daemon=True)
        self._resolver.start()
        self._browser = ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._on_change])

    def nodes(self) -> list[Announcement]:
        """The present nodes, in the order of their names."""
        with self._lock:
            return sorted(self._found.values(), key=lambda node: (node.name, node.addr, node.port))

    def close(self) -> None:
        self._browser.cancel()
        with contextlib.suppress(queue.Empty):
            while True:
                self._to_resolve.get_nowait()
        self._to_resolve.put(None)
        self._resolver.join()
        self._zeroconf.close()

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            with self._lock:
                self._found.pop(name, None)
        else:  # a thread of ours asks for the rest of the announcement, because this one is zeroconf's
            with contextlib.suppress(queue.Full):
                self._to_resolve.put_nowait(name)

    def _resolve_all(self) -> None:
        while (name := self._to_resolve.get()) is not None:
            self._resolve(name)

    def _resolve(self, name: str) -> None:
        info = ServiceInfo(SERVICE, name)
        try:
            if not info.request(self._zeroconf, RESOLVE_MS) or info.port is None:
                return
        except Exception as e:  # an error of the library, or closed meanwhile: one announcement less
            logger.debug("an announcement that cannot be read: %s", e)
            return
        fields = {key: value or "" for key, value in info.decoded_properties.items()}
        for addr in info.parsed_addresses(IPVersion.V4Only):
            found = Announcement.parse(addr, info.port, fields)
            if found is not None and found.is_of(self._keys.keys):
                with self._lock:
                    if name in self._found or len(self._found) < N_KEPT:
                        self._found[name] = found
                return


def _open(interfaces: Sequence[str]) -> Zeroconf:
    try:
        return Zeroconf(list(interfaces) or InterfaceChoice.All, ip_version=IPVersion.V4Only)
    except OSError as e:
        raise UsageError(
            f"nodes cannot be found on this network ({e.strerror or e}): write a nodes file, see --nodes-config"
        ) from None
