"""Nodes that a starter finds: they announce themselves or connect to --dial-port, and prove that they have the key.

An announcement says where a node's ports are, with a code that only an owner of the key can make (mdns.py sends and hears it).
What the node answers to `GET /` decides.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mdi.cancel import Cancel
from mdi.control.client import ControlClient, FanOut
from mdi.control.messages import COMPILING
from mdi.control.reach import compiling
from mdi.control.web_pages import is_here
from mdi.errors import CheckpointError, ControlError, UsageError
from mdi.files import replacing
from mdi.net.invitation import GuestNode
from mdi.net.keys import KeyFile, mac
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.decode import decode_text
from mdi.spec.settings_file import read_limited
from mdi.units import counted, duration

SALT_BYTES = 8
TAG_BYTES = 8
NAME_LIMIT = 40
_LABEL = "mdi discovery"


@dataclass(frozen=True)
class Announcement:
    """Where a node is.

    Attributes:
        name: as its owner calls it; for people.
        addr, port: where its control port is.
        ring_port: on which the node before it in a ring connects.
        process: the number that its process drew; a restarted node has another one. "" if it is not known yet.
    """

    name: str
    addr: str
    port: int
    ring_port: int
    process: str
    salt: str
    tag: str

    @property
    def where(self) -> str:
        return f"{self.addr}:{self.port}"

    @property
    def place(self) -> tuple[str, int, int]:
        """Where both of its ports are."""
        return self.addr, self.port, self.ring_port

    @classmethod
    def of(cls, name: str, addr: str, port: int, ring_port: int, process: str, secret: bytes) -> Announcement:
        """Signed with a cluster's key."""
        salt = secrets.token_hex(SALT_BYTES)
        return cls(name, addr, port, ring_port, process, salt, _tag(secret, salt, addr, port, ring_port, process))

    def is_of(self, keys: tuple[bytes, ...]) -> bool:
        """Whether a node with one of these keys made it."""
        fields = (self.salt, self.addr, self.port, self.ring_port, self.process)
        return any(hmac.compare_digest(self.tag.encode(), _tag(key, *fields).encode()) for key in keys)

    def fields(self) -> dict[str, str]:
        """The texts of an announcement besides address and control port."""
        return {
            "name": self.name,
            "ring": str(self.ring_port),
            "process": self.process,
            "salt": self.salt,
            "tag": self.tag,
        }

    @classmethod
    def parse(cls, addr: str, port: int, fields: Mapping[str, str]) -> Announcement | None:
        """The content of an announcement; None if it cannot be read."""
        try:
            ring_port = int(fields["ring"])
            found = cls(
                fields["name"][:NAME_LIMIT], addr, port, ring_port, fields["process"], fields["salt"], fields["tag"]
            )
        except (KeyError, ValueError):
            return None
        is_port = 0 < port < 65536 and 0 < ring_port < 65536
        return found if is_port and max(map(len, found.fields().values())) <= NAME_LIMIT else None


def _tag(secret: bytes, salt: str, addr: str, port: int, ring_port: int, process: str) -> str:
    fields = (salt, addr, str(port), str(ring_port), process)
    return mac(secret, _LABEL, *(field.encode() for field in fields))[:TAG_BYTES].hex()


SETTLE_S = 3.0  # without a new node, if the number of nodes is not given
REPORT_S = 10.0  # until it says whom it waits for, and again when that is something else
POLL_S = 0.2  # several sources have to be looked at, and nodes that did not answer are asked again
AGAIN_S = 2.0  # until a node that did not answer is asked again
ASK_S = 5.0

logger = logging.getLogger("mdi")

# Why a node that is named does not answer, and what to do; the keys are those of mdi.control.reach.PROBLEMS.
_APART = (
    "let TCP {0.port} and {0.ring_port} through its firewall; if the network keeps its machines apart, connect it with "
    "`mdi join --dial` and --dial-port here"
)
_ADVICE = {
    "refused": "it is still starting, or `mdi join` has ended there",
    "timeout": _APART,
    "unreachable": _APART,
    "silent": "the process there hangs: look at its output",
    "key": "it has another key: let it join again",
}

N_KEPT = 64  # guests
FILE_LIMIT_BYTES = 64 << 10  # of their file

Source = Callable[[], Iterable[Announcement]]


@dataclass(frozen=True)
class FoundNode:
    """A node of the cluster, and its status."""

    announcement: Announcement
    status: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.announcement.name} at {self.announcement.addr}:{self.announcement.port}"

    @property
    def is_compiling(self) -> bool:
        return self.status.get("state") == COMPILING

    def config(self, name: str) -> NodeConfig:
        """As an entry of a nodes file."""
        found = self.announcement
        return NodeConfig(name, found.addr, found.port, found.ring_port)


class Guests:
    """Nodes that have fetched the key from here and said where they will be: a source that needs no multicast.

    Args:
        path: of the file that keeps them for later runs.

    Raises:
        UsageError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # several boards may ask at once
        try:
            data = read_limited(path, FILE_LIMIT_BYTES) if path.exists() else b"[]"
        except CheckpointError as e:
            raise UsageError(str(e)) from None
        self._places = decode_text(list[GuestNode], data, str(path), UsageError)

    def add(self, node: GuestNode, addr: str) -> None:
        """A node, at the address that it gave, or else at the one that its request came from: a router may have changed it."""
        with self._lock:
            for each in dict.fromkeys((node.addr,) if is_here(addr) else (node.addr, addr)):
                place = replace(node, addr=each)
                others = [other for other in self._places if (other.addr, other.port) != (place.addr, place.port)]
                self._places = [*others, place][-N_KEPT:]
            try:
                with replacing(self._path, UsageError) as file:
                    file.write(json.dumps([asdict(place) for place in self._places], indent=1).encode())
            except UsageError as e:  # the node has joined all the same
                logger.warning("%s is known until this process ends: %s", node.name, e)

    def nodes(self) -> list[Announcement]:
        """Without the numbers of their processes, which they do not know yet."""
        return [Announcement(place.name, place.addr, place.port, place.ring_port, "", "", "") for place in self._places]


class Gathering:
    """Asks the nodes that the sources name, and keeps those that answer with the key.

    Args:
        on_come: called once for each node, and again when it has compiled its kernels, or is somewhere else.
    """

    def __init__(
        self, sources: Sequence[Source], keys: KeyFile, on_come: Callable[[FoundNode], None] = lambda node: None
    ) -> None:
        self._sources, self._keys, self._on_come = sources, keys, on_come
        self._found: dict[str, FoundNode] = {}  # by process, or by address where a source does not know the process
        self._doubles: dict[str, str] = {}  # known by another way: their processes
        self._asked_at: dict[str, float] = {}
        self._unheard: dict[str, str] = {}  # those that do not answer, and why

    @property
    def nodes(self) -> list[FoundNode]:
        return sorted(self._found.values(), key=lambda node: (node.announcement.name, node.label))

    def look(self) -> bool:
        """Ask new nodes, and forget those that are gone. Returns whether a node came."""
        there = {found.process or found.where: found for source in self._sources for found in source()}
        for key in self._found.keys() - there.keys():
            del self._found[key]
        processes = {node.announcement.process for node in self._found.values()}
        self._doubles = {key: process for key, process in self._doubles.items() if process in processes}
        self._unheard = {key: why for key, why in list(self._unheard.items()) if key in there}
        now = time.monotonic()
        new = {
            key: found
            for key, found in there.items()
            if self._is_asked(key, found) and now - self._asked_at.get(key, -AGAIN_S) >= AGAIN_S
        }
        self._asked_at.update(dict.fromkeys(new, now))
        asked = FanOut({key: partial(self._status_of, key, found) for key, found in new.items()})
        asked.join(ASK_S)
        before = len(self._found)
        for key, status in list(asked.results.items()):
            if status is not None:
                self._take(key, FoundNode(replace(new[key], process=str(status["process"])), status))
        return len(self._found) > before

    def _is_asked(self, key: str, found: Announcement) -> bool:
        """Not those that are known where they are; but a node that compiles its kernels will be done with that."""
        if key not in self._found:
            return key not in self._doubles
        known = self._found[key]
        return known.is_compiling or known.announcement.place != found.place

    def _take(self, key: str, node: FoundNode) -> None:
        self._unheard.pop(key, None)
        before, process = self._found.get(key), node.announcement.process
        if before is None and any(one.announcement.process == process for one in self._found.values()):
            self._doubles[key] = process
            return
        self._found[key] = node
        if before is None or not node.is_compiling:
            self._on_come(node)

    def wait(
        self, n_nodes: int | None, wait_s: float, meanwhile: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda line: None, cancel: Cancel | None = None,
    ) -> list[FoundNode]:  # fmt: skip
        """The nodes, once `n_nodes` are there; or, for None, once no more have come for a while.

        Args:
            meanwhile: called again and again, to renew a code, say; its exceptions pass through.
            tell: called with lines about nodes that have not come.
            cancel: its end ends the waiting, with its error.

        Raises:
            ControlError: that many did not come in time.
        """
        cancel = cancel or Cancel()
        begin = last = reported_at = time.monotonic()
        reported: list[str] = []
        while True:
            meanwhile()
            now = time.monotonic()
            if self.look():
                last = now
            if n_nodes is not None and len(self._found) >= n_nodes:
                return self.nodes[:n_nodes]
            if n_nodes is None and self._found and now - last >= SETTLE_S:
                return self.nodes
            if n_nodes is not None and now - reported_at >= REPORT_S:
                reported_at, before, reported = now, reported, self._waiting_for(n_nodes)
                for line in reported if reported != before else ():
                    tell(line)
            if now - begin >= wait_s:
                raise ControlError(self._too_few(n_nodes, wait_s))
            cancel.wait(POLL_S)

    def within(self, wait_s: float, cancel: Cancel | None = None) -> list[FoundNode]:
        """The nodes that have been found after so many seconds; the end of `cancel` ends the waiting, with its error."""
        cancel, end = cancel or Cancel(), time.monotonic() + wait_s
        while time.monotonic() < end:
            self.look()
            cancel.wait(POLL_S)
        return self.nodes

    def _waiting_for(self, n_nodes: int) -> list[str]:
        """Whom it waits for, and what to check there. This node counts, too."""
        lines = [
            f"{1 + len(self._found)} of {1 + n_nodes} nodes are there; check on the others that `mdi join` runs, and that "
            "they are in the same network as this machine"
        ]
        lines += [compiling(node.label, node.status) for node in self.nodes if node.is_compiling]
        return lines + list(self._unheard.values())

    def _too_few(self, n_nodes: int | None, wait_s: float) -> str:
        there = ", ".join(node.label for node in self.nodes) or "none"
        unheard = "".join(f"; {line}" for line in list(self._unheard.values()))
        wanted = "no node" if n_nodes is None else f"not {counted(n_nodes, 'node')}"
        return (
            f"{wanted} of this key came within {duration(wait_s)} (there: {there}{unheard}): run `mdi join` on each board, or "
            "name the nodes in a file (--nodes-config)"
        )

    def _status_of(self, key: str, found: Announcement) -> dict[str, Any] | None:
        """The node's status; None if it is not the one that is announced."""
        node = NodeConfig(found.name, found.addr, found.port, found.ring_port)
        try:
            status = ControlClient(node, self._keys).status(timeout_s=ASK_S)
        except ControlError as e:
            advice = _ADVICE.get(e.problem, "")
            self._unheard[key] = f"{e}: {advice.format(found)}" if advice else str(e)
            return None
        process = status.get("process")
        return status if isinstance(process, str) and process and found.process in ("", process) else None


def cluster_of(nodes: Sequence[FoundNode], starter: NodeConfig, keys: KeyFile) -> ClusterConfig:
    """The nodes as a nodes file would list them."""
    return ClusterConfig(starter, tuple(node.config(f"secondary{i}") for i, node in enumerate(nodes)), keys)


class Arrivals:
    """Present nodes that prove that they have the key. Listening begins with the first call. Not for several threads.

    Args:
        listen: gives the sources, and closes them with the stack. Raises UsageError if the network cannot be used.
    """

    def __init__(self, listen: Callable[[ExitStack], list[Source]], keys: KeyFile) -> None:
        self._listen = listen
        self._keys = keys
        self._stack = ExitStack()
        self._gathering: Gathering | None = None

    def nodes(self) -> dict[str, NodeConfig]:
        """By the numbers that their processes drew; a node that takes part in the run is among them."""
        if self._gathering is None:
            self._gathering = Gathering(self._sources(), self._keys)
        self._gathering.look()
        return {n.announcement.process: n.config(n.announcement.name) for n in self._gathering.nodes}

    def close(self) -> None:
        """Harmless if repeated; `nodes` listens again."""
        self._gathering = None
        self._stack.close()

    def _sources(self) -> list[Source]:
        try:
            return self._listen(self._stack)
        except UsageError as e:
            logger.debug("nodes that start later are not found: %s", e)
            return []
