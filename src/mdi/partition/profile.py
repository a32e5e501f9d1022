"""What is known about a cluster before anything is placed on it: profiles of nodes and links, and their JSON form.

A profile is measured by the node itself (see `mdi.node`), or written by hand for a cluster that is not bought yet. This
module holds numbers only: it measures nothing, and knows no model but by the name of what the times were measured with.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mdi.config import N_NODES_LIMIT
from mdi.errors import UsageError

# What a link is taken for if nothing was measured near it: a switched gigabit network.
DEFAULT_ROUND_TRIP_S = 300e-6
DEFAULT_BYTES_S = 125e6

Times = tuple[tuple[int, float], ...]


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
        process_bytes: what the process takes beside weights, caches and activations.
        cached_parts: sha256 of the parts that it has already.
        shared_bytes: what is free of the device for all its processes together, whatever the limits of this one: nodes of one
            machine take from the same, see `mdi.partition.sharing`; 0 is unknown.
        held_bytes: the part of `memory_bytes` that it holds now, and would let go of.
        machine: nodes with the same name here stand on one machine; "" is a machine of its own.
        machine_share: part of its machine's cores and memory bandwidth that it takes while it computes, from 0 to 1, see
            `mdi.partition.machines`; a node of one thread on two cores takes a half, or all if it alone can use up the
            bandwidth. 0 is unknown, and shares nothing.
    """

    name: str
    device: str
    n_cores: float
    memory_bytes: int
    disk_bytes: int
    disk_read_bytes_s: float
    read_bytes_s: float
    block_s: Times
    head_s: Times
    process_bytes: int
    cached_parts: tuple[str, ...] = ()
    shared_bytes: int = 0
    held_bytes: int = 0
    n_threads: int = 0
    machine: str = ""
    machine_share: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: Any, where: str = "node profile") -> NodeProfile:
        """Raises UsageError: a field is missing, unknown or makes no sense; the message names it."""
        fields = _fields(cls, data, where)
        for name in ("name", "device"):
            _text(fields[name], f"{where}.{name}")
        for name in ("memory_bytes", "disk_bytes", "process_bytes"):
            fields[name] = _whole(fields[name], f"{where}.{name}")
        for name in ("shared_bytes", "held_bytes", "n_threads"):
            fields[name] = _whole(fields.get(name, 0), f"{where}.{name}")
        for name in ("n_cores", "disk_read_bytes_s", "read_bytes_s"):
            fields[name] = _number(fields[name], f"{where}.{name}")
        _text(fields.get("machine", ""), f"{where}.machine", may_be_empty=True)
        fields["machine_share"] = _number(fields.get("machine_share", 0.0), f"{where}.machine_share")
        if fields["machine_share"] > 1:
            raise UsageError(f"{where}.machine_share: a node takes at most 1, all of its machine")
        if not fields["n_cores"]:
            raise UsageError(f"{where}.n_cores: a node needs more than 0 cores")
        for name in ("block_s", "head_s"):
            fields[name] = _times(fields[name], f"{where}.{name}")
        if not fields["block_s"] and not fields["read_bytes_s"]:
            raise UsageError(f"{where}: needs block_s, the times of one block, or at least read_bytes_s")
        parts = fields.get("cached_parts", ())
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{where}.cached_parts: expected a list of sha256 sums")
        fields["cached_parts"] = tuple(parts)
        return cls(**fields)


@dataclass(frozen=True)
class LinkProfile:
    """The way from one node to another. Half the round trip is taken for the way there."""

    source: str
    target: str
    round_trip_s: float
    bytes_s: float

    def seconds(self, n_bytes: float) -> float:
        """How long `n_bytes` take from the first byte sent to the last one received."""
        return self.round_trip_s / 2 + n_bytes / self.bytes_s

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "link profile") -> LinkProfile:
        """Raises UsageError: as for a node."""
        fields = _fields(cls, data, where)
        for name in ("source", "target"):
            _text(fields[name], f"{where}.{name}")
        for name in ("round_trip_s", "bytes_s"):
            fields[name] = _number(fields[name], f"{where}.{name}")
        if not fields["bytes_s"]:
            raise UsageError(f"{where}.bytes_s: a link carries more than 0 bytes per second")
        return cls(**fields)


@dataclass(frozen=True)
class ClusterProfile:
    """Nodes, the starter first, and the links between them that were measured.

    Attributes:
        links: any pairs; `mdi.partition.links` guesses the others.
        model, config_hash, format: what `block_s` and `head_s` were measured with ("float32", "bfloat16", "float16", "fp16",
            "int8", "int4").
    """

    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...]
    model: str
    config_hash: str
    format: str

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
        fields = _fields(cls, data, where)
        for name in ("model", "config_hash", "format"):
            _text(fields[name], f"{where}.{name}", may_be_empty=name != "format")
        for name in ("nodes", "links"):
            if not isinstance(fields[name], (list, tuple)):
                raise UsageError(f"{where}.{name}: expected a list, found {_short(fields[name])}")
        if not 1 <= len(fields["nodes"]) <= N_NODES_LIMIT:
            raise UsageError(f"{where}.nodes: expected 1 to {N_NODES_LIMIT} nodes, found {len(fields['nodes'])}")
        nodes = tuple(NodeProfile.from_json(node, f"{where}.nodes[{i}]") for i, node in enumerate(fields["nodes"]))
        links = tuple(LinkProfile.from_json(link, f"{where}.links[{i}]") for i, link in enumerate(fields["links"]))
        names = [node.name for node in nodes]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"{where}.nodes: two nodes are called {name!r}")
        for link in links:
            for end in (link.source, link.target):
                if end not in names:
                    raise UsageError(f"{where}.links: there is no node {end!r}, only {', '.join(names[:8])}")
        return cls(nodes, links, fields["model"], fields["config_hash"], fields["format"])


def read_profile(text: str, where: str) -> ClusterProfile:
    """A cluster profile from the text of a JSON file. Raises UsageError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{where} is not valid JSON: {e}") from None
    return ClusterProfile.from_json(data, where)


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, so that what is written equals what will be read."""
    lists: dict[str, Any] = json.loads(json.dumps(data))
    return lists


def _fields(cls: Any, data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: expected an object, found {_short(data)}")
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name in data:
        if name not in known:
            raise UsageError(f"{where}: unknown field {_short(name)}; expected {', '.join(known)}")
    for name, field in known.items():
        if name not in data and field.default is dataclasses.MISSING:
            raise UsageError(f"{where}: the field {name!r} is missing")
    return dict(data)


def _text(value: Any, where: str, may_be_empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise UsageError(f"{where}: expected a string, found {_short(value)}")


def _number(value: Any, where: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise UsageError(f"{where}: expected a number from 0 on, found {_short(value)}")
    return float(value)


def _whole(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number):
        raise UsageError(f"{where}: expected a whole number, found {_short(value)}")
    return int(value)


def _times(value: Any, where: str) -> Times:
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"{where}: expected a list of [rows, seconds], found {_short(value)}")
    times: list[tuple[int, float]] = []
    for i, entry in enumerate(value):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise UsageError(f"{where}[{i}]: expected [rows, seconds], found {_short(entry)}")
        rows, seconds = _whole(entry[0], f"{where}[{i}]"), _number(entry[1], f"{where}[{i}]")
        if rows < 1 or not seconds:
            raise UsageError(f"{where}[{i}]: expected at least one row and more than 0 seconds, found {_short(entry)}")
        if times and rows <= times[-1][0]:
            raise UsageError(f"{where}: rows must rise, but {rows} follows {times[-1][0]}")
        times.append((rows, seconds))
    return tuple(times)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
