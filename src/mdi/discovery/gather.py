"""Finds nodes for a starter: those that announce themselves or connect to --dial-port, and prove that they have the key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mdi.config import ClusterConfig, NodeConfig
from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.discovery.announcement import Announcement
from mdi.errors import ControlError
from mdi.security.keys import KeyFile
from mdi.units import counted, duration

SETTLE_S = 3.0  # without a new node, if the number of nodes is not given
POLL_S = 0.2  # several sources have to be looked at, and nodes that did not answer are asked again
AGAIN_S = 2.0  # until a node that did not answer is asked again
ASK_S = 5.0

Source = Callable[[], Iterable[Announcement]]


@dataclass(frozen=True)
class FoundNode:
    """A node of the cluster, and its status."""

    announcement: Announcement
    status: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.announcement.name} at {self.announcement.addr}:{self.announcement.port}"

    def config(self, name: str) -> NodeConfig:
        """As an entry of a nodes file."""
        found = self.announcement
        return NodeConfig(name, found.addr, found.port, found.ring_port)


class Gathering:
    """Asks the nodes that the sources name, and keeps those that answer with the key.

    Args:
        on_come: called once for each node.
    """

    def __init__(
        self, sources: Sequence[Source], keys: KeyFile, on_come: Callable[[FoundNode], None] = lambda node: None
    ) -> None:
        self._sources, self._keys, self._on_come = sources, keys, on_come
        self._found: dict[str, FoundNode] = {}  # by process
        self._asked_at: dict[str, float] = {}

    @property
    def nodes(self) -> list[FoundNode]:
        return sorted(self._found.values(), key=lambda node: (node.announcement.name, node.label))

    def look(self) -> bool:
        """Ask new nodes, and forget those that are gone. Returns whether a node came."""
        there = {found.process: found for source in self._sources for found in source()}
        for process in self._found.keys() - there.keys():
            del self._found[process]
        now = time.monotonic()
        new = {
            process: found
            for process, found in there.items()
            if process not in self._found and now - self._asked_at.get(process, -AGAIN_S) >= AGAIN_S
        }
        self._asked_at.update(dict.fromkeys(new, now))
        asked = FanOut({process: partial(self._status_of, found) for process, found in new.items()})
        asked.join(ASK_S)
        come = [
            FoundNode(new[process], status) for process, status in list(asked.results.items()) if status is not None
        ]
        for node in come:
            self._found[node.announcement.process] = node
            self._on_come(node)
        return bool(come)

    def wait(self, n_nodes: int | None, wait_s: float, check: Callable[[], None] = lambda: None) -> list[FoundNode]:
        """The nodes, once `n_nodes` are there; or, for None, once no more have come for a while.

        Raises:
            ControlError: that many did not come in time.
        """
        begin = last = time.monotonic()
        while True:
            check()
            now = time.monotonic()
            if self.look():
                last = now
            if n_nodes is not None and len(self._found) >= n_nodes:
                return self.nodes[:n_nodes]
            if n_nodes is None and self._found and now - last >= SETTLE_S:
                return self.nodes
            if now - begin >= wait_s:
                raise ControlError(self._too_few(n_nodes, wait_s))
            time.sleep(POLL_S)

    def within(self, wait_s: float) -> list[FoundNode]:
        """The nodes that have been found when the time is over."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            self.look()
            time.sleep(POLL_S)
        return self.nodes

    def _too_few(self, n_nodes: int | None, wait_s: float) -> str:
        there = ", ".join(node.label for node in self.nodes) or "none"
        wanted = "no node" if n_nodes is None else f"not {counted(n_nodes, 'node')}"
        return (
            f"{wanted} of this key came within {duration(wait_s)} (there: {there}): run `mdi join` on each board, or name the "
            "nodes in a file (--nodes-config)"
        )

    def _status_of(self, found: Announcement) -> dict[str, Any] | None:
        """What the node says; None if it is not the one that is announced."""
        node = NodeConfig(found.name, found.addr, found.port, found.ring_port)
        status = ControlClient(node, self._keys).status(timeout_s=ASK_S)
        return status if status.get("process") == found.process else None


def cluster_of(nodes: Sequence[FoundNode], starter: NodeConfig, keys: KeyFile) -> ClusterConfig:
    """What a nodes file would say of them."""
    return ClusterConfig(starter, tuple(node.config(f"secondary{i}") for i, node in enumerate(nodes)), keys)
