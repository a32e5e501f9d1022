"""Links of 100 ms, 1 Mbit/s and 5 % loss: the same tokens as anywhere else, and nobody is taken for lost."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import lossy_network
import pytest
from lossy_network import LossyNetwork

from processes import SRC, Process, Reader
from tiny_checkpoint import reference, write_checkpoint

pytestmark = pytest.mark.skipif(not lossy_network.is_possible(), reason="needs root, ip and /dev/net/tun")

N_NODES, N_TOKENS = 3, 4


@pytest.mark.slow
def test_links_that_lose_packets_lose_no_node(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    with contextlib.ExitStack() as stack:
        network = LossyNetwork(N_NODES, delay_s=0.1, bytes_per_s=125_000, loss=0.05)
        stack.callback(network.close)
        reader = Reader()
        stack.callback(reader.close)
        nodes = [
            {"addr": network.address(i), "communication": {"port": 8088}, "inference": {"port_in": 5088}}
            for i in range(N_NODES)
        ]
        path = tmp_path / "nodes.json"
        path.write_text(json.dumps({"nodes": {"starter": nodes[0], "secondary": nodes[1:]}}), encoding="utf-8")

        def start(host: int, launcher: str, *args: object) -> Process:
            command = network.command(host, sys.executable, str(SRC / f"{launcher}.py"), "--insecure")
            process = Process(reader, launcher, *args, command=command)
            stack.callback(process.end)
            return process

        for i in range(1, N_NODES):
            folder = tmp_path / f"cache{i}"
            start(i, "secondary", "--nodes-config", path, i - 1, "--cache-dir", folder, "--ckpt", checkpoint)
        starter = start(
            0, "starter", "--ckpt", checkpoint, "--nodes-config", path, "--prompt-style", "none", "--temperature", 0,
            "--n-tokens", N_TOKENS, "--n-samples", 1, "--prompt", "Who are you?", "--json", "--no-journal",
            "--placement", "even",
        )  # fmt: skip
        assert starter.wait() == 0, starter.story()
        found = json.loads(starter.out)
        assert [sample["token_ids"] for sample in found["samples"]] == [list(reference("Who are you?", N_TOKENS))]
        assert found["recoveries"] == []
        assert network.n_lost > 0
