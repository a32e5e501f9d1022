"""The nodes file, read and checked once.

The JSON form is the documented one of MDI-LLM (`nodes.starter`, `nodes.secondary[]`, or one secondary's entry alone).
This module knows nothing of models, sockets or torch.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import os
import re
from collections import Counter
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from mdi.errors import UsageError
from mdi.net.keys import KeyFile
from mdi.spec.decode import Meta, Name, Text, Whole, decode, shown
from mdi.spec.settings_file import TEXT_LIMIT_BYTES, read_limited

N_NODES_LIMIT = 1024
DTYPES = ("float32", "float16", "bfloat16")  # that a node can compute in

logger = logging.getLogger("mdi")

_DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "32": "float32"}


@dataclass(frozen=True)
class NodeConfig:
    """One node, as the nodes file describes it.

    Attributes:
        name: "starter" or "secondary<i>"; how errors and reports call the node.
        addr: host name or address at which the other nodes reach it.
        port: HTTP control port (0: any free one, for tests).
        port_in: TCP port on which the previous node of the ring connects (0: any free one).
        port_out: accepted for compatibility; outgoing links use any free port.
        starter_addr: where a secondary expects its starter; informative.
        device, dtype, threads: to compute with; None leaves the choice to the node.
        cores: numbers of the cores to compute on; None leaves that to the system.
        kv_memory: limit for caches in bytes; None: the free memory after loading, less a margin.
        bind: address to listen on, if it is not `addr` (behind NAT, or "0.0.0.0").
        is_spare: whether it gets blocks only when another node is lost.
        group: nodes with the same name here are one stage of the ring, and compute its blocks together; None is a stage alone.
    """

    name: str
    addr: str
    port: int
    port_in: int
    port_out: int | None = None
    starter_addr: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    bind: str | None = None
    cores: tuple[int, ...] | None = None
    kv_memory: int | None = None
    is_spare: bool = False
    group: str | None = None

    @property
    def listen_addr(self) -> str:
        return self.bind or self.addr


PortOrAny = Annotated[int, Meta(ge=0, le=65535)]


@dataclass(frozen=True)
class _Communication:
    port: PortOrAny
    starter_addr: Text | None = None


@dataclass(frozen=True)
class _Inference:
    port_in: PortOrAny
    port_out: PortOrAny | None = None


@dataclass(frozen=True)
class _Entry:
    """A node as it stands in a file; see NodeConfig."""

    addr: Name
    communication: _Communication
    inference: _Inference
    device: Text | None = None
    dtype: Text | None = None
    threads: Annotated[int, Meta(ge=1)] | None = None
    bind: Text | None = None
    cores: Text | Annotated[tuple[Whole, ...], Meta(min_length=1)] | None = None
    kv_memory: Text | Whole | None = None
    spare: bool = False
    group: Name | None = None

    def config(self, name: str, where: str) -> NodeConfig:
        """`where` names the entry in errors. Raises UsageError."""
        cores, kv_memory = self.cores, self.kv_memory
        if cores is not None:
            cores = parse_cores(cores, f"{where}.cores") if isinstance(cores, str) else tuple(dict.fromkeys(cores))
        return NodeConfig(
            name=name,
            addr=self.addr,
            port=self.communication.port,
            port_in=self.inference.port_in,
            port_out=self.inference.port_out,
            starter_addr=self.communication.starter_addr,
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            bind=self.bind,
            cores=cores,
            kv_memory=None if kv_memory is None else parse_bytes(str(kv_memory), f"{where}.kv_memory"),
            is_spare=self.spare,
            group=self.group,
        )


@dataclass(frozen=True)
class _Network:
    starter: _Entry
    secondary: Annotated[tuple[_Entry, ...], Meta(max_length=N_NODES_LIMIT - 1)] = ()


@dataclass(frozen=True)
class _NodesFile:
    nodes: _Network


@dataclass(frozen=True)
class ClusterConfig:
    """All nodes of a ring, in ring order: the starter, then the secondaries; `keys` is the cluster's, if it has one.

    `spares` are nodes outside of the ring, which replace lost ones.
    """

    starter: NodeConfig
    secondaries: tuple[NodeConfig, ...] = ()
    keys: KeyFile | None = field(default=None, repr=False)
    spares: tuple[NodeConfig, ...] = ()

    @property
    def nodes(self) -> tuple[NodeConfig, ...]:
        return (self.starter, *self.secondaries)

    @property
    def n_nodes(self) -> int:
        return 1 + len(self.secondaries)

    @property
    def n_stages(self) -> int:
        """Nodes and groups that have blocks of their own."""
        return len({(node.group, None) if node.group else (None, node.name) for node in self.nodes})


def standalone() -> ClusterConfig:
    """A ring of one node, on loopback and free ports."""
    return ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0))


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read a whole network's nodes file.

    Raises:
        UsageError: the file is missing, no JSON, or a field is missing or wrong; the message names file and field.
    """
    path = _as_it_is_called(Path(path))
    data = read_json(path)
    _name_misspelt(_NodesFile, data, f"{path}:")
    network = decode(_NodesFile, data, f"{path}:", UsageError).nodes
    where = f"{path}: nodes"
    starter = network.starter.config("starter", f"{where}.starter")
    if starter.is_spare:
        raise UsageError(f"{where}.starter.spare: the starter always takes part; only a secondary can be a spare")
    others = [entry.config(f"secondary{i}", f"{where}.secondary[{i}]") for i, entry in enumerate(network.secondary)]
    secondaries = tuple(node for node in others if not node.is_spare)
    cluster = ClusterConfig(starter, secondaries, spares=tuple(node for node in others if node.is_spare))
    refuse_shared_ports(cluster, str(path))
    _check_groups(cluster, str(path))
    return cluster


def load_secondary(path: str | Path, index: int | None) -> NodeConfig:
    """Read the entry of one secondary: number `index` of a whole network's file, or a file that holds it alone.

    Raises:
        UsageError: as `load_cluster`; also an index out of range, or missing where the file holds several secondaries.
    """
    path = _as_it_is_called(Path(path))
    data = read_json(path)
    if "nodes" not in data:
        _name_misspelt(_Entry, data, f"{path}:")
        return node_of(data, f"secondary{index or 0}", str(path))
    cluster = load_cluster(path)
    secondaries = sorted((*cluster.secondaries, *cluster.spares), key=lambda node: _number(node.name))
    if not secondaries:
        raise UsageError(f"{path} lists no secondary node: it describes a standalone starter")
    if index is None and len(secondaries) == 1:
        index = 0
    if index is None or not 0 <= index < len(secondaries):
        raise UsageError(
            f"{path} lists {len(secondaries)} secondary nodes: give the index of this one after the file, "
            f"0 to {len(secondaries) - 1}" + ("" if index is None else f"; got {index}")
        )
    return secondaries[index]


def load_nodes(path: str | Path) -> tuple[NodeConfig, ...]:
    """All nodes that a nodes file lists; none where it describes one secondary alone. Raises UsageError."""
    path = _as_it_is_called(Path(path))
    if "nodes" not in read_json(path):
        return ()
    cluster = load_cluster(path)
    return (*cluster.nodes, *cluster.spares)


def _as_it_is_called(path: Path) -> Path:
    """The file, also as the README of the first version calls it: settings-distr/config.json."""
    if path.exists() or path.parent.name != "settings-distr":
        return path
    name = "configuration.json" if path.name == "config.json" else path.name
    real = path.parent.with_name("settings_distr") / name
    if not real.is_file():
        return path
    _say_once(f"{path} is not there; reading {real}")
    return real


@functools.cache
def _say_once(line: str) -> None:
    logger.info("%s", line)


def _name_misspelt(cls: Any, data: Any, where: str) -> None:
    """Raises UsageError for a field that is almost one of these; others are accepted, and belong to other programs."""
    if isinstance(data, list):
        for i, one in enumerate(data[:N_NODES_LIMIT]):
            _name_misspelt(cls, one, f"{where}[{i}]")
    if not isinstance(data, dict):
        return
    dot = " " if where.endswith(":") else "."
    hints = get_type_hints(cls)
    for name, value in data.items():
        if name not in hints and (near := difflib.get_close_matches(name, hints.keys() - data.keys(), 1, 0.75)):
            raise UsageError(f"{where}{dot}{name}: there is no such field: is {near[0]} meant?")
        kind = next((k for k in (hints.get(name), *get_args(hints.get(name))) if is_dataclass(k)), None)
        if kind is not None:
            _name_misspelt(kind, value, f"{where}{dot}{name}")


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON file that must hold an object; UsageError says what is wrong and where."""
    try:
        # Some editors begin a file with a byte order mark.
        text = read_limited(Path(path), TEXT_LIMIT_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no such file: {path} (the nearest that exists is {nearest_existing(path)})") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read {path}: {e}") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        is_after_comma = text[: e.pos].rstrip().endswith(",") and text[e.pos :].lstrip()[:1] in ("]", "}")
        hint = " (is the comma before it one too many?)" if is_after_comma else ""
        raise UsageError(f"{path} is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}{hint}") from None
    except (ValueError, RecursionError) as e:  # a number with thousands of digits, brackets without end
        raise UsageError(f"{path} cannot be read as JSON: {e}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected a JSON object, found {shown(data)}")
    return data


def nearest_existing(path: str | Path) -> Path:
    """The deepest existing parent of `path`, for error messages."""
    p = Path(path).expanduser().absolute()
    while not p.exists() and p != p.parent:
        p = p.parent
    return p


def what_is_there(path: str | Path) -> str:
    """For the error about a path that does not exist: the file or folder that was probably meant, else the nearest parent."""
    wanted, parent = Path(path).expanduser().absolute(), nearest_existing(path)
    missing = wanted.relative_to(parent).parts[:1]
    with contextlib.suppress(OSError):
        names = {name.casefold(): name for name in os.listdir(parent)}
        if missing and (near := difflib.get_close_matches(missing[0].casefold(), names, 1)):
            return f"is {parent / names[near[0]]} meant?"
    return f"the nearest that exists is {parent}"


def node_of(entry: Any, name: str, where: str) -> NodeConfig:
    """One node from its entry in a nodes file; `where` names the entry in errors. Raises UsageError."""
    return decode(_Entry, entry, where, UsageError).config(name, where)


def _number(name: str) -> int:
    """12 of "secondary12"."""
    return int(name.removeprefix("secondary"))


def parse_cores(text: str, where: str) -> tuple[int, ...]:
    """Core numbers of a text like "0,2-3"; UsageError if it is none."""
    cores: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", piece)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise UsageError(f"{where}: expected core numbers like 0,1 or 0,2-3, got {text!r}")
        cores.extend(range(first, last + 1))
    return tuple(dict.fromkeys(cores))


def parse_bytes(text: str, where: str) -> int:
    """Bytes of a text like "2G", "500MB" or "4096": powers of ten, as sizes are shown, and of 1024 for "500MiB". UsageError if
    it is none.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if found is None:
        raise UsageError(f"{where}: expected a size like 2G, 500M or a number of bytes, got {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " "))


def check_dtype(name: str | None) -> str | None:
    """The full name of a number format, "float32" for "fp32"; None leaves the choice to the node. UsageError if unknown."""
    if name is None or name == "auto":
        return None
    full = _DTYPE_ALIASES.get(name.lower(), name.lower())
    if full not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}: expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return full


def check_device(name: str | None) -> None:
    """Raises UsageError if this is not the name of a device. Does not check whether the machine has it."""
    if name is not None and not re.fullmatch(r"auto|(cpu|cuda|mps)(:\d{1,3})?", name):
        raise UsageError(f"unknown device {name!r}: expected cpu, cuda, cuda:<n> or mps")


def refuse_shared_ports(cluster: ClusterConfig, where: str) -> None:
    """Raises UsageError if two nodes of one address have the same port."""
    seen: dict[tuple[str, int], str] = {}
    for node in (*cluster.nodes, *cluster.spares):
        for port, what in ((node.port, "communication port"), (node.port_in, "port_in")):
            other = seen.setdefault((node.addr, port), f"{node.name}'s {what}")
            if port and other != f"{node.name}'s {what}":
                raise UsageError(f"{where}: {node.addr}:{port} is both {other} and {node.name}'s {what}")


def _check_groups(cluster: ClusterConfig, where: str) -> None:
    """Raises UsageError for nodes that cannot be in their group."""
    n_members = Counter(node.group for node in cluster.nodes if node.group is not None)
    for node in (*cluster.nodes, *cluster.spares):
        if node.group is None:
            continue
        entry = f"{where}: {node.name} in the group {node.group[:40]!r}"
        if node.is_spare:
            raise UsageError(f'{entry}: a spare takes the place of any lost node: leave "group" or "spare" out')
        if node.group in [other.name for other in cluster.nodes]:
            raise UsageError(f"{entry}: that is the name of a node: choose another one for the group")
        if n_members[node.group] == 1:
            raise UsageError(
                f'{entry}: no other node is in it: name the same "group" for another node, or leave it out'
            )
        if node.device is not None and node.device.startswith(("cuda", "mps")):
            raise UsageError(
                f"{entry} has the device {node.device}: the nodes of a group compute on CPUs: "
                f'leave "group" out, or choose "device": "cpu"'
            )
