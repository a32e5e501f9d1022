"""A thousand connections of strangers to a node with a key: it answers its cluster meanwhile, and keeps nothing of them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.control.client import ControlClient
from mdi.errors import ControlError
from mdi.net.hello import CHALLENGE_BYTES
from secondaries import entry_of, secondary

N_CONNECTIONS = 1000
N_THREADS = 400  # far below one for each


def crowd(ports: list[int]) -> list[socket.socket]:
    """Silent ones, ones with rubbish, and ones with half a request, in turn."""
    sayings = (b"", secrets.token_bytes(CHALLENGE_BYTES), b"POST /init HTTP/1.1\r\nContent-Length: 9\r\n", b"\0" * 72)
    made = []
    for i in range(N_CONNECTIONS):
        with contextlib.suppress(OSError):  # refused at once, or dropped while it speaks: both are allowed
            sock = socket.create_connection(("127.0.0.1", ports[i % len(ports)]), 5)
            made.append(sock)
            sock.sendall(sayings[i % len(sayings)])
    return made


@pytest.mark.slow
def test_a_thousand_strangers(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "cluster.key")
    with secondary(0, tmp_path / "cache", keys=keys) as node:
        client = ControlClient(entry_of(node), keys)
        assert client.status()["state"] == "IDLE"
        strangers = crowd([node.control_port, node.ring_port])
        try:
            assert threading.active_count() < N_THREADS
            for _ in range(5):
                with contextlib.suppress(ControlError):  # its connection may be among those that are dropped
                    assert client.status()["state"] == "IDLE"
        finally:
            for sock in strangers:
                sock.close()
        assert client.status(timeout_s=30)["state"] == "IDLE"
