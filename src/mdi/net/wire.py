"""Frames: as values, as bytes, and over sockets.

A frame is a fixed header, three tables (slices, freed sequences, copies) and raw payload bytes. Nothing is pickled, and every
length is checked against a limit and against the others before anything is allocated for it. This module knows no tensors;
docs/protocol.md repeats the table.

    offset  size  field
    0       4     magic "MDIr"
    4       1     protocol version
    5       1     type (FrameType)
    6       1     payload dtype (DTYPES)
    7       1     flags: 1 for a replay, else 0
    8       8     epoch: random id of the run
    16      8     frame number
    24      4     n_slices
    28      4     n_freed
    32      4     n_copies
    36      4     n_rows of the payload
    40      4     n_cols of the payload
    44      4     n_cached: columns for caches, of all rows of the slices; they follow the n_rows x n_cols values
    48      8     payload bytes, which its type, n_rows, n_cols, n_cached and the slices decide
    56      16    CRC32 of the 56 bytes before, the tables and the payload, and twelve zeros
    72            n_slices times: seq_id u64, start u32, n_rows u32, n_logits u32   (20 bytes each)
                  n_freed times: seq_id u64
                  n_copies times: seq_id u64, new seq_id u64
                  payload

All numbers are little-endian. Between nodes with a cluster key the same fields are sealed (`SealedCodec`): the first 56 bytes,
with the tag in the place of the CRC; and, if there are any, payload and tables, in this order, with a tag of 16 bytes behind.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from mdi.errors import WireError
from mdi.kernels.slices import NO_SLICES, RECORD, SliceTable
from mdi.kernels.slices import Slice as Slice
from mdi.net.keys import TAG_BYTES, SealedSession

SILENCE_S = 6.0  # a neighbour that is silent for so long counts as dead, unless the run has another limit
# Who is refused for so long gives up: nobody listens there any more, or the node has left the run. Before that, word of the
# run's end may still be on its way round the ring.
REFUSED_S = 0.7
FRAME_ROWS = 1 << 13  # of one frame at most: prompt rows, and a row for each sequence that decodes


class FrameType(IntEnum):
    HELLO = 1  # first frame of a link, and its answer
    BATCH = 2  # rows of sequences
    STOP = 3  # the run is over; passed on in both directions
    ERROR = 4  # a node failed; the payload says which and how; passed on in both directions
    PING = 5  # sign of life of one link, in both directions, never passed on
    CHALLENGE = 6  # before the HELLO, where nodes have a cluster key, and its answer
    NOTICE = 7  # a node will leave; passed on in both directions, before queued frames, up to the starter
    MESSAGE = 8  # a question outside of rings, and its answers, see net.message
    DATA = 9  # bytes that belong to a MESSAGE


@dataclass(frozen=True)
class PayloadType:
    """The layout of a payload: all scales first, if there are some, then all values, row by row.

    Attributes:
        name: torch's name of the type, or our own for scaled types.
        value_bytes: of one value.
        scale_bytes: of one scale and what belongs to it; 0 if the values are not scaled.
        block: consecutive values of a row that share a scale; 0 is the whole row. The last block of a row may be short.
    """

    name: str
    value_bytes: int
    scale_bytes: int = 0
    block: int = 0

    def n_scales(self, n_cols: int) -> int:
        """Scales of one row."""
        if not (self.scale_bytes and n_cols):
            return 0
        return -(-n_cols // self.block) if self.block else 1

    def n_bytes(self, n_rows: int, n_cols: int) -> int:
        return n_rows * (self.n_scales(n_cols) * self.scale_bytes + n_cols * self.value_bytes)


PLAIN_BYTES = PayloadType("bytes", 1)
# float16 times a power of two in float32 for each row: hidden states may pass the largest float16, 65504.
ROW_FLOAT16 = PayloadType("row-scaled float16", 2, scale_bytes=4)
# 8 bits times a bfloat16 for every 64 values, the largest of which stands beside the scale, again as bfloat16: one large
# value must not take the precision of its neighbours. Its place holds -128, which stands for nothing else.
BLOCK_INT8 = PayloadType("block-scaled int8", 1, scale_bytes=4, block=64)

DTYPES: dict[int, PayloadType] = {
    0: PLAIN_BYTES,
    1: PayloadType("float32", 4),
    2: PayloadType("float16", 2),
    3: PayloadType("bfloat16", 2),
    4: PayloadType("float64", 8),
    5: ROW_FLOAT16,
    6: BLOCK_INT8,
}
DTYPE_CODES = {payload_type.name: code for code, payload_type in DTYPES.items()}

# What a run's rows travel as; "auto" is what each stage computes in. All nodes of a ring must agree (net.hello).
WIRE_DTYPES = ("auto", "fp16", "int8")
REDUCE_DTYPES = ("float32", *WIRE_DTYPES[1:])  # of partial sums, see tensor.sums


@dataclass(frozen=True)
class Limits:
    """Limits of a receiver; a frame beyond them is refused before its payload is allocated.

    Attributes:
        n_taps: blocks of the run whose outputs come back to the starter.
    """

    max_rows: int = FRAME_ROWS
    max_cols: int = 1 << 17
    max_slices: int = 1 << 16
    max_payload_bytes: int = 1 << 30
    n_taps: int = 0


HANDSHAKE_LIMITS = Limits(max_rows=1, max_cols=4096, max_slices=0, max_payload_bytes=4096)


@dataclass(frozen=True)
class Frame:
    """One message of the ring.

    A node first frees the caches of `freed` and copies those of each (sequence, new sequence) of `copies`, as they were before
    both, and then computes the rows.

    Attributes:
        is_replay: rows that one node needs to have its caches again, and nobody else: they travel from the node before it to
            it, and between all others the frame has none (engine.worker).
        n_rows, n_cols: rows that carry the columns which only computed rows have (model.rows), hidden among them.
        n_cached: numbers of the columns for caches, which all rows of the slices carry; 0 in a model that has none.
        payload: a bytes-like object of n_rows * n_cols values of `dtype`, see PayloadType; behind them, laid out in the same
            way, those of the columns for caches.
    """

    type: FrameType
    epoch: int
    number: int = 0
    dtype: str = "bytes"
    n_rows: int = 0
    n_cols: int = 0
    slices: SliceTable = NO_SLICES
    freed: tuple[int, ...] = ()
    payload: bytes | bytearray | memoryview = field(default=b"", repr=False)
    copies: tuple[tuple[int, int], ...] = ()
    is_replay: bool = False
    n_cached: int = 0

    def __post_init__(self) -> None:
        if type(self.slices) is not SliceTable:
            object.__setattr__(self, "slices", SliceTable(self.slices))

    @property
    def has_rows(self) -> bool:
        return bool(self.n_rows or self.n_cached)

    @property
    def is_task(self) -> bool:
        """Whether it has bytes instead of rows: a task for all nodes, whose answers are in the bytes that come back."""
        return self.dtype == PLAIN_BYTES.name and self.n_rows > 0 and self.type is FrameType.BATCH

    @property
    def sections(self) -> list[Frame]:
        """The columns that only computed rows have, and those for caches, if there are some: each as if they were all."""
        if not self.n_cached:
            return [self]
        data = memoryview(self.payload).cast("B")
        split = DTYPES[DTYPE_CODES[self.dtype]].n_bytes(self.n_rows, self.n_cols)
        cached = replace(self, n_rows=self.slices.n_rows, n_cols=self.n_cached, n_cached=0, payload=data[split:])
        return [replace(self, n_cached=0, payload=data[:split]), cached]

    @classmethod
    def message(cls, frame_type: FrameType, epoch: int, data: bytes = b"") -> Frame:
        """A frame that carries plain bytes instead of rows."""
        return cls(frame_type, epoch, n_rows=1 if data else 0, n_cols=len(data), payload=data)


MAGIC = b"MDIr"
VERSION = 2
_FIELDS = struct.Struct("<4sBBBBQQIIIIIIQ")
_SEQ_ID = struct.Struct("<Q")
_COPY = struct.Struct("<QQ")
CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + CHECK_BYTES

Buffer = bytes | bytearray | memoryview
Read = Callable[[memoryview], object]  # fills a buffer
Take = Callable[[int], memoryview]  # makes a buffer of so many bytes


@dataclass(frozen=True)
class Header:
    """A decoded header, needed to read the rest of the frame. `fields` are its bytes up to the CRC."""

    type: FrameType
    epoch: int
    number: int
    dtype: str
    n_slices: int
    n_freed: int
    n_copies: int
    n_rows: int
    n_cols: int
    n_cached: int
    payload_bytes: int
    is_replay: bool
    fields: bytes
    crc: bytes

    @property
    def tables_bytes(self) -> int:
        return self.n_slices * RECORD.size + self.n_freed * _SEQ_ID.size + self.n_copies * _COPY.size


class FrameCodec:
    """Writes and reads the frames of one connection, within `limits`. `session`, if there is one, seals them."""

    session: SealedSession | None = None

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits

    def parts(self, frame: Frame) -> tuple[bytes, Buffer]:
        """Bytes of the next frame on the wire, in two buffers."""
        return self.head(frame), frame.payload

    def head(self, frame: Frame) -> bytes:
        """Header and tables of a frame; `frame.payload` follows on the wire unchanged."""
        fields, tables = _fields_of(frame), _tables_of(frame)
        return fields + _check_of(fields, tables, frame.payload) + tables

    def header(self, data: Buffer) -> Header:
        """Check a header of HEADER_BYTES bytes.

        Raises:
            WireError: another magic or version, an unknown type or dtype, a count beyond the limits, or sizes that contradict
                each other.
        """
        if len(data) != HEADER_BYTES:
            raise WireError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
        return self._parsed(bytes(data[: _FIELDS.size]), bytes(data[_FIELDS.size :]))

    def body_bytes(self, header: Header) -> int:
        """How much follows the header on the wire."""
        return header.tables_bytes + header.payload_bytes

    def body(self, header: Header, read: Read, take: Take) -> Frame:
        """Read the rest of a frame: `read` fills a buffer from the wire, `take` gives the one for the payload. WireError."""
        tables = bytearray(header.tables_bytes)
        read(memoryview(tables))
        payload = take(header.payload_bytes)
        read(payload)
        return self.frame(header, tables, payload)

    def frame(self, header: Header, tables: Buffer, payload: bytearray | memoryview) -> Frame:
        """Put a frame together from its parts.

        Raises:
            WireError: the CRC does not fit, or the tables contradict each other or the rows.
        """
        if len(tables) != header.tables_bytes or len(payload) != header.payload_bytes:
            raise WireError(
                f"{len(tables)} + {len(payload)} bytes of tables and payload, expected "
                f"{header.tables_bytes} + {header.payload_bytes}"
            )
        if _check_of(header.fields, tables, payload) != header.crc:
            raise WireError(f"frame {header.number} is damaged")
        return _assembled(header, tables, payload, self.limits.n_taps)

    def _parsed(self, fields: bytes, crc: bytes) -> Header:
        magic, version, frame_type, dtype_code, flags, epoch, number, *sizes = _FIELDS.unpack(fields)
        n_slices, n_freed, n_copies, n_rows, n_cols, n_cached, n_bytes = sizes
        if magic != MAGIC:
            raise WireError(f"not a frame of MDI-LLM: it begins with {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise WireError(f"the peer speaks version {version} of the ring protocol, this node version {VERSION}")
        if frame_type not in FrameType._value2member_map_:
            raise WireError(f"unknown type of frame: {frame_type}")
        is_batch = frame_type == FrameType.BATCH
        if dtype_code not in DTYPES or flags > is_batch or (n_cached and not is_batch):
            raise WireError(f"unknown payload dtype {dtype_code}, flags {flags} or field {n_cached}")
        self._check_counts(n_slices, n_freed, n_copies, n_rows, n_cols + n_cached, n_bytes)
        payload_type = DTYPES[dtype_code]
        # Of columns for caches, the slices say how many rows have them.
        if not n_cached and payload_type.n_bytes(n_rows, n_cols) != n_bytes:
            raise WireError(f"a payload of {n_bytes} bytes cannot be {n_rows} x {n_cols} values of {payload_type.name}")
        return Header(
            FrameType(frame_type), epoch, number, payload_type.name, n_slices, n_freed, n_copies, n_rows, n_cols, n_cached,
            n_bytes, bool(flags), fields, crc,
        )  # fmt: skip

    def _check_counts(self, n_slices: int, n_freed: int, n_copies: int, n_rows: int, n_cols: int, n_bytes: int) -> None:
        limits = self.limits
        for what, found, limit in (
            ("slices", n_slices, limits.max_slices),
            ("freed sequences", n_freed, limits.max_slices),
            ("copies", n_copies, limits.max_slices),
            ("rows", n_rows, limits.max_rows),
            ("columns", n_cols, limits.max_cols),
            ("payload bytes", n_bytes, limits.max_payload_bytes),
        ):
            if found > limit:
                raise WireError(f"a frame with {found} {what}; this node accepts at most {limit}")


class SealedCodec(FrameCodec):
    """The frames of a connection whose two sides have met (`mdi.net.hello`); see the module for the bytes."""

    def __init__(self, session: SealedSession, limits: Limits) -> None:
        super().__init__(limits)
        self.session: SealedSession = session

    def parts(self, frame: Frame) -> tuple[bytes, Buffer]:
        head, body = self.session.seal(_fields_of(frame)), b"".join((frame.payload, _tables_of(frame)))
        return head, self.session.seal(body) if body else b""

    def header(self, data: Buffer) -> Header:
        """As FrameCodec's; also WireError if it is not the next header of this connection. Once for each frame."""
        fields = bytearray(_FIELDS.size)
        self.session.open(data, fields)
        return self._parsed(bytes(fields), b"")

    def body_bytes(self, header: Header) -> int:
        n_bytes = super().body_bytes(header)
        return n_bytes + TAG_BYTES if n_bytes else 0

    def body(self, header: Header, read: Read, take: Take) -> Frame:
        body = take(super().body_bytes(header))
        if len(body):
            sealed = bytearray(self.body_bytes(header))
            read(memoryview(sealed))
            self.session.open(sealed, body)
        tables, payload = bytes(body[header.payload_bytes :]), body[: header.payload_bytes]
        return _assembled(header, tables, payload, self.limits.n_taps)


PLAIN = FrameCodec()
HANDSHAKE = FrameCodec(HANDSHAKE_LIMITS)


def _fields_of(frame: Frame) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        VERSION,
        frame.type,
        DTYPE_CODES[frame.dtype],
        frame.is_replay,
        frame.epoch,
        frame.number,
        len(frame.slices),
        len(frame.freed),
        len(frame.copies),
        frame.n_rows,
        frame.n_cols,
        frame.n_cached,
        memoryview(frame.payload).nbytes,
    )


def _tables_of(frame: Frame) -> bytes:
    if not (frame.freed or frame.copies):
        return frame.slices.records
    freed, copies = map(_SEQ_ID.pack, frame.freed), [_COPY.pack(*pair) for pair in frame.copies]
    return b"".join((frame.slices.records, *freed, *copies))


def _check_of(fields: bytes, tables: Buffer, payload: Buffer) -> bytes:
    crc = zlib.crc32(payload, zlib.crc32(tables, zlib.crc32(fields)))
    return crc.to_bytes(4, "little").ljust(CHECK_BYTES, b"\0")


def _assembled(header: Header, tables: Buffer, payload: bytearray | memoryview, n_taps: int) -> Frame:
    """The frame; WireError if the tables contradict each other or the rows."""
    view = memoryview(tables)
    n_slices, n_freed = header.n_slices * RECORD.size, header.n_freed * _SEQ_ID.size
    slices = SliceTable.read(bytes(view[:n_slices]))
    freed = tuple(seq_id for (seq_id,) in _SEQ_ID.iter_unpack(view[n_slices : n_slices + n_freed]))
    copies = tuple(_COPY.iter_unpack(view[n_slices + n_freed :]))
    if header.type is FrameType.BATCH:
        is_task = header.dtype == PLAIN_BYTES.name and not (slices or freed or copies)
        _check_slices(slices, 0 if is_task else header.n_rows, n_taps)
        _check_copies(copies)
    if header.n_cached:
        form = DTYPES[DTYPE_CODES[header.dtype]]
        expected = form.n_bytes(header.n_rows, header.n_cols) + form.n_bytes(slices.n_rows, header.n_cached)
        if header.payload_bytes != expected:
            raise WireError(f"a payload of {header.payload_bytes} bytes; rows and columns for caches take {expected}")
    return Frame(
        header.type, header.epoch, header.number, header.dtype, header.n_rows, header.n_cols, slices, freed, payload, copies,
        header.is_replay, header.n_cached,
    )  # fmt: skip


def _check_slices(slices: SliceTable, n_rows: int, n_taps: int) -> None:
    rows, logits = slices.n_rows, slices.n_logits
    # The last stage returns only the rows that need logits; every other frame has all rows. Below them, for each block whose
    # outputs are wanted and that has been computed, come those of the rows that need logits.
    if not any([n_rows in (rows + n * logits, logits + n * logits) for n in range(1 + n_taps)]):
        raise WireError(f"a payload of {n_rows} rows for slices of {rows} rows, {logits} of them for logits")
    if any([s.n_logits > s.n_rows for s in slices]):
        raise WireError("a slice needs more logits than it has rows")
    if len({s.seq_id for s in slices}) != len(slices):
        raise WireError("a frame has two slices of one sequence")


def _check_copies(copies: Sequence[tuple[int, int]]) -> None:
    made = {new for _, new in copies}
    if len(made) != len(copies) or any(seq_id == new for seq_id, new in copies):
        raise WireError("copies of caches that overwrite each other or themselves")


# Each byte is a sign of life, but a frame must end: no link that a ring can use is slower than this.
PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 10_000

Allocate = Callable[[int], Any]


class CutOffError(WireError):
    """The connection was closed in the middle of a frame."""


class BufferPool:
    """Receive buffers that are used again: a decoding frame comes a thousand times with the same size.

    Args:
        n_kept: buffers that wait to be used again, at most.
        allocate: makes a writable buffer whose len() is its bytes; for a GPU, page-locked memory.
    """

    def __init__(self, n_kept: int, allocate: Allocate = bytearray) -> None:
        self._n_kept = n_kept
        self._allocate = allocate
        self._type: type = type(allocate(0))
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> memoryview:
        if n_bytes == 0:
            return memoryview(b"")  # a PING must not use up a buffer
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= n_bytes:
                    return memoryview(self._free.pop(i))[:n_bytes]
        return memoryview(self._allocate(max(n_bytes, 4096)))[:n_bytes]

    def give_back(self, view: bytes | bytearray | memoryview) -> None:
        """Return a view that `take` gave; nothing may read it any more."""
        buffer = view.obj if isinstance(view, memoryview) else view
        if not isinstance(buffer, self._type):
            return
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=len)  # the smallest that fits is found first; the largest are the ones to keep
            if len(self._free) > self._n_kept:
                del self._free[0]


def tune(sock: socket.socket) -> None:
    """Options of every ring socket: a decoding frame is small and must not wait for the next one."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send_frame(sock: socket.socket, frame: Frame, codec: FrameCodec = PLAIN, is_patient: bool = False) -> int:
    """Write one frame, header and payload in one system call if the system has one; returns the bytes written.

    Args:
        is_patient: continue after the socket's own timeout: a busy peer may take nothing, but it sends PINGs.
    """
    first, second = codec.parts(frame)
    head, payload = memoryview(first), memoryview(second).cast("B") if len(second) else memoryview(b"")
    sent, n_bytes = 0, len(head) + payload.nbytes
    while sent < n_bytes:
        try:
            if sent >= len(head):
                sent += sock.send(payload[sent - len(head) :])
            elif hasattr(sock, "sendmsg"):
                sent += sock.sendmsg([head[sent:], payload])
            else:  # Windows
                sent += sock.send(head[sent:])
        except TimeoutError:
            if not is_patient:
                raise
    return n_bytes


def read_frame(sock: socket.socket, codec: FrameCodec, pool: BufferPool | None = None) -> Frame | None:
    """Read one frame; None if the peer closed the connection between two frames.

    Raises:
        CutOffError: it closed in the middle of one.
        WireError: the bytes are not a frame that `codec` accepts.
        OSError: the socket's own errors, TimeoutError among them.
    """
    head = bytearray(HEADER_BYTES)
    if not _read_exactly(sock, memoryview(head), may_end=True):
        return None
    take = pool.take if pool else lambda n_bytes: memoryview(bytearray(n_bytes))
    return codec.body(codec.header(head), lambda view: _read_exactly(sock, view), take)


def _read_exactly(sock: socket.socket, view: memoryview, may_end: bool = False) -> bool:
    done = 0
    deadline = None
    while done < len(view):
        n = sock.recv_into(view[done:])
        if n == 0:
            if may_end and done == 0:
                return False
            raise CutOffError(f"the connection was closed {len(view) - done} bytes before the end of a frame")
        done += n
        now = time.monotonic()
        if deadline is None:  # the deadline begins with the first byte; before that, the limit of silence applies
            deadline = now + PATIENCE_S + len(view) / SLOWEST_BYTES_PER_S
        if now > deadline and done < len(view):
            raise WireError(f"a frame was too slow: {len(view) - done} of {len(view)} bytes are still missing")
    return True
