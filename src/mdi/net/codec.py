"""Frames as bytes.

A frame is a fixed header, three tables (slices, freed sequences, copies) and raw payload bytes. Nothing is pickled, and every
length is checked against a limit and against the others before anything is allocated for it. This module knows no sockets
and no tensors; docs/protocol.md repeats the table.

    offset  size  field
    0       4     magic "MDIr"
    4       1     protocol version
    5       1     kind (Kind)
    6       1     payload dtype (DTYPES)
    7       1     flags: 1 if the frame is authenticated, else 0
    8       8     epoch: random id of the run
    16      8     frame number
    24      4     n_slices
    28      4     n_freed
    32      4     n_copies
    36      4     n_rows of the payload
    40      4     n_cols of the payload
    44      4     0
    48      8     payload bytes, which kind of payload, n_rows and n_cols decide
    56      16    over the 56 bytes before, the tables and the payload: CRC32 and twelve zeros; or, authenticated, BLAKE2b of
                  16 bytes with the key, over the number of frames that this side has sent before (8 bytes) and all that
    72            n_slices times: seq_id u64, start u32, n_rows u32, n_logits u32   (20 bytes each)
                  n_freed times: seq_id u64
                  n_copies times: seq_id u64, new seq_id u64
                  payload

All numbers are little-endian.
"""

from __future__ import annotations

import hmac
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from mdi.errors import WireError
from mdi.net.wire import DTYPE_CODES, DTYPES, HANDSHAKE_LIMITS, Frame, Kind, Limits, Slice

MAGIC = b"MDIr"
VERSION = 2
_FIELDS = struct.Struct("<4sBBBBQQIIIIIIQ")
_SLICE = struct.Struct("<QIII")
_SEQ_ID = struct.Struct("<Q")
_COPY = struct.Struct("<QQ")
CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + CHECK_BYTES
_AUTHENTICATED = 1


@dataclass(frozen=True)
class Header:
    """A decoded header: what is needed to read the rest of the frame. `fields` are its bytes up to `check`."""

    kind: Kind
    epoch: int
    number: int
    dtype: str
    n_slices: int
    n_freed: int
    n_copies: int
    n_rows: int
    n_cols: int
    payload_bytes: int
    fields: bytes
    check: bytes

    @property
    def tables_bytes(self) -> int:
        return self.n_slices * _SLICE.size + self.n_freed * _SEQ_ID.size + self.n_copies * _COPY.size


class FrameCodec:
    """Writes and reads the frames of one connection.

    Args:
        limits: what is accepted.
        key: secret that both sides know, 1 to 64 bytes. With one, each frame carries a tag, and only frames with the right tag
            in the right order are accepted. A codec with a key belongs to one connection.
    """

    def __init__(self, limits: Limits | None = None, key: bytes | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self._key = key
        self._n_sent = 0
        self._n_read = 0

    def head(self, frame: Frame) -> bytes:
        """Header and tables of the next frame to be sent, to be followed on the wire by `frame.payload` as it is."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            frame.kind,
            DTYPE_CODES[frame.dtype],
            0 if self._key is None else _AUTHENTICATED,
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
        tables = b"".join(_SLICE.pack(s.seq_id, s.start, s.n_rows, s.n_logits) for s in frame.slices)
        tables += b"".join(map(_SEQ_ID.pack, frame.freed))
        tables += b"".join(_COPY.pack(*pair) for pair in frame.copies)
        check = self._check_of(self._n_sent, fields, tables, frame.payload)
        self._n_sent += 1
        return fields + check + tables

    def header(self, data: bytes | bytearray | memoryview) -> Header:
        """Check a header of HEADER_BYTES bytes.

        Raises:
            WireError: another magic or version, an unknown kind or dtype, a count beyond the limits, sizes that contradict
                each other, or no tag where one is expected.
        """
        if len(data) != HEADER_BYTES:
            raise WireError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
        fields, check = bytes(data[: _FIELDS.size]), bytes(data[_FIELDS.size :])
        magic, version, kind, dtype_code, flags, epoch, number, *sizes = _FIELDS.unpack(fields)
        n_slices, n_freed, n_copies, n_rows, n_cols, zero, n_bytes = sizes
        if magic != MAGIC:
            raise WireError(f"not a frame of MDI-LLM: it begins with {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise WireError(f"the peer speaks version {version} of the ring protocol, this node version {VERSION}")
        if kind not in Kind._value2member_map_:
            raise WireError(f"unknown kind of frame: {kind}")
        if dtype_code not in DTYPES or flags not in (0, _AUTHENTICATED) or zero:
            raise WireError(f"unknown payload dtype {dtype_code}, flags {flags} or field {zero}")
        if flags != (0 if self._key is None else _AUTHENTICATED):
            raise WireError(
                "a frame without a tag, but this node has a key" if self._key else "a frame with a tag: no key here"
            )
        self._check_counts(n_slices, n_freed, n_copies, n_rows, n_cols, n_bytes)
        payload_type = DTYPES[dtype_code]
        if payload_type.n_bytes(n_rows, n_cols) != n_bytes:
            raise WireError(f"a payload of {n_bytes} bytes cannot be {n_rows} x {n_cols} values of {payload_type.name}")
        return Header(
            Kind(kind), epoch, number, payload_type.name, n_slices, n_freed, n_copies, n_rows, n_cols, n_bytes, fields, check
        )  # fmt: skip

    def frame(self, header: Header, tables: bytes | bytearray | memoryview, payload: bytearray | memoryview) -> Frame:
        """Put the next frame that was read together from its parts.

        Raises:
            WireError: the CRC or the tag does not fit, or the tables contradict each other or the rows.
        """
        if len(tables) != header.tables_bytes or len(payload) != header.payload_bytes:
            raise WireError(
                f"{len(tables)} + {len(payload)} bytes of tables and payload, expected "
                f"{header.tables_bytes} + {header.payload_bytes}"
            )
        check = self._check_of(self._n_read, header.fields, tables, payload)
        if not hmac.compare_digest(check, header.check):
            what = "is damaged" if self._key is None else "is damaged, out of order, or of somebody with another key"
            raise WireError(f"frame {header.number} {what}")
        self._n_read += 1
        view = memoryview(tables)
        n_slices, n_freed = header.n_slices * _SLICE.size, header.n_freed * _SEQ_ID.size
        slices = tuple(Slice(*one) for one in _SLICE.iter_unpack(view[:n_slices]))
        freed = tuple(seq_id for (seq_id,) in _SEQ_ID.iter_unpack(view[n_slices : n_slices + n_freed]))
        copies = tuple(_COPY.iter_unpack(view[n_slices + n_freed :]))
        if header.kind is Kind.BATCH:
            _check_slices(slices, header.n_rows)
            _check_copies(copies)
        return Frame(
            header.kind, header.epoch, header.number, header.dtype, header.n_rows, header.n_cols, slices, freed, payload, copies
        )  # fmt: skip

    def _check_of(
        self,
        n_before: int,
        fields: bytes,
        tables: bytes | bytearray | memoryview,
        payload: bytes | bytearray | memoryview,
    ) -> bytes:
        if self._key is None:
            crc = zlib.crc32(payload, zlib.crc32(tables, zlib.crc32(fields)))
            return crc.to_bytes(4, "little").ljust(CHECK_BYTES, b"\0")
        tag = blake2b(n_before.to_bytes(8, "little") + fields, digest_size=CHECK_BYTES, key=self._key)
        tag.update(tables)
        tag.update(payload)
        return tag.digest()

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


PLAIN = FrameCodec()
HANDSHAKE = FrameCodec(HANDSHAKE_LIMITS)


def _check_slices(slices: Sequence[Slice], n_rows: int) -> None:
    rows = sum(s.n_rows for s in slices)
    logits = sum(s.n_logits for s in slices)
    # The last stage returns only the rows that want logits; every other frame holds all rows.
    if n_rows not in (rows, logits):
        raise WireError(f"a payload of {n_rows} rows for slices that hold {rows} rows, {logits} of them for logits")
    if any(s.n_logits > s.n_rows for s in slices):
        raise WireError("a slice that wants more logits than it has rows")
    if len({s.seq_id for s in slices}) != len(slices):
        raise WireError("two slices of one sequence in a frame: each begins where its cache ends, and both cannot")


def _check_copies(copies: Sequence[tuple[int, int]]) -> None:
    made = {new for _, new in copies}
    if len(made) != len(copies) or any(seq_id == new for seq_id, new in copies):
        raise WireError("copies of caches that overwrite each other or themselves")
