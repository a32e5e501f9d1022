"""The starter's two ports before there is a run: for a doctor, or while a placement is computed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import mdi
from mdi.control.asked import EchoOnly, MessageServer
from mdi.control.messages import CONTROL_VERSION
from mdi.control.server import ControlServer, StatusOnly
from mdi.net.keys import KeyFile
from mdi.net.listener import RingListener, open_socket
from mdi.spec.cluster import NodeConfig


class _BeforeRun(StatusOnly):
    def __init__(self, name: str) -> None:
        self._name = name

    def status(self, run: str | None) -> dict[str, Any]:
        return {
            "name": self._name,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "state": "IDLE",
            "clock_s": time.time(),
        }


@contextlib.contextmanager
def open_ports(starter: NodeConfig, keys: KeyFile | None = None) -> Iterator[tuple[int, int]]:
    """Listen on the starter's control and ring port; gives both ports. UsageError if one cannot be listened on."""
    sock = open_socket(starter.listen_addr, starter.port_in, "starter's inference port_in")
    listener = RingListener(sock, starter.name, keys)
    messages = MessageServer(EchoOnly(), listener)
    try:
        control = ControlServer(_BeforeRun(starter.name), starter.listen_addr, starter.port, starter.name, keys)
        try:
            yield control.port, listener.port
        finally:
            control.close()
    finally:
        messages.close()
        listener.close()
