"""The requests of a starter and the answers of a node as JSON, checked field by field."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

from mdi.block_ranges import ADAPTER_PREFIX, block_span
from mdi.engine.replay import COMPUTE, FILL, PASS
from mdi.errors import Code, ControlError
from mdi.kernels import LAYOUT_VERSION
from mdi.net.wire import REDUCE_DTYPES, REFUSED_S
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.cluster import N_NODES_LIMIT, PortOrAny
from mdi.spec.decode import (
    FormatText,
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
from mdi.spec.options import SUM_CHOICES, Length, Requested
from mdi.spec.window import WindowOptions

A = TypeVar("A", bound="Arguments")

# Raised with every change of what one side expects of the other; nodes of different versions do not work together.
CONTROL_VERSION = 16
COMPILING = "COMPILING"  # state of a node without a run, whose kernels are not there yet
VERSION_LIMIT = 1 << 30
HAND_OVER_S = 30.0  # time for other nodes to take the blocks of a leaving node
MOST_ROWS = 1 << 20  # in a question about rows
ROWS_BYTES = 2 << 20  # of rows in an answer
MOST_TAPS = 64  # blocks of a model whose outputs a run can have
N_RANKS_LIMIT = 256  # nodes of a group


@dataclass(frozen=True)
class PartSpec:
    """A part of the weights that a node needs: its name, the sha256 of its canonical bytes, and how many they are."""

    name: Name
    sha256: Sha256
    n_bytes: Annotated[int, Meta(ge=1, le=1 << 45)]


Bounds = Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 31)], ...], Meta(min_length=2, max_length=N_RANKS_LIMIT + 1)]


@dataclass(frozen=True)
class ToldGroup:
    """A group as a node is told of it; see tensor.group.Group.

    Attributes:
        members: name, address and ring port of each, by rank.
        heads, columns, vocabulary: see tensor.shares.Shares.
        packing: formats of blocks and head; folds: see checkpoint.packing.Packing.
    """

    rank: Whole
    members: Annotated[tuple[tuple[Text, Text, PortOrAny], ...], Meta(max_length=N_RANKS_LIMIT)]
    heads: Bounds
    columns: Bounds
    vocabulary: Bounds | None
    packing: tuple[FormatText, FormatText]
    algorithm: Annotated[str, one_of(SUM_CHOICES)]
    reduce_dtype: Annotated[str, one_of(REDUCE_DTYPES)]
    n_here: tuple[Annotated[int, Meta(ge=0, le=N_NODES_LIMIT)], ...]
    name: Text
    is_last: bool
    folds: bool = True


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
        is_ahead: the run's ring before goes on while this one is prepared; else it is ended.
        taps: blocks, rising, whose outputs come back to the starter.
        gradients: refused where blocks have none.
        window: of weights; None: they are in memory. group: None computes blocks alone.
        is_hot: whether the next node has the same blocks, and this one could take its place, see engine.worker.
        refused_s: see net.ring.Seat.
        keeps_received: rows that come are kept, as those that are sent.
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
    exclusive: bool = False
    keep_caches: bool = False
    replay: Annotated[str, one_of((COMPUTE, FILL, PASS))] = COMPUTE
    replay_bytes: Annotated[int, Meta(ge=0, le=1 << 45)] = 0
    keeps_received: bool = False
    hand_over: bool = False
    is_ahead: bool = False
    taps: Annotated[tuple[Whole, ...], Meta(max_length=MOST_TAPS)] = ()
    gradients: bool = False
    window: WindowOptions | None = None
    group: ToldGroup | None = None
    is_hot: bool = False
    refused_s: Annotated[float, Meta(ge=0, le=600)] = REFUSED_S
    layout_version: Annotated[int, Meta(ge=0, le=VERSION_LIMIT)] = LAYOUT_VERSION
    control_version: int = CONTROL_VERSION

    def to_json(self) -> dict[str, Any]:
        parts = [vars(part) for part in self.parts]
        group, window = self.group and vars(self.group), self.window and vars(self.window)
        own = {"model": self.model.to_json(), "parts": parts, "extent": vars(self.extent)}
        return {**vars(self), **own, "group": group, "window": window}

    @classmethod
    def from_json(cls, data: Any) -> InitRequest:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        _check_versions(data)
        _check_complete("request", cls, data)
        _check_complete("request.extent", Extent, data["extent"])
        request = decode_with_model(cls, data, "request", refused)
        if request.index >= len(request.names):
            raise refused(f"request.index: expected a place in a ring of {len(request.names)}, found {request.index}")
        spans_rise("request", refused, blocks=request.blocks)
        _check_blocks(request)
        _check_taps(request)
        return request


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
        return decode_with_model(cls, data, "request", refused)


@dataclass(frozen=True)
class Arguments:
    """Of a message, as they travel."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls: type[A], data: Any) -> A:
        """Raises ControlError (400) naming the field that is missing or wrong."""
        found = decode(cls, data, "request", refused)
        found.check()
        return found

    def check(self) -> None:
        """Raises ControlError (400) for fields that do not fit each other."""


@dataclass(frozen=True)
class ProbeRequest(Arguments):
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


@dataclass(frozen=True)
class ForwardRequest(Arguments):
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

    def check(self) -> None:
        if self.offset > self.part.n_bytes:
            raise refused(f"request.offset: {self.offset} is more than the part's {self.part.n_bytes} bytes")


@dataclass(frozen=True)
class BlocksRequest(Arguments):
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


@dataclass(frozen=True)
class TensorsRequest(Arguments):
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
        return decode_text(cls, data, "a message", refused)


@dataclass(frozen=True)
class PartRequest(Arguments):
    """Arguments of a message `part`, whose bytes are those of a part of a run from `offset` on."""

    run: RunId
    sha256: Sha256
    offset: Whole


@dataclass(frozen=True)
class RowsRequest(Arguments):
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

    def check(self) -> None:
        if not 0 < self.stop - self.start <= MOST_ROWS:
            raise refused(f"request: from 1 to {MOST_ROWS} rows can be asked for")


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
class WatchRequest(Arguments):
    """Arguments of the messages `watch` and `status`: a ring of a run, None is the latest one."""

    run: RunId
    epoch: RunId | None = None


def _check_complete(where: str, cls: type[Any], data: Any) -> None:
    """A default is for who makes a request, not for who reads one."""
    missing = [f.name for f in fields(cls) if f.default is not None and isinstance(data, dict) and f.name not in data]
    if missing:
        raise refused(f"{where}: the field {missing[0]!r} is missing")


def _check_versions(data: Any) -> None:
    if not isinstance(data, dict):
        raise refused(f"request: expected an object, found {shown(data)}")
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


def _check_taps(request: InitRequest) -> None:
    taps, n_layer = request.taps, request.model.config.n_layer
    if taps != tuple(sorted(set(taps))) or (taps and taps[-1] >= n_layer):
        raise refused(f"request.taps: expected rising blocks of a model of {n_layer}, found {shown(list(taps))}")


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


def refused(message: str) -> ControlError:
    """The error of a request that is malformed."""
    return ControlError(message, 400)
