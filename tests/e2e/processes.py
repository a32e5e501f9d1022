"""Real processes for the end-to-end tests: started from the launchers, watched line by line, surely ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mdi.node.local import free_ports

SRC = Path(__file__).resolve().parents[2] / "src"
DEADLINE_S = 90.0  # of whatever a test waits for: far beyond what it takes, so that a slow machine fails nothing
SOON_S = 30.0  # what the documents call ten seconds


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


class Process:
    """A launcher as a child process; `out` and `err` hold what it has printed so far.

    Args:
        stdin: subprocess.PIPE to hold its stdin; else it has none.
    """

    def __init__(self, launcher: str, *args: object, stdin: int = subprocess.DEVNULL, **options: Any) -> None:
        self.name = " ".join([launcher, *map(str, args)])
        command = [sys.executable, str(SRC / f"{launcher}.py"), *map(str, args)]
        options.setdefault("env", environment())
        self.child = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        self.out = self.err = ""
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, name), name=f"read-{launcher}", daemon=True)
            for stream, name in ((self.child.stdout, "out"), (self.child.stderr, "err"))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.child.pid

    def _read(self, stream: IO[bytes], name: str) -> None:
        while piece := os.read(stream.fileno(), 1 << 16):
            with self._changed:
                setattr(self, name, getattr(self, name) + piece.decode("utf-8", "replace"))
                self._changed.notify_all()
        stream.close()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, text: str, n_times: int = 1, where: str = "err", deadline_s: float = DEADLINE_S) -> None:
        """Wait until it has printed `text` so many times."""

        def is_there() -> bool:
            return getattr(self, where).count(text) >= n_times or not any(r.is_alive() for r in self._readers)

        with self._changed:
            self._changed.wait_for(is_there, deadline_s)
        assert getattr(self, where).count(text) >= n_times, f"no {text!r} ({n_times} times) in: {self.story()}"

    def wait_chars(self, n_chars: int) -> None:
        """Wait until it has printed so many characters on stdout."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.out) >= n_chars, DEADLINE_S), self.story()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit status, once all it printed is here."""
        try:
            status = self.child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s:.0f} s: {self.story()}") from None
        for reader in self._readers:
            reader.join(10)
        return status

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def end(self) -> None:
        """Whatever it does, it is gone after this."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.wait(10)
        for reader in self._readers:
            reader.join(10)
        if self.child.stdin is not None:
            self.child.stdin.close()

    def story(self) -> str:
        return f"{self.name}\nstatus {self.child.poll()}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}"

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class Cluster:
    """A nodes file on loopback, and the secondaries of it as processes.

    Args:
        folder: for the nodes file and the secondaries' caches.
    """

    def __init__(self, folder: Path, n_nodes: int) -> None:
        self.folder = folder
        self.n_nodes = n_nodes
        folder.mkdir(parents=True, exist_ok=True)
        ports = iter(free_ports(2 * n_nodes))
        self.entries: list[dict[str, Any]] = [
            {"addr": "127.0.0.1", "communication": {"port": next(ports)}, "inference": {"port_in": next(ports)}}
            for _ in range(n_nodes)
        ]
        self.secondaries: list[Process | None] = [None] * (n_nodes - 1)
        self._flags: list[tuple[object, ...]] = [()] * (n_nodes - 1)
        self.path = self.write("nodes.json")

    def write(self, name: str, n_nodes: int | None = None) -> Path:
        """The nodes file of the first `n_nodes` nodes."""
        path = self.folder / name
        entries = self.entries[:n_nodes]
        path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}), encoding="utf-8")
        return path

    def cache_dir(self, index: int) -> Path:
        return self.folder / f"cache{index}"

    def start(self, index: int, *flags: object, **options: Any) -> Process:
        """Start secondary `index`, in place of the one that ran before."""
        old = self.secondaries[index]
        if old is not None:
            old.end()
        self._flags[index] = flags
        process = Process(
            "secondary", "--nodes-config", self.path, index, "--cache-dir", self.cache_dir(index), *flags, **options
        )
        self.secondaries[index] = process
        return process

    def start_all(self, *flags: object) -> Cluster:
        for index in range(self.n_nodes - 1):
            self.start(index, *flags)
        for index in range(self.n_nodes - 1):
            self[index].wait_for("waits for its starter")
        return self

    def revive(self) -> None:
        """Start again what has ended."""
        for index, process in enumerate(self.secondaries):
            if process is None or process.child.poll() is not None:
                self.start(index, *self._flags[index])

    def __getitem__(self, index: int) -> Process:
        process = self.secondaries[index]
        assert process is not None
        return process

    def status(self, index: int) -> dict[str, Any]:
        """What node `index` of the ring (0 is the starter) answers to `GET /`."""
        import requests

        port = self.entries[index]["communication"]["port"]
        with requests.get(f"http://127.0.0.1:{port}/", timeout=10) as response:
            answer: dict[str, Any] = response.json()
            return answer

    def wait_states(self, *allowed: str, deadline_s: float = SOON_S) -> None:
        """Wait until every secondary is in one of these states."""
        deadline = time.monotonic() + deadline_s
        while True:
            states = [self.status(index)["state"] for index in range(1, self.n_nodes)]
            if all(state in allowed for state in states):
                return
            assert time.monotonic() < deadline, f"the secondaries are {states}, expected {allowed}"

    def end(self) -> None:
        for process in self.secondaries:
            if process is not None:
                process.end()


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than as one that nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_gone(pids: list[int], deadline_s: float = SOON_S) -> None:
    deadline = time.monotonic() + deadline_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        threading.Event().wait(0.05)
