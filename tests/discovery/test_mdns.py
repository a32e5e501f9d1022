"""Nodes that announce themselves over real multicast, in networks of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from networks import network

from cluster_keys import key_file

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
