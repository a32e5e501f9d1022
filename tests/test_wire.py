"""Frames as bytes: round trips, every lie that a header can tell, and fuzz that may raise nothing but WireError."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.errors import WireError
from mdi.net.hello import Fault, Hello
from mdi.net.wire import (
    DTYPE_CODES,
    DTYPES,
    HANDSHAKE_LIMITS,
    HEADER_BYTES,
    PLAIN,
    VERSION,
    Frame,
    FrameCodec,
    FrameType,
    Header,
    Limits,
    Slice,
)

SMALL = Limits(max_rows=64, max_cols=64, max_slices=8, max_payload_bytes=1 << 14)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def batches(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from([DTYPES[code] for code in sorted(DTYPES)]))
    rows = draw(st.lists(st.integers(0, 8), max_size=8))
    ids = draw(st.lists(U64, min_size=len(rows), max_size=len(rows), unique=True))
    slices = tuple(Slice(i, draw(U32), n, draw(st.integers(0, n))) for i, n in zip(ids, rows, strict=True))
    only_logits = draw(st.booleans())
    n_rows = sum(s.n_logits if only_logits else s.n_rows for s in slices)
    n_cols = draw(st.integers(0, 16))
    n_cached = draw(st.sampled_from([0, 0, 1, 9]))
    n_bytes = kind.n_bytes(n_rows, n_cols) + kind.n_bytes(sum(rows), n_cached)
    payload = draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    freed = tuple(draw(st.lists(U64, max_size=8)))
    pairs = st.tuples(U64, U64).filter(lambda pair: pair[0] != pair[1])
    copies = tuple(draw(st.lists(pairs, max_size=8, unique_by=lambda pair: pair[1])))
    return Frame(
        FrameType.BATCH,
        draw(U64),
        draw(U64),
        kind.name,
        n_rows,
        n_cols,
        slices,
        freed,
        payload,
        copies,
        n_cached=n_cached,
    )


def decoded(data: bytes, limits: Limits = SMALL, codec: FrameCodec | None = None) -> Frame:
    """The frame that a reader of exactly these bytes would find; WireError too where they end too early."""
    stream = io.BytesIO(data)
    codec = codec or FrameCodec(limits)
    header = codec.header(stream.read(HEADER_BYTES))
    assert header.tables_bytes <= limits.max_slices * 44
    assert header.payload_bytes <= limits.max_payload_bytes
    return codec.frame(header, stream.read(header.tables_bytes), bytearray(stream.read(header.payload_bytes)))


def encoded(frame: Frame) -> bytes:
    return PLAIN.head(frame) + bytes(frame.payload)


FRAME = Frame(
    FrameType.BATCH, 7, 3, "float32", 3, 2, (Slice(1, 10, 1, 1), Slice(2, 0, 2, 0)), (9, 8), bytes(range(24)), ((1, 5),)
)


def test_sizes() -> None:
    assert HEADER_BYTES == 72
    assert len(PLAIN.head(Frame(FrameType.PING, 1))) == 72
    assert len(PLAIN.head(FRAME)) == 72 + 2 * 20 + 2 * 8 + 16


def test_bytes_of_a_frame_stand_where_the_table_says() -> None:
    data = encoded(FRAME)
    assert data[:8] == b"MDIr" + bytes([VERSION, FrameType.BATCH, 1, 0])
    assert struct.unpack_from("<QQIIIIIIQ", data, 8) == (7, 3, 2, 2, 1, 3, 2, 0, 24)
    assert struct.unpack_from("<I12s", data, 56) == (zlib.crc32(data[72:], zlib.crc32(data[:56])), bytes(12))
    assert struct.unpack_from("<QIIIQIIIQQQQ", data, 72) == (1, 10, 1, 1, 2, 0, 2, 0, 9, 8, 1, 5)
    assert data[72 + 72 :] == bytes(range(24))


@settings(deadline=None)
@given(frame=batches())
def test_a_batch_comes_back(frame: Frame) -> None:
    found = decoded(encoded(frame))
    assert replace(found, payload=bytes(found.payload)) == frame


@settings(deadline=None)
@given(kind=st.sampled_from(list(FrameType)), epoch=U64, data=st.binary(max_size=64))
def test_a_message_comes_back(kind: FrameType, epoch: int, data: bytes) -> None:
    if kind is FrameType.BATCH and data:
        return  # rows without slices
    found = decoded(encoded(Frame.message(kind, epoch, data)))
    assert (found.type, found.epoch, bytes(found.payload)) == (kind, epoch, data)


@settings(deadline=None)
@given(frame=batches())
def test_a_memoryview_is_sent_like_bytes(frame: Frame) -> None:
    assert PLAIN.head(replace(frame, payload=memoryview(bytearray(frame.payload)))) == PLAIN.head(frame)


def sealed(data: bytes) -> bytes:
    """The same bytes with a CRC that fits, as a peer could send them."""
    return data[:56] + struct.pack("<I12x", zlib.crc32(data[72:], zlib.crc32(data[:56]))) + data[72:]


def changed(offset: int, new: bytes, frame: Frame = FRAME) -> bytes:
    data = bytearray(encoded(frame))
    data[offset : offset + len(new)] = new
    return sealed(bytes(data))


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


LIES = [
    (changed(0, b"HTTP"), "not a frame of MDI-LLM: it begins with b'HTTP'"),
    (changed(4, b"\x01"), "speaks version 1 of the ring protocol, this node version 2"),
    (changed(5, b"\x00"), "unknown type of frame: 0"),
    (changed(5, b"\x7f"), "unknown type of frame: 127"),
    (changed(6, b"\x09"), "unknown payload dtype 9"),
    (changed(7, b"\x02"), "flags 2"),
    (changed(44, b"\x01"), "a payload of 24 bytes; rows and columns for caches take 36"),
    (changed(44, u32(63)), "65 columns; .* at most 64"),
    (changed(44, b"\x01", Frame(FrameType.PING, 1)), "field 1"),
    (changed(24, u32(9)), "9 slices; this node accepts at most 8"),
    (changed(28, u32(2**32 - 1)), "4294967295 freed sequences; .* at most 8"),
    (changed(32, u32(9)), "9 copies; .* at most 8"),
    (changed(36, u32(65)), "65 rows; .* at most 64"),
    (changed(40, u32(65)), "65 columns; .* at most 64"),
    (changed(48, struct.pack("<Q", 2**63)), "payload bytes; .* at most 16384"),
    (changed(48, struct.pack("<Q", 23)), "a payload of 23 bytes cannot be 3 x 2 values of float32"),
    (changed(36, u32(2)), "a payload of 24 bytes cannot be 2 x 2 values of float32"),
    (changed(6, b"\x04"), "cannot be 3 x 2 values of float64"),
    (changed(72 + 12, u32(2)), "a payload of 3 rows for slices of 4 rows, 1 of them for logits"),
    (changed(72 + 36, u32(3)), "more logits than it has rows"),
    (changed(72 + 20, b"\x01"), "two slices of one sequence"),
    (changed(72 + 64, b"\x01"), "copies of caches that overwrite"),
    (encoded(replace(FRAME, copies=((1, 5), (2, 5)))), "copies of caches that overwrite"),
    (encoded(FRAME)[:-1] + b"\xff", "frame 3 is damaged"),
    (encoded(FRAME)[:8] + b"\xff" + encoded(FRAME)[9:], "is damaged"),
    (encoded(FRAME)[:60] + b"\xff" + encoded(FRAME)[61:], "is damaged"),
    (encoded(FRAME)[:80] + b"\xff" + encoded(FRAME)[81:], "is damaged"),
    (encoded(FRAME)[:71], "a header of 71 bytes, expected 72"),
    (b"", "a header of 0 bytes"),
    (encoded(FRAME)[:90], "18 \\+ 0 bytes of tables and payload, expected 72 \\+ 24"),
    (encoded(FRAME)[:-1], "72 \\+ 23 bytes"),
]


@pytest.mark.parametrize(("data", "message"), LIES, ids=[m[:30] for _, m in LIES])
def test_each_lie_is_refused_with_its_message(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decoded(data)


def test_the_last_stage_may_return_only_the_rows_for_logits() -> None:
    short = replace(FRAME, n_rows=1, payload=bytes(8))
    assert decoded(encoded(short)).n_rows == 1


@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_only_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        decoded(data)


@settings(max_examples=500, deadline=None)
@given(frame=batches(), data=st.data(), seal=st.booleans())
def test_a_mutated_frame_is_refused_or_still_consistent(frame: Frame, data: st.DataObject, seal: bool) -> None:
    raw = bytearray(encoded(frame))
    changes = st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255))
    for offset, value in data.draw(st.lists(changes, min_size=1, max_size=4)):
        raw[offset] = value
    mutated = sealed(bytes(raw)) if seal else bytes(raw)
    try:
        found = decoded(mutated)
    except WireError:
        return
    rows = sum(s.n_rows for s in found.slices)
    logits = sum(s.n_logits for s in found.slices)
    assert found.type is not FrameType.BATCH or found.n_rows in (rows, logits)
    assert found.type is not FrameType.BATCH or len({s.seq_id for s in found.slices}) == len(found.slices)
    form = DTYPES[DTYPE_CODES[found.dtype]]
    assert len(found.payload) == form.n_bytes(found.n_rows, found.n_cols) + form.n_bytes(rows, found.n_cached)
    if not seal:
        assert mutated == encoded(frame)


@settings(max_examples=300, deadline=None)
@given(fields=st.tuples(*[st.integers(0, 255)] * 3, *[U64] * 2, *[U32] * 6, U64))
def test_a_header_of_any_numbers_promises_no_more_than_the_limits(fields: tuple[int, ...]) -> None:
    kind, dtype, flags, *rest = fields
    *counts, n_bytes = rest
    data = struct.pack("<4sBBBBQQIIIIIIQ", b"MDIr", VERSION, kind % 7, dtype % 6, flags % 2, *counts, n_bytes)
    data += bytes(16)
    for limits in (SMALL, HANDSHAKE_LIMITS, Limits()):
        try:
            header = FrameCodec(limits).header(data)
        except WireError:
            continue
        assert isinstance(header, Header)
        assert header.tables_bytes <= 44 * limits.max_slices
        assert header.payload_bytes <= limits.max_payload_bytes


@settings(deadline=None)
@given(data=st.binary(max_size=100) | st.text(alphabet='{}[]":,0123456789ntrufalse').map(str.encode))
def test_a_hello_of_any_bytes_raises_only_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        Hello.from_bytes(data)
    assert isinstance(Fault.from_bytes(data), Fault)


@pytest.mark.parametrize(
    "data",
    [
        b'{"index":"1","n_nodes":3,"placement":"x"}',
        b'{"index":1,"n_nodes":3,"placement":7}',
        b'{"index":1,"n_nodes":3}',
        b'[1,3,"x"]',
        b"[" * 4000,
        b"9" * 4090,
    ],
)
def test_a_hello_with_other_fields_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        Hello.from_bytes(data)


@settings(deadline=None)
@given(st.builds(Hello, st.integers(0, 1000), st.integers(0, 1000), st.text(max_size=64)))
def test_a_hello_comes_back(hello: Hello) -> None:
    assert Hello.from_bytes(hello.to_bytes()) == hello


def test_a_hello_of_a_later_version_may_say_more() -> None:
    assert Hello.from_bytes(b'{"index":1,"n_nodes":2,"placement":"x","more":[1]}') == Hello(1, 2, "x")


@settings(deadline=None)
@given(node=st.text(), message=st.text(max_size=2000), reporter=st.text())
def test_a_fault_fits_a_handshake_whatever_it_says(node: str, message: str, reporter: str) -> None:
    frame = Frame.message(FrameType.ERROR, 1, Fault(node, message, reporter).to_bytes())
    found = Fault.from_bytes(decoded(encoded(frame), HANDSHAKE_LIMITS).payload)
    shown = ["".join(c if c.isprintable() else " " for c in text) for text in (node[:40], message[:500], reporter[:40])]
    assert found == Fault(*shown)  # a terminal's control characters have no place in a report


@pytest.mark.parametrize("text", ["\U0001f600" * 1000, "\x00" * 1000, "\ud800" * 1000, '"\\' * 1000])
def test_the_largest_faults_fit_a_handshake(text: str) -> None:
    frame = Frame.message(FrameType.ERROR, 1, Fault(text, text, text).to_bytes())
    assert len(Fault.from_bytes(decoded(encoded(frame), HANDSHAKE_LIMITS).payload).message) == 500
