"""The ring port: strangers of every kind come and go, the true neighbour gets in, and a wrong one is told why not."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopback import DEADLINE_S, PLACEMENT, listener
from mdi.errors import UsageError
from mdi.net import listener as listener_module
from mdi.net.hello import Fault, Hello
from mdi.net.listener import N_TOLD, QUIET_S, DropLog, Expectation, RingListener, open_socket
from mdi.net.wire import (
    HANDSHAKE,
    HANDSHAKE_LIMITS,
    HEADER_BYTES,
    PLAIN,
    Frame,
    FrameCodec,
    FrameType,
    read_frame,
    send_frame,
)
from waiting import until

EPOCH = 5
HELLO = Hello(2, 4, PLACEMENT)
ANSWER = Frame.message(FrameType.HELLO, EPOCH, Hello(3, 4, PLACEMENT).to_bytes())


@pytest.fixture
def port() -> Iterator[RingListener]:
    one = listener("starter")
    yield one
    one.close()


class Guests(contextlib.ExitStack):
    """Connections that are closed at the end of a test."""

    def connect(self, port: RingListener) -> socket.socket:
        sock = self.enter_context(socket.create_connection(("127.0.0.1", port.port), DEADLINE_S))
        sock.settimeout(DEADLINE_S)
        return sock


@pytest.fixture
def guests() -> Iterator[Guests]:
    with Guests() as stack:
        yield stack


def hello(epoch: int = EPOCH, index: int = 2, n_nodes: int = 4, placement: str = PLACEMENT) -> Frame:
    return Frame.message(FrameType.HELLO, epoch, Hello(index, n_nodes, placement).to_bytes())


def is_dropped(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def refusal(sock: socket.socket) -> str:
    """What the node says to who sent a HELLO that it does not like."""
    frame = read_frame(sock, HANDSHAKE)
    assert frame is not None and frame.type is FrameType.ERROR
    assert is_dropped(sock)
    return Fault.from_bytes(frame.payload).message


def let_in(expectation: Expectation) -> socket.socket:
    sock = expectation.wait(DEADLINE_S)
    assert sock is not None
    return sock


def test_the_neighbour_gets_in_and_its_answer(port: RingListener, guests: Guests) -> None:
    expectation = port.expect(EPOCH, HELLO, ANSWER)
    sock = guests.connect(port)
    send_frame(sock, hello())
    with let_in(expectation):
        answer = read_frame(sock, HANDSHAKE)
        assert answer is not None and Hello.from_bytes(answer.payload).index == 3


class WithoutFiles(socket.socket):
    """Has no file for the first connection; later ones are accepted."""

    n_tries = 0

    def accept(self) -> Any:
        self.n_tries += 1
        if self.n_tries == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


@contextlib.contextmanager
def without_files(accept_again_s: float) -> Iterator[tuple[RingListener, WithoutFiles]]:
    sock = WithoutFiles(fileno=open_socket("127.0.0.1", 0, "port").detach())
    one = RingListener(sock, "starter", accept_again_s=accept_again_s)
    try:
        yield one, sock
    finally:
        one.close()


def test_a_connection_that_cannot_be_accepted_is_not_tried_all_the_time(guests: Guests) -> None:
    with without_files(3600.0) as (port, sock):
        guests.connect(port)
        until(lambda: sock.n_tries)
        threading.Event().wait(0.3)
        assert sock.n_tries == 1


def test_a_connection_is_accepted_once_that_is_possible(guests: Guests) -> None:
    with without_files(0.02) as (port, _):
        expectation = port.expect(EPOCH, HELLO, ANSWER)
        send_frame(guests.connect(port), hello())
        let_in(expectation).close()


def test_what_follows_the_hello_is_left_to_the_link(port: RingListener, guests: Guests) -> None:
    expectation = port.expect(EPOCH, HELLO)
    sock = guests.connect(port)
    greeting = hello()
    sock.sendall(PLAIN.head(greeting) + bytes(greeting.payload) + PLAIN.head(Frame(FrameType.PING, EPOCH, 9)))
    with let_in(expectation) as mine:
        found = read_frame(mine, HANDSHAKE)
        assert found is not None and (found.type, found.number) == (FrameType.PING, 9)


def test_a_hello_may_come_byte_by_byte(port: RingListener, guests: Guests) -> None:
    expectation = port.expect(EPOCH, HELLO)
    sock = guests.connect(port)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    greeting = hello()
    for byte in PLAIN.head(greeting) + bytes(greeting.payload):
        sock.sendall(bytes([byte]))
    let_in(expectation).close()


REFUSED = [
    (hello(epoch=6), "starter does not know run 0000000000000006"),
    (hello(index=1), "starter expects node 2 of 4 here, not node 1 of 4"),
    (hello(n_nodes=5), "starter expects node 2 of 4 here, not node 2 of 5"),
    (hello(placement="b" * 64), "starter and its neighbour disagree about the model or its cut"),
]


@pytest.mark.parametrize(("frame", "message"), REFUSED, ids=[message[-30:] for _, message in REFUSED])
def test_a_wrong_neighbour_is_told_why_and_the_true_one_still_gets_in(
    port: RingListener, guests: Guests, frame: Frame, message: str
) -> None:
    expectation = port.expect(EPOCH, HELLO)
    wrong = guests.connect(port)
    send_frame(wrong, frame)
    assert refusal(wrong) == message
    true = guests.connect(port)
    send_frame(true, hello())
    with let_in(expectation):
        late = guests.connect(port)
        send_frame(late, hello())
        assert refusal(late) == "starter already has its neighbour for this run"
        send_frame(again := guests.connect(port), frame)
        assert refusal(again)


def test_several_rings_are_closed_at_the_same_port_at_the_same_time(port: RingListener, guests: Guests) -> None:
    """Of several runs, and of one run in which the node holds two stages."""
    places = [(EPOCH, 2), (EPOCH + 1, 2), (EPOCH + 1, 0)]
    expectations = [port.expect(epoch, Hello(index, 4, PLACEMENT)) for epoch, index in places]
    for (epoch, index), expectation in reversed(list(zip(places, expectations, strict=True))):
        send_frame(guests.connect(port), hello(epoch=epoch, index=index))
        let_in(expectation).close()
        assert expectation.caller == Hello(index, 4, PLACEMENT)
    for expectation in expectations[:2]:
        port.forget(expectation)
    send_frame(sock := guests.connect(port), hello())
    assert "does not know run" in refusal(sock)
    send_frame(sock := guests.connect(port), hello(epoch=EPOCH + 1, index=0))
    assert "already has its neighbour" in refusal(sock), "the other one of its run is still there"


def test_without_a_run_every_hello_is_refused(port: RingListener, guests: Guests) -> None:
    send_frame(sock := guests.connect(port), hello())
    assert "does not know run" in refusal(sock)
    expectation = port.expect(EPOCH, HELLO)
    port.forget(expectation)
    assert expectation.wait(DEADLINE_S) is None
    send_frame(sock := guests.connect(port), hello())
    assert "does not know run" in refusal(sock)


STRANGERS = [
    bytes(HEADER_BYTES),
    b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nUser-Agent: a curious browser\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    PLAIN.head(Frame(FrameType.PING, EPOCH)),
    PLAIN.head(Frame(FrameType.BATCH, EPOCH)),
    PLAIN.head(Frame.message(FrameType.HELLO, EPOCH, b"{}")) + b"{}",
    PLAIN.head(Frame.message(FrameType.HELLO, EPOCH, b"[" * 4000)) + b"[" * 4000,
    PLAIN.head(Frame.message(FrameType.HELLO, EPOCH, bytes(5000))),
    PLAIN.head(hello()) + bytes(len(hello().payload)),
]


@pytest.mark.parametrize("data", STRANGERS, ids=range(len(STRANGERS)))
def test_a_talking_stranger_is_dropped(port: RingListener, guests: Guests, data: bytes) -> None:
    expectation = port.expect(EPOCH, HELLO)
    stranger = guests.connect(port)
    stranger.sendall(data)
    assert is_dropped(stranger)
    send_frame(guests.connect(port), hello())
    let_in(expectation).close()


def test_strangers_without_end_do_not_fill_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mdi")
    now = 0.0
    log = DropLog("node", lambda: now)
    for _ in range(10_000):
        log.tell("192.0.2.1:1", "why")
    assert len(caplog.messages) == N_TOLD + 9 and "5120 connections" in caplog.messages[-1]
    now = 2 * QUIET_S
    log.tell("192.0.2.2:1", "why")
    assert "192.0.2.2" in caplog.messages[-1], "after a quiet minute each is told again"


def test_a_silent_stranger_and_one_that_dawdles_are_dropped_after_a_while(guests: Guests) -> None:
    port = RingListener(open_socket("127.0.0.1", 0, "test"), "starter", hello_s=0.2)
    try:
        silent, slow = guests.connect(port), guests.connect(port)
        slow.sendall(b"MDIr")
        assert is_dropped(silent) and is_dropped(slow)
    finally:
        port.close()


def test_a_hundred_strangers_keep_nobody_out(port: RingListener, guests: Guests) -> None:
    strangers = [guests.connect(port) for _ in range(100)]
    expectation = port.expect(EPOCH, HELLO)
    send_frame(guests.connect(port), hello())
    with let_in(expectation):
        assert sum(1 for _ in port.pending()) <= listener_module.N_PENDING_LIMIT
        assert all(is_dropped(sock) for sock in strangers[:36])  # the first to come are the first to go
        for sock in strangers[-20:]:
            sock.sendall(b"\xff" * HEADER_BYTES)
        assert all(is_dropped(sock) for sock in strangers[-20:])


def test_strangers_that_reset_their_connection_do_no_harm(port: RingListener, guests: Guests) -> None:
    expectation = port.expect(EPOCH, HELLO, ANSWER)
    for data in (b"", b"MDIr", PLAIN.head(hello())):
        with socket.create_connection(("127.0.0.1", port.port)) as sock:
            sock.sendall(data)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    send_frame(guests.connect(port), hello())
    let_in(expectation).close()


def test_a_neighbour_that_resets_before_its_answer_does_not_end_the_listener(
    port: RingListener, guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(sock: socket.socket, frame: Frame, codec: FrameCodec) -> int:
        raise ConnectionResetError("reset by peer")

    port.expect(EPOCH, HELLO, ANSWER)
    with monkeypatch.context() as patch:
        patch.setattr(listener_module, "send_frame", broken)
        send_frame(sock := guests.connect(port), hello())
        assert is_dropped(sock)
    expectation = port.expect(EPOCH, HELLO)
    send_frame(guests.connect(port), hello())
    let_in(expectation).close()


def test_a_connection_that_nobody_took_is_closed(port: RingListener, guests: Guests) -> None:
    expectation = port.expect(EPOCH, HELLO, ANSWER)
    send_frame(sock := guests.connect(port), hello())
    assert read_frame(sock, HANDSHAKE) is not None  # it was let in
    port.forget(expectation)
    assert is_dropped(sock)


def test_who_waits_is_woken_when_the_expectation_is_withdrawn(port: RingListener, guests: Guests) -> None:
    old = port.expect(EPOCH, HELLO)
    new = port.expect(EPOCH + 1, HELLO)
    port.forget(old)
    assert old.accepted.get(timeout=DEADLINE_S) is None
    with pytest.raises(queue.Empty):
        old.accepted.get_nowait()
    send_frame(sock := guests.connect(port), hello())
    assert "does not know run" in refusal(sock)
    send_frame(guests.connect(port), hello(epoch=EPOCH + 1))
    let_in(new).close()


def test_closing_drops_who_waits(guests: Guests) -> None:
    port = listener()
    sock = guests.connect(port)
    sock.sendall(b"MD")
    port.close()
    assert is_dropped(sock)
    with pytest.raises(OSError):
        socket.create_connection(sock.getpeername(), 1).close()


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(min_size=HEADER_BYTES, max_size=120),
    prefix=st.sampled_from([b"", b"MDIr\x01\x01\x00\x00", PLAIN.head(hello())]),
)
def test_any_bytes_leave_the_port_open(port: RingListener, data: bytes, prefix: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port.port), DEADLINE_S) as sock:
        sock.settimeout(DEADLINE_S)
        with contextlib.suppress(OSError):  # the port may be faster
            sock.sendall(prefix + data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    expectation = port.expect(EPOCH, HELLO)
    with socket.create_connection(("127.0.0.1", port.port), DEADLINE_S) as sock:
        send_frame(sock, hello())
        let_in(expectation).close()


def test_a_port_in_use_and_addresses_that_are_not_here_are_told(port: RingListener) -> None:
    with pytest.raises(UsageError) as e:
        open_socket("127.0.0.1", port.port, "ring port")
    assert f"127.0.0.1:{port.port} (ring port)" in str(e.value) and e.value.code == "usage"
    with pytest.raises(UsageError) as e:
        open_socket("192.0.2.1", 0, "ring port")
    assert "192.0.2.1:0" in str(e.value) and e.value.code == "usage"
    for addr in ("no-such-host.invalid", "a" * 100 + ".b", "a..b", "\udcff"):
        with pytest.raises(UsageError):
            open_socket(addr, 0, "ring port")


def test_the_hello_of_a_real_node_fits_the_handshake() -> None:
    assert len(json.dumps(json.loads(hello().payload))) < HANDSHAKE_LIMITS.max_payload_bytes
