"""From boards that know nothing of each other to a text: a key, a code for each board, and a starter that waits for them."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from networks import network
from test_mdns import DEADLINE_S, command, environment

from cluster_keys import key_file

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--ckpt",
    ROOT / "assets" / "nano-llama",
    "--prompt",
    "Once",
    "--n-tokens",
    12,
    "--temperature",
    0,
    "--n-samples",
    1,
    "--json",
)


class Running:
    """A command whose lines can be waited for."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(folder)
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, pattern: str) -> re.Match[str]:
        while True:
            if match := re.search(pattern, self._lines.get(timeout=DEADLINE_S)):
                return match

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="network namespaces are Linux's")
def test_boards_join_and_generate(tmp_path: Path) -> None:
    """One board announces itself, one is only known from its joining, and one dials the starter, as behind a router."""
    key = key_file(tmp_path / "cluster.key").path
    alone = subprocess.run(
        [sys.executable, "-m", "mdi.cli", "sample", *map(str, FLAGS)],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**environment(tmp_path), "MDI_KEY_FILE": ""}, check=True,
    )  # fmt: skip
    running: list[Running] = []
    with network(4) as hosts:
        addr = hosts[0][1]
        flags = ("--key", key, "--nodes", 4, "--no-journal", "--dial-port", 8089, *FLAGS)
        starter = Running(command(hosts[0][0], "starter", *flags), tmp_path)
        running.append(starter)
        try:
            for i, (namespace, _) in enumerate(hosts[1:]):
                where, code = starter.wait_for(rf"mdi join ({re.escape(addr)}:\d+) (\S+)").groups()
                own: tuple[Any, ...] = ((), ("--no-announce",), ("--dial", f"{addr}:8089"))[i]
                words = ("join", where, code, "--key", tmp_path / f"{i}.key", "--cache-dir", tmp_path / str(i), *own)
                running.append(Running(command(namespace, *words), tmp_path))
                running[-1].wait_for("waits for its starter")
            samples = json.loads(starter.wait_for(r"^\{.*")[0])["samples"]
        finally:
            for process in reversed(running):
                process.end()
    assert [sample["token_ids"] for sample in samples] == [s["token_ids"] for s in json.loads(alone.stdout)["samples"]]
