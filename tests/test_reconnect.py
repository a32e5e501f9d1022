"""Connections that break between living nodes: nothing is lost, nothing comes twice, and who is lost is known."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import mdi.net.link
from cluster_keys import key_file
from loopback import DEADLINE_S, Nodes, listener, nodes
from mdi.errors import NodeLostError, RingEndedError, RingError
from mdi.net.hello import Fault, Hello, call
from mdi.net.keys import KeyFile
from mdi.net.link import Connection, Link, NodeStillAbsentError
from mdi.net.reconnect import Dialer, Waiter
from mdi.net.ring import Seat, TcpRing
from mdi.net.wire import Frame, FrameCodec, FrameType, Limits, Slice, read_frame, send_frame
from waiting import until

N_COLS = 2048


def batch(epoch: int, number: int) -> Frame:
    payload = bytes([number % 256]) * (4 * N_COLS)
    return Frame(FrameType.BATCH, epoch, number, "float32", 1, N_COLS, (Slice(1, number, 1, 1),), (), payload)


class Passing:
    """A ring whose secondaries pass each frame on as it is."""

    def __init__(self, n: Nodes) -> None:
        self.nodes = n
        self.endings: queue.Queue[tuple[str, RingError | None]] = queue.Queue()
        self.threads = [threading.Thread(target=self._pass, args=(i,)) for i in range(1, len(n.rings))]
        for thread in self.threads:
            thread.start()

    def _pass(self, index: int) -> None:
        ring, name = self.nodes.rings[index], self.nodes.seats[index].name
        try:
            while True:
                frame = ring.recv(DEADLINE_S)
                assert frame is not None
                ring.send(replace(frame, payload=bytes(frame.payload)))
                ring.release(frame)
        except RingEndedError:
            self.endings.put((name, None))
        except RingError as e:
            self.endings.put((name, e))

    def rounds(self, first: int, n_frames: int, n_in_flight: int) -> Iterator[int]:
        """Send frames, so many at a time, and take them back; the number of each one that is back, and whole."""
        starter = self.nodes.rings[0]
        sent = first
        for number in range(first, first + n_frames):
            while sent < min(number + n_in_flight, first + n_frames):
                starter.send(batch(self.nodes.epoch, sent))
                sent += 1
            frame = starter.recv(DEADLINE_S)
            assert frame is not None
            assert (frame.number, bytes(frame.payload)) == (number, bytes([number % 256]) * (4 * N_COLS))
            starter.release(frame)
            yield number


@contextlib.contextmanager
def passing(n_nodes: int, silence_s: float = 30.0, keys: KeyFile | None = None) -> Iterator[Passing]:
    with nodes(n_nodes, silence_s=silence_s, keys=keys) as n:
        one = Passing(n)
        try:
            yield one
        finally:
            n.rings[0].stop("the test is over")
            for thread in one.threads:
                thread.join(DEADLINE_S)
                assert not thread.is_alive()


def reset(link_owner: TcpRing, is_next: bool) -> None:
    """As when a router between the two forgets the connection: what was under way is gone."""
    link = link_owner.next_link if is_next else link_owner.previous_link
    connection = link.connection
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("n_nodes", [2, 3])
def test_every_frame_comes_once_and_in_order_whatever_breaks(n_nodes: int, is_sealed: bool, tmp_path: Path) -> None:
    chance = random.Random(n_nodes)
    with passing(n_nodes, keys=key_file(tmp_path / "key") if is_sealed else None) as ring:
        for number in ring.rounds(5, 400, n_nodes):
            if number % 10 == 0:
                reset(chance.choice(ring.nodes.rings), chance.random() < 0.5)
        assert sum(one.n_reconnected for one in ring.nodes.rings) > 20
        assert ring.endings.empty()


def test_a_connection_that_breaks_while_nothing_is_sent_is_made_again() -> None:
    with passing(3) as ring:
        list(ring.rounds(0, 3, 3))
        reset(ring.nodes.rings[1], True)
        list(ring.rounds(3, 3, 3))
        assert ring.endings.empty()


def test_a_notice_that_was_lost_with_its_connection_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system took it, and it never left: nobody knows."""
    broken: set[socket.socket] = set()

    def lose_notices(sock: socket.socket, frame: Frame, codec: FrameCodec, **options: bool) -> int:
        if frame.type is FrameType.NOTICE and len(broken) < 2:
            broken.add(sock)
            sock.shutdown(socket.SHUT_RDWR)
            return 0
        return send_frame(sock, frame, codec, **options)

    monkeypatch.setattr(mdi.net.link, "send_frame", lose_notices)
    with passing(3) as ring:
        list(ring.rounds(0, 3, 3))
        ring.nodes.rings[2].announce_leave()
        until(lambda: ring.nodes.rings[0].leaving == ("secondary1",))
        assert len(broken) == 2 and ring.endings.empty()


def first_link(ring: Passing) -> tuple[Link, Connection]:
    """The starter's to the next node, after two rounds."""
    list(ring.rounds(0, 2, 1))
    link = ring.nodes.rings[0].next_link
    assert link.connection is not None
    return link, link.connection


def test_a_frame_that_was_sent_in_half_comes_whole() -> None:
    """The connection is closed in the middle of a frame: its beginning is dropped, and it is sent again."""
    with passing(2) as ring:
        link, connection = first_link(ring)
        connection.sock.sendall(connection.codec.head(batch(ring.nodes.epoch, 2))[:50])
        link.interrupt()
        list(ring.rounds(2, 4, 1))
        assert ring.nodes.rings[0].n_reconnected >= 1


def test_what_was_sent_is_kept_only_as_long_as_it_can_be_lacking() -> None:
    with passing(3) as ring:
        list(ring.rounds(0, 50, 3))
        assert all(len(one.next_link.sent_frames) <= one.capacity + 1 for one in ring.nodes.rings)
        assert all(not one.previous_link.sent_frames for one in ring.nodes.rings)


def test_a_node_that_is_gone_is_lost_by_its_name() -> None:
    with passing(3, silence_s=30.0) as ring:
        list(ring.rounds(0, 3, 3))
        ring.nodes.kill(1)
        with pytest.raises(NodeLostError) as caught:
            while True:
                ring.nodes.rings[0].recv(DEADLINE_S)
        assert (caught.value.node, caught.value.code) == ("secondary0", "lost")


def answer_to(ring: Passing, hello: Frame) -> Frame:
    """What node 1 answers to somebody who calls in the name of the starter."""
    port = ring.nodes.listeners[1].port
    sock, codec = call(("127.0.0.1", port), hello, None, DEADLINE_S)
    with sock:
        frame = read_frame(sock, codec)
        assert frame is not None
        return frame


def test_a_process_that_was_started_anew_is_not_taken_for_the_old_one() -> None:
    with passing(2) as ring:
        seat = ring.nodes.seats[0]
        for stranger in (replace(seat, process="another"), replace(seat, epoch=seat.epoch ^ 1)):
            frame = answer_to(ring, stranger.hello_with(reconnect=1))
            assert frame.type is FrameType.ERROR and Fault.from_bytes(frame.payload).code == RingError.code
        list(ring.rounds(0, 4, 2))


def test_a_next_node_that_was_started_anew_is_lost() -> None:
    with passing(2) as ring:
        dialer = ring.nodes.rings[0].next_link.reconnect
        assert isinstance(dialer, Dialer)
        dialer.process = "the one before"
        reset(ring.nodes.rings[0], True)
        with pytest.raises(NodeLostError) as caught:
            while True:
                ring.nodes.rings[0].recv(DEADLINE_S)
        assert caught.value.node == "secondary0"


@pytest.mark.parametrize("process", ["now", "before"])
def test_who_calls_again_goes_on_with_the_same_process_alone(process: str) -> None:
    names, until_s = ("starter", "secondary0"), time.monotonic() + DEADLINE_S
    one = listener("secondary0")
    starter = Seat(1, 0, names, "p", "127.0.0.1", one.port, process="x")
    waiter = Waiter(
        Seat(1, 1, names, "p", "127.0.0.1", 1, process="now"), Limits(), one, Hello.from_bytes(starter.hello.payload)
    )
    found: list[Connection] = []
    thread = threading.Thread(target=lambda: found.append(waiter.connect(5, until_s)))
    thread.start()
    try:
        dialer = Dialer(starter, Limits(), process)
        if process == "now":
            found.append(dialer.connect(None, until_s))
            assert found[-1].received == 5
        else:
            with pytest.raises(NodeStillAbsentError):
                found.append(dialer.connect(None, until_s))
    finally:
        thread.join(DEADLINE_S)
        waiter.stop()
        for connection in found:
            connection.sock.close()
        one.close()


def test_a_call_replaces_a_connection_that_looks_sound() -> None:
    """The other side found it broken; and of several calls the last one counts, in whatever order they are heard."""
    with passing(2) as ring:
        list(ring.rounds(0, 2, 2))
        seat = ring.nodes.seats[0]
        assert answer_to(ring, seat.hello_with(reconnect=7)).type is FrameType.HELLO
        # That caller is gone again, and nobody else has called as often: until the starter has, nothing goes on.
        dialer = ring.nodes.rings[0].next_link.reconnect
        assert isinstance(dialer, Dialer)
        dialer.n_calls = 7
        list(ring.rounds(2, 4, 2))


def test_of_several_calls_the_one_that_was_made_last_counts() -> None:
    """Calls can overtake each other on their way: an older one must not replace a newer one."""
    one = listener("secondary0")
    seat = Seat(1, 1, ("starter", "secondary0"), "p", "127.0.0.1", 1, process="x")
    waiter = Waiter(seat, Limits(), one, Hello(0, 2, "p"))
    ours, theirs = zip(*(socket.socketpair() for _ in range(4)), strict=True)
    try:
        for sock, number in zip(ours, (2, 1, 2, 3), strict=True):
            waiter.take(sock, FrameCodec(), Hello(0, 2, "p", extensions={"reconnect": number, "received": number}))
        assert [sock.fileno() == -1 for sock in ours] == [True, True, True, False]
        connection = waiter.connect(None, time.monotonic() + DEADLINE_S)
        assert connection.sock is ours[3] and (connection.received, waiter.n_calls) == (3, 3)
        late, peer = socket.socketpair()
        with peer:
            waiter.take(late, FrameCodec(), Hello(0, 2, "p", extensions={"reconnect": 3}))
            is_closed = late.fileno() == -1
            waiter.stop()
        assert is_closed, "a call that was answered already is old, too"
        with pytest.raises(NodeStillAbsentError):
            waiter.connect(None, time.monotonic() + DEADLINE_S)
    finally:
        for sock in (*ours, *theirs):
            sock.close()
        one.close()


def test_a_ring_ends_while_a_connection_is_being_made() -> None:
    with passing(3) as ring:
        list(ring.rounds(0, 3, 3))
        ring.nodes.listeners[1].close()  # nobody can call node 1 any more
        for index in (0, 1):
            reset(ring.nodes.rings[index], True)
        ring.nodes.rings[0].stop("the test is over")
        ring.nodes.rings[0].close()
        for one in ring.nodes.rings[1:]:
            one.stop("the test is over")


@pytest.mark.parametrize("received", [None, 5])
def test_the_numbers_of_a_hello(received: int | None) -> None:
    seat = Seat(1, 0, ("starter", "secondary0"), "p", "127.0.0.1", 1, process="x")
    hello = Hello.from_bytes(seat.hello_with(reconnect=3, received=received).payload)
    assert (hello.reconnect, hello.received, hello.process) == (3, received, "x")
    first = Hello.from_bytes(seat.hello.payload)
    assert (first.reconnect, first.received) == (0, None)
    odd = Hello(0, 2, "p", extensions={"reconnect": "many", "received": -3})
    assert (odd.reconnect, odd.received) == (0, None)


def test_a_frame_that_is_missing_ends_the_link() -> None:
    """Numbers tell: what the neighbour did not keep long enough cannot be made up for."""
    with passing(2) as ring:
        link, connection = first_link(ring)
        send_frame(connection.sock, batch(ring.nodes.epoch, 9), connection.codec)
        name, error = ring.endings.get(timeout=DEADLINE_S)
        assert name == "secondary0" and isinstance(error, NodeLostError) and error.node == "starter"


def test_limits_hold_over_a_new_connection() -> None:
    with passing(2) as ring:
        reset(ring.nodes.rings[0], True)
        list(ring.rounds(0, 2, 2))
        connection = ring.nodes.rings[1].previous_link.connection
        assert connection is not None and connection.codec.limits == Limits()
