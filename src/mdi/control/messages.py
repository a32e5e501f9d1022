"""The requests of a starter and the answers of a node as JSON, checked field by field. Stdlib only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mdi.block_ranges import block_span
from mdi.control.requested import Requested
from mdi.engine.replay import COMPUTE, FILL, PASS
from mdi.errors import ControlError
from mdi.json_fields import Fields, shown
from mdi.kernels import LAYOUT_VERSION
from mdi.limits import excess
from mdi.net.wire import SILENCE_S

# Raised with every change of what one side expects of the other; nodes of different versions do not work together.
CONTROL_VERSION = 5
# Values of "code" in a node's error; a peer of another version may have others.
CODES = {
    "busy": "the node has another run that does not share it, or measures itself: ask again in a moment",
    "control": "the request is malformed",
    "leaving": "the process is ending",
    "memory": "the stage and its caches do not fit into the node's memory",
    "disk": "the weights do not fit on the node's disk",
    "role": "the node has another role: it is a starter, or has no head",
    "run": "the node does not take part in this run (any more)",
    "stopped": "the run was stopped on this node, and its request was late",
    "usage": "the node has no such device, format or type",
    "version": "the node has another version of this protocol",
    "weights": "weights are missing, damaged, or others than announced",
    "wire": "a frame that cannot be accepted",
    "ring": "the ring could not be closed, or it broke",
    "lost": "a neighbour is silent",
    "engine": "the computation cannot go on from its state",
    "left": "the node was told to end",
    "stuck": "the node lives, but its computing does not go on",
    "key": "the other side does not have the same cluster key",
    "nonce": "the request was signed with an expired nonce",
    "failed": "anything else",
}
COMPILING = "COMPILING"  # state of a node without a run, whose kernels are not there yet
N_SLOTS_LIMIT = 64  # nodes of one machine
AFTER_MS_LIMIT = 10_000
N_FRAMES_LIMIT = 4096
N_TEXTS = 8  # at the same time, of a run that does not say how many
SILENCE_LIMITS_S = (0.5, 600.0)


@dataclass(frozen=True)
class PartSpec:
    """A part of the weights that a node needs: its name, the sha256 of its canonical bytes, and how many they are."""

    name: str
    sha256: str
    n_bytes: int

    @classmethod
    def of(cls, get: Fields) -> PartSpec:
        return cls(get.string("name"), get.hex("sha256", 64), get.integer("n_bytes", 1, 1 << 45))


@dataclass(frozen=True)
class InitRequest(Requested):
    """Body of `POST /init`: everything that a secondary has to know about a run; see also Requested.

    Attributes:
        run: random 64-bit id of the run, as 16 hex digits; a caller that knows it may end the run.
        epoch: the same of this ring: a run whose ring broke goes on over another one.
        index: the receiver's place in the ring; names[0] is the starter.
        placement: hash of model, cut and ring.
        next_addr, next_port: ring port of the next node.
        config: litgpt Config as a plain object; `config_hash` is its hash.
        blocks: (start, stop) of the receiver.
        max_length: tokens that a sequence may reach.
        stored_format: the one that the parts are packed in, see checkpoint.packing; None if they are plain.
        layout_version: of packed weights, see kernels.layout; all nodes of a ring have the same.
        n_frames: frames in flight at most; None is as many as nodes.
        silence_s: a neighbour that is silent for so long is lost.
        n_sequences: of the run at the same time, at most: the receiver's caches need hold no more.
        exclusive: no other run may be on the node.
        replay: the receiver's part in replays, see engine.worker; replay_bytes: for rows that it has sent.
        keep_caches: use the caches of the run's last ring, if they still exist.
        hand_over: whether the starter takes the receiver's blocks elsewhere if it says that it is about to leave.
    """

    run: str
    epoch: str
    index: int
    names: tuple[str, ...]
    placement: str
    next_addr: str
    next_port: int
    model: str
    config: dict[str, Any]
    config_hash: str
    stored_dtype: str
    blocks: tuple[int, int]
    parts: tuple[PartSpec, ...]
    max_length: int
    stored_format: str | None = None
    n_frames: int | None = None
    silence_s: float = SILENCE_S
    n_sequences: int = N_TEXTS
    exclusive: bool = False
    keep_caches: bool = False
    replay: str = COMPUTE
    replay_bytes: int = 0
    hand_over: bool = False
    layout_version: int = LAYOUT_VERSION
    control_version: int = CONTROL_VERSION
    extensions: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "parts": [vars(part) for part in self.parts]}  # asdict would copy the config

    @classmethod
    def from_json(cls, data: Any) -> InitRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        get = Fields(data, "request", _refused)
        _check_versions(get)
        names = tuple(get.strings("names"))
        if not names:
            raise get.wrong("names", "the names of all nodes")
        start, stop = get.span("blocks")
        request = cls(
            run=get.hex("run", 16),
            epoch=get.hex("epoch", 16),
            index=get.integer("index", 1, len(names) - 1),
            names=names,
            placement=get.text("placement"),
            next_addr=get.text("next_addr"),
            next_port=get.integer("next_port", 1, 65535),
            model=get.text("model"),
            config=get.object("config"),
            config_hash=get.text("config_hash"),
            stored_dtype=get.text("stored_dtype"),
            blocks=(start, stop),
            parts=tuple(map(PartSpec.of, get.items("parts"))),
            max_length=get.integer("max_length", 1, 1 << 30),
            stored_format=get.optional("stored_format", get.text),
            n_frames=get.optional("n_frames", lambda key: get.integer(key, 1, N_FRAMES_LIMIT)),
            silence_s=get.number("silence_s", *SILENCE_LIMITS_S) if "silence_s" in data else SILENCE_S,
            n_sequences=get.optional("n_sequences", lambda key: get.integer(key, 1, 1 << 30)) or N_TEXTS,
            exclusive=get.boolean("exclusive"),
            keep_caches=get.boolean("keep_caches"),
            replay=get.choice("replay", (COMPUTE, FILL, PASS)),
            replay_bytes=get.integer("replay_bytes", 0, 1 << 45),
            hand_over=get.boolean("hand_over"),
            extensions=get.object("extensions"),
            **Requested.read(get),
        )
        _check_blocks(request)
        return request


@dataclass(frozen=True)
class Slots:
    """When a node of a machine with several is to compute, so that all know what they take from each other.

    Attributes:
        after_ms: from the request on to the first slot. Clocks of machines differ; a delay needs none.
        place: number of the slot in which this node computes alone.
        n_nodes: of the machine; all compute in the slot after their own ones.
    """

    after_ms: int
    place: int
    n_nodes: int

    @classmethod
    def from_json(cls, data: Any) -> Slots:
        """Raises ControlError (400): a node must not wait for as long as a peer likes."""
        get = Fields(data, "request", _refused)
        n_nodes = get.integer("n_nodes", 2, N_SLOTS_LIMIT)
        return cls(get.integer("after_ms", 0, AFTER_MS_LIMIT), get.integer("place", 0, n_nodes - 1), n_nodes)


@dataclass(frozen=True)
class ProfileRequest(Requested):
    """Body of `POST /profile`: which model the node is to measure itself with, computed as it would be in a run.

    Attributes:
        config: litgpt Config as a plain object; `config_hash` is its hash.
        stored_dtype: as in `InitRequest`.
        fresh: measure again, whatever is kept.
        run: id of the run to place, if there is one: its starter may end the node's process even if the node gets no blocks.
        slots: the node is to measure nothing but what it takes of its machine, at these times.
    """

    config: dict[str, Any]
    config_hash: str
    stored_dtype: str
    fresh: bool = False
    run: str | None = None
    slots: Slots | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ProfileRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        get = Fields(data, "request", _refused)
        _check_counts(get.object("config"))
        return cls(
            config=get.object("config"),
            config_hash=get.text("config_hash"),
            stored_dtype=get.text("stored_dtype"),
            fresh=get.boolean("fresh") if "fresh" in data else False,
            run=get.optional("run", lambda key: get.hex(key, 16)),
            slots=None if data.get("slots") is None else Slots.from_json(data["slots"]),
            **Requested.read(get),
        )


@dataclass(frozen=True)
class ProbeRequest:
    """Body of `POST /probe`: another node, which the receiver is to reach.

    Attributes:
        name: of that node.
        addr, port, port_in: where its control port and its ring port should be.
        measure: whether to measure the bandwidth as well, with a few megabytes.
    """

    name: str
    addr: str
    port: int
    port_in: int
    measure: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ProbeRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        get = Fields(data, "request", _refused)
        return cls(
            name=get.string("name"),
            addr=get.string("addr"),
            port=get.integer("port", 1, 65535),
            port_in=get.integer("port_in", 1, 65535),
            measure=get.boolean("measure") if "measure" in data else False,
        )


@dataclass(frozen=True)
class ForwardRequest:
    """Body of `POST /forward`: a part that the receiver has, and another node of the run that lacks it.

    Attributes:
        run: in which the other node waits for the part.
        offset: bytes of it that the receiver has already.
        node, addr, port: name of the other node, and where its control port is.
    """

    run: str
    part: PartSpec
    offset: int
    node: str
    addr: str
    port: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ForwardRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        get = Fields(data, "request", _refused)
        (part,) = map(PartSpec.of, Fields({"part": [get.object("part")]}, "request", _refused).items("part"))
        return cls(
            run=get.hex("run", 16), part=part, offset=get.integer("offset", 0, part.n_bytes), node=get.string("node"),
            addr=get.string("addr"), port=get.integer("port", 1, 65535),
        )  # fmt: skip


def _check_versions(get: Fields) -> None:
    version = get.data.get("control_version")
    if type(version) is not int or version != CONTROL_VERSION:
        raise ControlError(
            f"the starter speaks version {shown(version)} of the control protocol, this node version {CONTROL_VERSION}: "
            "install the same version of MDI-LLM on both",
            409,
            code="version",
        )
    if get.integer("layout_version", 0, 1 << 30) != LAYOUT_VERSION:
        raise ControlError(
            f"the starter packs weights in version {get.data['layout_version']} of their layout, this node in version "
            f"{LAYOUT_VERSION}: install the same version of MDI-LLM on both",
            409,
            code="version",
        )


def _check_blocks(request: InitRequest) -> None:
    _check_counts(request.config)
    start, stop = request.blocks
    n_layer = request.config.get("n_layer")
    if not isinstance(n_layer, int) or not 0 <= start < stop <= n_layer:
        raise ControlError(f"blocks: {[start, stop]} is no range of a model of {n_layer} blocks", 400)
    names_wanted = (f"block.{i}" for i in range(start, stop))  # never as a list: `stop` came from a peer
    blocks = request.parts[:-1] if request.parts and request.parts[-1].name == "head" else request.parts
    if len(blocks) != stop - start or any(p.name != n for p, n in zip(blocks, names_wanted, strict=True)):
        raise ControlError(f"the parts that are named are not those of {block_span(start, stop)}", 400)


def _check_counts(config: dict[str, Any]) -> None:
    if too_much := excess(config):
        raise ControlError(f"field 'config': {too_much}", 400)


def _refused(message: str) -> ControlError:
    return ControlError(message, 400)
