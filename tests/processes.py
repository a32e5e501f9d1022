"""Real processes for the end-to-end tests: started from the launchers, watched while they print, surely ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from mdi.run.local import free_ports

SRC = Path(__file__).resolve().parents[1] / "src"
DEADLINE_S = 120.0  # of whatever a test waits for: far beyond what it takes, so that a slow machine fails nothing
SOON_S = 60.0  # what the documents call ten seconds: of a machine with nothing else to do


@dataclass
class Result:
    """What a launcher left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def token_ids(self) -> list[list[int]]:
        assert self.status == 0, self.err
        return [sample["token_ids"] for sample in self.json["samples"]]


class Reader:
    """One thread that reads what all processes print, so that none of them ever waits for a full pipe."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._mine, self._wake = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self.changed = threading.Condition()
        self._new: list[tuple[Process, str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="read-processes", daemon=True)
        self._thread.start()

    def add(self, process: Process) -> None:
        with self.changed:
            self._new += [(process, "out", process.child.stdout), (process, "err", process.child.stderr)]
        self._mine.send(b"+")

    def close(self) -> None:
        self._mine.close()
        self._thread.join(DEADLINE_S)
        self._wake.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if not self._wake.recv(100):
                        return
                    with self.changed:
                        new, self._new = self._new, []
                    for process, name, stream in new:
                        self._selector.register(stream, selectors.EVENT_READ, (process, name))
                    continue
                process, name = key.data
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    self._selector.unregister(key.fileobj)
                with self.changed:
                    if piece:
                        process.printed[name] += piece
                    else:
                        key.fileobj.close()  # type: ignore[union-attr]
                        process.n_open -= 1
                    self.changed.notify_all()


class Process:
    """A launcher as a child process; `out` and `err` are what it has printed so far.

    Args:
        options: for subprocess.Popen; `command` replaces the launcher by a whole command line.
    """

    def __init__(self, reader: Reader, launcher: str, *args: object, **options: Any) -> None:
        command = options.pop("command", None) or [sys.executable, str(SRC / f"{launcher}.py")]
        command = [*command, *map(str, args)]
        self.name = " ".join(command)
        options.setdefault("stdin", subprocess.DEVNULL)
        options["env"] = {**os.environ, "OMP_NUM_THREADS": "1", **options.get("env", {})}
        self.printed = {"out": bytearray(), "err": bytearray()}
        self.n_open = 2
        self._changed = reader.changed
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        reader.add(self)

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def out(self) -> str:
        return self.printed["out"].decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self.printed["err"].decode("utf-8", "replace")

    def wait_for(self, text: str, n_times: int = 1, deadline_s: float = DEADLINE_S) -> None:
        """Wait until it has printed `text` on stderr so many times."""
        wanted = text.encode()
        with self._changed:
            self._changed.wait_for(lambda: self.printed["err"].count(wanted) >= n_times or not self.n_open, deadline_s)
        assert self.printed["err"].count(wanted) >= n_times, f"no {text!r} ({n_times} times) in: {self.story()}"

    def wait_for_out(self, text: str, n_times: int) -> None:
        """Wait until it has printed `text` on stdout so many times."""
        wanted = text.encode()
        with self._changed:
            self._changed.wait_for(lambda: self.printed["out"].count(wanted) >= n_times or not self.n_open, DEADLINE_S)
        assert self.printed["out"].count(wanted) >= n_times, self.story()

    def wait_bytes(self, n_bytes: int) -> None:
        """Wait until it has printed so much on stdout."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.printed["out"]) >= n_bytes or not self.n_open, DEADLINE_S)
        assert len(self.printed["out"]) >= n_bytes, self.story()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit status, once all it printed is here."""
        try:
            status = self.child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s:.0f} s: {self.story()}") from None
        with self._changed:
            self._changed.wait_for(lambda: not self.n_open, DEADLINE_S)
        return status

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def end(self) -> None:
        """Whatever it does, it is gone after this."""
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(DEADLINE_S)
        if self.child.stdin is not None:
            self.child.stdin.close()
        with self._changed:
            self._changed.wait_for(lambda: not self.n_open, DEADLINE_S)

    def story(self) -> str:
        return (
            f"{self.name}\nstatus {self.child.poll()}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}"
        )


class Cluster:
    """A nodes file on loopback, and the secondaries of it as processes.

    Args:
        folder: for the nodes file and the secondaries' caches.
    """

    def __init__(self, reader: Reader, folder: Path, n_nodes: int) -> None:
        self._reader = reader
        self.folder = folder
        self.n_nodes = n_nodes
        folder.mkdir(parents=True, exist_ok=True)
        ports = iter(free_ports(2 * n_nodes))
        self.entries: list[dict[str, Any]] = [
            {"addr": "127.0.0.1", "communication": {"port": next(ports)}, "inference": {"port_in": next(ports)}}
            for _ in range(n_nodes)
        ]
        self.secondaries: list[Process | None] = [None] * (n_nodes - 1)
        self.path = self.nodes_file(n_nodes)

    def nodes_file(self, n_nodes: int) -> Path:
        """The nodes file of the first `n_nodes` nodes."""
        path = self.folder / f"nodes{n_nodes}.json"
        entries = self.entries[:n_nodes]
        path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}), encoding="utf-8")
        return path

    def cache_dir(self, index: int) -> Path:
        return self.folder / f"cache{index}"

    def port(self, node: int) -> int:
        """Control port of a node; 0 is the starter."""
        port: int = self.entries[node]["communication"]["port"]
        return port

    def ring_port(self, node: int) -> int:
        port: int = self.entries[node]["inference"]["port_in"]
        return port

    def start(self, index: int, *flags: object, **options: Any) -> Process:
        """Start secondary `index`, in place of the one that ran before."""
        old = self.secondaries[index]
        if old is not None:
            old.end()
        args = ("--nodes-config", self.path, index, "--cache-dir", self.cache_dir(index), *flags)
        process = self.secondaries[index] = Process(self._reader, "secondary", *args, **options)
        return process

    def revive(self) -> None:
        """Start again what has ended, and let go on what was stopped."""
        for index, process in enumerate(self.secondaries):
            if process is None or process.child.poll() is not None:
                self.start(index)
            else:
                process.signal(signal.SIGCONT)
        for index in range(self.n_nodes - 1):
            self[index].wait_for("waits for its starter")

    def __getitem__(self, index: int) -> Process:
        process = self.secondaries[index]
        assert process is not None
        return process

    def status(self, node: int) -> dict[str, Any]:
        """What a node (0 is the starter) answers to `GET /`."""
        with requests.get(f"http://127.0.0.1:{self.port(node)}/", timeout=DEADLINE_S) as response:
            answer: dict[str, Any] = response.json()
            return answer

    def wait_states(self, *allowed: str, deadline_s: float = SOON_S) -> list[dict[str, Any]]:
        """Wait until every secondary is in one of these states; what they answer then."""
        deadline = time.monotonic() + deadline_s
        while True:
            found = [self.status(node) for node in range(1, self.n_nodes)]
            if all(status["state"] in allowed for status in found):
                return found
            assert time.monotonic() < deadline, f"expected {allowed}, but the secondaries are {found}"

    def end(self) -> None:
        for process in self.secondaries:
            if process is not None:
                process.end()


@contextlib.contextmanager
def meanwhile(act: Callable[[Callable[[], bool]], object]) -> Iterator[None]:
    """Do something in a thread, beside what the caller does inside; `act` is given what says whether that is over."""
    over = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act(over.is_set)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, name="meanwhile")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(DEADLINE_S)
    assert not errors, errors


def wait_for_tokens(ring: Cluster, n_tokens: int, is_over: Callable[[], bool], n_samples: int = 3) -> None:
    """Until each of so many samples has more tokens than this, as the starter itself tells."""
    while not is_over():
        with contextlib.suppress(requests.ConnectionError):  # it may still be importing
            samples = ring.status(0).get("samples", [])
            if len(samples) == n_samples and all(s["n_tokens"] > n_tokens for s in samples):
                return
    raise AssertionError("the run ended before its samples had tokens")


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than as one that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(pids: list[int], deadline_s: float = SOON_S) -> None:
    deadline = time.monotonic() + deadline_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        threading.Event().wait(0.05)


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


Starter = Callable[..., Result]
Spawn = Callable[..., Process]
