"""The ports of a starter and the cache memory of its process, for one run or for several at the same time."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Protocol

from mdi.control.asked import EchoOnly, MessageServer
from mdi.control.server import ControlServer, StatusOnly
from mdi.errors import ControlError
from mdi.net.listener import RingListener, open_socket
from mdi.spec.cluster import ClusterConfig
from mdi.stages.store import StageStore


class RunStatus(Protocol):
    """A run that can be asked for its status."""

    @property
    def run_id(self) -> str: ...

    def status(self, run: str | None) -> dict[str, Any]: ...

    def check_echo(self) -> None: ...


class StarterPorts(StatusOnly, EchoOnly):
    """Opened by the first run. A ring of one node has no ring port, and no control port if its number is 0."""

    def __init__(self) -> None:
        self.caches = StageStore()
        self.control: ControlServer | None = None
        self.listener: RingListener | None = None
        self._messages: MessageServer | None = None
        self._runs: list[RunStatus] = []
        self._opening = threading.Lock()

    def add(self, run: RunStatus, cluster: ClusterConfig) -> None:
        """From now on, answer for this one, too. Raises UsageError if a port cannot be had."""
        node = cluster.starter
        with self._opening:
            self._runs.append(run)
            if self.control is None and (cluster.secondaries or node.port):
                self.control = ControlServer(self, node.listen_addr, node.port, node.name, cluster.keys)
            if self.listener is None and cluster.secondaries:
                sock = open_socket(node.listen_addr, node.port_in, "starter's inference port_in")
                self.listener = RingListener(sock, node.name, cluster.keys)
                self._messages = MessageServer(self, self.listener)

    def over(self, cluster: ClusterConfig) -> ClusterConfig:
        """A cluster of several nodes with the ports that this one really has."""
        assert self.listener is not None and self.control is not None
        return replace(cluster, starter=replace(cluster.starter, port=self.control.port, port_in=self.listener.port))

    def remove(self, run: RunStatus) -> None:
        """Harmless if repeated."""
        if run in self._runs:
            self._runs.remove(run)

    def status(self, run: str | None) -> dict[str, Any]:
        """The status of the requested run, else of the latest one."""
        if not self._runs:
            raise ControlError("this starter has no run yet", 503, code="starting")
        return next((one for one in self._runs if one.run_id == run), self._runs[-1]).status(run)

    def check_echo(self) -> None:
        for run in self._runs:
            run.check_echo()

    def close(self) -> None:
        """Harmless if repeated."""
        if self.control is not None:
            self.control.close()
        if self._messages is not None:
            self._messages.close()
        if self.listener is not None:
            self.listener.close()
        self.control = self.listener = None
