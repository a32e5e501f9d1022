"""Rings of real TCP links: how they are closed, how they end, and that a lost node is called by its right name."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from loopback import DEADLINE_S, PLACEMENT, Nodes, listener, names_of, nodes, seats_of
from mdi.cancel import Cancel, CancelledError
from mdi.errors import Code, NodeLostError, RingEndedError, RingError
from mdi.net import handshake as handshake_module
from mdi.net import link as link_module
from mdi.net.handshake import close_starter_ring, join_ring
from mdi.net.hello import Fault, connected
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, Seat, TcpRing
from mdi.net.wire import HANDSHAKE, PLAIN, Frame, FrameType, Limits, Slice, read_frame, send_frame
from mdi.run.local import free_ports
from waiting import until

EPOCH = 11
SILENCE_S = 3.0  # of a ring that is being closed


def batch(epoch: int, number: int = 0) -> Frame:
    return Frame(FrameType.BATCH, epoch, number, "float32", 1, 4, (Slice(1, number, 1, 1),), (), bytes(range(16)))


def received(ring: TcpRing) -> Frame:
    frame = ring.recv(DEADLINE_S)
    assert frame is not None
    return frame


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def loss(ring: TcpRing) -> RingError:
    """The error that ends a ring."""
    with pytest.raises(RingError) as caught:
        while ring.recv(DEADLINE_S) is not None:
            pass
    return caught.value


def test_frames_go_round_in_order() -> None:
    with nodes(4) as n:
        for number in range(20):
            n.rings[0].send(batch(n.epoch, number))
            for ring in n.rings[1:]:
                frame = received(ring)
                ring.send(
                    Frame(
                        FrameType.BATCH, n.epoch, frame.number, "float32", 1, 4, frame.slices, (), bytes(frame.payload)
                    )
                )
                ring.release(frame)
            frame = received(n.rings[0])
            assert (frame.number, bytes(frame.payload)) == (number, bytes(range(16)))
        # A frame is counted once it is out, which may be after its receiver has it.
        eventually(lambda: [ring.n_frames for ring in n.rings] == [20] * 4)
        assert all(ring.bytes_sent >= 20 * (52 + 20 + 16) for ring in n.rings)


def test_a_ring_of_two_has_one_neighbour_on_both_sides() -> None:
    with nodes(2) as n:
        n.rings[0].send(batch(n.epoch, 1))
        n.rings[1].send(received(n.rings[1]))
        assert received(n.rings[0]).number == 1
        n.kill(1)
        error = loss(n.rings[0])
        assert isinstance(error, NodeLostError) and error.node == "secondary0"


def test_wake_ends_one_wait_and_takes_no_place() -> None:
    with nodes(2) as n:
        for _ in range(10):
            n.rings[0].wake()
        assert n.rings[0].recv(DEADLINE_S) is None
        assert n.rings[0].recv(0.01) is None


def test_the_ring_of_one_node() -> None:
    ring = LoopbackRing(1)
    for _ in range(5):
        ring.wake()
    frame = batch(1)
    ring.send(frame)  # would wait for ever if the wakes took its place
    assert ring.recv() is frame
    ring.release(frame)
    assert ring.n_frames == 1
    ring.wake()
    assert ring.recv(DEADLINE_S) is None
    ring.stop("over")
    with pytest.raises(RingEndedError):
        ring.recv()
    ring.close()


@pytest.mark.parametrize("n_nodes", [2, 5])
def test_stop_ends_every_node_though_no_engine_takes_a_frame(n_nodes: int) -> None:
    with nodes(n_nodes) as n:
        for number in range(n_nodes):
            n.rings[0].send(batch(n.epoch, number))
        n.rings[0].stop("the run is over")
        for ring in n.rings:
            assert ring.wait_end(DEADLINE_S)
            with pytest.raises(RingEndedError):
                ring.recv()
            ring.send(batch(n.epoch))  # does nothing


@pytest.mark.parametrize("n_nodes", [2, 3, 5])
def test_a_starter_that_stops_and_closes_at_once_is_not_lost_to_its_last_node(n_nodes: int) -> None:
    """Whose STOP might come by way of all other nodes, of which one takes its time."""
    with nodes(n_nodes) as n:
        go_on = threading.Event()
        pass_on = n.rings[1].next_link.on_last

        def pass_on_late(frame: Frame) -> None:
            assert go_on.wait(DEADLINE_S)
            pass_on(frame)

        if n_nodes > 2:
            n.rings[1].next_link.on_last = n.rings[1].previous_link.on_last = pass_on_late
        n.rings[0].stop("the run is over")
        n.rings[0].close()
        for ring in reversed(n.rings[2:] or n.rings[1:]):
            assert ring.wait_end(DEADLINE_S)
            with pytest.raises(RingEndedError):
                ring.recv()
        go_on.set()
        assert n.rings[1].wait_end(DEADLINE_S)
        with pytest.raises(RingEndedError):
            n.rings[1].recv()


def test_a_fault_reaches_the_nodes_downstream_and_the_starter() -> None:
    with nodes(4) as n:
        n.rings[1].fail(Fault("secondary0", "it failed: no memory", "secondary0"))
        for ring in (n.rings[2], n.rings[3], n.rings[0]):
            error = loss(ring)
            assert isinstance(error, NodeLostError) and error.node == "secondary0"
            assert str(error) == "secondary0 is lost: it failed: no memory"


def test_a_stop_does_not_take_the_place_of_a_fault() -> None:
    """A starter that gives up says why, and then ends the run as it ends any."""
    for _ in range(20):  # the ERROR may have been sent before the STOP was asked for
        with nodes(2) as n:
            n.rings[0].fail(Fault("secondary0", "it went away", "starter"))
            n.rings[0].stop("the run is over")
            error = loss(n.rings[1])
            assert isinstance(error, NodeLostError) and error.node == "secondary0"


def test_a_fault_of_nobody_is_a_ring_error() -> None:
    with nodes(2) as n:
        n.rings[1].fail(Fault("", "something is wrong", "secondary0"))
        error = loss(n.rings[0])
        assert not isinstance(error, NodeLostError) and str(error) == "something is wrong"


@pytest.mark.parametrize(("n_nodes", "victim"), [(3, 1), (3, 2), (5, 1), (5, 2), (5, 4)])
def test_a_node_that_dies_is_named_to_the_starter_and_all_others_end(n_nodes: int, victim: int) -> None:
    with nodes(n_nodes) as n:
        for number in range(n_nodes):
            n.rings[0].send(batch(n.epoch, number))
        n.kill(victim)
        error = loss(n.rings[0])
        assert isinstance(error, NodeLostError) and error.node == n.seats[victim].name
        n.rings[0].close()
        for index, ring in enumerate(n.rings):
            if index not in (0, victim):
                assert ring.wait_end(DEADLINE_S)
                assert isinstance(loss(ring), NodeLostError)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_node_that_falls_silent_is_named(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP: its connections stand, but nothing comes any more."""
    monkeypatch.setattr(link_module, "PING_INTERVAL_S", 0.05)
    with nodes(3, silence_s=1.0) as n:
        n.rings[victim].next_link.outbox.get = lambda timeout_s=None: frozen.wait() and None  # type: ignore[method-assign]
        frozen = threading.Event()
        n.rings[victim].next_link.outbox.put_first(Frame(FrameType.PING, n.epoch))
        try:
            error = loss(n.rings[0])
            assert isinstance(error, NodeLostError) and error.node == n.seats[victim].name
            assert error.code == "lost" and " 1 s" in str(error)
        finally:
            n.rings[victim].end_with(None)
            n.rings[victim].next_link.outbox.close()
            frozen.set()


def test_the_starter_that_dies_is_noticed_by_everybody() -> None:
    with nodes(4) as n:
        n.kill(0)
        for ring in n.rings[1:]:
            error = loss(ring)
            assert isinstance(error, NodeLostError) and error.node == "starter"


def raw_link(n: Nodes, index: int) -> socket.socket:
    """The socket on which node `index` sends: for bytes that a sound node would not send."""
    connection = n.rings[index].next_link.connection
    assert connection is not None
    return connection.sock


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            PLAIN.head(batch(EPOCH + 1)) + bytes(range(16)),
            "a frame of run 000000000000000c, expected run 000000000000000b",
        ),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20, "not a frame of MDI-LLM"),
        (PLAIN.head(batch(EPOCH)) + bytes(16), "is damaged"),
    ],
    ids=["epoch", "http", "crc"],
)
@pytest.mark.parametrize("culprit", [1, 2])
def test_garbage_in_the_middle_of_a_run_names_the_neighbour(culprit: int, data: bytes, reason: str) -> None:
    with nodes(3, epoch=EPOCH) as n:
        raw_link(n, culprit).sendall(data)
        error = loss(n.rings[0])
        assert isinstance(error, NodeLostError) and error.node == n.seats[culprit].name
        assert reason in str(error)


def test_strangers_before_and_after_the_ring_is_closed_change_nothing() -> None:
    with contextlib.ExitStack() as guests, nodes(3) as n:
        for one in n.listeners:
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 4, PLAIN.head(Frame(FrameType.BATCH, n.epoch))):
                sock = guests.enter_context(socket.create_connection(("127.0.0.1", one.port), DEADLINE_S))
                sock.sendall(data)
        n.rings[0].send(batch(n.epoch, 3))
        assert received(n.rings[1]).number == 3
        assert not any(ring.wait_end(0) for ring in n.rings)


def test_a_failure_is_told_in_both_directions() -> None:
    """The nodes before the one that fails know as soon as those after it, by its own words."""
    with nodes(5) as n:
        n.rings[2].fail(Fault("secondary1", "it failed: no memory", "secondary1", Code.MEMORY))
        for index in (1, 0, 3, 4):
            error = loss(n.rings[index])
            assert isinstance(error, NodeLostError) and (error.node, error.code) == ("secondary1", "memory")


def test_two_nodes_that_die_at_once_are_known_on_either_side() -> None:
    with nodes(5) as n:
        n.kill(2)
        n.kill(4)
        for index in (0, 1, 3):
            error = loss(n.rings[index])
            assert isinstance(error, NodeLostError) and error.node in ("secondary1", "secondary3")


def test_a_next_node_that_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is frozen: it takes what the system buffers for it, and says nothing."""
    monkeypatch.setattr(link_module, "PING_INTERVAL_S", 0.1)
    seat = replace(seats_of(free_ports(2), EPOCH)[0], silence_s=0.5)
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ends.append((stack.enter_context(socket.create_connection(server.getsockname())), server.accept()[0]))
        (prev, sock_in), (frozen, sock_out) = ends
        ring = TcpRing(seat, sock_in, sock_out, 2, Limits())
        stack.callback(ring.close)
        over = threading.Event()

        def talk() -> None:
            while not over.wait(0.1):
                with contextlib.suppress(OSError):
                    send_frame(prev, Frame(FrameType.PING, EPOCH))

        thread = threading.Thread(target=talk)
        thread.start()
        error = loss(ring)
        over.set()
        thread.join(DEADLINE_S)
        assert isinstance(error, NodeLostError) and "nothing was heard" in str(error)


# Closing the ring


class Starting:
    """A starter that closes its ring in a thread, and the listener on which its last node is to call."""

    def __init__(self, ports: list[int], timeout_s: float = DEADLINE_S) -> None:
        self.listener = listener()
        self.seats = [replace(seat, silence_s=SILENCE_S) for seat in seats_of([self.listener.port, *ports], EPOCH)]
        self._timeout_s = timeout_s
        self._result: queue.Queue[TcpRing | Exception] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.put(close_starter_ring(self.listener, self.seats[0], 4, Limits(), self._timeout_s))
        except Exception as e:
            self._result.put(e)

    def error(self) -> NodeLostError:
        found = self._result.get(timeout=DEADLINE_S)
        assert isinstance(found, NodeLostError), found
        return found

    def close(self) -> None:
        self._thread.join(DEADLINE_S)
        self.listener.close()


@contextlib.contextmanager
def starting(ports: list[int], timeout_s: float = DEADLINE_S) -> Iterator[Starting]:
    one = Starting(ports, timeout_s)
    try:
        yield one
    finally:
        one.close()


@contextlib.contextmanager
def fake_node(behave: Callable[[socket.socket], object]) -> Iterator[int]:
    """A ring port on which `behave` gets the first connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)

        def run() -> None:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(DEADLINE_S)
                behave(sock)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join(DEADLINE_S)


def refuse(sock: socket.socket) -> None:
    frame = read_frame(sock, HANDSHAKE)
    assert frame is not None
    send_frame(sock, Frame.message(FrameType.ERROR, frame.epoch, Fault("", "no, thank you", "secondary0").to_bytes()))


def die(sock: socket.socket) -> None:
    read_frame(sock, HANDSHAKE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def answer_with(frame: Frame) -> Callable[[socket.socket], object]:
    return lambda sock: (read_frame(sock, HANDSHAKE), send_frame(sock, frame))


def wait_for_the_end(sock: socket.socket) -> None:
    read_frame(sock, HANDSHAKE)
    with contextlib.suppress(OSError):
        sock.recv(1)


BAD_NEIGHBOURS: list[tuple[Callable[[socket.socket], object], str]] = [
    (refuse, " says: no, thank you"),
    (lambda sock: read_frame(sock, HANDSHAKE), "closed the connection in the handshake"),
    (die, "broke off the handshake"),
    (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4), "broke off the handshake: not a frame of MDI-LLM"),
    (answer_with(batch(EPOCH)), "broke off the handshake"),
    (answer_with(Frame(FrameType.PING, EPOCH + 1)), "answered with a PING frame"),
    (answer_with(Frame(FrameType.PING, EPOCH)), "closed the connection in the handshake"),
    (answer_with(Frame.message(FrameType.HELLO, EPOCH + 1, b"{}")), "answered with a HELLO frame"),
]


@pytest.mark.parametrize(("behave", "message"), BAD_NEIGHBOURS, ids=[m[:30] for _, m in BAD_NEIGHBOURS])
def test_a_next_node_that_spoils_the_handshake_is_named(
    behave: Callable[[socket.socket], object], message: str
) -> None:
    with fake_node(behave) as port, starting([port, free_ports(1)[0]]) as starter:
        error = starter.error()
        assert error.node == "secondary0" and message in str(error)


def test_a_next_node_that_is_not_there_is_named() -> None:
    port = free_ports(1)[0]
    with starting([port, free_ports(1)[0]]) as starter:
        error = starter.error()
        assert error.node == "secondary0"
        assert f"starter cannot reach the ring port of secondary0 at 127.0.0.1:{port}" in str(error)


def test_a_next_node_whose_name_is_unknown_is_named() -> None:
    one = listener()
    try:
        seat = Seat(EPOCH, 0, names_of(2), PLACEMENT, "no-such-host.invalid", 1)
        with pytest.raises(NodeLostError) as lost:
            close_starter_ring(one, seat, 2, Limits())
        assert (lost.value.node, lost.value.code) == ("secondary0", "lost")
    finally:
        one.close()


def test_a_next_node_that_stays_silent_is_named() -> None:
    with fake_node(wait_for_the_end) as port, starting([port, free_ports(1)[0]], timeout_s=0.2) as starter:
        error = starter.error()
        assert error.node == "secondary0" and "did not answer within" in str(error)


@contextlib.contextmanager
def ring_up_to(behave: Callable[[socket.socket], object]) -> Iterator[Starting]:
    """A starter, a secondary, and a second one that does as it is told when it has been called."""
    middle = listener("secondary0")
    try:
        with fake_node(behave) as port:
            seat = seats_of([free_ports(1)[0], middle.port, port], EPOCH)[1]
            joining = Joining(middle, replace(seat, silence_s=SILENCE_S))
            try:
                with starting([middle.port, port]) as starter:  # not before it is expected
                    yield starter
            finally:
                joining.join()
    finally:
        middle.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_module, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(handshake_module, "REPORT_S", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_node_that_is_frozen_is_named_long_before_an_answer_is_due(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel has taken the connection for it; the node before it is alive, and waits as long as the starter does."""
    caplog.set_level("INFO")
    with ring_up_to(wait_for_the_end) as starter:
        error = starter.error()
        assert error.node == "secondary1"
        assert str(error) == (
            "secondary1 is frozen or cut off: nothing was heard of it for 3 s while the ring was closed"
        )
    assert "starter waits for secondary0 to join the ring (up to 60 s)" in caplog.text
    assert "secondary0 waits for secondary1 to join the ring" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_node_that_takes_its_time_is_not_frozen() -> None:
    """It gives signs of life for longer than the silence after which it would be taken for frozen, and then says no."""

    def dither(sock: socket.socket) -> None:
        frame = read_frame(sock, HANDSHAKE)
        assert frame is not None
        for _ in range(100):
            threading.Event().wait(0.05)
            send_frame(sock, Frame(FrameType.PING, frame.epoch))
        send_frame(sock, Frame.message(FrameType.ERROR, frame.epoch, Fault("", "not today", "secondary1").to_bytes()))

    with ring_up_to(dither) as starter:
        assert str(starter.error()) == "secondary1 says: not today"


def test_a_last_node_that_never_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_module, "CONNECT_S", 0.2)

    def lie(sock: socket.socket) -> None:
        frame = read_frame(sock, HANDSHAKE)
        assert frame is not None
        send_frame(sock, frame)
        wait_for_the_end(sock)

    with fake_node(lie) as port, starting([port, free_ports(1)[0]]) as starter:
        error = starter.error()
        assert error.node == "secondary1" and "secondary1 did not connect to starter" in str(error)


class Joining:
    """A secondary that takes its place in a thread."""

    def __init__(self, one: RingListener, seat: Seat, timeout_s: float = DEADLINE_S) -> None:
        self._expectation = one.expect(seat.epoch, seat.prev_hello)
        self._seat = seat
        self._timeout_s = timeout_s
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        sock = self._expectation.wait(DEADLINE_S)
        assert sock is not None
        try:
            join_ring(sock, self._seat, 4, Limits(), self._timeout_s).close()
        except RingError as e:
            self.error = e

    def join(self) -> None:
        self._thread.join(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behave", "message"),
    [
        *BAD_NEIGHBOURS,
        (None, "secondary1 cannot reach the ring port of secondary2"),
        (wait_for_the_end, "did not answer"),
    ],
    ids=[*(m[:30] for _, m in BAD_NEIGHBOURS), "absent", "silent"],
)
def test_what_is_wrong_far_away_is_told_to_the_starter(
    behave: Callable[[socket.socket], object] | None, message: str
) -> None:
    """A ring of four whose third secondary is no good: the two in between pass on who it is."""
    timeout_s = 4.0 if behave is wait_for_the_end else DEADLINE_S
    bad = fake_node(behave) if behave else contextlib.nullcontext(free_ports(1)[0])
    middle = [listener("secondary0"), listener("secondary1")]
    with bad as port:
        ports = [middle[0].port, middle[1].port, port]
        seats = seats_of([free_ports(1)[0], *ports], EPOCH)
        joining = [Joining(one, seats[i + 1], timeout_s) for i, one in enumerate(middle)]
        with starting(ports, timeout_s) as starter:
            error = starter.error()
            assert error.node == "secondary2" and message in str(error)
        for one in joining:
            one.join()
            assert isinstance(one.error, NodeLostError) and one.error.node == "secondary2"
    for one in middle:
        one.close()


def test_nodes_that_disagree_say_so_in_words() -> None:
    one = listener("secondary0")
    seats = seats_of([free_ports(1)[0], one.port], EPOCH)
    odd = one.expect(EPOCH, Seat(EPOCH, 1, names_of(2), "b" * 64, "127.0.0.1", seats[1].next_port).prev_hello)
    with starting([one.port]) as starter:
        error = starter.error()
        assert error.node == "secondary0" and "disagree about the model or its cut" in str(error)
    one.forget(odd)
    one.expect(EPOCH + 1, seats[1].prev_hello)
    with starting([one.port]) as starter:
        assert "secondary0 does not know run 000000000000000b" in str(starter.error())
    one.close()


def test_frames_come_and_go_while_a_node_computes() -> None:
    """While a node is busy with one frame, the next one is received, and the last one leaves."""
    with nodes(2) as ring:
        first, second = ring.rings
        for number in range(2):
            first.send(Frame(FrameType.BATCH, ring.epoch, number))
        busy_with = second.recv(DEADLINE_S)
        assert busy_with is not None and busy_with.number == 0
        second.send(busy_with)  # from here on the node computes: it touches no queue
        inbox = second.inbox
        with inbox.changed:
            assert inbox.changed.wait_for(lambda: inbox.n_items == 1, DEADLINE_S)
        back = first.recv(DEADLINE_S)
        assert back is not None and back.number == 0


@pytest.mark.parametrize(("starters", "secondarys"), [("int8", "auto"), ("auto", "fp16"), ("fp16", "int8")])
def test_nodes_that_disagree_about_the_wire_say_so_at_once(starters: str, secondarys: str) -> None:
    one = listener("secondary0")
    seat = replace(seats_of([free_ports(1)[0], one.port], EPOCH)[0], wire=starters)
    one.expect(EPOCH, replace(seat, index=1, wire=secondarys).prev_hello)
    starter = listener()
    with pytest.raises(NodeLostError, match=f"expects rows in the wire format '{secondarys}'.*sends '{starters}'"):
        close_starter_ring(starter, seat, 2, Limits(), timeout_s=DEADLINE_S)
    starter.close()
    one.close()


def test_a_previous_node_that_goes_away_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer cannot be sent to who has called."""
    seat = Seat(EPOCH, 1, names_of(2), PLACEMENT, "127.0.0.1", free_ports(1)[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
    good = answer_with(replace(seat, index=0).hello)
    with fake_node(good) as port:
        seat = Seat(EPOCH, 1, names_of(2), PLACEMENT, "127.0.0.1", port)
        with pytest.raises(RingError) as refused:
            join_ring(sock, seat, 2, Limits())
        assert type(refused.value) is RingError, "it ends the forming, and is no node that this one lost"
    assert sock.fileno() == -1


@pytest.mark.parametrize("place", ["starter", "secondary"])
def test_a_node_that_waits_for_the_next_one_ends_with_its_cancel(place: str) -> None:
    """The next node lives, and the limits are far away."""
    cancel = Cancel()

    def give_up(sock: socket.socket) -> None:
        read_frame(sock, HANDSHAKE)
        cancel.cancel(CancelledError("not wanted"))
        with contextlib.suppress(OSError):
            assert sock.recv(1) == b""  # who called has hung up

    with fake_node(give_up) as port, contextlib.ExitStack() as stack:
        seat = Seat(EPOCH, 0 if place == "starter" else 1, names_of(3), PLACEMENT, "127.0.0.1", port, silence_s=600.0)
        with pytest.raises(CancelledError):
            if place == "starter":
                one = listener()
                stack.callback(one.close)
                close_starter_ring(one, seat, 2, Limits(), timeout_s=600.0, cancel=cancel)
            else:
                caller, sock = (stack.enter_context(end) for end in socket.socketpair())
                join_ring(sock, seat, 2, Limits(), timeout_s=600.0, cancel=cancel)
        if place == "secondary":
            caller.settimeout(DEADLINE_S)
            frame = read_frame(caller, HANDSHAKE)
            assert frame is not None and frame.type is FrameType.ERROR
            assert Fault.from_bytes(frame.payload).code == "cancelled"


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port whose queue of callers is full: connecting to it goes on until a timeout."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def test_who_connects_to_a_port_that_does_not_answer_ends_with_its_cancel() -> None:
    cancel, failed = Cancel(), queue.SimpleQueue[BaseException]()

    def connect() -> None:
        try:
            connected(("127.0.0.1", port), 600.0, cancel).close()
        except BaseException as e:
            failed.put(e)

    with deaf_port() as port:
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        until(lambda: bool(cancel.wakers))  # it has begun to connect
        cancel.cancel(CancelledError("not wanted"))
        assert type(failed.get(timeout=DEADLINE_S)) is CancelledError
        thread.join(DEADLINE_S)


def test_connecting_ends_with_the_deadline_of_its_cancel() -> None:
    with deaf_port() as port, pytest.raises(CancelledError):
        connected(("127.0.0.1", port), 600.0, Cancel(0.05))
