"""Rings whose nodes have a cluster key, over loopback: they close, hide what they say, and keep everybody else out."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster_keys import key_file
from loopback import DEADLINE_S, PLACEMENT, listener, nodes
from mdi.control.reach import greet
from mdi.errors import AccessError, NodeLostError
from mdi.net.handshake import close_starter_ring
from mdi.net.hello import Fault, Hello, meet
from mdi.net.keys import KeyFile, new_secret, write_keys
from mdi.net.listener import RingListener
from mdi.net.ring import Seat
from mdi.net.wire import HANDSHAKE, PLAIN, Frame, FrameType, Limits, Slice, read_frame, send_frame

EPOCH = 5


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return key_file(tmp_path / "cluster.key")


@pytest.fixture
def port(keys: KeyFile) -> Iterator[RingListener]:
    one = listener("secondary0", keys)
    yield one
    one.close()


def batch(epoch: int, number: int) -> Frame:
    data = torch.arange(8, dtype=torch.float32).numpy().tobytes()
    return Frame(FrameType.BATCH, epoch, number, "float32", 2, 4, (Slice(1, number, 2, 0),), (), data)


def test_a_ring_goes_round_and_a_plain_frame_ends_it(keys: KeyFile) -> None:
    with nodes(3, keys=keys) as n:
        for number in range(5):
            n.rings[0].send(batch(n.epoch, number))
            for i in (1, 2, 0):
                frame = n.rings[i].recv(DEADLINE_S)
                assert frame is not None and frame.number == number and bytes(frame.payload) == batch(0, 0).payload
                if i:
                    n.rings[i].send(frame)
        frame = batch(n.epoch, 9)
        n.rings[0].next_link.connection.sock.sendall(PLAIN.head(frame) + bytes(frame.payload))
        with pytest.raises(NodeLostError) as caught:
            while True:
                n.rings[2].recv(DEADLINE_S)
        assert caught.value.node == "starter"


def test_keys_change_while_a_ring_runs(keys: KeyFile) -> None:
    """Each step of a change leaves the ring that runs alone, and lets a new one close."""
    old, new = keys.first, new_secret()
    with nodes(2, keys=keys) as running:
        for number, step in enumerate(((old, new), (new, old), (new,))):
            write_keys(keys.path, step)
            running.rings[0].send(batch(running.epoch, number))
            frame = running.rings[1].recv(DEADLINE_S)
            assert frame is not None and frame.number == number
            with nodes(3, keys=keys) as other:
                other.rings[0].send(batch(other.epoch, 2))
                found = other.rings[1].recv(DEADLINE_S)
                assert found is not None and found.number == 2


def test_the_true_neighbour_gets_in_beside_strangers(keys: KeyFile, port: RingListener) -> None:
    expectation = port.expect(EPOCH, Hello(2, 4, PLACEMENT))
    hello = Frame.message(FrameType.HELLO, EPOCH, Hello(2, 4, PLACEMENT).to_bytes())
    with socket.create_connection(("127.0.0.1", port.port), DEADLINE_S) as stranger:
        send_frame(stranger, hello)
        answer = read_frame(stranger, HANDSHAKE)
        assert answer is not None and answer.type is FrameType.ERROR
        assert Fault.from_bytes(answer.payload).code == AccessError.code
        assert expectation.caller is None
    with socket.create_connection(("127.0.0.1", port.port), DEADLINE_S) as friend:
        codec = meet(friend, keys)
        for byte in b"".join(bytes(part) for part in codec.parts(hello)):
            friend.sendall(bytes([byte]))
        sock = expectation.wait(DEADLINE_S)
        assert sock is not None
        with sock:
            send_frame(sock, Frame(FrameType.PING, EPOCH), expectation.codec)
            frame = read_frame(friend, codec)
            assert frame is not None and frame.type is FrameType.PING


def test_a_hello_without_a_challenge_or_with_an_old_one_is_refused(keys: KeyFile, port: RingListener) -> None:
    """Somebody who recorded a call plays it again, and sends what followed it."""
    expectation = port.expect(EPOCH, Hello(2, 4, PLACEMENT))
    hello = Frame.message(FrameType.HELLO, EPOCH, Hello(2, 4, PLACEMENT).to_bytes())
    recorded = b""

    class Recorder(socket.socket):
        def sendmsg(self, buffers, *args):  # type: ignore[no-untyped-def]
            nonlocal recorded
            recorded += b"".join(bytes(buffer) for buffer in buffers)
            return super().sendmsg(buffers, *args)

    with Recorder() as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(("127.0.0.1", port.port))
        send_frame(sock, hello, meet(sock, keys))
        mine = expectation.wait(DEADLINE_S)
        assert mine is not None
        mine.close()
    again = port.expect(EPOCH + 1, Hello(2, 4, PLACEMENT))
    with socket.create_connection(("127.0.0.1", port.port), DEADLINE_S) as sock:
        sock.sendall(recorded)
        assert read_frame(sock, HANDSHAKE) is not None  # its own challenge, which the recording does not fit
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert again.caller is None


@pytest.mark.parametrize(("has_theirs", "has_mine"), [(True, True), (True, False), (False, True)])
def test_who_has_another_key_or_none_is_told_in_one_line_at_both_ends(
    has_theirs: bool, has_mine: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = key_file(tmp_path / "theirs") if has_theirs else None
    mine = key_file(tmp_path / "mine") if has_mine else None
    there, here = listener("secondary0", theirs), listener("starter", mine)
    seat = Seat(EPOCH, 0, ("starter", "secondary0"), PLACEMENT, "127.0.0.1", there.port)
    with caplog.at_level("INFO", "mdi"):
        try:
            with pytest.raises(NodeLostError) as caught:
                close_starter_ring(here, replace(seat, keys=mine), 2, Limits())
        finally:
            there.close()
            here.close()
    assert (caught.value.node, caught.value.code) == ("secondary0", AccessError.code)
    assert len(str(caught.value).splitlines()) == 1 and "--key" in str(caught.value)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "key" in told[0]


def test_a_question_proves_the_key(keys: KeyFile, port: RingListener, tmp_path: Path) -> None:
    assert greet("127.0.0.1", port.port, "secondary0", DEADLINE_S, keys).is_ok
    assert greet("127.0.0.1", port.port, "secondary0", DEADLINE_S, key_file(tmp_path / "other")).problem == "key"
    assert greet("127.0.0.1", port.port, "secondary0", DEADLINE_S).problem == "key"
