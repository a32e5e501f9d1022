"""The table of the nodes of a standing swarm, as each of them keeps it: announcements that are passed on from node to node.

It is no public swarm: all its machines have one key, and trust each other.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from mdi.control.messages import Arguments, PartSpec, refused
from mdi.errors import ControlError
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.cluster import NodeConfig
from mdi.spec.decode import Meta, Name, Number, Port, RunId, Sha256, ShortName, Text, Whole, decode, spans_rise
from mdi.spec.model_id import ModelId, decode_with_model

EXPIRY_S = 60.0
N_LIMIT = 4096  # nodes that one node knows
N_TOLD = 128  # announcements in an answer, the newest ones: more of them would be late over a slow link, and be lost
FORMER_S = 24 * 3600.0  # how long it is remembered where a node was
N_FORMER = 256

Kind = tuple[str, Arithmetic, int]  # hash of the weights, how they are computed, blocks of the model


@dataclass(frozen=True)
class Announced:
    """The announcement of a node.

    Attributes:
        process: the number that it drew; `version` rises with each announcement of it.
        age_s: seconds since it said so, as far as those know who passed it on.
        addr, port, ring_port: where it is.
        model: the name, for people; `weights` says which ones they are (`weights_id`).
        arithmetic: of its blocks: nodes of one ring have the same. What caches hold is for each run to say.
        n_layer: of the model; start, stop: the blocks that it holds, half-open.
        is_ready: whether they are loaded.
        speed: tokens per second through its blocks, or through its network if that is slower.
        block_s: seconds of one block for one row.
        cache_bytes: free memory for caches.
        n_runs: that it takes part in.
        is_leaving: whether it gives its blocks up.
        is_whole: whether it has the whole model on its disk, and not only the blocks that it holds.
    """

    name: ShortName
    process: RunId
    version: Whole
    addr: Name
    port: Port
    ring_port: Port
    model: Text
    weights: Sha256
    arithmetic: Arithmetic
    n_layer: Annotated[int, Meta(ge=1, le=1 << 16)]
    start: Whole
    stop: Whole
    is_ready: bool
    speed: Number
    block_s: Number
    cache_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    n_runs: Whole = 0
    is_leaving: bool = False
    is_whole: bool = False
    age_s: Number = 0.0

    @property
    def label(self) -> str:
        """Unique: names need not be."""
        return f"{self.name}-{self.process[:6]}"

    @property
    def place(self) -> tuple[str, int]:
        """Where it is asked."""
        return self.addr, self.ring_port

    @property
    def kind(self) -> Kind:
        """Only nodes with the same one share a ring, and the plan of moves."""
        return self.weights, self.arithmetic, self.n_layer

    def config(self) -> NodeConfig:
        """As an entry of a nodes file."""
        return NodeConfig(self.label, self.addr, self.port, self.ring_port)


@dataclass(frozen=True)
class SwarmRequest(Arguments):
    """Bytes of a message `swarm`: tell me what is new.

    Attributes:
        own: the caller's own announcement; None if it is a starter.
        known: versions that the caller knows, by process.
    """

    own: Announced | None = None
    known: Annotated[dict[RunId, Whole], Meta(max_length=N_LIMIT)] = field(default_factory=dict)

    def check(self) -> None:
        if self.own is not None:
            _check(self.own)


@dataclass(frozen=True)
class _Reported:
    nodes: Annotated[tuple[Announced, ...], Meta(max_length=N_LIMIT)]


def announcements_of(answer: Any, where: str) -> tuple[Announced, ...]:
    """The announcements in an answer. Raises ControlError."""
    nodes = decode(_Reported, answer, where, ControlError).nodes
    for one in nodes:
        _check(one)
    return nodes


def _check(one: Announced) -> None:
    spans_rise("announced", refused, blocks=(one.start, one.stop))
    if one.stop > one.n_layer:
        raise refused(f"announced blocks up to {one.stop} of a model of {one.n_layer}")


N_PARTS = 4096  # of a model

PartNames = Annotated[tuple[Name, ...], Meta(max_length=N_PARTS)]


@dataclass(frozen=True)
class ModelRequest(Arguments):
    """Arguments of a message `model`: what is known of the model that a node holds blocks of.

    Attributes:
        weights: see Announced.
        parts: names of those whose hashes are wanted.
    """

    weights: Sha256
    parts: PartNames = ()


@dataclass(frozen=True)
class ModelFacts:
    """A model as one node tells another of it.

    Attributes:
        parts: those of the request that the node knows.
    """

    model: ModelId
    parts: Annotated[tuple[PartSpec, ...], Meta(max_length=N_PARTS)]

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model.to_json(), "parts": [vars(part) for part in self.parts]}

    @classmethod
    def from_json(cls, data: Any, where: str) -> ModelFacts:
        """Raises ControlError."""
        return decode_with_model(cls, data, where, ControlError)


class SwarmTable:
    """The last announcement of every node, for at most EXPIRY_S. For several threads.

    Where nodes were that have not said that they leave is remembered for longer: perhaps they were only cut off.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, tuple[float, Announced]] = {}  # by process, with the time when it was said
        self._former: dict[tuple[str, int], tuple[float, Announced]] = {}  # by place, the oldest first

    def add(self, announced: Sequence[Announced]) -> None:
        """Announcements that came. An older or an equal one changes nothing, so nobody keeps a node alive by repeating it."""
        now = self._clock()
        with self._lock:
            for one in announced:
                known = self._nodes.get(one.process)
                if one.age_s < EXPIRY_S and (known is None or known[1].version < one.version):
                    self._nodes[one.process] = now - one.age_s, one
            self._expire(now)
            for process in sorted(self._nodes, key=lambda one: self._nodes[one][0])[:-N_LIMIT]:
                del self._nodes[process]

    @property
    def nodes(self) -> list[Announced]:
        """With their present ages."""
        return self.newer_than({})

    @property
    def versions(self) -> dict[str, int]:
        """By process."""
        return {one.process: one.version for one in self.nodes}

    def newer_than(self, versions: Mapping[str, int]) -> list[Announced]:
        """Announcements that somebody with these versions lacks."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            return [
                replace(one, age_s=now - since)
                for since, one in self._nodes.values()
                if versions.get(one.process, -1) < one.version
            ]

    @property
    def former(self) -> list[Announced]:
        """Last announcements of nodes that nothing is heard of, at places where there is no other one."""
        with self._lock:
            self._expire(self._clock())
            present = {one.place for _, one in self._nodes.values()}
            return [one for place, (_, one) in self._former.items() if place not in present]

    def answer(self, request: SwarmRequest) -> dict[str, Any]:
        """The answer to a message `swarm`: N_TOLD announcements at most; who asks again gets the next ones."""
        lacking = self.newer_than(request.known)
        if request.own is not None:
            self.add([request.own])
            lacking = [one for one in lacking if one.process != request.own.process]
        return {"nodes": [asdict(one) for one in sorted(lacking, key=lambda one: one.age_s)[:N_TOLD]]}

    def _expire(self, now: float) -> None:
        for process, (since, one) in list(self._nodes.items()):
            if now - since >= EXPIRY_S:
                del self._nodes[process]
                self._former.pop(one.place, None)
                if not one.is_leaving:
                    self._former[one.place] = since, one
        for place, (since, _) in list(self._former.items()):
            if now - since >= FORMER_S or len(self._former) > N_FORMER:
                del self._former[place]


def weights_id(model: ModelId, last_block: str) -> str:
    """Hash of a model's weights, by the hash of its last block, which identifies the others."""
    return hashlib.sha256(json.dumps([model.config_hash, model.dtype, last_block]).encode()).hexdigest()


def message_bytes(content: Any) -> int:
    """Of an announcement, a request or an answer as it travels."""
    return len(json.dumps(asdict(content) if hasattr(content, "__dataclass_fields__") else content).encode())
