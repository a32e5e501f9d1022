"""From boards that know nothing of each other to a text: a key, a code for the boards, and a starter that waits for them."""

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

from caches import own_cache
from cluster_keys import key_file
from mdi.cli import launch

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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The sample of one node, in this process."""
    monkeypatch.setenv("MDI_KEY_FILE", "")
    capsys.readouterr()
    assert launch("sample", [*map(str, FLAGS)]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert isinstance(sample, dict)
    return sample


class Running:
    """A command whose lines can be waited for."""

    def __init__(self, words: list[str], folder: Path, variables: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(folder) | (variables or {}),
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
def test_boards_join_and_generate(alone: dict[str, Any], tmp_path: Path) -> None:
    """One board announces itself, one is only known from its joining, and one dials the starter, as behind a router."""
    key = key_file(tmp_path / "cluster.key").path
    running: list[Running] = []
    with network(4) as hosts:
        addr = hosts[0][1]
        flags = ("--key", key, "--nodes", 4, "--no-journal", "--dial-port", 8089, *FLAGS)
        starter = Running(command(hosts[0][0], "starter", *flags), tmp_path)
        running.append(starter)
        try:
            where, code = starter.wait_for(rf"mdi join ({re.escape(addr)}:\d+) (\S+)").groups()
            for i, (namespace, _) in enumerate(hosts[1:]):
                own: tuple[Any, ...] = ((), ("--no-announce",), ("--dial", f"{addr}:8089"))[i]
                words = ("join", where, code, "--key", tmp_path / f"{i}.key", "--cache-dir", tmp_path / str(i), *own)
                running.append(Running(command(namespace, *words), tmp_path))
                running[-1].wait_for("waits for its starter")
            samples = json.loads(starter.wait_for(r"^\{.*")[0])["samples"]
        finally:
            for process in reversed(running):
                process.end()
    assert [sample["token_ids"] for sample in samples] == [alone["token_ids"]]


ASK = """
import sys, urllib.request
data = sys.argv[2].encode()
request = urllib.request.Request("http://127.0.0.1:8000" + sys.argv[1], data, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
QUESTION = {"model": "nano-llama", "prompt": "Once", "max_tokens": 12, "temperature": 0}
PROXY = "http://10.77.0.250:3128"  # nobody; what nodes say to each other must not go there


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="network namespaces are Linux's")
def test_three_boxes_three_commands(alone: dict[str, Any], tmp_path: Path) -> None:
    """No key, no file: a server prints one line for both boards. One has no multicast. The server knows them again later.

    Then a board comes that is invited on the page.
    """
    running: list[Running] = []

    def start(host: int, *words: object) -> Running:
        own = {
            "MDI_KEY_FILE": "",
            "XDG_CONFIG_HOME": str(tmp_path / f"{host}"),
            "MDI_CACHE_DIR": own_cache(tmp_path / f"c{host}"),
            **dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"), PROXY),
        }
        running.append(Running(command(hosts[host][0], *words), tmp_path, own))
        return running[-1]

    def ask(path: str, body: object) -> Any:
        words = ["ip", "netns", "exec", hosts[0][0], sys.executable, "-c", ASK, path, json.dumps(body)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        return json.loads(done.stdout)

    def answer() -> str:
        return str(ask("/v1/completions", QUESTION)["choices"][0]["text"])

    serve = ("serve", "--ckpt", ROOT / "assets" / "nano-llama", "--machines", 3)
    with network(4) as hosts:
        try:
            server = start(0, *serve)
            where, code = server.wait_for(r"each of the other 2 machines: +mdi join (\S+) (\S+)").groups()
            start(1, "join", where, code, "--cache-dir", tmp_path / "c1").wait_for("waits for its starter")
            start(2, "join", where, code, "--no-announce", "--cache-dir", tmp_path / "c2").wait_for(
                "waits for its starter"
            )
            server.wait_for("ready: ")
            first = answer()
            server.end()
            running.remove(server)
            server = start(0, *serve)
            server.wait_for("ready: ")
            assert answer() == first
            _, *line = ask("/api/machines", {})["line"].split()
            start(3, *line, "--cache-dir", tmp_path / "c3").wait_for("waits for its starter")
            server.wait_for(rf"found \S+ at {re.escape(hosts[3][1])}:\d+: it is secondary2")
            assert answer() == first
        finally:
            for process in reversed(running):
                process.end()
    assert first == alone["text"]
