"""Divides the memory of a machine among the profiles of its nodes.

Memory of the machine or GPU: each node says that all of it is free, but it is there once. And times: nodes that are alike are
equally fast, whatever else the machine did while one of them measured itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import fmean

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


def level_times(nodes: Sequence[NodeProfile], alike: Sequence[Hashable]) -> tuple[NodeProfile, ...]:
    """The profiles with the mean times of nodes that are alike, so that noise does not decide which one gets the blocks.

    Args:
        alike: of each node; equal where machine, device, cores, threads and format are.
    """
    groups: dict[tuple[Hashable, tuple[int, ...]], list[int]] = {}
    for i, key in enumerate(alike):
        groups.setdefault((key, tuple(rows for rows, _ in nodes[i].block_s)), []).append(i)
    level = list(nodes)
    for (_, rows), group in groups.items():
        means = [fmean(nodes[i].block_s[k][1] for i in group) for k in range(len(rows))]
        read = fmean(nodes[i].read_bytes_s for i in group)
        for i in group:
            level[i] = replace(nodes[i], block_s=tuple(zip(rows, means, strict=True)), read_bytes_s=read)
    return tuple(level)
