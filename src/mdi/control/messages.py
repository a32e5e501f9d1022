"""What the starter tells a node, and what a node answers, as JSON. Checked field by field; stdlib only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from mdi.block_ranges import block_span
from mdi.errors import ControlError
from mdi.kernels import LAYOUT_VERSION
from mdi.kernels.page_sizes import CACHE_TYPES
from mdi.limits import excess
from mdi.net.wire import WIRE_DTYPES

# Raised with every change of what one side expects of the other; nodes of different versions do not work together.
CONTROL_VERSION = 3
# What a node may answer as "code" beside the words of an error; a peer's may be others.
CODES = {
    "busy": "with another run, or measuring itself: ask again in a moment",
    "control": "the request is not as it must be",
    "leaving": "the process is ending",
    "memory": "the stage and its caches do not fit into the node's memory",
    "disk": "the weights do not fit on the node's disk",
    "role": "it is not that kind of node: a starter, or one without a head",
    "run": "the node takes part in no such run, or not any more",
    "usage": "the node cannot do that: no such device, format or type there",
    "version": "it speaks another version of this protocol",
    "weights": "weights are missing, damaged, or not those that were announced",
    "wire": "a frame that cannot be accepted",
    "ring": "the ring could not be closed, or it broke",
    "lost": "a neighbour is not heard any more",
    "engine": "the computation met a state that it cannot go on from",
    "left": "the node was told to end",
    "key": "the other side does not have the same cluster key",
    "nonce": "the request was signed with a nonce that is not good any more",
    "failed": "anything else",
}
KV_DTYPES = ("auto", *CACHE_TYPES)
N_SLOTS_LIMIT = 64  # nodes of one machine
AFTER_MS_LIMIT = 10_000
N_FRAMES_LIMIT = 4096
N_THREADS_LIMIT = 4096


@dataclass(frozen=True)
class PartSpec:
    """A part of the weights that a node needs: its name, the sha256 of its canonical bytes, and how many they are."""

    name: str
    sha256: str
    n_bytes: int


@dataclass(frozen=True)
class InitRequest:
    """Body of `POST /init`: everything that a secondary has to know about a run.

    Attributes:
        epoch: random 64-bit id of the run, as 16 hex digits.
        index: the receiver's place in the ring; names[0] is the starter.
        placement: hash of model, cut and ring.
        next_addr, next_port: ring port of the next node.
        config: litgpt Config as a plain object; `config_hash` is its hash.
        blocks: (start, stop) of the receiver.
        dtype: what the starter wishes it to compute in; the node's own setting goes first. None: the node chooses.
        max_length: tokens that a sequence may reach.
        quantize: weight format that the starter requested, see kernels.layout.
        stored_format: the one that the parts are packed in, see checkpoint.packing; None if they are plain.
        layout_version: of packed weights, see kernels.layout; all nodes of a ring have the same.
        wire_dtype: what rows travel as, see net.wire; every node of a ring does the same.
        kv_dtype: what the caches hold; "auto" is what the node computes in.
        n_frames: frames in flight at most; None is as many as nodes.
        device, threads: what the starter's nodes file says of the receiver; what it was started with goes first.
    """

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
    dtype: str | None = None
    compile: bool = False
    quantize: str | None = None
    stored_format: str | None = None
    wire_dtype: str = "auto"
    kv_dtype: str = "auto"
    n_frames: int | None = None
    device: str | None = None
    threads: int | None = None
    layout_version: int = LAYOUT_VERSION
    control_version: int = CONTROL_VERSION
    extensions: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> InitRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        if not isinstance(data, dict):
            raise ControlError("the run configuration must be a JSON object", 400)
        version = data.get("control_version")
        if type(version) is not int or version != CONTROL_VERSION:
            raise ControlError(
                f"the starter speaks version {_shown(version)} of the control protocol, this node version {CONTROL_VERSION}: "
                "install the same version of MDI-LLM on both",
                409,
                code="version",
            )
        get = _Fields(data)
        if get.integer("layout_version", 0, 1 << 30) != LAYOUT_VERSION:
            raise ControlError(
                f"the starter packs weights in version {data['layout_version']} of their layout, this node in version "
                f"{LAYOUT_VERSION}: install the same version of MDI-LLM on both",
                409,
                code="version",
            )
        names = tuple(get.strings("names"))
        start, stop = get.pair("blocks")
        request = cls(
            epoch=get.hex("epoch", 16),
            index=get.integer("index", 1, len(names) - 1),
            names=names,
            placement=get.string("placement"),
            next_addr=get.string("next_addr"),
            next_port=get.integer("next_port", 1, 65535),
            model=get.string("model"),
            config=get.object("config"),
            config_hash=get.string("config_hash"),
            stored_dtype=get.string("stored_dtype"),
            blocks=(start, stop),
            parts=tuple(get.parts("parts")),
            max_length=get.integer("max_length", 1, 1 << 30),
            dtype=None if data.get("dtype") is None else get.string("dtype"),
            compile=get.boolean("compile"),
            quantize=None if data.get("quantize") is None else get.string("quantize"),
            stored_format=None if data.get("stored_format") is None else get.string("stored_format"),
            wire_dtype=get.choice("wire_dtype", WIRE_DTYPES),
            kv_dtype=get.choice("kv_dtype", KV_DTYPES),
            n_frames=None if data.get("n_frames") is None else get.integer("n_frames", 1, N_FRAMES_LIMIT),
            device=None if data.get("device") is None else get.string("device"),
            threads=None if data.get("threads") is None else get.integer("threads", 1, N_THREADS_LIMIT),
            extensions=get.object("extensions"),
        )
        _check_counts(request.config)
        n_layer = data["config"].get("n_layer")
        if not isinstance(n_layer, int) or not 0 <= start < stop <= n_layer:
            raise ControlError(f"blocks: {[start, stop]} is no range of a model of {n_layer} blocks", 400)
        names_wanted = (f"block.{i}" for i in range(start, stop))  # never as a list: `stop` came from a peer
        blocks = request.parts[:-1] if request.parts and request.parts[-1].name == "head" else request.parts
        if len(blocks) != stop - start or any(p.name != n for p, n in zip(blocks, names_wanted, strict=True)):
            raise ControlError(f"the parts that are named are not those of {block_span(start, stop)}", 400)
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
        get = _Fields.of(data)
        n_nodes = get.integer("n_nodes", 2, N_SLOTS_LIMIT)
        return cls(get.integer("after_ms", 0, AFTER_MS_LIMIT), get.integer("place", 0, n_nodes - 1), n_nodes)


@dataclass(frozen=True)
class ProfileRequest:
    """Body of `POST /profile`: which model the node is to measure itself with.

    Attributes:
        config: litgpt Config as a plain object; `config_hash` is its hash.
        stored_dtype, dtype, quantize, device, threads: as in `InitRequest`: the node measures itself as it would run.
        fresh: measure again, whatever is kept.
        run: id of the run that is to be placed, if there is one: its starter may end the node's process, part or no part.
        slots: the node is to measure nothing but what it takes of its machine, at these times.
    """

    config: dict[str, Any]
    config_hash: str
    stored_dtype: str
    dtype: str | None = None
    quantize: str | None = None
    fresh: bool = False
    device: str | None = None
    threads: int | None = None
    run: str | None = None
    slots: Slots | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ProfileRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        get = _Fields.of(data)
        _check_counts(get.object("config"))
        return cls(
            config=get.object("config"),
            config_hash=get.string("config_hash"),
            stored_dtype=get.string("stored_dtype"),
            dtype=None if data.get("dtype") is None else get.string("dtype"),
            quantize=None if data.get("quantize") is None else get.string("quantize"),
            fresh=get.boolean("fresh") if "fresh" in data else False,
            device=None if data.get("device") is None else get.string("device"),
            threads=None if data.get("threads") is None else get.integer("threads", 1, N_THREADS_LIMIT),
            run=None if data.get("run") is None else get.hex("run", 16),
            slots=None if data.get("slots") is None else Slots.from_json(data["slots"]),
        )


@dataclass(frozen=True)
class ProbeRequest:
    """Body of `POST /probe`: another node, which the receiver is to reach.

    Attributes:
        name: of that node.
        addr, port, port_in: where its control port and its ring port should be.
        measure: whether the bandwidth is to be measured as well, with a few megabytes.
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
        get = _Fields.of(data)
        return cls(
            name=get.string("name"),
            addr=get.string("addr"),
            port=get.integer("port", 1, 65535),
            port_in=get.integer("port_in", 1, 65535),
            measure=get.boolean("measure") if "measure" in data else False,
        )


def parse_json(body: bytes) -> Any:
    """JSON from a peer; ControlError (400) if it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as e:
        raise ControlError(f"the body is not JSON: {str(e)[:200]}", 400) from None


def _check_counts(config: dict[str, Any]) -> None:
    if too_much := excess(config):
        raise ControlError(f"field 'config': {too_much}", 400)


def _shown(value: Any) -> str:
    """A JSON value in an error message; what is nested, without its content, which may be nested without end."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:100]


class _Fields:
    """Typed access to the fields of an object that came from a peer."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    @classmethod
    def of(cls, data: Any) -> _Fields:
        if not isinstance(data, dict):
            raise ControlError(f"expected a JSON object, got {_shown(data)}", 400)
        return cls(data)

    def _get(self, key: str, kind: type, what: str) -> Any:
        if key not in self._data:
            raise ControlError(f"field {key!r} is missing: expected {what}", 400)
        value = self._data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ControlError(f"field {key!r}: expected {what}, got {_shown(value)}", 400)
        return value

    def boolean(self, key: str) -> bool:
        return self._get(key, bool, "true or false")

    def string(self, key: str) -> str:
        value: str = self._get(key, str, "a string")
        if len(value) > 1000:
            raise ControlError(f"field {key!r}: a string of {len(value)} characters", 400)
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.string(key)
        if value not in allowed:
            raise ControlError(f"field {key!r}: expected one of {', '.join(allowed)}, got {_shown(value)}", 400)
        return value

    def strings(self, key: str) -> list[str]:
        values = self._get(key, list, "a list of strings")
        if not values or not all(isinstance(v, str) and len(v) <= 1000 for v in values):
            raise ControlError(f"field {key!r}: expected a list of strings", 400)
        return values

    def integer(self, key: str, low: int, high: int) -> int:
        value: int = self._get(key, int, "a whole number")
        if not low <= value <= high:
            raise ControlError(f"field {key!r}: {value} is not from {low} to {high}", 400)
        return value

    def hex(self, key: str, n_digits: int) -> str:
        value = self.string(key)
        if len(value) != n_digits or any(c not in "0123456789abcdef" for c in value):
            raise ControlError(f"field {key!r}: expected {n_digits} hex digits", 400)
        return value

    def pair(self, key: str) -> tuple[int, int]:
        values = self._get(key, list, "[start, stop]")
        if len(values) != 2 or not all(type(v) is int for v in values):
            raise ControlError(f"field {key!r}: expected [start, stop]", 400)
        return values[0], values[1]

    def object(self, key: str) -> dict[str, Any]:
        return self._get(key, dict, "an object")

    def parts(self, key: str) -> list[PartSpec]:
        parts = []
        for entry in self._get(key, list, "a list of parts"):
            if not isinstance(entry, dict):
                raise ControlError(f"field {key!r}: expected objects", 400)
            fields = _Fields(entry)
            parts.append(
                PartSpec(fields.string("name"), fields.hex("sha256", 64), fields.integer("n_bytes", 1, 1 << 45))
            )
        return parts
