"""Profiles of nodes and links: what is known about a cluster before a placement. Their JSON form.

A profile is measured by the node itself (see `mdi.node`), or written by hand for a cluster that is not bought yet. This
module holds numbers only: it measures nothing, and knows no model but by the name of what the times were measured with.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from mdi.config import N_NODES_LIMIT
from mdi.errors import UsageError
from mdi.spec.decode import Meta, Name, Number, Positive, Text, Whole, decode, only_fields_of, parsed

# Assumed link if nothing was measured near it: a switched gigabit network.
DEFAULT_ROUND_TRIP_S = 300e-6
DEFAULT_BYTES_S = 125e6

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
        process_bytes: memory of the process besides weights, caches and activations.
        cached_parts: sha256 of the parts that it has already.
        shared_bytes: what is free of the device for all its processes together, whatever the limits of this one: nodes of one
            machine take from the same, see `mdi.partition.sharing`; 0 is unknown.
        held_bytes: the part of `memory_bytes` that it holds now and would free.
        machine: nodes with the same value are on one machine; "" is a machine of its own.
        computed_by: what computes the blocks of the cluster profile's model: the kernels and their instruction set, or torch
            and why; "" is unknown.
        group: nodes with the same value are one stage, see `mdi.partition.group_profile`; "" is a stage of its own.
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
        links: any pairs; `mdi.partition.links` guesses the others.
        model, config_hash, format: what `block_s` and `head_s` were measured with ("float32", "bfloat16", "float16", "fp16",
            "int8", "int4").
    """

    nodes: Annotated[tuple[NodeProfile, ...], Meta(min_length=1, max_length=N_NODES_LIMIT)]
    links: tuple[LinkProfile, ...]
    model: Text
    config_hash: Text
    format: Name

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
