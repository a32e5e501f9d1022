"""Frames as bytes.

A frame is a fixed header, three tables (slices, freed sequences, copies) and raw payload bytes. Nothing is pickled, and every
length is checked against a limit and against the others before anything is allocated for it. This module knows no sockets
and no tensors; docs/protocol.md repeats the table.

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
    44      4     0
    48      8     payload bytes, which its type, n_rows and n_cols decide
    56      16    CRC32 of the 56 bytes before, the tables and the payload, and twelve zeros
    72            n_slices times: seq_id u64, start u32, n_rows u32, n_logits u32   (20 bytes each)
                  n_freed times: seq_id u64
                  n_copies times: seq_id u64, new seq_id u64
                  payload

All numbers are little-endian. Between nodes with a cluster key the same fields are sealed (`SealedCodec`): the first 56 bytes,
with the tag in the place of the CRC; and, if there are any, payload and tables, in this order, with a tag of 16 bytes behind.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mdi.errors import WireError
from mdi.net.wire import DTYPE_CODES, DTYPES, HANDSHAKE_LIMITS, Frame, FrameType, Limits, Slice
from mdi.security.session import TAG_BYTES, SealedSession

MAGIC = b"MDIr"
VERSION = 2
_FIELDS = struct.Struct("<4sBBBBQQIIIIIIQ")
_SLICE = struct.Struct("<QIII")
_SEQ_ID = struct.Struct("<Q")
_COPY = struct.Struct("<QQ")
CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + CHECK_BYTES

Buffer = bytes | bytearray | memoryview
Read = Callable[[memoryview], object]  # fills a buffer
Take = Callable[[int], memoryview]  # makes a buffer of so many bytes


@dataclass(frozen=True)
class Header:
    """A decoded header, needed to read the rest of the frame. `fields` are its bytes up to `check`, the CRC."""

    type: FrameType
    epoch: int
    number: int
    dtype: str
    n_slices: int
    n_freed: int
    n_copies: int
    n_rows: int
    n_cols: int
    payload_bytes: int
    is_replay: bool
    fields: bytes
    check: bytes

    @property
    def tables_bytes(self) -> int:
        return self.n_slices * _SLICE.size + self.n_freed * _SEQ_ID.size + self.n_copies * _COPY.size


class FrameCodec:
    """Writes and reads the frames of one connection, within `limits`. `session`, if there is one, seals them."""

    session: SealedSession | None = None

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits

    def parts(self, frame: Frame) -> tuple[bytes, Buffer]:
        """What goes over the wire for the next frame, in two buffers."""
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
        if _check_of(header.fields, tables, payload) != header.check:
            raise WireError(f"frame {header.number} is damaged")
        return _assembled(header, tables, payload)

    def _parsed(self, fields: bytes, check: bytes) -> Header:
        magic, version, frame_type, dtype_code, flags, epoch, number, *sizes = _FIELDS.unpack(fields)
        n_slices, n_freed, n_copies, n_rows, n_cols, zero, n_bytes = sizes
        if magic != MAGIC:
            raise WireError(f"not a frame of MDI-LLM: it begins with {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise WireError(f"the peer speaks version {version} of the ring protocol, this node version {VERSION}")
        if frame_type not in FrameType._value2member_map_:
            raise WireError(f"unknown type of frame: {frame_type}")
        if dtype_code not in DTYPES or flags > (frame_type == FrameType.BATCH) or zero:
            raise WireError(f"unknown payload dtype {dtype_code}, flags {flags} or field {zero}")
        self._check_counts(n_slices, n_freed, n_copies, n_rows, n_cols, n_bytes)
        payload_type = DTYPES[dtype_code]
        if payload_type.n_bytes(n_rows, n_cols) != n_bytes:
            raise WireError(f"a payload of {n_bytes} bytes cannot be {n_rows} x {n_cols} values of {payload_type.name}")
        return Header(
            FrameType(frame_type), epoch, number, payload_type.name, n_slices, n_freed, n_copies, n_rows, n_cols, n_bytes,
            bool(flags), fields, check,
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
    """The frames of a connection whose two sides have met (`mdi.security.challenge`); see the module for the bytes."""

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
        return _assembled(header, bytes(body[header.payload_bytes :]), body[: header.payload_bytes])


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
        0,
        memoryview(frame.payload).nbytes,
    )


def _tables_of(frame: Frame) -> bytes:
    tables = b"".join(_SLICE.pack(*s) for s in frame.slices)
    tables += b"".join(map(_SEQ_ID.pack, frame.freed))
    return tables + b"".join(_COPY.pack(*pair) for pair in frame.copies)


def _check_of(fields: bytes, tables: Buffer, payload: Buffer) -> bytes:
    crc = zlib.crc32(payload, zlib.crc32(tables, zlib.crc32(fields)))
    return crc.to_bytes(4, "little").ljust(CHECK_BYTES, b"\0")


def _assembled(header: Header, tables: Buffer, payload: bytearray | memoryview) -> Frame:
    """The frame; WireError if the tables contradict each other or the rows."""
    view = memoryview(tables)
    n_slices, n_freed = header.n_slices * _SLICE.size, header.n_freed * _SEQ_ID.size
    slices = tuple(Slice(*one) for one in _SLICE.iter_unpack(view[:n_slices]))
    freed = tuple(seq_id for (seq_id,) in _SEQ_ID.iter_unpack(view[n_slices : n_slices + n_freed]))
    copies = tuple(_COPY.iter_unpack(view[n_slices + n_freed :]))
    if header.type is FrameType.BATCH:
        _check_slices(slices, header.n_rows)
        _check_copies(copies)
    return Frame(
        header.type, header.epoch, header.number, header.dtype, header.n_rows, header.n_cols, slices, freed, payload, copies,
        header.is_replay,
    )  # fmt: skip


def _check_slices(slices: Sequence[Slice], n_rows: int) -> None:
    rows = sum(s.n_rows for s in slices)
    logits = sum(s.n_logits for s in slices)
    # The last stage returns only the rows that need logits; every other frame has all rows.
    if n_rows not in (rows, logits):
        raise WireError(f"a payload of {n_rows} rows for slices of {rows} rows, {logits} of them for logits")
    if any(s.n_logits > s.n_rows for s in slices):
        raise WireError("a slice needs more logits than it has rows")
    if len({s.seq_id for s in slices}) != len(slices):
        raise WireError("a frame has two slices of one sequence")


def _check_copies(copies: Sequence[tuple[int, int]]) -> None:
    made = {new for _, new in copies}
    if len(made) != len(copies) or any(seq_id == new for seq_id, new in copies):
        raise WireError("copies of caches that overwrite each other or themselves")
