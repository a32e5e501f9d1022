"""Memory that several nodes take from the same machine or GPU: each says that all of it is free, but it is there once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mdi.partition.profile import NodeProfile


def share_memory(nodes: Sequence[NodeProfile], hosts: Sequence[str]) -> tuple[NodeProfile, ...]:
    """The profiles with memory that can be had all at once.

    Where the nodes of one machine and device claim more than is free there, each keeps what it holds already, and what is
    free is divided in proportion to the claims. Nodes whose own limits (control groups) are tighter than that keep them.

    Args:
        hosts: the machine of each node.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for i, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
        if node.shared_bytes:
            device = "cuda:0" if node.device == "cuda" else node.device
            groups.setdefault((host, device), []).append(i)
    shared = list(nodes)
    for group in groups.values():
        free = min(nodes[i].shared_bytes for i in group)
        claims = {i: max(0, nodes[i].memory_bytes - nodes[i].process_bytes - nodes[i].held_bytes) for i in group}
        total = sum(claims.values())
        for i, claim in claims.items():
            part = claim if total <= free else claim * free // total
            shared[i] = replace(nodes[i], memory_bytes=nodes[i].memory_bytes - claim + part)
    return tuple(shared)
