"""The requests of a starter and the answers of a node as JSON, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

from mdi.block_ranges import ADAPTER_PREFIX, block_span
from mdi.engine.replay import COMPUTE, FILL, PASS
from mdi.errors import Code, ControlError
from mdi.kernels import LAYOUT_VERSION
from mdi.net.wire import REFUSED_S, SILENCE_S
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.decode import (
    Meta,
    Name,
    Port,
    RunId,
    Sha256,
    Span,
    Text,
    Whole,
    decode,
    decode_text,
    one_of,
    shown,
    spans_rise,
)
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId, decode_with_model
from mdi.spec.options import Length, Requested, Silence

T = TypeVar("T")

# Raised with every change of what one side expects of the other; nodes of different versions do not work together.
CONTROL_VERSION = 11
COMPILING = "COMPILING"  # state of a node without a run, whose kernels are not there yet
VERSION_LIMIT = 1 << 30
HAND_OVER_S = 30.0  # time for other nodes to take the blocks of a leaving node
MOST_ROWS = 1 << 20  # in a question about rows
ROWS_BYTES = 2 << 20  # of rows in an answer
KEEPS_RECEIVED = "received"  # extension of `/init`: rows that come are kept, as those that are sent
GRADIENTS = "gradients"  # extension of `/init`: refused where blocks have no gradients


@dataclass(frozen=True)
class PartSpec:
    """A part of the weights that a node needs: its name, the sha256 of its canonical bytes, and how many they are."""

    name: Name
    sha256: Sha256
    n_bytes: Annotated[int, Meta(ge=1, le=1 << 45)]


@dataclass(frozen=True)
class InitRequest(Requested):
    """Body of `POST /init`: everything that a secondary has to know about a run; see also Requested.

    Attributes:
        run: random 64-bit id of the run, as 16 hex digits; a caller that knows it may end the run.
        epoch: the same of this ring: a run whose ring broke goes on over another one.
        index: the receiver's place in the ring; names[0] is the starter.
        placement: hash of model, cut and ring.
        next_addr, next_port: ring port of the next node.
        blocks: (start, stop) of the receiver.
        extent: of the run.
        layout_version: of packed weights, see kernels.layout; all nodes of a ring have the same.
        silence_s: a neighbour that is silent for so long is lost.
        exclusive: no other run may be on the node.
        replay: the receiver's part in replays, see engine.worker; replay_bytes: for rows that it has sent.
        keep_caches: use the caches of the run's last ring, if they still exist.
        is_hot: whether the next node has the same blocks, and this one could take its place, see engine.worker.
        refused_s: see net.ring.Seat.
        hand_over: whether the starter takes the receiver's blocks elsewhere if it says that it is about to leave.
    """

    run: RunId
    epoch: RunId
    index: Annotated[int, Meta(ge=1)]
    names: Annotated[tuple[Text, ...], Meta(min_length=1)]
    placement: Text
    next_addr: Text
    next_port: Port
    model: ModelId
    blocks: Span
    parts: tuple[PartSpec, ...]
    extent: Extent
    silence_s: Silence = SILENCE_S
    exclusive: bool = False
    keep_caches: bool = False
    replay: Annotated[str, one_of((COMPUTE, FILL, PASS))] = COMPUTE
    replay_bytes: Annotated[int, Meta(ge=0, le=1 << 45)] = 0
    hand_over: bool = False
    is_hot: bool = False
    refused_s: Annotated[float, Meta(ge=0, le=600)] = REFUSED_S
    layout_version: Annotated[int, Meta(ge=0, le=VERSION_LIMIT)] = LAYOUT_VERSION
    control_version: int = CONTROL_VERSION
    extensions: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        parts = [vars(part) for part in self.parts]
        return {**vars(self), "model": self.model.to_json(), "parts": parts, "extent": vars(self.extent)}

    @classmethod
    def from_json(cls, data: Any) -> InitRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        _check_versions(data)
        _check_complete("request", cls, data)
        _check_complete("request.extent", Extent, data["extent"])
        request = decode_with_model(cls, data, "request", _refused)
        if request.index >= len(request.names):
            raise _refused(f"request.index: expected a place in a ring of {len(request.names)}, found {request.index}")
        spans_rise("request", _refused, blocks=request.blocks)
        _check_blocks(request)
        taps_of(request.extensions, request.model.config.n_layer)
        return request


MOST_TAPS = 64  # blocks of a model whose outputs a run can have
_TAPS = "taps"  # of the extensions of a run: the numbers of these blocks


def tap_extensions(taps: Sequence[int]) -> dict[str, Any]:
    """The extension of `/init` with the blocks whose outputs come back to the starter; empty if there are none."""
    return {_TAPS: list(taps)} if taps else {}


def taps_of(extensions: Mapping[str, Any], n_layer: int) -> tuple[int, ...]:
    """The blocks in such an extension. Raises ControlError (400) if they are none of a model of `n_layer` blocks."""
    taps = extensions.get(_TAPS, [])
    if not isinstance(taps, list) or len(taps) > MOST_TAPS or any(type(tap) is not int for tap in taps):
        raise ControlError(f"extensions.{_TAPS}: expected a list of at most {MOST_TAPS} blocks", 400)
    if taps != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < n_layer):
        raise ControlError(f"extensions.{_TAPS}: expected rising blocks of a model of {n_layer}", 400)
    return tuple(taps)


@dataclass(frozen=True)
class ProfileRequest(Requested):
    """Bytes of a message `profile`: which model the node is to measure itself with, computed as it would be in a run.

    Attributes:
        fresh: measure again, whatever is kept.
        run: id of the run to place, if there is one: its starter may end the node's process even if the node gets no blocks.
    """

    model: ModelId
    fresh: bool = False
    run: RunId | None = None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> ProfileRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        return decode_with_model(cls, data, "request", _refused)


@dataclass(frozen=True)
class ProbeRequest:
    """Arguments of a message `probe`: another node, which the receiver is to reach.

    Attributes:
        name: of that node.
        addr, port, port_in: where its control port and its ring port should be.
        measure: whether to measure the bandwidth as well, with a few megabytes.
    """

    name: Name
    addr: Name
    port: Port
    port_in: Port
    measure: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ProbeRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        return _decoded(cls, data)


@dataclass(frozen=True)
class ForwardRequest:
    """Arguments of a message `forward`: a part that the receiver has, and another node of the run that lacks it.

    Attributes:
        run: in which the other node waits for the part.
        offset: bytes of it that the other node has already.
        node, addr, port_in: name of the other node, and where its ring port is.
    """

    run: RunId
    part: PartSpec
    offset: Whole
    node: Name
    addr: Name
    port_in: Port

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ForwardRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        request = _decoded(cls, data)
        if request.offset > request.part.n_bytes:
            raise _refused(f"request.offset: {request.offset} is more than the part's {request.part.n_bytes} bytes")
        return request


@dataclass(frozen=True)
class BlocksRequest:
    """Arguments of a message `blocks`. Its bytes are float32 rows (n_texts, n_tokens, n_embd), then gradients of that shape.

    Attributes:
        blocks: (start, stop) of the receiver's blocks.
        is_backward: the gradients with respect to the rows and to the tensors are wanted, not the rows behind the blocks.
        tensors: hash of the set that the blocks compute with, which a message `tensors` has given; None: no tensors.
    """

    run: RunId
    blocks: Span
    n_texts: Annotated[int, Meta(ge=1, le=1 << 16)]
    n_tokens: Length
    is_backward: bool = False
    tensors: Sha256 | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> BlocksRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        return _decoded(cls, data)


@dataclass(frozen=True)
class TensorsRequest:
    """Arguments of a message `tensors`. Its bytes are the header of some tensors (stages.trained_tensors), then the tensors.

    Attributes:
        blocks: (start, stop), of the receiver's, that the tensors may belong to.
        sha256: of the message's bytes.
        header_bytes: of the tensors' names and shapes.
    """

    run: RunId
    blocks: Span
    sha256: Sha256
    header_bytes: Annotated[int, Meta(ge=1, le=1 << 20)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> TensorsRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        return _decoded(cls, data)


@dataclass(frozen=True)
class Opening:
    """The first frame of a message on a ring port (net.message).

    Attributes:
        ask: what is asked.
        n_bytes: that follow once the node wants them.
        args: the fields of one of the requests below, but for a profile, which may be longer than an opening.
    """

    ask: Text
    version: int
    n_bytes: Whole = 0
    args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, data: bytes) -> Opening:
        """Raises ControlError (400)."""
        return decode_text(cls, data, "a message", _refused)


@dataclass(frozen=True)
class PartRequest:
    """Arguments of a message `part`, whose bytes are those of a part of a run from `offset` on."""

    run: RunId
    sha256: Sha256
    offset: Whole

    @classmethod
    def from_json(cls, data: Any) -> PartRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        return _decoded(cls, data)


@dataclass(frozen=True)
class RowsRequest:
    """Arguments of a message `rows`: what the receiver says of rows of one text in a ring.

    Attributes:
        seq_id, start, stop: positions of a text, half-open.
        which: the rows that it has SENT to the next node, or those that it has RECEIVED.
        is_whole: whether the rows themselves are asked for, besides their hash.
    """

    run: RunId
    epoch: RunId
    seq_id: Whole
    start: Whole
    stop: Whole
    which: Annotated[str, one_of(("sent", "received"))]
    is_whole: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> RowsRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        request = _decoded(cls, data)
        if not 0 < request.stop - request.start <= MOST_ROWS:
            raise _refused(f"request: from 1 to {MOST_ROWS} rows can be asked for")
        return request


@dataclass(frozen=True)
class ToldRows:
    """The answer: the type of the rows (net.wire.DTYPES), their width, the sha256 of their bytes, and how they were computed.

    Attributes:
        rows: base64 of the bytes, if they were asked for: all scales, then all values.
    """

    dtype: Name
    n_cols: Whole
    sha256: Sha256
    arithmetic: Arithmetic
    rows: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str) -> ToldRows:
        """Raises ControlError."""
        return decode(cls, data, where, ControlError)


@dataclass(frozen=True)
class WatchRequest:
    """Arguments of the messages `watch` and `status`: a ring of a run, None is the latest one."""

    run: RunId
    epoch: RunId | None = None

    @classmethod
    def from_json(cls, data: Any) -> WatchRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        return _decoded(cls, data)


def _decoded(cls: type[T], data: Any) -> T:
    return decode(cls, data, "request", _refused)


def _check_complete(where: str, cls: type[Any], data: Any) -> None:
    """A default is for who makes a request, not for who reads one."""
    missing = [f.name for f in fields(cls) if f.default is not None and isinstance(data, dict) and f.name not in data]
    if missing:
        raise _refused(f"{where}: the field {missing[0]!r} is missing")


def _check_versions(data: Any) -> None:
    if not isinstance(data, dict):
        raise _refused(f"request: expected an object, found {shown(data)}")
    version, layout = data.get("control_version"), data.get("layout_version")
    if type(version) is not int or version != CONTROL_VERSION:
        raise version_error("the starter", version)
    if type(layout) is int and 0 <= layout <= VERSION_LIMIT and layout != LAYOUT_VERSION:
        raise ControlError(
            f"the starter packs weights in version {layout} of their layout, this node in version "
            f"{LAYOUT_VERSION}: install the same version of MDI-LLM on both",
            409,
            code=Code.VERSION,
        )


def version_error(who: str, version: Any) -> ControlError:
    """The refusal for another version of this protocol."""
    return ControlError(
        f"{who} speaks version {shown(version)} of the control protocol, this node version {CONTROL_VERSION}: "
        "install the same version of MDI-LLM on both",
        409,
        code=Code.VERSION,
    )


def _check_blocks(request: InitRequest) -> None:
    (start, stop), n_layer = request.blocks, request.model.config.n_layer
    if not 0 <= start < stop <= n_layer:
        raise ControlError(f"blocks: {[start, stop]} is no range of a model of {n_layer} blocks", 400)
    names_wanted = (f"block.{i}" for i in range(start, stop))  # never as a list: `stop` came from a peer
    parts = [part for part in request.parts if not part.name.startswith(ADAPTER_PREFIX)]
    _check_adapters(request)
    blocks = parts[:-1] if parts and parts[-1].name == "head" else parts
    if len(blocks) != stop - start or any(p.name != n for p, n in zip(blocks, names_wanted, strict=True)):
        raise ControlError(f"the listed parts do not match {block_span(start, stop)}", 400)


def _check_adapters(request: InitRequest) -> None:
    """Each belongs to one of the blocks; they come last."""
    names = [part.name for part in request.parts]
    found = [name for name in names if name.startswith(ADAPTER_PREFIX)]
    numbers = [name.removeprefix(ADAPTER_PREFIX) for name in found]
    start, stop = request.blocks
    is_known = all(n.isascii() and n.isdigit() and len(n) < 10 and str(int(n)) == n for n in numbers)
    if not is_known or not all(start <= int(n) < stop for n in numbers) or len(set(found)) < len(found):
        raise ControlError(f"the listed parts of adapters do not match {block_span(start, stop)}", 400)
    if names[len(names) - len(found) :] != found:
        raise ControlError("the parts of adapters do not follow all others", 400)


def _refused(message: str) -> ControlError:
    return ControlError(message, 400)
