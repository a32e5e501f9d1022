"""Networks of a test's own: namespaces joined by a bridge, so that nothing reaches a real network."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@contextlib.contextmanager
def network(n_hosts: int) -> Iterator[list[tuple[str, str]]]:
    """Hosts in one network: (namespace, address) of each. Skips the test where namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = f"mdi{os.getpid()}"
    switch, made = f"{mark}s", []
    try:
        try:
            run("ip", "netns", "add", switch)
            made.append(switch)
            run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
            run("ip", "-n", switch, "link", "set", "br0", "up")
        except (OSError, subprocess.CalledProcessError) as e:
            pytest.skip(f"no network namespaces here: {getattr(e, 'stderr', e)}")
        hosts = []
        for i in range(n_hosts):
            name, addr = f"{mark}h{i}", f"10.77.0.{i + 1}"
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{i}", "netns", switch)
            run("ip", "-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{addr}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "route", "add", "default", "dev", "eth0")
            hosts.append((name, addr))
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)
