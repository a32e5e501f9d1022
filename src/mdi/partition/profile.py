"""Profiles of nodes and links: what is known about a cluster before a placement. Their JSON form.

A profile is measured by the node itself (see `mdi.node`), or written by hand for a cluster that is not bought yet. This
module holds numbers only: it measures nothing, and knows no model but by the name of what the times were measured with.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from mdi.config import N_NODES_LIMIT
from mdi.errors import UsageError
from mdi.json_fields import Fields, parse_object, shown

# Assumed link if nothing was measured near it: a switched gigabit network.
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
    computed_by: str = ""
    group: str = ""

    def to_json(self) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: Any, where: str = "node profile") -> NodeProfile:
        """Raises UsageError: a field is missing, unknown or makes no sense; the message names it."""
        get = _known(cls, data, where)
        profile = cls(
            name=get.string("name"),
            device=get.string("device"),
            n_cores=get.number("n_cores"),
            memory_bytes=_whole(get, "memory_bytes"),
            disk_bytes=_whole(get, "disk_bytes"),
            disk_read_bytes_s=get.number("disk_read_bytes_s"),
            read_bytes_s=get.number("read_bytes_s"),
            block_s=_times(get, "block_s"),
            head_s=_times(get, "head_s"),
            process_bytes=_whole(get, "process_bytes"),
            cached_parts=tuple(get.optional("cached_parts", get.strings) or ()),
            shared_bytes=get.optional("shared_bytes", lambda key: _whole(get, key)) or 0,
            held_bytes=get.optional("held_bytes", lambda key: _whole(get, key)) or 0,
            n_threads=get.optional("n_threads", lambda key: _whole(get, key)) or 0,
            machine=get.optional("machine", get.text) or "",
            computed_by=get.optional("computed_by", get.text) or "",
            group=get.optional("group", get.text) or "",
        )
        if not profile.n_cores:
            raise get.wrong("n_cores", "more than 0 cores")
        if not profile.block_s and not profile.read_bytes_s:
            raise UsageError(f"{where}: needs block_s, the times of one block, or at least read_bytes_s")
        return profile


@dataclass(frozen=True)
class LinkProfile:
    """The link from one node to another. Its delay counts as half the round trip."""

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
        get = _known(cls, data, where)
        link = cls(get.string("source"), get.string("target"), get.number("round_trip_s"), get.number("bytes_s"))
        if not link.bytes_s:
            raise get.wrong("bytes_s", "more than 0 bytes per second")
        return link


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
        get = _known(cls, data, where)
        listed = get.entries("nodes")
        if not 1 <= len(listed) <= N_NODES_LIMIT:
            raise UsageError(f"{where}.nodes: expected 1 to {N_NODES_LIMIT} nodes, found {len(listed)}")
        nodes = tuple(NodeProfile.from_json(node, f"{where}.nodes[{i}]") for i, node in enumerate(listed))
        links = tuple(LinkProfile.from_json(link, f"{where}.links[{i}]") for i, link in enumerate(get.entries("links")))
        names = [node.name for node in nodes]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"{where}.nodes: two nodes are called {name!r}")
        for link in links:
            for end in (link.source, link.target):
                if end not in names:
                    raise UsageError(f"{where}.links: there is no node {end!r}, only {', '.join(names[:8])}")
        return cls(nodes, links, get.text("model"), get.text("config_hash"), get.string("format"))


def read_profile(text: str, where: str) -> ClusterProfile:
    """A cluster profile from the text of a JSON file. Raises UsageError."""
    return ClusterProfile.from_json(parse_object(text, where, UsageError).data, where)


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, so that written and read profiles are equal."""
    lists: dict[str, Any] = json.loads(json.dumps(data))
    return lists


def _known(cls: Any, data: Any, where: str) -> Fields:
    """The fields of an object that has none but those of a dataclass."""
    get = Fields(data, where, UsageError)
    get.only([field.name for field in dataclasses.fields(cls)])
    return get


def _whole(get: Fields, key: str) -> int:
    """A whole number, which may be written as 1e9."""
    number = get.number(key)
    if number != int(number):
        raise get.wrong(key, "a whole number")
    return int(get.data[key])


def _times(get: Fields, key: str) -> Times:
    times: list[tuple[int, float]] = []
    for i, entry in enumerate(get.entries(key, "a list of [rows, seconds]")):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise UsageError(f"{get.where}.{key}[{i}]: expected [rows, seconds], found {shown(entry)}")
        pair = Fields({"rows": entry[0], "seconds": entry[1]}, f"{get.where}.{key}[{i}]", UsageError)
        rows, seconds = _whole(pair, "rows"), pair.number("seconds")
        if rows < 1 or not seconds:
            raise UsageError(f"{pair.where}: expected at least one row and more than 0 seconds, found {shown(entry)}")
        if times and rows <= times[-1][0]:
            raise UsageError(f"{get.where}.{key}: rows must rise, but {rows} follows {times[-1][0]}")
        times.append((rows, seconds))
    return tuple(times)
