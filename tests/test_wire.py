"""Frames as bytes: round trips, every lie that a header can tell, and fuzz that may raise nothing but WireError; what is done
with a socket, by one that gives and takes a few bytes at once.
"""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.errors import WireError
from mdi.net import wire as frame_io
from mdi.net.hello import Fault, Hello
from mdi.net.wire import (
    DTYPE_CODES,
    DTYPES,
    HANDSHAKE_LIMITS,
    HEADER_BYTES,
    PLAIN,
    VERSION,
    BufferPool,
    CutOffError,
    Frame,
    FrameCodec,
    FrameType,
    Header,
    Limits,
    Slice,
    read_frame,
    send_frame,
    tune,
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


# As nodes of other versions read them.
KINDS = {
    "HELLO": 1, "BATCH": 2, "STOP": 3, "ERROR": 4, "PING": 5, "CHALLENGE": 6, "NOTICE": 7, "MESSAGE": 8, "DATA": 9,
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_bytes_of_a_frame_of_each_kind(name: str) -> None:
    fields = bytes.fromhex(
        f"4d444972 02{KINDS[name]:02x}0000 0807060504030201 0000000000000000"
        "00000000 00000000 00000000 01000000 02000000 00000000 0200000000000000"
    )
    kind = FrameType[name]
    data = encoded(Frame.message(kind, 0x0102030405060708, b"hi"))
    assert data == fields + struct.pack("<I12x", zlib.crc32(fields + b"hi")) + b"hi"
    assert encoded(Frame.message(kind, 1))[36:56] == bytes(20), "without bytes there is no row"


def test_bytes_of_a_replay() -> None:
    assert encoded(replace(FRAME, is_replay=True))[4:8] == bytes([2, 2, 1, 1])
    assert decoded(encoded(replace(FRAME, is_replay=True))).is_replay and not decoded(encoded(FRAME)).is_replay


@pytest.mark.parametrize(
    ("code", "name", "sizes"),  # rows, columns, and the bytes that they take
    [
        (0, "bytes", [(1, 10, 10)]),
        (1, "float32", [(3, 2, 24)]),
        (2, "float16", [(3, 2, 12)]),
        (3, "bfloat16", [(3, 2, 12)]),
        (4, "float64", [(3, 2, 48)]),
        (5, "row-scaled float16", [(3, 0, 0), (3, 1, 18), (3, 200, 1212)]),
        (6, "block-scaled int8", [(2, 0, 0), (2, 1, 10), (2, 63, 134), (2, 64, 136), (2, 65, 146), (2, 128, 272)]),
    ],
)
def test_numbers_of_each_kind_take_so_many_bytes(code: int, name: str, sizes: list[tuple[int, int, int]]) -> None:
    assert DTYPE_CODES[name] == code
    assert [(n_rows, n_cols, DTYPES[code].n_bytes(n_rows, n_cols)) for n_rows, n_cols, _ in sizes] == sizes


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
    (changed(7, b"\x01", Frame(FrameType.PING, 1)), "flags 1"),
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


def test_a_frame_as_large_as_the_limits_is_accepted() -> None:
    eight = range(8)
    slices = tuple(Slice(i, 0, 8, 8) for i in eight)
    copies = tuple((i, 100 + i) for i in eight)
    frame = Frame(FrameType.BATCH, 7, 3, "float32", 64, 64, slices, tuple(eight), bytes(1 << 14), copies)
    assert decoded(encoded(frame)).copies == copies


@pytest.mark.parametrize(
    ("limits", "most"),
    [(Limits(), (65536, 65536, 65536, 8192, 131072, 1 << 30)), (HANDSHAKE_LIMITS, (0, 0, 0, 1, 4096, 4096))],
)
def test_a_header_may_say_as_much_as_the_limits_and_no_more(limits: Limits, most: tuple[int, ...]) -> None:
    def header(*counts: int) -> Header:
        *before, n_cols, n_bytes = counts  # with a column for caches, the slices say how many bytes there are
        data = struct.pack(
            "<4sBBBBQQIIIIIIQ16x", b"MDIr", VERSION, FrameType.BATCH, 0, 0, 7, 3, *before, n_cols - 1, 1, n_bytes
        )
        return FrameCodec(limits).header(data)

    assert header(*most).payload_bytes == most[-1]
    for i, name in enumerate(("slices", "freed sequences", "copies", "rows", "columns", "payload bytes")):
        with pytest.raises(WireError, match=f"{most[i] + 1} {name};"):
            header(*most[:i], most[i] + 1, *most[i + 1 :])


@pytest.mark.parametrize(("n_taps", "accepted"), [(0, {3, 5}), (2, {3, 5, 6, 8, 9, 11})])
def test_rows_of_taps_come_below_the_others(n_taps: int, accepted: set[int]) -> None:
    frame = replace(FRAME, slices=(Slice(1, 0, 3, 1), Slice(2, 0, 2, 2)))  # 5 rows, 3 of them for logits
    found = set()
    for n_rows in range(20):
        with contextlib.suppress(WireError):
            data = encoded(replace(frame, n_rows=n_rows, payload=bytes(8 * n_rows)))
            found.add(decoded(data, replace(SMALL, n_taps=n_taps)).n_rows)
    assert found == accepted


def test_a_task_is_a_batch_of_bytes_alone() -> None:
    task = Frame.message(FrameType.BATCH, 7, b"{}")
    assert decoded(encoded(task)).is_task and task.has_rows
    for other in (
        replace(task, freed=(1,)),
        replace(task, copies=((1, 2),)),
        replace(task, slices=(Slice(1, 0, 2, 0),)),
        replace(task, dtype="float16", n_cols=1),
    ):
        with pytest.raises(WireError, check=lambda e: "1 rows" in str(e)):
            decoded(encoded(other))
    none = Frame(FrameType.BATCH, 7)
    for other in (Frame.message(FrameType.STOP, 7, b"{}"), FRAME, none, replace(none, freed=(1,))):
        assert not decoded(encoded(other)).is_task
    assert [one.has_rows for one in (FRAME, none, replace(none, n_cached=1))] == [True, False, True]


def test_the_columns_of_a_frame_come_in_two_sections() -> None:
    frame = replace(FRAME, dtype="float16", n_rows=1, n_cols=2, n_cached=1, payload=bytes(range(10)))
    first, cached = decoded(encoded(frame)).sections
    assert (first.n_rows, first.n_cols, first.n_cached, bytes(first.payload)) == (1, 2, 0, bytes(range(4)))
    assert (cached.n_rows, cached.n_cols, cached.n_cached, bytes(cached.payload)) == (3, 1, 0, bytes(range(4, 10)))
    assert decoded(encoded(FRAME)).sections == [replace(FRAME, payload=bytearray(FRAME.payload))]


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


# Sockets and buffers


class Windows:
    """A socket that takes at most so many bytes at once, and nothing at every third call if its peer is busy."""

    def __init__(self, n_at_once: int, is_busy: bool = False) -> None:
        self.n_at_once, self.is_busy = n_at_once, is_busy
        self.data = b""
        self.n_calls = 0

    def send(self, data: bytes | memoryview) -> int:
        self.n_calls += 1
        if self.is_busy and self.n_calls % 3 == 0:
            raise TimeoutError
        taken = bytes(data[: self.n_at_once])
        self.data += taken
        return len(taken)


class Linux(Windows):
    def sendmsg(self, parts: Iterable[bytes | memoryview]) -> int:
        return self.send(b"".join(parts))


FLOATS = replace(FRAME, payload=memoryview(array("f", [1, 2, 3, 4, 5, 6])))


@pytest.mark.parametrize("frame", [FRAME, FLOATS, Frame(FrameType.PING, 1)], ids=["batch", "floats", "ping"])
@pytest.mark.parametrize("n_at_once", [1, 50, 72, 100, 1000])
@pytest.mark.parametrize("system", [Windows, Linux])
def test_a_frame_is_sent_whole(system: type[Windows], n_at_once: int, frame: Frame) -> None:
    for sock in (system(n_at_once), system(n_at_once, is_busy=True)):
        assert send_frame(sock, frame, is_patient=True) == len(sock.data)  # type: ignore[arg-type]
        assert sock.data == encoded(frame)


def test_a_frame_is_sent_at_once_and_a_busy_peer_ends_it_without_patience() -> None:
    sock = Linux(1000)
    send_frame(sock, FRAME)  # type: ignore[arg-type]
    assert sock.n_calls == 1
    with pytest.raises(TimeoutError):
        send_frame(Linux(50, is_busy=True), FRAME)  # type: ignore[arg-type]


class Giving:
    """A socket that gives `data`, one piece at a time; each piece comes after `wait_s`, by the clock of `time`."""

    def __init__(self, data: bytes, n_at_once: int, wait_s: float = 0.0) -> None:
        self.file = io.BytesIO(data)
        self.n_at_once, self.wait_s = n_at_once, wait_s
        self.now_s = 1000.0

    def recv_into(self, view: memoryview) -> int:
        self.now_s += self.wait_s
        return self.file.readinto(view[: self.n_at_once])

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("n_at_once", [1, 50, 1000])
def test_frames_are_read_from_pieces(n_at_once: int) -> None:
    ping = Frame(FrameType.PING, 1)
    sock: Any = Giving(encoded(FRAME) + encoded(ping) + encoded(FRAME)[:100], n_at_once)
    for expected in (FRAME, ping):
        found = read_frame(sock, PLAIN)
        assert found is not None
        assert replace(found, payload=bytes(found.payload)) == expected
    with pytest.raises(CutOffError, match="closed 44 bytes before the end"):
        read_frame(sock, PLAIN)
    with pytest.raises(CutOffError, match="closed 1 bytes before the end"):
        read_frame(cast(Any, Giving(encoded(ping)[:71], n_at_once)), PLAIN)
    assert read_frame(cast(Any, Giving(b"", n_at_once)), PLAIN) is None


def test_a_frame_ends_thirty_seconds_after_its_first_byte_and_one_more_for_each_10_000(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(n_at_once: int, wait_s: float) -> Frame | None:
        sock = Giving(encoded(Frame(FrameType.PING, 1)), n_at_once, wait_s)
        monkeypatch.setattr(frame_io, "time", sock)
        return read_frame(cast(Any, sock), PLAIN)

    assert read(72, 1e6), "before the first byte another limit applies"
    assert read(12, 7.501), "five of six pieces have come in 30.004 s, and the last one is all that is missing"
    for wait_s, missing in ((7.502, 12), (31.0, 48)):
        with pytest.raises(WireError, match=f"too slow: {missing} of 72 bytes"):
            read(12, wait_s)


def test_options_of_sockets() -> None:
    with socket.socket() as sock:
        tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_buffers_are_used_again() -> None:
    pool = BufferPool(2)
    first = pool.take(5000)
    pool.give_back(first)
    assert pool.take(5000).obj is first.obj
    pool.give_back(first)
    assert pool.take(100).obj is first.obj
    small = pool.take(100)
    assert small.obj is not first.obj and len(small) == 100
    pool.give_back(small)
    assert pool.take(4096).obj is small.obj, "a buffer is no smaller than this"
    assert len(pool.take(0)) == 0
    for n_bytes in (10_000, 20_000, 30_000):
        pool.give_back(bytearray(n_bytes))
    assert len(pool.take(25_000).obj) == 30_000  # type: ignore[arg-type]
    assert len(pool.take(15_000).obj) == 20_000  # type: ignore[arg-type]  # the smallest was the one to go
    pool.give_back(b"a payload that came from no pool")


def test_a_pool_of_another_type_of_memory() -> None:
    made: list[int] = []

    def allocate(n_bytes: int) -> np.ndarray:
        made.append(n_bytes)
        return np.empty(n_bytes, dtype=np.uint8)

    pool = BufferPool(2, allocate)
    first = pool.take(5000)
    first[:] = bytes(5000)
    pool.give_back(first)
    pool.give_back(bytearray(6000))  # not of its kind
    assert pool.take(100).obj is first.obj and made.count(5000) == 1
