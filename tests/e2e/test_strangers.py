"""Connections from strangers to the ring and control ports, before and during a run: dropped, and the ids stay right."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from mdi.cancel import Cancel
from mdi.control.client import ControlClient
from mdi.control.messages import ForwardRequest, PartSpec
from mdi.errors import ControlError
from mdi.net.hello import Hello
from mdi.net.wire import Frame, FrameType, send_frame
from mdi.spec.cluster import NodeConfig
from processes import Cluster, Spawn, Starter
from tiny_checkpoint import reference

NOISE = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    os.urandom(5000),
    b"MDIr",
    b"MDIr" + b"\xff" * 60,
    b"\x16\x03\x01\x02\x00\x01\x00",
]


@contextlib.contextmanager
def strangers(ports: list[int]) -> Iterator[list[socket.socket]]:
    """Connections to each port: one for every kind of noise (b"" stays silent), and one that says a false HELLO."""
    with contextlib.ExitStack() as stack:
        made = []
        for port in ports:
            for noise in NOISE:
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                with contextlib.suppress(OSError):
                    sock.sendall(noise)
                made.append(sock)
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            hello = Hello(0, 3, "0" * 64)
            with contextlib.suppress(OSError):
                send_frame(sock, Frame.message(FrameType.HELLO, 12345, hello.to_bytes()))
            made.append(sock)
        yield made


def test_before_a_run(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    ports = [port for node in (1, 2) for port in (ring.ring_port(node), ring.port(node))]
    with strangers(ports):
        result = starter(checkpoint, ring.path, "--n-tokens", 12, "--n-samples", 3)
    assert result.token_ids == [list(reference("Who are you?", 12))] * 3
    assert "Traceback" not in ring[0].err + ring[1].err


@pytest.mark.slow
def test_during_a_run(ring: Cluster, endless: Path, checkpoint: Path, spawn: Spawn, starter: Starter) -> None:
    process = spawn(
        "starter", "--ckpt", endless, "--nodes-config", ring.path, "--prompt-style", "none", "--n-tokens", 60000,
        "--n-samples", 1, "--temperature", 0,
    )  # fmt: skip
    process.wait_bytes(100)
    ports = [port for node in (0, 1, 2) for port in (ring.ring_port(node), ring.port(node))]
    with strangers(ports):
        process.wait_bytes(len(process.printed["out"]) + 300)
    process.wait_bytes(len(process.printed["out"]) + 300)
    assert [ring.status(node)["state"] for node in (0, 1, 2)] == ["RUNNING"] * 3
    process.signal(signal.SIGINT)
    assert process.wait() == 130
    # what was printed is what a lone node prints
    alone = starter(endless, ring.nodes_file(1), "--n-tokens", 400, "--n-samples", 1).json["samples"][0]["text"]
    n_chars = 200
    assert process.out[: n_chars + len("Who are you?")] in ("Who are you?" + alone[:n_chars], alone[: n_chars + 12])
    assert "Traceback" not in process.err + ring[0].err + ring[1].err


@pytest.mark.slow
def test_somebody_who_does_not_know_the_run(ring: Cluster, endless: Path, spawn: Spawn) -> None:
    """The id of a run is what allows to end it, or to send it weights."""
    process = spawn("starter", "--ckpt", endless, "--nodes-config", ring.path, "--n-tokens", 60000, "--n-samples", 1)
    process.wait_bytes(100)
    for body in (b'{"run": "", "leave": true}', b'{"run": "0000000000000000"}', b"{}"):
        with requests.put(f"http://127.0.0.1:{ring.port(1)}/stop", data=body, timeout=60) as answer:
            assert answer.status_code in (400, 409), answer.text
    entry = NodeConfig("secondary0", "127.0.0.1", ring.port(1), ring.ring_port(1))
    client, part = ControlClient(entry), PartSpec("block.1", "0" * 64, 9)
    for ask in (
        lambda: client.send_part(part, "0" * 16, 0, [bytes(9)]),
        lambda: client.forward(ForwardRequest("0" * 16, part, 0, "x", "127.0.0.1", 9)),
        lambda: next(client.watch("0" * 16, None, Cancel())),
    ):
        with pytest.raises(ControlError) as caught:
            ask()
        assert (caught.value.status, caught.value.code) == (409, "run")
    process.wait_bytes(len(process.printed["out"]) + 100)
    assert ring[0].child.poll() is None and ring.status(1)["state"] == "RUNNING"
