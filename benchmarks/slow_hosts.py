"""Hosts of their own on this machine, each a network namespace, joined by a switch with a delay and a rate.

Needs root, `ip`, /dev/net/tun and a C++ compiler. The switch (slow_switch.cpp) takes some of a core.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from lossy_network import IFF_NO_PI, Hosts

GIGABIT = 0.0002, 940.0  # Gigabit Ethernet: delay one way in seconds, Mbit/s

IFF_VNET_HDR, TUNSETOFFLOAD = 0x4000, 0x400454D0
CHECKSUM, TSO4 = 1, 2  # offloads
SOURCE = Path(__file__).with_name("slow_switch.cpp")


class SlowHosts(Hosts):
    """Hosts joined by a switch, which is a process.

    Args:
        delay_s: one way.
        mbit: that each host may send in a second, or what each of them may; 0: as much as it can.
    """

    def __init__(self, n_hosts: int, delay_s: float, *mbit: float) -> None:
        self._switch: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(n_hosts, IFF_NO_PI | IFF_VNET_HDR)
        try:
            for tap in self.taps:
                fcntl.ioctl(tap, TUNSETOFFLOAD, CHECKSUM | TSO4)
            compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
            subprocess.run([compiler, "-O2", "-std=c++17", str(SOURCE), "-o", self._program], check=True)
            self.join(delay_s, *mbit)
        except BaseException:
            self.close()
            raise

    @property
    def _program(self) -> str:
        return f"{self._folder.name}/slow_switch"

    def join(self, delay_s: float, *mbit: float) -> None:
        """A switch with these numbers, in the place of one that is there; what is under way then is lost, and sent again."""
        self._end_switch()
        numbers = [f"{1e6 * delay_s:.0f}", ",".join(f"{rate:g}" for rate in mbit or (0,)), *map(str, self.taps)]
        self._switch = subprocess.Popen([self._program, *numbers], pass_fds=self.taps, stdin=subprocess.PIPE, text=True)

    def slow(self, a: int, b: int, more_s: float) -> None:
        """From now on the link between two hosts takes so much longer, in both directions."""
        assert self._switch is not None and self._switch.stdin is not None
        print(a, b, f"{1e6 * more_s:.0f}", file=self._switch.stdin, flush=True)

    def enter(self, host: int) -> None:
        """From now on this process is on a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/var/run/netns/{self.names[host]}", os.O_RDONLY)
        try:
            if libc.setns(fd, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.names[host]}")
        finally:
            os.close(fd)

    def _end_switch(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()

    def close(self) -> None:
        self._end_switch()
        self._folder.cleanup()
        super().close()
