"""Frames: what travels over a ring link, as bytes.

A frame is a fixed header, a table of slices, a list of freed sequence ids, and raw payload bytes. Nothing is pickled, and
every length is checked against a limit and against the others before anything is allocated for it. This module knows no
sockets and no tensors; docs/protocol.md repeats the table.

    offset  size  field
    0       4     magic "MDIr"
    4       1     protocol version
    5       1     kind (Kind)
    6       1     payload dtype (DTYPES)
    7       1     flags, 0
    8       8     epoch: random id of the run
    16      8     frame number
    24      4     n_slices
    28      4     n_freed
    32      4     n_rows of the payload
    36      4     n_cols of the payload
    40      8     payload bytes, which kind of payload, n_rows and n_cols decide
    48      4     CRC32 of the 48 bytes before, the tables and the payload
    52            n_slices times: seq_id u64, start u32, n_rows u32, n_logits u32   (20 bytes each)
                  n_freed times: seq_id u64
                  payload

All numbers are little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from mdi.errors import WireError

MAGIC = b"MDIr"
VERSION = 1
FRAME_ROWS = 1 << 13  # of one frame at most: prompt rows, and a row for each sequence that decodes
_HEADER = struct.Struct("<4sBBBBQQIIIIQI")
_SLICE = struct.Struct("<QIII")
_SEQ_ID = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size
_CRC_OFFSET = HEADER_BYTES - 4


class Kind(IntEnum):
    HELLO = 1  # first frame of a link, and its answer
    BATCH = 2  # rows of sequences
    STOP = 3  # the run is over; passed on round the ring
    ERROR = 4  # a node failed; the payload says which and how; passed on round the ring
    PING = 5  # sign of life of one link, never passed on


@dataclass(frozen=True)
class PayloadType:
    """How the numbers of a payload lie in memory: all scales first, if it has some, then all values, row by row.

    Attributes:
        name: torch's name of the type, or what the scaled ones are called here.
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
        if not self.scale_bytes:
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


@dataclass(frozen=True)
class Slice:
    """Rows of one sequence in a frame.

    Attributes:
        seq_id: the sequence.
        start: position of the first row in the sequence; a start before the end of the cache truncates the cache.
        n_rows: how many consecutive positions.
        n_logits: how many of the last rows come back to the starter for logits.
    """

    seq_id: int
    start: int
    n_rows: int
    n_logits: int


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts; a frame beyond it is refused before its payload is allocated."""

    max_rows: int = FRAME_ROWS
    max_cols: int = 1 << 17
    max_slices: int = 1 << 16
    max_payload_bytes: int = 1 << 30


HANDSHAKE_LIMITS = Limits(max_rows=1, max_cols=4096, max_slices=0, max_payload_bytes=4096)


@dataclass(frozen=True)
class Frame:
    """One message of the ring. `payload` is a bytes-like object of n_rows * n_cols values of `dtype`, see PayloadType."""

    kind: Kind
    epoch: int
    number: int = 0
    dtype: str = "bytes"
    n_rows: int = 0
    n_cols: int = 0
    slices: tuple[Slice, ...] = ()
    freed: tuple[int, ...] = ()
    payload: bytes | bytearray | memoryview = field(default=b"", repr=False)

    @classmethod
    def message(cls, kind: Kind, epoch: int, data: bytes = b"") -> Frame:
        """A frame that carries plain bytes instead of rows."""
        return cls(kind, epoch, n_rows=1 if data else 0, n_cols=len(data), payload=data)


@dataclass(frozen=True)
class Header:
    """A decoded header: what is needed to read the rest of the frame."""

    kind: Kind
    epoch: int
    number: int
    dtype: str
    n_slices: int
    n_freed: int
    n_rows: int
    n_cols: int
    payload_bytes: int
    crc: int
    crc_so_far: int

    @property
    def tables_bytes(self) -> int:
        return self.n_slices * _SLICE.size + self.n_freed * _SEQ_ID.size


def encode_head(frame: Frame) -> bytes:
    """Header and tables of a frame, to be followed on the wire by `frame.payload` as it is."""
    payload_bytes = memoryview(frame.payload).nbytes
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        frame.kind,
        DTYPE_CODES[frame.dtype],
        0,
        frame.epoch,
        frame.number,
        len(frame.slices),
        len(frame.freed),
        frame.n_rows,
        frame.n_cols,
        payload_bytes,
        0,
    )
    tables = b"".join(_SLICE.pack(s.seq_id, s.start, s.n_rows, s.n_logits) for s in frame.slices)
    tables += b"".join(map(_SEQ_ID.pack, frame.freed))
    crc = zlib.crc32(frame.payload, zlib.crc32(tables, zlib.crc32(fields[:_CRC_OFFSET])))
    return fields[:_CRC_OFFSET] + struct.pack("<I", crc) + tables


def decode_header(data: bytes | bytearray | memoryview, limits: Limits) -> Header:
    """Check a header of HEADER_BYTES bytes.

    Raises:
        WireError: another magic or version, an unknown kind or dtype, a count beyond `limits`, or sizes that contradict
            each other.
    """
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
    magic, version, kind, dtype_code, flags, epoch, number, n_slices, n_freed, n_rows, n_cols, n_bytes, crc = (
        _HEADER.unpack(data)
    )
    if magic != MAGIC:
        raise WireError(f"not a frame of MDI-LLM: it begins with {bytes(magic)!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"the peer speaks version {version} of the ring protocol, this node version {VERSION}")
    if kind not in Kind._value2member_map_:
        raise WireError(f"unknown kind of frame: {kind}")
    if dtype_code not in DTYPES or flags:
        raise WireError(f"unknown payload dtype {dtype_code} or flags {flags}")
    for what, found, limit in (
        ("slices", n_slices, limits.max_slices),
        ("freed sequences", n_freed, limits.max_slices),
        ("rows", n_rows, limits.max_rows),
        ("columns", n_cols, limits.max_cols),
        ("payload bytes", n_bytes, limits.max_payload_bytes),
    ):
        if found > limit:
            raise WireError(f"a frame with {found} {what}; this node accepts at most {limit}")
    payload_type = DTYPES[dtype_code]
    if payload_type.n_bytes(n_rows, n_cols) != n_bytes:
        raise WireError(f"a payload of {n_bytes} bytes cannot be {n_rows} x {n_cols} values of {payload_type.name}")
    return Header(
        Kind(kind),
        epoch,
        number,
        payload_type.name,
        n_slices,
        n_freed,
        n_rows,
        n_cols,
        n_bytes,
        crc,
        zlib.crc32(memoryview(data)[:_CRC_OFFSET]),
    )


def decode_frame(header: Header, tables: bytes | bytearray | memoryview, payload: bytearray | memoryview) -> Frame:
    """Put a frame together from its parts; WireError if the CRC does not fit or the slices contradict the rows."""
    if len(tables) != header.tables_bytes or len(payload) != header.payload_bytes:
        raise WireError(
            f"{len(tables)} + {len(payload)} bytes of tables and payload, expected "
            f"{header.tables_bytes} + {header.payload_bytes}"
        )
    crc = zlib.crc32(payload, zlib.crc32(tables, header.crc_so_far))
    if crc != header.crc:
        raise WireError(f"frame {header.number} is damaged: CRC32 {crc:08x}, expected {header.crc:08x}")
    split = header.n_slices * _SLICE.size
    view = memoryview(tables)
    slices = tuple(Slice(*fields) for fields in _SLICE.iter_unpack(view[:split]))
    freed = tuple(seq_id for (seq_id,) in _SEQ_ID.iter_unpack(view[split:]))
    if header.kind is Kind.BATCH:
        _check_slices(slices, header.n_rows)
    return Frame(
        header.kind, header.epoch, header.number, header.dtype, header.n_rows, header.n_cols, slices, freed, payload
    )


def _check_slices(slices: Sequence[Slice], n_rows: int) -> None:
    rows = sum(s.n_rows for s in slices)
    logits = sum(s.n_logits for s in slices)
    # The last stage returns only the rows that want logits; every other frame holds all rows.
    if n_rows not in (rows, logits):
        raise WireError(f"a payload of {n_rows} rows for slices that hold {rows} rows, {logits} of them for logits")
    if any(s.n_logits > s.n_rows for s in slices):
        raise WireError("a slice that wants more logits than it has rows")
