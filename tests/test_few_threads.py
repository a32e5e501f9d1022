"""A moment in which the system gives no thread, at the limit of a container say: ports are as good as before after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.control.client import ControlClient
from mdi.control.relay import DialOut, Relay, Tunnel
from mdi.errors import ControlError, WireError
from mdi.node.secondary_status import InTime
from mdi.spec.cluster import NodeConfig
from node_ports import BareNode, ports_of
from waiting import until


@contextlib.contextmanager
def without_threads(*names: str) -> Iterator[list[str]]:
    """Within: threads of these names cannot be started; those that were to be."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name not in names:
            return start(thread)
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield refused


@pytest.mark.parametrize(
    "ask", [lambda client: client.status(), lambda client: client.echo(10)], ids=["HTTP", "message"]
)
def test_a_port_answers_again(ask: Callable[[ControlClient], object]) -> None:
    with ports_of(BareNode()) as entry:
        client = ControlClient(entry)
        with without_threads("control-request", "message") as refused:
            for _ in range(2):
                with pytest.raises(ControlError):
                    ask(client)
        assert len(refused) == 2
        ask(client)


def test_the_disk_is_asked_again() -> None:
    in_time = InTime()
    with without_threads("status-disk"):
        assert in_time.ask("disk", lambda: 1) is None
    until(lambda: in_time.ask("disk", lambda: 1) == 1)


def test_nodes_dial_in_again(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "k")
    relay = Relay("127.0.0.1", 0, keys)
    try:
        with without_threads("relay"), pytest.raises((OSError, WireError)):
            Tunnel.dial("127.0.0.1", relay.port, keys.keys)
        Tunnel.dial("127.0.0.1", relay.port, keys.keys).close()
    finally:
        relay.close()


@pytest.mark.parametrize("name", ["dial-out", "tunnel"])
def test_a_node_that_dialled_is_reached_again(tmp_path: Path, name: str) -> None:
    keys = key_file(tmp_path / "k")
    relay = Relay("127.0.0.1", 0, keys)
    with ports_of(BareNode(), keys) as entry:
        own = {"control": (entry.addr, entry.port), "ring": (entry.addr, entry.port_in)}
        node = DialOut(("127.0.0.1", relay.port), keys, "board", "ab" * 8, own)
        try:
            until(relay.nodes)
            (found,) = relay.nodes()
            client = ControlClient(NodeConfig("board", found.addr, found.port, found.ring_port), keys)
            with without_threads(name) as refused, pytest.raises(ControlError):
                client.status(timeout_s=0.5)
            assert refused
            assert client.status(timeout_s=60)["state"] == "IDLE"
        finally:
            node.close()
            relay.close()
