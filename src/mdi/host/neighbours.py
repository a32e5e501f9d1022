"""Nodes on one machine: which they are, and how many of its cores each computes on."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import psutil

from mdi.control_groups import n_cores
from mdi.spec.cluster import NodeConfig


def host_of(addr: str) -> str:
    """The machine behind an address, as far as it is known: nodes of one machine share its cores."""
    try:
        found = str(socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return addr
    return "loopback" if found.startswith("127.") or found == "::1" else found


def threads_of_others(node: NodeConfig, nodes: Sequence[NodeConfig]) -> list[int | None]:
    """Threads of the other nodes on this node's machine, None where the nodes file says nothing; nodes on GPUs do not count."""
    others = [other for other in nodes if other.name != node.name and (other.device or "auto") in ("auto", "cpu")]
    if not others:
        return []
    host = host_of(node.addr)
    return [_threads_of(other) for other in others if host_of(other.addr) == host]


def _threads_of(node: NodeConfig) -> int | None:
    return node.threads or (len(node.cores) if node.cores else None)


def fair_threads(others: Sequence[int | None], cores: float | None = None) -> int:
    """Threads for a node that was not given a number: one for each whole core that it can have.

    A thread more than cores only makes the others wait, and under a quota stops all of them for the rest of the period. Of
    two threads on one core (hyper-threading) the second brings nothing.

    Args:
        others: threads of the other nodes of this machine; those without a number get as many as this one.
        cores: that this process may use; None asks the system.
    """
    left = (usable_cores() if cores is None else cores) - sum(n for n in others if n is not None)
    return max(1, int(left / (1 + sum(n is None for n in others))))


def usable_cores() -> float:
    """Cores that this process may use; two that are one core of the hardware count once."""
    usable = n_cores()
    return min(usable, psutil.cpu_count(logical=False) or usable)
