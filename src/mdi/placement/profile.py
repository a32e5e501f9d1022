"""Profiles of nodes and links: what is known about a cluster before a placement. Their JSON form.

A profile is measured by the node itself (see `mdi.node`), or written by hand for a cluster that is not bought yet (`boards`
is an example). This module holds numbers only: it measures nothing, and knows no model but by the name of what the times
were measured with. Links that nobody measured are guessed; nodes of one machine share its memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any, TypeVar

from mdi.errors import UsageError
from mdi.spec.cluster import N_NODES_LIMIT
from mdi.spec.decode import FormatText, Meta, Name, Number, Positive, Text, Whole, decode, only_fields_of, parsed

# Assumed link if nothing was measured near it: a switched gigabit network.
DEFAULT_ROUND_TRIP_S = 300e-6
DEFAULT_BYTES_S = 125e6

UNLIMITED = 1 << 60  # bytes of memory of a node that a plan is not to be limited by

T = TypeVar("T")
Times = tuple[tuple[Annotated[int, Meta(ge=1)], Positive], ...]


@dataclass(frozen=True)
class NodeProfile:
    """One node.

    Attributes:
        name: "starter" or "secondary<i>", or whatever the cluster's owner calls it.
        device: "cpu", "cuda:0", ...
        n_cores: cores that it may use, by affinity and cgroup quota; 0.6 is 60 % of one core.
        n_threads: CPU threads that it computes with; 0 is unknown.
        memory_bytes: free memory of the device, for weights, caches, activations and the process; cgroup limit respected.
        disk_bytes: free space under the cache folder.
        disk_read_bytes_s: 0 is unknown.
        read_bytes_s: how fast one node's threads read memory; 0 is unknown.
        block_s: (rows, seconds) of one block of the cluster profile's model in its format, rows rising; () is unknown, and
            estimated from `read_bytes_s`.
        head_s: the same for final norm, head and embedding; () is unknown, and estimated from bytes.
        attention_macs_s: multiplications per second of attention over a prompt, without weights; 0 is unknown, and taken to be
            those of a block with many rows.
        window_bytes: limit of its memory (--memory), with which it reads weights from its disk while computing; 0: none.
        expert_hits: share of chosen experts that were in memory in a run with this limit, as its report says (`expert_hits` and
            `expert_misses` of NodeMetrics); 0 is unknown, and experts are taken to be chosen about equally often.
        process_bytes: memory of the process besides weights, caches and activations.
        cached_parts: sha256 of the parts that it has already.
        shared_bytes: what is free of the device for all its processes together, whatever the limits of this one: nodes of one
            machine take from the same, see `mdi.placement.profile`; 0 is unknown.
        held_bytes: the part of `memory_bytes` that it holds now and would free.
        machine: nodes with the same value are on one machine; "" is a machine of its own.
        computed_by: what computes the blocks of the cluster profile's model: the kernels and their instruction set, or torch
            and why; "" is unknown.
        group: nodes with the same value are one stage, see `mdi.placement.parallel`; "" is a stage of its own.
    """

    name: Name
    device: Name
    n_cores: Positive
    memory_bytes: Whole
    disk_bytes: Whole
    disk_read_bytes_s: Number
    read_bytes_s: Number
    block_s: Times
    head_s: Times
    process_bytes: Whole
    cached_parts: tuple[Text, ...] = ()
    shared_bytes: Whole = 0
    held_bytes: Whole = 0
    n_threads: Whole = 0
    machine: Text = ""
    computed_by: Text = ""
    group: Text = ""
    attention_macs_s: Number = 0.0
    window_bytes: Whole = 0
    expert_hits: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def at_pace(self, times: float) -> NodeProfile:
        """The node where all that it computes takes so many times as long."""
        return replace(
            self, n_cores=self.n_cores / times, read_bytes_s=self.read_bytes_s / times,
            block_s=tuple((rows, s * times) for rows, s in self.block_s),
            head_s=tuple((rows, s * times) for rows, s in self.head_s), attention_macs_s=self.attention_macs_s / times,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: Any, where: str = "node profile") -> NodeProfile:
        """Raises UsageError: a field is missing, unknown or makes no sense; the message names it."""
        profile = _read(cls, data, where)
        for key in ("block_s", "head_s"):
            rows = [n for n, _ in getattr(profile, key)]
            if rows != sorted(set(rows)):
                raise UsageError(f"{where}.{key}: rows must rise")
        if not profile.block_s and not profile.read_bytes_s:
            raise UsageError(f"{where}: needs block_s, the times of one block, or at least read_bytes_s")
        return profile


@dataclass(frozen=True)
class LinkProfile:
    """The link from one node to another. Its delay counts as half the round trip."""

    source: Name
    target: Name
    round_trip_s: Number
    bytes_s: Positive

    def seconds(self, n_bytes: float) -> float:
        """How long `n_bytes` take from the first byte sent to the last one received."""
        return self.round_trip_s / 2 + n_bytes / self.bytes_s

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "link profile") -> LinkProfile:
        """Raises UsageError: as for a node."""
        return _read(cls, data, where)


@dataclass(frozen=True)
class ClusterProfile:
    """Nodes, the starter first, and the links between them that were measured.

    Attributes:
        links: any pairs; `mdi.placement.profile` guesses the others.
        model, config_hash, format: what `block_s` and `head_s` were measured with ("float32", "bfloat16", "float16", "fp16",
            "int8", "int4", "mxfp4").
    """

    nodes: Annotated[tuple[NodeProfile, ...], Meta(min_length=1, max_length=N_NODES_LIMIT)]
    links: tuple[LinkProfile, ...]
    model: Text
    config_hash: Text
    format: FormatText

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "config_hash": self.config_hash,
            "format": self.format,
            "nodes": [node.to_json() for node in self.nodes],
            "links": [link.to_json() for link in self.links],
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "cluster profile") -> ClusterProfile:
        """Raises UsageError: a field is missing, unknown or makes no sense, or names do not fit each other."""
        found = _read(cls, data, where)
        nodes = tuple(NodeProfile.from_json(node, f"{where}.nodes[{i}]") for i, node in enumerate(data["nodes"]))
        links = tuple(LinkProfile.from_json(link, f"{where}.links[{i}]") for i, link in enumerate(data["links"]))
        names = [node.name for node in nodes]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"{where}.nodes: two nodes are called {name!r}")
        for link in links:
            for end in (link.source, link.target):
                if end not in names:
                    raise UsageError(f"{where}.links: there is no node {end!r}, only {', '.join(names[:8])}")
        return dataclasses.replace(found, nodes=nodes, links=links)


def read_profile(text: str, where: str) -> ClusterProfile:
    """A cluster profile from the text of a JSON file. Raises UsageError."""
    return ClusterProfile.from_json(parsed(text, where, UsageError, _number), where)


def _number(text: str) -> float:
    """A whole number may be written as 1e9."""
    value = float(text)
    return int(value) if abs(value) < 1 << 53 and value.is_integer() else value


def _read(cls: type[T], data: Any, where: str) -> T:
    """An object that has no other fields than a dataclass; null is a field that may be missing, and is."""
    found = decode(dict[str, Any], data, where, UsageError)
    only_fields_of(cls, found, where, UsageError)
    return decode(cls, {key: value for key, value in found.items() if value is not None}, where, UsageError)


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, so that written and read profiles are equal."""
    lists: dict[str, Any] = json.loads(json.dumps(data))
    return lists


# What a frame costs at each hop beside the network: hand-overs between threads (benchmarks/RESULTS.md, half a round trip).
HOP_S = 150e-6


class Links:
    """Way from node i to node j, by their places in the profile.

    A pair that was not measured is taken for the worst of the measured links that touch either of its nodes, or, without
    any, for a switched gigabit network.
    """

    def __init__(self, profile: ClusterProfile) -> None:
        index = {node.name: i for i, node in enumerate(profile.nodes)}
        self._measured: dict[tuple[int, int], tuple[float, float]] = {}
        for link in profile.links:
            self._measured[index[link.source], index[link.target]] = (link.round_trip_s, link.bytes_s)
        self._worst: dict[int, tuple[float, float]] = {}
        for pair, (round_trip_s, bytes_s) in self._measured.items():
            for node in pair:
                slowest = self._worst.get(node, (0.0, float("inf")))
                self._worst[node] = (max(slowest[0], round_trip_s), min(slowest[1], bytes_s))

    @property
    def are_equal(self) -> bool:
        """Whether all links count as equal, so that the order of the nodes does not matter."""
        return not self._measured

    def of(self, source: int, target: int) -> tuple[float, float]:
        """Round trip in seconds, bytes per second."""
        found = self._measured.get((source, target))
        if found is not None:
            return found
        near = [self._worst[node] for node in (source, target) if node in self._worst]
        if not near:
            return DEFAULT_ROUND_TRIP_S, DEFAULT_BYTES_S
        return max(worst[0] for worst in near), min(worst[1] for worst in near)

    def transmit_s(self, source: int, target: int, n_bytes: float) -> float:
        """How long the link is busy with so many bytes."""
        return n_bytes / self.of(source, target)[1]

    def seconds(self, source: int, target: int, n_bytes: float) -> float:
        """From the last computation on one node to the first on the next."""
        round_trip_s, bytes_s = self.of(source, target)
        return HOP_S + round_trip_s / 2 + n_bytes / bytes_s


_GB = 10**9


def boards() -> ClusterProfile:
    """Three boards with 4 GB each."""
    nodes = (
        _board("starter", int(3.2 * _GB), 5e9),
        _board("secondary0", int(3.2 * _GB), 5e9),
        _board("secondary1", int(3.2 * _GB), 5e9),
    )
    names = [node.name for node in nodes]
    links = tuple(LinkProfile(a, b, 400e-6, 110e6) for a in names for b in names if a != b)
    return ClusterProfile(nodes, links, model="", config_hash="", format="int8")


def _board(name: str, memory_bytes: int, read_bytes_s: float) -> NodeProfile:
    return NodeProfile(
        name=name,
        device="cpu",
        n_cores=4.0,
        memory_bytes=memory_bytes,
        disk_bytes=20 * _GB,
        disk_read_bytes_s=80e6,
        read_bytes_s=read_bytes_s,
        block_s=(),
        head_s=(),
        process_bytes=400_000_000,
    )


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
            groups.setdefault(_memory_of(node, host), []).append(i)
    shared = list(nodes)
    for group in groups.values():
        free = min(nodes[i].shared_bytes for i in group)
        claims = {i: max(0, nodes[i].memory_bytes - nodes[i].process_bytes - nodes[i].held_bytes) for i in group}
        total = sum(claims.values())
        for i, claim in claims.items():
            part = claim if total <= free else claim * free // total
            shared[i] = replace(nodes[i], memory_bytes=nodes[i].memory_bytes - claim + part)
    return tuple(shared)


def _memory_of(node: NodeProfile, host: str) -> tuple[str, str]:
    """Nodes with the same take from the same memory."""
    return host, "cuda:0" if node.device == "cuda" else node.device


def left_over(profile: ClusterProfile, free: Mapping[str, int], n_rings: Mapping[str, int]) -> ClusterProfile:
    """What models that run already leave of measured nodes: the memory that is free now, and a part of the time.

    Rings of one node take turns, and another one gets one turn of all.

    Args:
        free: of each node that is wanted, bytes for weights and caches.
        n_rings: of the running models that each node takes part in.
    """
    wanted = [node for node in profile.nodes if node.name in free]
    hosts = [node.machine or node.name for node in wanted]
    # A node tells what its own limits leave to it. What is free of the machine is that of the one with the widest limits.
    shared: dict[tuple[str, str], int] = {}
    for node, host in zip(wanted, hosts, strict=True):
        memory = _memory_of(node, host)
        shared[memory] = max(shared.get(memory, 0), free[node.name])
    nodes = [
        replace(
            node.at_pace(1 + n_rings.get(node.name, 0)), memory_bytes=free[node.name] + node.process_bytes,
            shared_bytes=shared[_memory_of(node, host)], held_bytes=0,
        )
        for node, host in zip(wanted, hosts, strict=True)
    ]  # fmt: skip
    links = tuple(link for link in profile.links if link.source in free and link.target in free)
    return replace(profile, nodes=share_memory(nodes, hosts), links=links)


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
