"""A node that others could reach is not started without a key, and says so before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.cli.access import KEY_VARIABLE, own_address, refuse_exposure, split_address, with_keys
from mdi.errors import UsageError
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import Options

SRC = Path(__file__).resolve().parents[2] / "src"
FLAGS = Options()


def node(addr: str, bind: str | None = None, port: int = 8088) -> NodeConfig:
    return NodeConfig("secondary0", addr, port, 5088, bind=bind)


@pytest.mark.parametrize("addr", ["127.0.0.1", "127.3.2.1", "::1", "localhost", "no-such-host.invalid"])
def test_loopback_needs_no_key(addr: str) -> None:
    refuse_exposure(FLAGS, None, node(addr))


@pytest.mark.parametrize("addr", ["0.0.0.0", "192.168.1.10", "::", "fe80::1%eth0", "8.8.8.8"])
def test_any_other_address_needs_one(addr: str, tmp_path: Path) -> None:
    for one in (node(addr), node("127.0.0.1", bind=addr)):
        with pytest.raises(UsageError):
            refuse_exposure(FLAGS, None, one)
        refuse_exposure(Options(insecure=True), None, one)
        refuse_exposure(FLAGS, key_file(tmp_path / "cluster.key"), one)


def test_a_starter_that_opens_no_port_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert with_keys(FLAGS, ClusterConfig(node("192.168.1.10", port=0))).keys is None
    with pytest.raises(UsageError):
        with_keys(FLAGS, ClusterConfig(node("192.168.1.10")))
    keys = key_file(tmp_path / "cluster.key")
    monkeypatch.setenv(KEY_VARIABLE, str(keys.path))
    found = with_keys(FLAGS, ClusterConfig(node("192.168.1.10"))).keys
    assert found is not None and found.keys == keys.keys


def test_addresses() -> None:
    assert split_address("192.168.1.10:8088", 0) == ("192.168.1.10", 8088)
    assert split_address("[fe80::1]:80", 0) == ("fe80::1", 80)
    assert split_address("board", 8088) == ("board", 8088)
    for wrong in ("board", "board:", ":80", "board:0", "board:99999", "board:x"):
        with pytest.raises(UsageError):
            split_address(wrong, 0)
    assert own_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("command", ["starter", "secondary", "doctor", "plan", "chat"])
def test_commands_refuse_it_before_torch(command: str, tmp_path: Path) -> None:
    entry = {"addr": "0.0.0.0", "communication": {"port": 1}, "inference": {"port_in": 2}}
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"nodes": {"starter": entry, "secondary": [{**entry, "addr": "0.0.0.1"}]}}))
    model = ["--ckpt", str(SRC.parent / "assets" / "nano-llama")] if command in ("starter", "chat") else []
    argv = [command, "--nodes-config", str(path), *(["0"] if command == "secondary" else []), *model]
    code = f"import sys\nfrom mdi.cli import main\nstatus = main({argv!r})\nprint(status, 'torch' in sys.modules)"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=SRC, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "False"], done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and "--key" in done.stderr
