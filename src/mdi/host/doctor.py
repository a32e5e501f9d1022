"""Examines a cluster before a run: every node from here, and every link of the ring from both ends."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mdi
from mdi.cancel import Cancel
from mdi.checkpoint.store import BlockStore
from mdi.control.client import PROBE_ANSWER_S, ControlClient, FanOut
from mdi.control.messages import CONTROL_VERSION, ProbeRequest
from mdi.control.reach import DEADLINE_S, UNTRIED, Reach, Route, bandwidth, try_node
from mdi.control.server import open_ports
from mdi.errors import ControlError, UsageError
from mdi.files import default_cache_dir
from mdi.host.device import choose_device, devices
from mdi.host.diagnosis import LinkFinding, NodeFinding, Problem, Report
from mdi.host.resources import device_free_bytes, free_memory_bytes
from mdi.kernels import library
from mdi.net.keys import KeyFile
from mdi.spec.cluster import ClusterConfig, NodeConfig

NOTHING = Route(UNTRIED, UNTRIED)


def examine(
    cluster: ClusterConfig,
    deadline_s: float = DEADLINE_S,
    needed_bytes: Mapping[str, int] | None = None,
    cache_dir: Path | None = None,
    cancel: Cancel | None = None,
) -> Report:
    """Reach everything that a run needs to reach. Takes a few deadlines, however many nodes there are.

    Args:
        deadline_s: for each connection and each answer.
        needed_bytes: weights that each node would get, by name; None is unknown.
        cache_dir: where this machine's free disk is looked at.
        cancel: ends the waiting, with its error.
    """
    cancel = cancel or Cancel()
    needed = needed_bytes or {}
    own: list[Problem] = []
    starter = starter_finding(cluster.starter, needed, cache_dir)
    with contextlib.ExitStack() as stack:
        if cluster.secondaries:
            try:
                ports = stack.enter_context(open_ports(cluster.starter, cluster.keys))
                cluster = replace(cluster, starter=replace(cluster.starter, port=ports[0], port_in=ports[1]))
            except UsageError as e:
                own.append(Problem("starter", str(e), "If that is a starter of yours, wait for its end"))
        nodes = (starter, *reach_nodes(cluster, deadline_s, needed, cancel))
        links = _measured(_reach_neighbours(cluster, nodes, cancel), nodes, cluster.keys, cancel)
    return Report(nodes, tuple(links), tuple(own))


def starter_finding(node: NodeConfig, needed: Mapping[str, int], cache_dir: Path | None) -> NodeFinding:
    """This machine, as it describes itself."""
    try:
        free = device_free_bytes(choose_device(node.device))
    except UsageError:  # a missing device is reported together with the present ones
        free = free_memory_bytes()
    status = {
        "name": node.name,
        "state": "IDLE",
        "version": mdi.__version__,
        "control_version": CONTROL_VERSION,
        "arithmetic": library.arithmetic(),
        "kernels": library.instruction_set(),
        "memory": {"available_bytes": free},
        "devices": devices(),
        "disk_free_bytes": BlockStore(cache_dir or default_cache_dir()).free_bytes(),
    }
    return NodeFinding(node, Route(Reach(), Reach()), status, needed.get(node.name, 0))


def reach_nodes(
    cluster: ClusterConfig, deadline_s: float, needed: Mapping[str, int], cancel: Cancel
) -> list[NodeFinding]:
    """Every secondary from here, all at once."""

    def reach(node: NodeConfig) -> NodeFinding:
        route = try_node(_request(node), deadline_s, cluster.keys)
        return NodeFinding(node, route, route.status or {}, needed.get(node.name, 0))

    calls = {node.name: lambda node=node: reach(node) for node in cluster.secondaries}
    return FanOut(calls).wait(cancel, 12 * deadline_s)


def _reach_neighbours(cluster: ClusterConfig, nodes: tuple[NodeFinding, ...], cancel: Cancel) -> list[LinkFinding]:
    """Each node asked for its way to the next and to the previous one; the starter's own ways are known already."""
    if len(nodes) == 1:
        return []
    configs = cluster.nodes

    def ways_of(index: int) -> list[LinkFinding]:
        steps = (1,) if len(nodes) == 2 else (1, -1)
        return [_way(nodes, index, configs[(index + step) % len(nodes)], step == 1, cluster.keys) for step in steps]

    calls = {node.name: lambda i=i: ways_of(i) for i, node in enumerate(configs)}
    found = FanOut(calls).wait(cancel, 4 * PROBE_ANSWER_S)
    return [link for links in found for link in links]


def _way(
    nodes: tuple[NodeFinding, ...], source: int, target: NodeConfig, in_ring: bool, keys: KeyFile | None
) -> LinkFinding:
    asked = nodes[source]
    name = asked.node.name
    if source == 0:
        known = next(finding.route for finding in nodes if finding.node.name == target.name)
        return LinkFinding(name, target, known, in_ring)
    cannot_ask = not asked.status or not asked.route.ring.is_ok
    if cannot_ask or asked.status.get("state") == "RUNNING" or "samples" in asked.status:
        return LinkFinding(name, target, NOTHING, in_ring)  # said elsewhere
    try:
        answer = ControlClient(asked.node, keys).probe(_request(target))
        return LinkFinding(name, target, Route.from_json(answer), in_ring)
    except ControlError as e:
        return LinkFinding(name, target, NOTHING, in_ring, str(e))


def _measured(
    links: list[LinkFinding], nodes: tuple[NodeFinding, ...], keys: KeyFile | None, cancel: Cancel
) -> list[LinkFinding]:
    """Bandwidth of the ring's links, one after the other, so that none takes part of another's."""
    configs = {finding.node.name: finding.node for finding in nodes}
    measured = []
    for link in links:
        cancel.check()
        route = link.route
        if link.in_ring and route.ring.is_ok:
            rate = link_bandwidth(configs[link.source], link.target, keys)
            route = replace(route, ring=replace(route.ring, bytes_s=rate))
        measured.append(replace(link, route=route))
    return measured


def link_bandwidth(source: NodeConfig, target: NodeConfig, keys: KeyFile | None = None) -> float:
    """Bytes per second from a node to another; 0 if that cannot be measured now."""
    if source.name == "starter":
        return bandwidth(ControlClient(target, keys))
    try:
        answer = ControlClient(source, keys).probe(_request(target, measure=True))
        return Route.from_json(answer).ring.bytes_s
    except ControlError:
        return 0.0


def _request(node: NodeConfig, measure: bool = False) -> ProbeRequest:
    return ProbeRequest(node.name, node.addr, node.port, node.port_in, measure)
