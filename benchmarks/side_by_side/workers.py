"""The systems as child processes of the benchmark: start, ask, and a certain end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any, TypeAlias

Answer: TypeAlias = "dict[str, Any]"
END_S = 20.0


class WorkerError(Exception):
    """A system could not do what it was asked for; the message is its own."""


class Worker:
    """One system in a process of its own; see peers.protocol.

    Args:
        name: for messages and the log file.
        module: of the worker, e.g. "peers.litgpt_peer".
        options: what its `load` gets.
        cores: that it may use, all its threads and children; a ring pins its nodes itself.
        environment: variables that it and its children have besides those of this process.
    """

    def __init__(
        self, name: str, python: str, module: str, options: dict[str, Any], cores: list[int], log_folder: Path,
        environment: dict[str, str],
    ) -> None:  # fmt: skip
        self.name = name
        log_folder.mkdir(parents=True, exist_ok=True)
        self._log = log_folder / f"{name.replace(' ', '-').replace('/', '-')}.log"
        benchmarks = Path(__file__).resolve().parents[1]
        path = os.pathsep.join([str(benchmarks), str(benchmarks.parent / "src")])
        # One thread each; llama.cpp is told its number of threads itself.
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
            )
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._process.pid, cores)
        self._rest = b""
        self._send(options)

    def wait_ready(self, timeout_s: float) -> None:
        """Raises WorkerError."""
        self._receive(timeout_s)

    def run(self, case: dict[str, int], timeout_s: float) -> Answer:
        """Run one case; WorkerError if that is not possible."""
        self._send({"case": case})
        return self._receive(timeout_s)

    def end(self) -> Answer:
        """What it measured in all; {} if it does not say. The process is gone afterwards."""
        try:
            self._send({"end": True})
            return self._receive(END_S)
        except WorkerError:
            return {}
        finally:
            self.kill()

    def kill(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(f"{self.name} has ended: {self._last_words()}") from None

    def _receive(self, timeout_s: float) -> Answer:
        """The next line, as an object."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"{self.name} did not answer within {timeout_s:.0f} s (see {self._log.name})")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise WorkerError(f"{self.name} has ended: {self._last_words()}")
            self._rest += piece
        line, self._rest = self._rest.split(b"\n", 1)
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1]:.300} (see {self._log.name})" if lines else f"see {self._log.name}"
