"""Both ports of a node that is not one: what HTTP and messages ask is answered by any object."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from loopback import listener
from mdi.control.client import ControlClient
from mdi.control.message_server import EchoOnly, MessageServer
from mdi.control.messages import CONTROL_VERSION
from mdi.control.server import ControlServer, StatusOnly
from mdi.net.keys import KeyFile
from mdi.net.message import Message
from mdi.spec.cluster import NodeConfig


class BareNode(StatusOnly, EchoOnly):
    """Base of nodes that tests make up."""

    def status(self, run: str | None) -> dict[str, Any]:
        return {"name": "secondary0", "version": "9", "state": "IDLE", "control_version": CONTROL_VERSION}


@contextlib.contextmanager
def ring_port_of(node: Any, keys: KeyFile | None = None, name: str = "secondary0") -> Iterator[NodeConfig]:
    """Where a node is asked with messages meanwhile."""
    ring = listener(name, keys)
    messages = MessageServer(node, ring)
    try:
        yield NodeConfig(name, "127.0.0.1", 0, ring.port)
    finally:
        messages.close()
        ring.close()


@contextlib.contextmanager
def ports_of(node: Any, keys: KeyFile | None = None, name: str = "secondary0") -> Iterator[NodeConfig]:
    """Where a node is served meanwhile."""
    with ring_port_of(node, keys, name) as entry:
        control = ControlServer(node, "127.0.0.1", 0, name, keys)
        try:
            yield replace(entry, port=control.port)
        finally:
            control.close()


@contextlib.contextmanager
def client_of(node: Any, keys: KeyFile | None = None) -> Iterator[ControlClient]:
    with ports_of(node, keys) as entry:
        yield ControlClient(entry, keys)


class Pushing:
    """In the place of a ring that is watched: the status is asked again after each `change`."""

    has_ended = False

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status, self._last, self.n_signs = status, None, 0  # type: ignore[var-annotated]

    def changed(self, timeout_s: float) -> dict[str, Any] | None:
        status = self._status()
        if status == self._last:
            threading.Event().wait(min(timeout_s, 0.02))
            return None
        self._last = status
        return status

    def touch(self) -> None:
        self.n_signs += 1


def opened(entry: NodeConfig, ask: str, n_bytes: int = 0, keys: KeyFile | None = None, **args: Any) -> Message:
    """A message whose opening was sent."""
    opening = {"ask": ask, "version": CONTROL_VERSION, "n_bytes": n_bytes, "args": args}
    return Message(entry.addr, entry.port_in, opening, keys, 30.0, 30.0)
