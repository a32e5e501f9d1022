"""Nodes on one machine, which share its cores and memory bandwidth.

A node that computes takes a part of its machine (`NodeProfile.machine_share`). In steady state the nodes of a machine compute
at the same time; together they cannot take more than all of it. So each frame keeps the machine busy for the sum of its
nodes' stages, each times the node's part.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdi.partition.links import HOP_S
from mdi.partition.profile import NodeProfile

# Places in the ring of a machine's nodes, with their shares of it.
Machine = tuple[tuple[int, float], ...]


def machines_of(nodes: Sequence[NodeProfile], order: Sequence[int]) -> tuple[Machine, ...]:
    """The machines on which a ring has several nodes."""
    found: dict[str, list[tuple[int, float]]] = {}
    for k, i in enumerate(order):
        if nodes[i].machine and nodes[i].machine_share:
            found.setdefault(nodes[i].machine, []).append((k, nodes[i].machine_share))
    return tuple(tuple(members) for members in found.values() if len(members) > 1)


def work_s(machine: Machine, stages: Sequence[float]) -> float:
    """How long one frame keeps a machine busy, hand-overs included."""
    return sum(share * (stages[k] + HOP_S) for k, share in machine)


def busiest_s(machines: Sequence[Machine], stages: Sequence[float]) -> float:
    """The same for the machine that a frame keeps busy longest; 0 if no nodes share one."""
    return max((work_s(machine, stages) for machine in machines), default=0.0)


def stage_limits(machines: Sequence[Machine], n_nodes: int, stage_s: float) -> list[float]:
    """How long each node's stage may take so that neither it nor its machine is busy for longer than `stage_s`.

    If all nodes of a machine keep to it, the machine does; it may do so as well if one takes longer and another less.
    """
    limits = [stage_s] * n_nodes
    for machine in machines:
        total = sum(share for _, share in machine)
        for k, _ in machine:
            limits[k] = min(stage_s, stage_s / total - HOP_S)
    return limits
