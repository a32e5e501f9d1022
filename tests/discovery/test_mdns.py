"""Nodes that announce themselves over real multicast, in networks of the test's own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from networks import network

from cluster_keys import key_file
from mdi.control import mdns
from mdi.control.discovery import Announcement
from mdi.control.mdns import N_RESOLVED, SERVICE, Announcer, Browser
from waiting import until

SRC = Path(__file__).resolve().parents[2] / "src"
DEADLINE_S = 120.0
N_CLUSTERS = 2


def command(namespace: str, *words: object) -> list[str]:
    return ["ip", "netns", "exec", namespace, sys.executable, "-m", "mdi.cli", *map(str, words)]


def found(namespace: str, keys: list[Path], folder: Path) -> list[list[str]]:
    """Addresses of the nodes of each key, looked for at the same time."""
    searches = [
        subprocess.Popen(
            command(namespace, "nodes", "--key", key, "--wait", 6, "--json"),
            stdout=subprocess.PIPE, text=True, env=environment(folder),
        )
        for key in keys
    ]  # fmt: skip
    told = [json.loads(search.communicate(timeout=DEADLINE_S)[0])["nodes"] for search in searches]
    return [[node["address"].rpartition(":")[0] for node in nodes] for nodes in told]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "MDI_KEY_FILE": str(folder / "none.key")}


def nameless(names: list[bytes], ttl_s: int = 4500) -> bytes:
    """An announcement of names, with no address for any of them; a goodbye if it is valid for 0 s."""
    service = b"".join(bytes([len(part)]) + part for part in SERVICE.encode().split(b".") if part) + b"\0"
    packet = struct.pack(">HHHHHH", 0, 0x8400, 0, len(names), 0, 0)
    for name in names:
        instance = bytes([len(name)]) + name + service
        packet += service + struct.pack(">HHIH", 12, 1, ttl_s, len(instance)) + instance
    return packet


@contextlib.contextmanager
def stranger_at(addr: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(addr))
        stranger.bind((addr, 5353))
        yield stranger


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="multicast on loopback is Linux's")
def test_a_goodbye_in_the_name_of_a_node_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "GONE_S", 2.0)
    keys, addr = key_file(tmp_path / "cluster.key"), "127.0.0.1"
    with contextlib.ExitStack() as stack:
        stranger, browser = stack.enter_context(stranger_at(addr)), Browser(keys, [addr])
        stack.callback(browser.close)
        process = secrets.token_hex(8)  # another test may be in the same network
        first = Announcer(Announcement.of("aaaa", addr, 8088, 5088, process, keys.first), [addr])
        stack.callback(first.close)
        second = Announcer(Announcement.of("bbbb", addr, 8088, 5088, secrets.token_hex(8), keys.first), [addr])
        until(lambda: len(browser.nodes()) == 2)
        stranger.sendto(nameless([process.encode()], ttl_s=0), ("224.0.0.251", 5353))
        closing = threading.Thread(target=second.close)  # its goodbye is the later one
        closing.start()
        stack.callback(closing.join)

        def is_only_one_left() -> bool:
            found = [node.name for node in browser.nodes()]
            assert "aaaa" in found
            return len(found) == 1

        until(is_only_one_left)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="multicast on loopback is Linux's")
def test_a_stranger_with_its_name_does_not_keep_a_node_away(tmp_path: Path) -> None:
    keys, addr, process, is_over = key_file(tmp_path / "own.key"), "127.0.0.1", secrets.token_hex(8), threading.Event()
    with stranger_at(addr) as stranger:

        def claim() -> None:
            while not is_over.wait(0.02):
                stranger.sendto(nameless([process.encode()]), ("224.0.0.251", 5353))

        claiming = threading.Thread(target=claim)
        claiming.start()
        try:
            Announcer(Announcement.of("node", addr, 8088, 5088, process, keys.first), [addr]).close()
        finally:
            is_over.set()
            claiming.join()


def test_what_fails_while_it_is_announced_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(mdns.Zeroconf, "register_service", fail)
    made = Announcement.of("node", "127.0.0.1", 8088, 5088, secrets.token_hex(8), key_file(tmp_path / "own.key").first)
    with pytest.raises(OSError, match="no network"):
        Announcer(made, ["127.0.0.1"])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="multicast on loopback is Linux's")
def test_names_without_an_address_do_not_hide_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "GONE_S", 0.1)
    keys, addr = key_file(tmp_path / "cluster.key"), "127.0.0.1"
    with stranger_at(addr) as stranger:
        browser = Browser(keys, [addr])
        try:
            first = Announcer(Announcement.of("first", addr, 8088, 5088, secrets.token_hex(8), keys.first), [addr])
            try:
                until(lambda: [node.name for node in browser.nodes()] == ["first"])
                for i in range(0, N_RESOLVED + 40, 20):
                    stranger.sendto(nameless([b"stranger %d" % (i + j) for j in range(20)]), ("224.0.0.251", 5353))
            finally:
                first.close()
            until(lambda: not browser.nodes())  # the strangers' packets came before its last one
            second = Announcer(Announcement.of("second", addr, 8088, 5088, secrets.token_hex(8), keys.first), [addr])
            try:
                until(lambda: [node.name for node in browser.nodes()] == ["second"])
            finally:
                second.close()
        finally:
            browser.close()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="network namespaces are Linux's")
def test_two_clusters_in_one_network_never_mix(tmp_path: Path) -> None:
    keys = [key_file(tmp_path / f"{i}.key") for i in range(N_CLUSTERS)]
    with network(5) as hosts:
        nodes = []
        try:
            for i, (namespace, addr) in enumerate(hosts[:4]):
                nodes.append(
                    subprocess.Popen(
                        command(
                            namespace, "join", "--key", keys[i % 2].path, "--addr", addr, "--cache-dir", tmp_path / str(i)
                        ),
                        stderr=subprocess.PIPE, text=True, env=environment(tmp_path),
                    )
                )  # fmt: skip
            for node in nodes:
                assert node.stderr is not None
                assert any("waits for its starter" in line for line in node.stderr)
            own = [[hosts[i][1], hosts[i + 2][1]] for i in range(N_CLUSTERS)]
            assert found(hosts[4][0], [key.path for key in keys], tmp_path) == own
            nodes[0].terminate()
            nodes[0].wait(DEADLINE_S)
            assert found(hosts[4][0], [keys[0].path], tmp_path) == [[hosts[2][1]]]
        finally:
            for node in nodes:
                node.terminate()
            for node in nodes:
                node.wait(DEADLINE_S)
                assert node.stderr is not None
                node.stderr.close()
