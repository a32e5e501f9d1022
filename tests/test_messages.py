"""Messages on the ring port: what a node is asked there, and everything that can go wrong with bytes, times and strangers."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster_keys import key_file
from mdi.cancel import Cancel, CancelledError
from mdi.control import message_server as asked_module
from mdi.control.client import ControlClient
from mdi.control.message_server import ECHO_LIMIT_BYTES, N_OF_ANYBODY, EchoOnly
from mdi.control.messages import CONTROL_VERSION, ForwardRequest, PartSpec, ProbeRequest, ProfileRequest
from mdi.errors import AccessError, CheckpointError, Code, ControlError, UsageError
from mdi.model.plain import ModelConfig
from mdi.net import message as message_module
from mdi.net.keys import KeyFile
from mdi.net.message import PIECE_BYTES, ExchangeError, Message
from mdi.net.wire import HEADER_BYTES, Frame, FrameCodec, FrameType, read_frame, send_frame
from mdi.spec.cluster import NodeConfig
from mdi.spec.model_id import ModelId
from node_ports import BareNode, Pushing, opened, ring_port_of
from waiting import until

DEADLINE_S = 30.0
DATA = bytes(range(256)) * 8192  # 2 MiB
PART = PartSpec("block.1", hashlib.sha256(DATA).hexdigest(), len(DATA))
RUN = "0123456789abcdef"
PROFILE = ProfileRequest(ModelId("x", ModelConfig(n_layer=5, name="x" * 9000), "c" * 64, "float32"))


class Node(BareNode):
    """Notes what it is asked, and raises what it is told to."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Any] = queue.Queue()
        self.error: Exception | None = None
        self.parts: dict[str, bytes] = {}
        self.broken_off: queue.Queue[int] = queue.Queue()
        self.says: dict[str, Any] = {"state": "LOADING"}
        self.ring: Pushing | None = None
        self.measures: Iterable[Any] = []

    def _note(self, call: Any) -> None:
        self.calls.put(call)
        if self.error is not None:
            raise self.error

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        self._note(("part", run, sha256, offset, n_bytes))
        data = b""
        try:
            while piece := read(65536):
                data += piece
        finally:
            if len(data) < n_bytes:
                self.broken_off.put(len(data))
        self.parts[sha256] = self.parts.get(sha256, b"")[:offset] + data

    def watch(self, run: str, epoch: str | None) -> Pushing:
        self._note(("watch", run, epoch))
        self.ring = Pushing(lambda: dict(self.says))
        return self.ring

    def status(self, run: str | None) -> dict[str, Any]:
        self._note(("status", run))
        return dict(self.says)

    def profile(self, request: ProfileRequest, note: Callable[[Any], None]) -> dict[str, Any]:
        self._note(request)
        for what in self.measures:
            note(what)
        return {"profile": 1}

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        self._note(request)
        return {"way": 2}

    def forward(self, request: ForwardRequest) -> None:
        self._note(request)


@pytest.fixture(params=[False, True], ids=["clear", "sealed"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> KeyFile | None:
    return key_file(tmp_path / "cluster.key") if request.param else None


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def entry(node: Node, keys: KeyFile | None) -> Iterator[NodeConfig]:
    with ring_port_of(node, keys) as found:
        yield found


@pytest.fixture
def client(entry: NodeConfig, keys: KeyFile | None) -> ControlClient:
    return ControlClient(entry, keys)


def is_well(client: ControlClient) -> bool:
    """Whether the node answers as ever."""
    return client.probe(ProbeRequest("x", "127.0.0.1", 1, 2)) == {"way": 2}


# What a node is asked


@pytest.mark.parametrize("offset", [0, 1, len(DATA) - 1, len(DATA)])
@pytest.mark.parametrize("n_piece", [100_000, 3 * PIECE_BYTES])
def test_a_part_is_sent_from_an_offset_on(node: Node, client: ControlClient, offset: int, n_piece: int) -> None:
    node.parts[PART.sha256] = DATA[:offset]
    pieces = (memoryview(DATA)[i : i + n_piece] for i in range(offset, len(DATA), n_piece))
    client.send_part(PART, RUN, offset, pieces)
    assert node.calls.get_nowait() == ("part", RUN, PART.sha256, offset, len(DATA) - offset)
    assert node.parts[PART.sha256] == DATA


def test_requests_come_as_they_were_sent(node: Node, client: ControlClient) -> None:
    probe, forward = ProbeRequest("b", "h", 1, 2, True), ForwardRequest(RUN, PART, 5, "b", "h", 7)
    assert client.profile(PROFILE) == {"profile": 1} and client.probe(probe) == {"way": 2}
    client.forward(forward)
    assert client.status(RUN) == node.says
    client.echo(100_000)
    assert [node.calls.get_nowait() for _ in range(4)] == [PROFILE, probe, forward, ("status", RUN)]


def test_a_node_says_what_it_measures_until_nobody_waits(node: Node, client: ControlClient) -> None:
    node.measures, heard = [{"what": "a block"}, None, {"what": "the head"}], []
    assert client.profile(PROFILE, heard.append) == {"profile": 1}
    assert heard == node.measures
    node.measures, cancel = itertools.repeat({"what": "a block"}), Cancel()
    with pytest.raises(CancelledError):
        client.profile(PROFILE, lambda what: cancel.cancel(), cancel)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ControlError("occupied by another run", 409, code=Code.BUSY), 409, "busy"),
        (ControlError("no status given"), 500, "control"),
        (UsageError("you asked for something odd"), 400, "usage"),
        (CheckpointError("the disk is full"), 500, "weights"),
        (ZeroDivisionError("a defect"), 500, "control"),
    ],
)
def test_what_a_node_raises_is_the_answer(
    node: Node, client: ControlClient, error: Exception, status: int, code: str
) -> None:
    node.error = error
    for ask in (
        lambda: client.profile(PROFILE),
        lambda: client.send_part(PART, RUN, 0, iter([DATA])),  # not one byte of it is read
        lambda: next(client.watch(RUN, None, Cancel())),
    ):
        with pytest.raises(ControlError) as caught:
            ask()
        assert (caught.value.status, caught.value.code) == (status, code)
        assert str(error) in str(caught.value) and "Traceback" not in str(caught.value)
    assert Code.of(code).travels


def test_a_part_that_is_refused_in_the_middle_is_answered(
    node: Node, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        read(1000)
        refused.set()
        raise CheckpointError("the disk is full")

    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            n_sent.append(1)
            yield bytes(1 << 20)
            assert refused.wait(DEADLINE_S)

    refused, n_sent = threading.Event(), []  # type: ignore[var-annotated]
    monkeypatch.setattr(node, "receive_part", full)
    many = PartSpec("block.1", PART.sha256, 64 << 20)
    with pytest.raises(ControlError) as caught:
        client.send_part(many, RUN, 0, pieces())
    assert caught.value.code == "weights" and len(n_sent) < 64, "what it does not want is not sent to the end"


def test_an_error_of_the_source_goes_through(node: Node, client: ControlClient) -> None:
    def broken() -> Iterator[bytes]:
        yield DATA[:1000]
        raise CheckpointError("the disk broke")

    with pytest.raises(CheckpointError):
        client.send_part(PART, RUN, 0, broken())
    assert node.broken_off.get(timeout=DEADLINE_S) <= 1000


def test_a_starter_answers_echoes_only() -> None:
    class Starter(BareNode, EchoOnly):
        pass

    with ring_port_of(Starter(), None, "starter") as entry:
        client = ControlClient(entry)
        client.echo(1000)
        for ask in (
            lambda: client.profile(PROFILE),
            lambda: client.send_part(PART, RUN, 0, iter([DATA])),
            lambda: next(client.watch(RUN, None, Cancel())),
            lambda: client.forward(ForwardRequest(RUN, PART, 5, "b", "h", 7)),
            lambda: client.probe(ProbeRequest("b", "h", 1, 2)),
        ):
            with pytest.raises(ControlError) as caught:
                ask()
            assert (caught.value.status, caught.value.code) == (409, "role")


def test_an_echo_that_would_disturb_a_run_is_refused(node: Node, client: ControlClient) -> None:
    def busy() -> None:
        raise ControlError("a run", 409, code=Code.BUSY)

    node.check_echo = busy  # type: ignore[method-assign]
    with pytest.raises(ControlError) as caught:
        client.echo(1000)
    assert caught.value.code == "busy"


# A ring that is watched


def test_changes_are_pushed_in_order_until_the_ring_has_ended(node: Node, client: ControlClient) -> None:
    seen = []
    for status in client.watch(RUN, "f" * 16, Cancel()):
        seen.append(status)
        assert node.ring is not None
        if len(seen) == 3:
            node.says["state"] = "IDLE"
            node.ring.has_ended = True
        elif len(seen) < 3:
            node.says["n"] = len(seen)
    states = [(status.get("n"), status["state"]) for status in seen]
    assert states == [(None, "LOADING"), (1, "LOADING"), (2, "LOADING"), (2, "IDLE")]
    assert node.calls.get_nowait() == ("watch", RUN, "f" * 16)


def test_who_watches_gives_signs_of_life(node: Node, client: ControlClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.control.client.SIGN_S", 0.02)
    watching = client.watch(RUN, None, Cancel())
    next(watching)
    assert node.ring is not None
    ring, begin = node.ring, node.ring.n_signs
    for i in range(2000):
        node.says["n"] = i
        next(watching)
        if ring.n_signs >= begin + 3:
            break
    assert ring.n_signs >= begin + 3
    watching.close()  # type: ignore[attr-defined]


def test_a_watch_is_woken_by_its_cancel(client: ControlClient) -> None:
    cancel = Cancel()
    watching = client.watch(RUN, None, cancel)
    next(watching)
    threading.Timer(0.1, cancel.cancel).start()
    with pytest.raises(CancelledError):
        next(watching)


def test_a_node_that_has_ended_ends_its_watches(node: Node, keys: KeyFile | None) -> None:
    with ring_port_of(node, keys) as entry:
        watching = ControlClient(entry, keys).watch(RUN, None, Cancel())
        next(watching)
    with pytest.raises(ControlError) as caught:
        next(watching)
    assert caught.value.problem == "closed"
    assert not [one.name for one in threading.enumerate() if one.name == "message"]


# Openings that are none


OPENINGS = [
    (b"", 400, "control"),
    (b"nonsense", 400, "control"),
    (b"[" * 4096, 400, "control"),
    (b"[]", 400, "control"),
    (b'{"ask": 5, "version": 8}', 400, "control"),
    (b'{"ask": "probe"}', 400, "control"),
    (json.dumps({"ask": "probe", "version": CONTROL_VERSION - 1}).encode(), 409, "version"),
    (json.dumps({"ask": "probe", "version": CONTROL_VERSION + 1}).encode(), 409, "version"),
    (json.dumps({"ask": "nothing", "version": CONTROL_VERSION}).encode(), 404, "control"),
    (json.dumps({"ask": "probe", "version": CONTROL_VERSION, "n_bytes": 1}).encode(), 413, "control"),
    (json.dumps({"ask": "probe", "version": CONTROL_VERSION, "args": {"name": ""}}).encode(), 400, "control"),
    (json.dumps({"ask": "part", "version": CONTROL_VERSION, "n_bytes": -1}).encode(), 400, "control"),
    (json.dumps({"ask": "part", "version": CONTROL_VERSION, "args": {"run": "x"}}).encode(), 400, "control"),
    (json.dumps({"ask": "watch", "version": CONTROL_VERSION, "args": {"run": None}}).encode(), 400, "control"),
    (json.dumps({"ask": "echo", "version": CONTROL_VERSION, "n_bytes": ECHO_LIMIT_BYTES + 1}).encode(), 413, "control"),
    (json.dumps({"ask": "profile", "version": CONTROL_VERSION, "n_bytes": 5 << 20}).encode(), 413, "control"),
    (json.dumps({"ask": "profile", "version": CONTROL_VERSION}).encode(), 400, "control"),
]


def met(entry: NodeConfig, keys: KeyFile | None) -> Message:
    """A message whose opening is still to be sent."""

    class Silent(Message):
        def _send(self, frame_type: FrameType, data: bytes | memoryview, timeout_s: float) -> None:
            pass

    return Silent(entry.addr, entry.port_in, {}, keys, DEADLINE_S, DEADLINE_S)


def say(message: Message, frame_type: FrameType, data: bytes, number: int | None = None) -> None:
    number = message.number if number is None else number
    send_frame(message.sock, Frame.message(frame_type, number, data), message.codec)


@pytest.mark.parametrize(("opening", "status", "code"), OPENINGS, ids=[str(one[0][:60]) for one in OPENINGS])
def test_an_opening_that_makes_no_sense_is_answered(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient, opening: bytes, status: int, code: str
) -> None:
    with met(entry, keys) as message:
        say(message, FrameType.MESSAGE, opening)
        answer = message.read(DEADLINE_S)
    assert (answer["status"], answer["code"]) == (status, code) and "Traceback" not in answer["error"]
    assert node.calls.empty() and is_well(client)


def test_an_opening_that_is_too_long_is_dropped(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient
) -> None:
    with met(entry, keys) as message:
        say(message, FrameType.MESSAGE, b" " * 4097)
        with pytest.raises(ExchangeError) as caught:
            message.read(DEADLINE_S)
    assert caught.value.problem == "closed" and node.calls.empty() and is_well(client)


@pytest.mark.parametrize("frame_type", [FrameType.DATA, FrameType.PING, FrameType.BATCH, FrameType.STOP])
def test_a_connection_begins_with_an_opening(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient, frame_type: FrameType
) -> None:
    with met(entry, keys) as message:
        say(message, frame_type, b"")
        with pytest.raises(ExchangeError) as caught:
            message.read(DEADLINE_S)
    assert caught.value.problem == "closed" and is_well(client)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(args=st.dictionaries(st.sampled_from(["run", "sha256", "offset", "epoch", "name", "port_in", "x"]), st.none()
       | st.integers() | st.text(max_size=9) | st.lists(st.integers(), max_size=2), max_size=4),
       ask=st.sampled_from(["part", "watch", "forward", "probe", "profile", "echo"]), n_bytes=st.integers(-5, 9))  # fmt: skip
def test_any_opening_is_answered(
    entry: NodeConfig, keys: KeyFile | None, args: dict[str, Any], ask: str, n_bytes: int
) -> None:
    opening = json.dumps({"ask": ask, "version": CONTROL_VERSION, "n_bytes": n_bytes, "args": args}).encode()
    with met(entry, keys) as message:
        say(message, FrameType.MESSAGE, opening)
        answer = message.read(DEADLINE_S)
    assert answer.keys() in ({"go"}, {"answer"}) or answer["status"] in (400, 413)


# Bytes that do not come as they were announced


@pytest.mark.parametrize(
    "then",
    [
        lambda message: say(message, FrameType.DATA, DATA[:100], 12345),
        lambda message: say(message, FrameType.MESSAGE, DATA[:100]),
        lambda message: say(message, FrameType.DATA, b""),
        lambda message: say(message, FrameType.DATA, DATA[: len(DATA) - 1000 + 1][:PIECE_BYTES]),
        lambda message: message.sock.sendall(secrets.token_bytes(HEADER_BYTES)),
        lambda message: message.sock.sendall(b"GET / HTTP/1.1\r\n" * 10),
        lambda message: message.sock.shutdown(socket.SHUT_WR),
        lambda message: message.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
    ],
    ids=["another id", "another opening", "nothing", "too many", "garbage", "http", "an end", "a reset"],
)
def test_a_part_whose_bytes_do_not_come_is_broken_off(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient, then: Callable[[Message], None]
) -> None:
    """The whole pieces before are kept; the transfer goes on from there over another connection."""
    n_bytes = 1000
    with opened(entry, "part", n_bytes, keys, run=RUN, sha256=PART.sha256, offset=len(DATA) - n_bytes) as message:
        assert message.read(DEADLINE_S) == {"go": True}
        say(message, FrameType.DATA, DATA[:600])
        then(message)
        if then.__code__.co_names[-1] != "pack":
            with contextlib.suppress(ExchangeError):
                assert message.read(DEADLINE_S)["status"] == 400
    assert node.broken_off.get(timeout=DEADLINE_S) <= 600 and PART.sha256 not in node.parts
    client.send_part(PART, RUN, 0, iter([DATA]))
    assert node.parts[PART.sha256] == DATA


def test_a_data_frame_that_is_too_long_takes_no_memory(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is refused; its bytes are not waited for."""
    monkeypatch.setattr(message_module, "PIECE_S", 10 * DEADLINE_S)
    with opened(entry, "part", 1 << 40, keys, run=RUN, sha256=PART.sha256, offset=0) as message:
        message.read(DEADLINE_S)
        head, _ = message.codec.parts(
            Frame(FrameType.DATA, message.number, n_rows=1, n_cols=PIECE_BYTES + 1, payload=bytes(PIECE_BYTES + 1))
        )
        message.sock.sendall(head[:HEADER_BYTES])
        assert message.read(DEADLINE_S)["status"] == 400
    assert node.broken_off.get(timeout=DEADLINE_S) == 0 and is_well(client)


def test_who_trickles_is_given_up(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening has a deadline at the listener (test_listener); so have all bytes that are not weights."""
    monkeypatch.setattr(asked_module, "REQUEST_S", 0.2)
    with opened(entry, "echo", 1000, keys) as message:
        message.read(DEADLINE_S)
        over = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for byte in message.codec.parts(Frame.message(FrameType.DATA, message.number, bytes(1000)))[0] * 9:
                    message.sock.sendall(bytes([byte]))
                    if over.wait(0.02):
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        with contextlib.suppress(ExchangeError):
            assert message.read(DEADLINE_S)["status"] == 400
        over.set()
        thread.join(DEADLINE_S)
    monkeypatch.undo()
    assert is_well(client)


def test_a_part_that_stops_coming_is_given_up(
    node: Node, entry: NodeConfig, keys: KeyFile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_module, "PIECE_S", 0.2)
    with opened(entry, "part", 1000, keys, run=RUN, sha256=PART.sha256, offset=0) as message:
        message.read(DEADLINE_S)
        assert node.broken_off.get(timeout=DEADLINE_S) == 0


# Strangers


def test_a_recorded_opening_cannot_be_played_again(node: Node, tmp_path: Path) -> None:
    """Whoever listens to a connection of two nodes with a key says the same bytes again: nothing is asked twice."""
    keys = key_file(tmp_path / "cluster.key")
    said: list[bytes] = []
    with ring_port_of(node, keys) as entry, socket.create_server(("127.0.0.1", 0)) as between:

        def carry() -> None:
            sock, _ = between.accept()
            with sock, socket.create_connection(("127.0.0.1", entry.port_in), DEADLINE_S) as there:
                back = threading.Thread(target=pump, args=(there, sock, None))
                back.start()
                pump(sock, there, said)
                back.join(DEADLINE_S)

        thread = threading.Thread(target=carry)
        thread.start()
        client = ControlClient(NodeConfig("secondary0", "127.0.0.1", 0, between.getsockname()[1]), keys)
        client.forward(ForwardRequest(RUN, PART, 5, "b", "h", 7))
        thread.join(DEADLINE_S)
        node.calls.get_nowait()
        with socket.create_connection(("127.0.0.1", entry.port_in), DEADLINE_S) as again, contextlib.suppress(OSError):
            again.sendall(b"".join(said))
            while again.recv(65536):
                pass
        assert node.calls.empty() and is_well(ControlClient(entry, keys))


def pump(source: socket.socket, target: socket.socket, kept: list[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if kept is not None:
                kept.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("has_key", [True, False])
def test_another_key_or_none_gets_nothing(node: Node, has_key: bool, tmp_path: Path) -> None:
    with ring_port_of(node, key_file(tmp_path / "cluster.key")) as entry:
        client = ControlClient(entry, key_file(tmp_path / "other") if has_key else None)
        for ask in (
            lambda: client.probe(ProbeRequest("x", "127.0.0.1", 1, 2)),
            lambda: client.send_part(PART, RUN, 0, iter([DATA])),
            lambda: next(client.watch(RUN, None, Cancel())),
        ):
            with pytest.raises(ControlError) as caught:
                ask()
            assert (caught.value.code, caught.value.problem) == (AccessError.code, "key")
    assert node.calls.empty()


def test_a_node_without_a_key_is_not_believed(node: Node, tmp_path: Path) -> None:
    with ring_port_of(node) as entry, pytest.raises(ControlError) as caught:
        ControlClient(entry, key_file(tmp_path / "cluster.key")).probe(ProbeRequest("x", "127.0.0.1", 1, 2))
    assert (caught.value.code, caught.value.problem) == (AccessError.code, "key")
    assert node.calls.empty()


def test_what_anybody_may_ask_has_few_places(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient
) -> None:
    """A hundred that do not go on: who knows a run is served all the same."""
    with contextlib.ExitStack() as stack:
        for _ in range(N_OF_ANYBODY):
            message = stack.enter_context(opened(entry, "echo", 1000, keys))
            assert message.read(DEADLINE_S) == {"go": True}
        for _ in range(100):
            with opened(entry, "echo", 1000, keys) as message:
                assert message.read(DEADLINE_S)["code"] == "busy"
        client.send_part(PART, RUN, 0, iter([DATA]))
        assert next(client.watch(RUN, None, Cancel()))["state"] == "LOADING"
    assert node.parts[PART.sha256] == DATA


def test_places_of_strangers_who_send_nothing_more_are_free_again(
    node: Node, entry: NodeConfig, keys: KeyFile | None, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of such a message have one deadline, whatever the wait for a piece is."""
    monkeypatch.setattr(message_module, "PIECE_S", 10 * DEADLINE_S)
    monkeypatch.setattr(asked_module, "REQUEST_S", 0.1)
    with contextlib.ExitStack() as stack:
        messages = [stack.enter_context(opened(entry, "echo", 1000, keys)) for _ in range(N_OF_ANYBODY)]
        for message in messages:
            assert message.read(DEADLINE_S) == {"go": True}
        for message in messages:
            assert "error" in message.read(DEADLINE_S)
        monkeypatch.undo()
        until(lambda: is_served(client))


def is_served(client: ControlClient) -> bool:
    try:
        return is_well(client)
    except ControlError as e:
        assert e.code == "busy"  # the last place is given back after its answer
        return False


def test_messages_have_a_number_of_places(
    node: Node, entry: NodeConfig, keys: KeyFile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_module, "N_MESSAGES", 4)
    watching = [ControlClient(entry, keys).watch(RUN, None, Cancel()) for _ in range(4)]
    assert [next(one)["state"] for one in watching] == ["LOADING"] * 4
    with pytest.raises(ControlError) as caught:
        next(ControlClient(entry, keys).watch(RUN, None, Cancel()))
    assert caught.value.problem == "closed"
    for one in watching:
        one.close()  # type: ignore[attr-defined]


# Nodes that answer otherwise


@contextlib.contextmanager
def other_node(talk: Callable[[socket.socket, FrameCodec, int], None]) -> Iterator[ControlClient]:
    """A ring port on which something else answers an opening."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            sock, _ = server.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(DEADLINE_S)
                codec = FrameCodec()
                frame = read_frame(sock, codec)
                assert frame is not None
                talk(sock, codec, frame.epoch)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield ControlClient(NodeConfig("secondary0", "127.0.0.1", 0, server.getsockname()[1]))
        finally:
            thread.join(DEADLINE_S)


def saying(data: bytes, frame_type: FrameType = FrameType.MESSAGE, number: int = 0) -> Any:
    return lambda sock, codec, own: send_frame(sock, Frame.message(frame_type, own ^ number, data), codec)


@pytest.mark.parametrize(
    ("talk", "problem"),
    [
        (lambda sock, codec, own: None, "closed"),
        (lambda sock, codec, own: sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 9), "stranger"),
        (lambda sock, codec, own: sock.sendall(b"HTTP/1.1 400 Bad"), "closed"),
        (saying(b"[]"), "stranger"),
        (saying(b"nonsense"), "stranger"),
        (saying(b"[" * 100_000), "stranger"),
        (saying(b'{"answer": {}}', number=1), "stranger"),
        (saying(b'{"answer": 5}'), "stranger"),
        (saying(b'{"error": "no"}'), "stranger"),
        (saying(b"x", FrameType.DATA), "stranger"),
        (saying(b"x", FrameType.ERROR), "stranger"),
    ],
)
def test_an_answer_that_is_none_is_told(talk: Any, problem: str) -> None:
    with other_node(talk) as client, pytest.raises(ControlError) as caught:
        client.probe(ProbeRequest("x", "127.0.0.1", 1, 2))
    assert (caught.value.problem, caught.value.status) == (problem, None)


def test_an_answer_that_is_trickled_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def trickle(sock: socket.socket, codec: FrameCodec, own: int) -> None:
        head, _ = codec.parts(Frame.message(FrameType.MESSAGE, own, b"{}"))
        for byte in head * 20:
            sock.sendall(bytes([byte]))
            threading.Event().wait(0.02)

    monkeypatch.setattr("mdi.control.client.PROBE_ANSWER_S", 0.3)
    with other_node(trickle) as client, pytest.raises(ControlError) as caught:
        client.probe(ProbeRequest("x", "127.0.0.1", 1, 2))
    assert caught.value.problem == "silent"


def test_a_node_that_reads_no_bytes_is_given_up() -> None:
    """Stopped in the middle of a transfer: its buffers are full and nothing moves."""
    over = threading.Event()

    def stop(sock: socket.socket, codec: FrameCodec, own: int) -> None:
        saying(b'{"go": true}')(sock, codec, own)
        over.wait(DEADLINE_S)

    part = PartSpec("block.0", "a" * 64, 64 << 20)
    with other_node(stop) as client:
        with pytest.raises(ControlError) as caught:
            client.send_part(part, RUN, 0, (bytes(1 << 20) for _ in range(64)), timeout_s=0.3)
        over.set()
    assert caught.value.problem == "silent"


def test_a_node_that_is_silent_while_it_is_watched_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def stop(sock: socket.socket, codec: FrameCodec, own: int) -> None:
        saying(b'{"push": {"state": "LOADING"}}')(sock, codec, own)
        over.wait(DEADLINE_S)

    monkeypatch.setattr("mdi.control.client.ANSWER_S", 0.3)
    monkeypatch.setattr("mdi.control.client.SIGN_S", 0.05)
    with other_node(stop) as client:
        watching = client.watch(RUN, None, Cancel())
        assert next(watching)["state"] == "LOADING"
        with pytest.raises(ControlError) as caught:
            next(watching)
        over.set()
    assert caught.value.problem == "silent"
