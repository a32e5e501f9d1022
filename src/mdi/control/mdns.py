"""Announcements on the local network by multicast DNS (RFC 6762, RFC 6763): this node's own, and its cluster's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence

from zeroconf import (
    DNSOutgoing,
    DNSQuestion,
    InterfaceChoice,
    IPVersion,
    ServiceBrowser,
    ServiceInfo,
    ServiceStateChange,
    Zeroconf,
)

from mdi.control.discovery import Announcement
from mdi.errors import UsageError
from mdi.net.keys import KeyFile

SERVICE = "_mdi-llm._tcp.local."
N_KEPT = 1024  # announcements that are remembered: strangers must not fill a node
N_RESOLVED = 64  # names at the same time that came without an address: nearly all announcements have one
RESOLVE_MS = 3000
CLOSE_S = 5.0
GONE_S = 3.0  # after a goodbye, for an answer: others may have asked just before, and answers wait a second then
QUERY, POINTER, INTERNET = 0, 12, 1  # of multicast DNS: flags, type and class

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
        # Nobody is asked whether the name is free: it has 64 random bits, so whoever has it, too, wants to keep the node away.
        try:
            self._zeroconf.register_service(self._info, cooperating_responders=True)
        except BaseException:
            self._zeroconf.close()
            raise

    def close(self) -> None:
        self._zeroconf.close()


class Browser:
    """The nodes of a cluster that announce themselves, until `close`.

    Announcements that are complete count at once. For names that came without an address the network is asked, for all at the
    same time, so that names that nobody explains delay nothing; of too many the oldest are given up.
    """

    def __init__(self, keys: KeyFile, interfaces: Sequence[str] = ()) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._found: dict[str, Announcement] = {}
        self._doubted: dict[str, float] = {}  # of those, who has said goodbye: until when it may answer
        self._zeroconf = _open(interfaces)
        self._asked: dict[str, asyncio.Task[None]] = {}  # the oldest first; only for zeroconf's thread
        self._browser = ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._on_change])

    def nodes(self) -> list[Announcement]:
        """The present nodes, in the order of their names."""
        now = time.monotonic()
        with self._lock:
            for name in [name for name, end in self._doubted.items() if end <= now]:
                del self._doubted[name]
                self._found.pop(name, None)
            return sorted(self._found.values(), key=lambda node: (node.name, node.addr, node.port))

    def close(self) -> None:
        self._browser.cancel()
        assert self._zeroconf.loop is not None
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):  # one class from Python 3.11 on
            asyncio.run_coroutine_threadsafe(self._give_up(), self._zeroconf.loop).result(CLOSE_S)
        self._zeroconf.close()

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            return self._doubt(name)
        with self._lock:
            self._doubted.pop(name, None)
        try:
            info = ServiceInfo(SERVICE, name)
            if info.load_from_cache(zeroconf):
                self._add(name, info)
            elif zeroconf.loop is not None:
                zeroconf.loop.call_soon_threadsafe(self._ask, name, info)
        except Exception as e:  # an error of the library, or closed meanwhile: one announcement less
            logger.debug("an announcement that cannot be read: %s", e)

    def _doubt(self, name: str) -> None:
        """A goodbye is not signed: whoever is there answers to a question, and stays."""
        question = DNSOutgoing(QUERY)
        question.add_question(DNSQuestion(SERVICE, POINTER, INTERNET))
        with self._lock:
            if name not in self._found:
                return
            self._doubted[name] = time.monotonic() + GONE_S
        self._zeroconf.send(question)

    def _ask(self, name: str, info: ServiceInfo) -> None:
        if name in self._asked:
            return
        if len(self._asked) >= N_RESOLVED:
            self._asked.pop(next(iter(self._asked))).cancel()
        self._asked[name] = asyncio.get_running_loop().create_task(self._resolve(name, info))

    async def _resolve(self, name: str, info: ServiceInfo) -> None:
        task = asyncio.current_task()
        try:
            if await info.async_request(self._zeroconf, RESOLVE_MS):
                self._add(name, info)
        except Exception as e:
            logger.debug("an announcement that cannot be read: %s", e)
        finally:
            if self._asked.get(name) is task:
                del self._asked[name]

    async def _give_up(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, name: str, info: ServiceInfo) -> None:
        """Keep what is announced under a name, if it is a node of the cluster."""
        if info.port is None:
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
