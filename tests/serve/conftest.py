"""One server for all tests here: the embedded model on two nodes of this machine, with three API keys."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_server import SEEDS

from mdi.node.secondary import SecondaryNode
from mdi.run.trace import read_trace
from secondaries import secondaries
from tiny_checkpoint import write_checkpoint
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "assets" / "nano-llama"
KEYS = ("alpha-secret", "beta-secret")
SMALL_KEY = "small-secret"  # may ask once
DEADLINE_S = 240.0


class Server:
    """A server process, from its start to its end."""

    def __init__(self, folder: Path, *flags: object, certificate: Path | None = None) -> None:
        from mdi.run.local import free_ports

        (self.port,) = free_ports(1)
        self._certificate = certificate
        self.log = folder / "server.log"
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [
            sys.executable,
            ROOT / "src" / "serve.py",
            "--ckpt",
            NANO,
            "--port",
            self.port,
            "--wait",
            120,
            *flags,
        ]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([str(part) for part in command], stderr=log, env=env)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of one request."""
        connection = self.connection()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"authorization": f"Bearer {KEYS[0]}", **(headers or {})})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else None
        finally:
            connection.close()

    @property
    def ollama_port(self) -> int:
        """The port of Ollama's API, which the log tells."""
        found = re.search(r"Ollama's API: http://127.0.0.1:(\d+)", self.log.read_text())
        assert found is not None
        return int(found[1])

    def connection(self, port: int | None = None) -> http.client.HTTPConnection:
        if self._certificate is None:
            return http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=DEADLINE_S)
        context = ssl.create_default_context(cafile=str(self._certificate))
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE_S, context=context)

    def wait(self) -> None:
        """Until it serves."""

        def serves() -> bool:
            assert self.process.poll() is None, f"the server has ended: {self.log.read_text()}"
            try:
                status, told = self.ask("GET", "/v1/models")
            except OSError:
                return False
            assert status in (200, 503), told
            return status == 200

        until(serves, DEADLINE_S)

    def texts(self) -> dict[str, int]:
        """What the engine says of its texts; a second old at most."""
        found: dict[str, int] = self.ask("GET", "/health")[1]["texts"]
        return found

    def end(self) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(
        f"# three of them\n{KEYS[0]} alpha\n{KEYS[1]} beta 5\n{SMALL_KEY} small minute_tokens=1\n"
    )
    (folder / "keys").chmod(0o600)
    flags = ("--nodes", 2, "--api-key-file", folder / "keys", "--queue", 8, "--max-running", 16, "--ollama-port", 0)
    made = Server(folder, *flags, "--trace", folder / "trace.json")
    try:
        made.wait()
        # One text for the trace: a process of the suite may run none but tests that refuse something.
        assert made.ask("POST", "/v1/completions", {"prompt": "ROMEO:", "max_tokens": 3})[0] == 200
        yield made
    finally:
        status = made.end()
    assert status == 0, made.log.read_text()
    trace = read_trace(folder / "trace.json")
    assert [node.name for node in trace.nodes] == ["starter", "secondary0"] and trace.n_tokens


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three models."""
    made = tmp_path_factory.mktemp("models")
    for name, seed in SEEDS.items():
        write_checkpoint(made / name, seed)
    return made


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[SecondaryNode]]:
    with secondaries(2, tmp_path, kv_memory=32 << 20) as made:
        yield made
