"""The doctor's findings, and what to do about them. Pure: from findings to words and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mdi
from mdi.columns import table
from mdi.control.messages import COMPILING, CONTROL_VERSION
from mdi.control.reach import PROBLEMS, Reach, Route
from mdi.spec.cluster import NodeConfig
from mdi.units import duration, size

CLOCK_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 256 << 20  # with less, no model of any use fits beside the libraries
DISK_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: with which node, what, and what to do."""

    node: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what}. {self.advice}"


@dataclass(frozen=True)
class NodeFinding:
    """One node: how the starter reaches it, and its own status."""

    node: NodeConfig
    route: Route
    status: Mapping[str, Any]
    needed_bytes: int = 0  # weights that it would get; 0 is unknown

    @property
    def memory_bytes(self) -> int | None:
        memory = self.status.get("memory")
        return _count(memory.get("available_bytes")) if isinstance(memory, dict) else None

    @property
    def disk_bytes(self) -> int | None:
        return _count(self.status.get("disk_free_bytes"))


@dataclass(frozen=True)
class LinkFinding:
    """The way from one node to a ring neighbour.

    Attributes:
        in_ring: whether frames go this way; else it is the reverse direction.
    """

    source: str
    target: NodeConfig
    route: Route
    in_ring: bool = True
    failure: str = ""  # why the source could not be asked


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    nodes: tuple[NodeFinding, ...]
    links: tuple[LinkFinding, ...]
    own: tuple[Problem, ...] = ()  # problems that the starter found itself
    problems: tuple[Problem, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "problems", tuple(_problems(self)))

    @property
    def is_ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.is_ok,
            "nodes": [_node_json(finding) for finding in self.nodes],
            "links": [
                {"source": link.source, "target": link.target.name, "in_ring": link.in_ring, **link.route.to_json()}
                for link in self.links
            ],
            "problems": [{"node": p.node, "what": p.what, "advice": p.advice} for p in self.problems],
        }

    def __str__(self) -> str:
        """Tables of nodes and links, then a line for each problem."""
        head = ("node", "control, ring", "state", "version", "control", "ring", "kernels", "memory", "disk", "clock")
        lines = table([head, *(_node_row(finding) for finding in self.nodes)])
        rows = [_link_row(link) for link in self.links if link.in_ring]
        if rows:
            lines += ["", *table([("link", "round trip", "bandwidth"), *rows])]
        lines.append("")
        lines += [str(problem) for problem in self.problems] or ["No problems found."]
        return "\n".join(lines)


def _problems(report: Report) -> list[Problem]:
    found = list(report.own)
    ill: dict[str, str] = {}  # node -> the starter's result at its ring port
    for finding in report.nodes:
        mine = _node_problems(finding)
        ill[finding.node.name] = finding.route.ring.problem
        found += mine
    for link in report.links:
        ring = link.route.ring
        if link.failure:
            found.append(Problem(link.source, f"could not be asked for its way to {link.target.name}", link.failure))
        elif ring.problem and ring.problem not in ("untried", ill.get(link.target.name)) and link.source != "starter":
            found.append(_link_problem(link))
    return found


def _node_problems(finding: NodeFinding) -> list[Problem]:
    node, route, status = finding.node, finding.route, finding.status
    found: list[Problem] = []
    is_locked_out = (route.control.problem, route.ring.problem) == ("silent", "key")  # it lives, so it does not hang
    if not route.control.is_ok and not is_locked_out:
        found.append(_port_problem(node, "control", node.port, route.control))
        if route.control.problem in ("name", "timeout", "unreachable") or route.ring.problem == route.control.problem:
            return found
    if not route.ring.is_ok and route.ring.problem != "untried":
        found.append(_port_problem(node, "ring", node.port_in, route.ring, status.get("ring_port")))
    if not status:
        return found
    if status.get("control_version") != CONTROL_VERSION or status.get("version") != mdi.__version__:
        theirs = f"{status.get('version')} (control protocol {status.get('control_version')})"
        what = f"runs version {theirs} of MDI-LLM, this machine {mdi.__version__} (control protocol {CONTROL_VERSION})"
        found.append(Problem(node.name, what, "Install the same version on both"))
    if status.get("arithmetic") == "torch":
        what = "has no kernels, and computes in plain torch, which is slower"
        found.append(
            Problem(node.name, what, "Look at what it prints when it starts; most often a C++ compiler is missing")
        )
    if "samples" in status and node.name != "starter":
        advice = f"Correct addr and communication.port of {node.name} in the nodes file"
        found.append(Problem(node.name, "a starter answers at its address", advice))
    elif status.get("state") == COMPILING:
        what, advice = (
            "compiles its kernels, once",
            "Wait for its end, which takes minutes on a small board, and try again",
        )
        found.append(Problem(node.name, what, advice))
    elif status.get("state") in ("LOADING", "RUNNING") or status.get("measuring"):
        what = f"is busy with another run ({status['state']})"
        found.append(Problem(node.name, what, "Wait for its end, or end it at its starter"))
    if abs(route.clock_skew_s) > CLOCK_LIMIT_S:
        way = "ahead of" if route.clock_skew_s > 0 else "behind"
        what = f"its clock is {duration(abs(route.clock_skew_s))} {way} this machine's"
        found.append(Problem(node.name, what, "Let both set their clocks by NTP (timedatectl set-ntp true)"))
    return found + _setting_problems(finding) + _capacity_problems(finding)


def _setting_problems(finding: NodeFinding) -> list[Problem]:
    """Where the node does not or cannot compute as this nodes file says."""
    node, own, devices = finding.node, finding.status.get("own"), finding.status.get("devices")
    found = []
    named = _numbered(node.device)
    if isinstance(devices, list) and named not in (None, "auto", *map(_numbered, devices)):
        what = f"has no device {node.device}, as the nodes file says, only {', '.join(map(str, devices))}"
        found.append(Problem(node.name, what, "Correct device in the nodes file, or look at the driver there"))
    for field_name, here in (("device", node.device), ("threads", node.threads)):
        there = own.get(field_name) if isinstance(own, dict) else None
        if here is not None and there is not None and _numbered(here) != _numbered(there):
            what = f"was started with {field_name} {there}, but the nodes file here says {here}"
            found.append(Problem(node.name, what, "It keeps its own: start it with this file, or correct the file"))
    return found


def _numbered(device: Any) -> Any:
    """ "cuda" is "cuda:0"."""
    return f"{device}:0" if device in ("cpu", "cuda", "mps") else device


def _capacity_problems(finding: NodeFinding) -> list[Problem]:
    found = []
    for what, have, least, advice in (
        ("memory", finding.memory_bytes, MEMORY_LIMIT_BYTES, "End other programs there, give it fewer blocks (--layers, "
         "--placement), or use a smaller format (--quantize)"),
        ("disk for its cache", finding.disk_bytes, DISK_LIMIT_BYTES, "Free some there, or choose another place with "
         "--cache-dir"),
    ):  # fmt: skip
        if have is None:
            continue
        if finding.needed_bytes and have < finding.needed_bytes:
            message = f"has {size(have)} of {what} free, but {size(finding.needed_bytes)} of weights would come"
            found.append(Problem(finding.node.name, message, advice))
        elif have < least:
            found.append(Problem(finding.node.name, f"has only {size(have)} of {what} free", advice))
    return found


def _port_problem(node: NodeConfig, what: str, port: int, reach: Reach, own_port: Any = None) -> Problem:
    """A port that the starter does not get through to."""
    where = f"{node.addr}:{port}"
    words = f"{what} port {where}: {PROBLEMS[reach.problem]}"
    if reach.detail:
        words += f" ({reach.detail})"
    field_name = "communication.port" if what == "control" else "inference.port_in"
    if isinstance(own_port, int) and own_port != port:
        return Problem(node.name, words, port_remedy(own_port, field_name))
    return Problem(node.name, words, _advice(reach.problem, node, port, field_name))


def port_remedy(own_port: int, field_name: str) -> str:
    """Advice for a node that listens on another port than the nodes file says."""
    return f"The node listens on {own_port}: correct {field_name}, on both machines alike"


def _advice(problem: str, node: NodeConfig, port: int, field_name: str) -> str:
    start = "Start the starter there" if node.name == "starter" else f"Start mdi secondary there ({node.name})"
    return {
        "name": f"Correct addr of {node.name} in the nodes file, or write its IP address there",
        "refused": f"{start}, or correct {field_name} in the nodes file",
        "timeout": f"Is the machine on, and addr right? If it answers a ping, a firewall drops this: let TCP port {port} in "
        f"there (ufw allow {port}/tcp)",
        "unreachable": "Are both machines in the same network? Check addr, cable and routes",
        "silent": "The process there hangs, or has been stopped, or is no node: look at its output, and start it again",
        "closed": "Something on the way closes connections: a proxy, or a node that is just ending. Try again",
        "stranger": f"Another program has this port: correct {field_name}, or choose another port",
        "key": "Start all nodes, and this command, with the same key file: --key FILE",
        "other": f"Two entries of the nodes file have been mixed up: correct addr and {field_name}",
    }.get(problem, "Try again")


def _link_problem(link: LinkFinding) -> Problem:
    target = link.target
    ring = link.route.ring
    words = f"cannot reach {target.name}'s ring port {target.addr}:{target.port_in}: {PROBLEMS[ring.problem]}"
    words += f" ({ring.detail})" if ring.detail else ""
    if not link.in_ring:
        words += "; the ring in this order does not need it, another order would"
    advice = _advice(ring.problem, target, target.port_in, "inference.port_in")
    if ring.problem == "name":
        advice = f"{link.source} does not know this name: write the IP address into the nodes file, or set up its DNS"
    elif target.addr.startswith("127.") or target.addr == "localhost":
        advice = f"{target.addr} means each machine itself: write the address that the others know"
    return Problem(link.source, words, advice)


def _node_json(finding: NodeFinding) -> dict[str, Any]:
    node, status = finding.node, finding.status
    return {
        "name": node.name,
        "addr": node.addr,
        "port": node.port,
        "port_in": node.port_in,
        "state": status.get("state"),
        "version": status.get("version"),
        "control_version": status.get("control_version"),
        "memory_bytes": finding.memory_bytes,
        "disk_bytes": finding.disk_bytes,
        "kernels": status.get("kernels"),
        "clock_skew_s": finding.route.clock_skew_s,
        **finding.route.to_json(),
    }


def _node_row(finding: NodeFinding) -> tuple[str, ...]:
    node, status, route = finding.node, finding.status, finding.route
    return (
        node.name,
        f"{node.addr}:{node.port}, {node.port_in}",
        str(status.get("state") or "-"),
        str(status.get("version") or "-"),
        _reach(route.control),
        _reach(route.ring),
        str(status.get("kernels") or "-"),
        "-" if finding.memory_bytes is None else size(finding.memory_bytes),
        "-" if finding.disk_bytes is None else size(finding.disk_bytes),
        "here" if node.name == "starter" else f"{route.clock_skew_s:+.1f} s" if status else "-",
    )


def _link_row(link: LinkFinding) -> tuple[str, ...]:
    route = link.route
    rate = f"{route.ring.bytes_s * 8 / 1e6:.0f} Mbit/s" if route.ring.bytes_s else "-"
    ring = route.ring
    if ring.is_ok and route.control.round_trip_s:  # measured a few times, the ring port only once
        ring = replace(ring, round_trip_s=min(ring.round_trip_s, route.control.round_trip_s))
    return f"{link.source} -> {link.target.name}", _reach(ring), rate


def _reach(reach: Reach) -> str:
    if not reach.is_ok:
        return reach.problem
    return duration(reach.round_trip_s) if reach.round_trip_s else "ok"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
