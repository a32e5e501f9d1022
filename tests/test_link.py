"""One link over a real socket pair: frames arrive whole, signs of life pass the queues by, and every loss has a reason."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator

import pytest

from mdi.errors import WireError
from mdi.net import link as link_module
from mdi.net import wire as frame_io
from mdi.net.link import N_IN_VAIN, Channel, Connection, Link, NodeStillAbsentError
from mdi.net.wire import (
    HEADER_BYTES,
    PLAIN,
    SILENCE_S,
    VERSION,
    BufferPool,
    CutOffError,
    Frame,
    FrameCodec,
    FrameType,
    Limits,
    Slice,
    read_frame,
    send_frame,
)

EPOCH = 77
DEADLINE_S = 30.0


def batch(number: int, n_rows: int = 2, n_cols: int = 8) -> Frame:
    data = bytes([number % 256]) * (n_rows * n_cols * 4)
    return Frame(FrameType.BATCH, EPOCH, number, "float32", n_rows, n_cols, (Slice(1, number, n_rows, 0),), (), data)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection, as the links have it: (sending end, receiving end)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    yield sender, receiver
    sender.close()
    receiver.close()


class Received:
    """A link that receives, and what it reported."""

    def __init__(
        self, sock: socket.socket, capacity: int = 4, limits: Limits | None = None, silence_s: float = SILENCE_S
    ) -> None:
        self.inbox: Channel[Frame] = Channel(capacity)
        self.lost: queue.Queue[str] = queue.Queue()
        self.last: queue.Queue[Frame] = queue.Queue()
        self.link = Link(
            sock, EPOCH, FrameCodec(limits), capacity, self.inbox, self.last.put, self.lost.put, silence_s=silence_s
        )  # fmt: skip

    def close(self) -> None:
        self.inbox.close()
        self.link.close()


def sending(sock: socket.socket, capacity: int, on_lost: Callable[[str], None], silence_s: float = SILENCE_S) -> Link:
    """A link that sends, to a neighbour that sends no rows."""
    return Link(sock, EPOCH, FrameCodec(), capacity, None, lambda frame: None, on_lost, silence_s=silence_s)


@pytest.fixture
def received(pair: tuple[socket.socket, socket.socket]) -> Iterator[Received]:
    one = Received(pair[1])
    yield one
    one.close()


@pytest.fixture
def fast_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "PING_INTERVAL_S", 0.02)


def until(channel: Channel[Frame], condition: Callable[[], bool]) -> None:
    """Wait for a state of a channel."""
    with channel.changed:
        assert channel.changed.wait_for(condition, DEADLINE_S)


def test_the_way_of_a_frame_is_known_to_who_has_sent_it(
    fast_pings: None, pair: tuple[socket.socket, socket.socket], received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the PINGs that come back, however long ago the frame has come."""
    clock = [100.0]
    monkeypatch.setattr(link_module.time, "perf_counter", lambda: clock[0])
    link = sending(pair[0], 4, lambda reason: None)
    try:
        assert link.way_s is None
        link.put(batch(0))
        assert received.inbox.get(DEADLINE_S) is not None
        clock[0] += 50.0
        deadline = time.monotonic() + DEADLINE_S
        while link.way_s is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert link.way_s == 0.0, "the clock stood while it was on its way"
        assert received.link.way_s is None
    finally:
        link.close()


@pytest.mark.parametrize("n_rows", [0, 1, 3000])
def test_a_frame_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket], n_rows: int) -> None:
    """Also one that is larger than what the kernel takes at once."""
    sender, receiver = pair
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    frame = batch(5, n_rows, 64)
    sent: list[int] = []
    thread = threading.Thread(target=lambda: sent.append(send_frame(sender, frame)))
    thread.start()
    found = read_frame(receiver, PLAIN)
    thread.join(DEADLINE_S)
    assert found is not None
    assert (found.number, found.slices, bytes(found.payload)) == (5, frame.slices, frame.payload)
    assert sent == [HEADER_BYTES + 20 + n_rows * 64 * 4]


def test_an_end_between_frames_is_none_and_within_one_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    send_frame(sender, batch(1))
    data = PLAIN.head(batch(2)) + bytes(batch(2).payload)
    sender.sendall(data[: HEADER_BYTES + 30])
    sender.close()
    assert read_frame(receiver, PLAIN) is not None
    with pytest.raises(CutOffError):
        read_frame(receiver, PLAIN)


def test_a_frame_beyond_the_limits_is_refused_before_its_payload_is_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = pair
    huge = struct.pack(
        "<4sBBBBQQIIIIIIQ", b"MDIr", VERSION, FrameType.BATCH, 1, 0, EPOCH, 0, 0, 0, 0, 1 << 13, 1 << 17, 0, 1 << 32
    )
    sender.sendall(huge + struct.pack("<I", zlib.crc32(huge)) + bytes(12))
    taken: list[int] = []

    class Pool(BufferPool):
        def take(self, n_bytes: int) -> memoryview:
            taken.append(n_bytes)
            return super().take(n_bytes)

    with pytest.raises(WireError) as refused:
        read_frame(receiver, PLAIN, Pool(1))
    assert type(refused.value) is WireError, "the rest was not waited for"
    assert not taken


def test_a_long_run_needs_no_more_buffers_than_are_in_flight(
    pair: tuple[socket.socket, socket.socket], received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = set()
    for number in range(200):
        send_frame(pair[0], batch(number, 2, 600))
        send_frame(pair[0], Frame(FrameType.PING, EPOCH))
        frame = received.inbox.get(DEADLINE_S)
        assert frame is not None and isinstance(frame.payload, memoryview)
        assert frame.number == number and bytes(frame.payload[:1]) == bytes([number % 256])
        buffers.add(id(frame.payload.obj))
        received.link.pool.give_back(frame.payload)
    assert len(buffers) <= 3


def test_pings_are_heard_and_not_passed_on(
    pair: tuple[socket.socket, socket.socket], received: Received, fast_pings: None
) -> None:
    sender = sending(pair[0], 4, lambda reason: None)
    before = sender.bytes_sent
    while sender.bytes_sent < before + 5 * HEADER_BYTES:
        assert received.inbox.get(0.01) is None
    sender.put(batch(1))
    frame = received.inbox.get(DEADLINE_S)
    assert frame is not None and frame.number == 1
    assert received.lost.empty() and received.last.empty()
    sender.close()
    assert received.lost.get(timeout=DEADLINE_S) == "it closed the connection"


@pytest.mark.parametrize("kind", [FrameType.STOP, FrameType.ERROR])
def test_stop_and_error_pass_a_full_inbox_and_a_full_queue_by(
    pair: tuple[socket.socket, socket.socket], received: Received, kind: FrameType
) -> None:
    """The engine takes nothing, yet the end of the run is heard; what waits to be sent stays behind."""
    sender = sending(pair[0], 100, lambda reason: None)
    for number in range(4):
        sender.put(batch(number))
    last = Frame.message(kind, EPOCH, b"why")
    until(received.inbox, lambda: received.inbox.n_items == 4)
    sender.put_last(last)
    found = received.last.get(timeout=DEADLINE_S)
    assert (found.type, bytes(found.payload)) == (kind, b"why")
    sender.sender.join(DEADLINE_S)
    assert not sender.put(batch(9))
    sender.close()
    assert received.lost.empty()


def test_what_is_queued_behind_a_stop_is_not_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    lost = threading.Event()
    big = batch(0, 4096, 1024)
    sender = sending(pair[0], 10, lambda reason: lost.set())
    sender.put(big)  # more than fits into the connection: the thread hangs in it
    sender.put(batch(1))
    sender.put(batch(2))
    until(sender.outbox, lambda: sender.outbox.n_items == 2)
    sender.put_last(Frame.message(FrameType.STOP, EPOCH))
    kinds = []
    while (frame := read_frame(pair[1], PLAIN)) is not None:
        kinds.append(frame.type)
    assert kinds == [FrameType.BATCH, FrameType.STOP]
    sender.close()
    assert not lost.is_set()


def taken(pair: tuple[socket.socket, socket.socket], numbers: Iterable[int]) -> list[int]:
    """Numbers of the frames that a link takes of those that come."""
    one = Received(pair[1], capacity=16)
    for number in numbers:
        send_frame(pair[0], batch(number))
    pair[0].close()
    assert one.lost.get(timeout=DEADLINE_S)
    found = [frame.number for frame in iter(one.inbox.poll, None)]
    one.close()
    return found


def test_a_frame_that_comes_twice_is_taken_once(pair: tuple[socket.socket, socket.socket]) -> None:
    """As after a connection that broke when the frame had just come: who sends cannot know, and sends it again."""
    assert taken(pair, (4, 5, 5, 4, 6, 6, 7)) == [4, 5, 6, 7]


def test_nothing_is_taken_after_a_frame_that_is_missing(pair: tuple[socket.socket, socket.socket]) -> None:
    assert taken(pair, (4, 5, 7, 8)) == [4, 5]


class Again:
    """Makes connections without another node; what the neighbour would read is in `peers`.

    Args:
        received: what the neighbour says that it has, for each connection in turn; then it is lost.
        is_closed: the neighbour closes each connection at once.
    """

    def __init__(self, received: Iterable[int | None], is_closed: bool = False) -> None:
        self.on_call: Callable[[], None] = lambda: None
        self.peers: queue.Queue[socket.socket] = queue.Queue()
        self.n_made = 0
        self._received, self._is_closed = iter(received), is_closed

    def connect(self, received: int | None, until: float) -> Connection:
        try:
            said = next(self._received)
        except StopIteration:
            raise NodeStillAbsentError("it is gone") from None
        mine, theirs = socket.socketpair()
        self.n_made += 1
        if self._is_closed:
            theirs.close()
        else:
            theirs.settimeout(DEADLINE_S)
            self.peers.put(theirs)
        return Connection(mine, FrameCodec(), said)

    def stop(self) -> None:
        pass


def numbers_up_to(sock: socket.socket, last: int) -> list[int]:
    """Of the rows that come, up to this one; PINGs do not count."""
    found: list[int] = []
    while last not in found:
        frame = read_frame(sock, PLAIN)
        assert frame is not None
        found.extend([frame.number] if frame.type is FrameType.BATCH else [])
    return found


@contextlib.contextmanager
def calling_again(sock: socket.socket, reconnect: Again, lost: queue.Queue[str]) -> Iterator[Link]:
    link = Link(
        sock, EPOCH, FrameCodec(), 8, None, lambda frame: None, lost.put, reconnect=reconnect, silence_s=2 * DEADLINE_S
    )  # fmt: skip
    try:
        yield link
    finally:
        link.close()


@pytest.mark.parametrize(("received", "again"), [(2, [3, 4]), (4, []), (None, [1, 2, 3, 4])])
def test_only_what_the_neighbour_lacks_is_sent_again(received: int | None, again: list[int]) -> None:
    first, peer = socket.socketpair()
    reconnect = Again([received])
    with peer, calling_again(first, reconnect, queue.Queue()) as link:
        for number in range(1, 5):
            link.put(batch(number))
        assert numbers_up_to(peer, 4) == [1, 2, 3, 4]
        peer.close()
        with reconnect.peers.get(timeout=DEADLINE_S) as second:
            link.put(batch(5))
            assert numbers_up_to(second, 5) == [*again, 5]


@pytest.mark.parametrize("received", [None, 3])
def test_a_neighbour_whose_connections_all_break_is_lost_in_the_end(received: int | None) -> None:
    """It lives and can be connected to, but no frame ever comes through, in either direction."""
    first, peer = socket.socketpair()
    peer.close()
    reconnect, lost = Again([received] * 500, is_closed=True), queue.Queue[str]()
    with calling_again(first, reconnect, lost):
        assert lost.get(timeout=DEADLINE_S) and reconnect.n_made <= 2 * N_IN_VAIN


def test_connections_over_which_the_neighbour_gets_on_are_repeated_as_often_as_needed() -> None:
    first, peer = socket.socketpair()
    peer.close()
    n = 3 * N_IN_VAIN
    reconnect, lost = Again(range(n), is_closed=True), queue.Queue[str]()
    with calling_again(first, reconnect, lost):
        assert lost.get(timeout=DEADLINE_S) and reconnect.n_made == n


def test_a_silent_peer_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    one = Received(pair[1], silence_s=0.2)
    assert one.lost.get(timeout=DEADLINE_S).startswith("nothing was heard for")
    one.close()


def test_a_peer_that_stops_within_a_frame_is_lost_too(pair: tuple[socket.socket, socket.socket]) -> None:
    one = Received(pair[1], silence_s=0.2)
    pair[0].sendall(PLAIN.head(batch(1)))
    assert one.lost.get(timeout=DEADLINE_S).startswith("nothing was heard for")
    one.close()


def test_a_frame_that_never_ends_is_not_waited_for(
    pair: tuple[socket.socket, socket.socket], received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes keep coming, so the peer is not silent."""
    monkeypatch.setattr(frame_io, "PATIENCE_S", 0.2)
    pair[0].sendall(PLAIN.head(batch(0)))
    pause = threading.Event()
    while received.lost.empty():
        with contextlib.suppress(OSError):
            pair[0].send(b"x")
        pause.wait(0.05)
    assert "bytes are still missing" in received.lost.get(timeout=DEADLINE_S)


def test_a_slow_engine_is_not_taken_for_dead(pair: tuple[socket.socket, socket.socket], fast_pings: None) -> None:
    """The inbox is full for much longer than the patience of the link: neither side gives the other up."""
    one = Received(pair[1], capacity=1, silence_s=0.6)
    lost: queue.Queue[str] = queue.Queue()
    sender = sending(pair[0], 10, lost.put, silence_s=0.6)
    for number in range(5):
        sender.put(batch(number))
    with pytest.raises(queue.Empty):
        one.lost.get(timeout=1.5)  # much longer than its patience
    numbers = [frame.number for _ in range(5) if (frame := one.inbox.get(DEADLINE_S)) is not None]
    assert numbers == [0, 1, 2, 3, 4]
    with pytest.raises(queue.Empty):
        one.lost.get(timeout=1.0)  # and with nothing but PINGs
    assert lost.empty()
    one.link.is_closing = True
    sender.close()
    one.close()


GARBAGE: list[tuple[Callable[[], bytes], str]] = [
    (
        lambda: b"GET / HTTP/1.1\r\n" * 8,
        "not a frame of MDI-LLM",
    ),
    (lambda: b"\x00" * 80, "not a frame of MDI-LLM"),
    (
        lambda: PLAIN.head(Frame(FrameType.PING, EPOCH + 1)),
        "a frame of run 000000000000004e, expected run 000000000000004d",
    ),
    (lambda: PLAIN.head(batch(1)) + b"\xff" * 64, "frame 1 is damaged"),
    (lambda: PLAIN.head(Frame(FrameType.HELLO, EPOCH)), "a HELLO frame in the middle of a run"),
    (lambda: PLAIN.head(batch(1))[:20], "it closed the connection|closed 52 bytes before the end"),
]


@pytest.mark.parametrize(("data", "reason"), GARBAGE, ids=[reason[:25] for _, reason in GARBAGE])
def test_garbage_loses_the_peer_with_the_reason(
    pair: tuple[socket.socket, socket.socket], received: Received, data: Callable[[], bytes], reason: str
) -> None:
    pair[0].sendall(data())
    pair[0].close()
    found = received.lost.get(timeout=DEADLINE_S)
    assert any(part in found for part in reason.split("|"))
    received.link.receiver.join(DEADLINE_S)
    assert received.lost.empty()  # it is said once


def test_a_reset_connection_is_lost(pair: tuple[socket.socket, socket.socket], received: Received) -> None:
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pair[0].close()
    assert "the connection broke" in received.lost.get(timeout=DEADLINE_S)


def test_sending_to_a_peer_that_is_gone_is_told_once(
    pair: tuple[socket.socket, socket.socket], fast_pings: None
) -> None:
    lost: queue.Queue[str] = queue.Queue()
    sender = sending(pair[0], 4, lost.put)
    pair[1].close()
    assert lost.get(timeout=DEADLINE_S)
    sender.sender.join(DEADLINE_S)
    assert lost.empty() and not sender.put(batch(1))
    sender.close()


def test_closing_says_nothing_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    """Of the side that closes; its peer stays open meanwhile, for a link hears that its peer has closed."""
    one = Received(pair[1])
    one.close()
    lost: queue.Queue[str] = queue.Queue()
    mine, peer = socket.socketpair()
    with peer:
        sender = sending(mine, 4, lost.put)
        sender.close()
    assert one.lost.empty() and lost.empty()


def test_closing_ends_a_send_that_hangs(pair: tuple[socket.socket, socket.socket]) -> None:
    """The next node is stopped and its buffers are full."""
    lost: queue.Queue[str] = queue.Queue()
    sender = sending(pair[0], 4, lost.put)
    sender.put(batch(0, 8192, 1024))
    until(sender.outbox, lambda: sender.outbox.is_empty)
    sender.put_last(Frame.message(FrameType.STOP, EPOCH))
    sender.close(flush_s=0.1)
    assert not sender.sender.is_alive() and lost.empty()
