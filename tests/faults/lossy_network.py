"""Hosts of their own on this machine, joined by a switch that is slow and loses packets. Needs root, `ip` and /dev/net/tun.

Each host is a network namespace with one TAP device, whose other end we read: what one host sends, another one gets later, at
the link's rate, or never. So TCP itself has to make up for it, as over a bad radio link.
`benchmarks/slow_hosts.py` joins the same hosts by a faster switch.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
BROADCAST = 1  # bit of the first byte of a destination: not for one host alone
DEADLINE_S = 30.0


def is_possible() -> bool:
    return os.name == "posix" and os.geteuid() == 0 and TUN.exists() and shutil.which("ip") is not None


class Hosts:
    """Hosts 0 ... n - 1 with the addresses 10.77.0.1 ..., whose packets nobody hands on yet.

    Attributes:
        names: of their network namespaces.
        taps: open devices, one of each host: what it sends is read there, and what is written there it gets.
    """

    def __init__(self, n_hosts: int, tap_flags: int = IFF_NO_PI) -> None:
        self.names = [f"mdi{os.getpid()}h{i}" for i in range(n_hosts)]
        self.taps: list[int] = []
        try:
            for i, host in enumerate(self.names):
                self._add(i, host, tap_flags)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, *command: str) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def close(self) -> None:
        for tap in self.taps:
            os.close(tap)
        self.taps.clear()
        for host in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host)

    def _add(self, i: int, host: str, tap_flags: int) -> None:
        _ip("netns", "add", host)
        tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        self.taps.append(tap)
        name = f"mdit{os.getpid() % 100000}x{i}"
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | tap_flags))
        _ip("link", "set", name, "address", f"02:00:00:00:00:{i:02x}")
        _ip("link", "set", name, "netns", host)
        _ip("-n", host, "addr", "add", f"{self.address(i)}/24", "dev", name)
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "link", "set", name, "up")


class LossyNetwork(Hosts):
    """Hosts joined by a switch, which is a thread.

    Args:
        delay_s: one way.
        bytes_per_s: that each host may send.
        loss: of packets, 0 to 1.
    """

    def __init__(self, n_hosts: int, delay_s: float, bytes_per_s: float, loss: float, seed: int = 1) -> None:
        self._delay_s, self._bytes_per_s, self._loss = delay_s, bytes_per_s, loss
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.n_sent = self.n_lost = 0
        super().__init__(n_hosts)
        self._thread = threading.Thread(target=self._run, name="lossy-network", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
        super().close()

    def _run(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        free_at = [0.0] * len(self.taps)
        while not self._over.is_set():
            wait_s = min(0.1, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.1
            for tap in select.select(self.taps, [], [], wait_s)[0]:
                source = self.taps.index(tap)
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(tap, 65536)
                    now = time.monotonic()
                    free_at[source] = max(now, free_at[source]) + len(packet) / self._bytes_per_s
                    for target in self._targets(source, packet):
                        self.n_sent += 1
                        if self._chance.random() < self._loss:
                            self.n_lost += 1
                            continue
                        heapq.heappush(under_way, (free_at[source] + self._delay_s, next(order), target, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(under_way)
                with contextlib.suppress(OSError):
                    os.write(self.taps[target], packet)

    def _targets(self, source: int, packet: bytes) -> list[int]:
        if packet[0] & BROADCAST:
            return [i for i in range(len(self.taps)) if i != source]
        return [packet[5]] if packet[5] < len(self.taps) else []


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=DEADLINE_S)
