"""A server as a process, and asyncio clients on plain sockets that stream from it: what the benchmarks of serving share."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
HOST = "127.0.0.1"


@dataclass
class Answer:
    """One streamed text, with the moment of each of its events."""

    begin: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    n_tokens: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        return self.times[0] - self.begin

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def request(body: dict[str, Any]) -> bytes:
    """A completion as it goes over the wire, streamed unless the body says otherwise; the connection closes behind it."""
    asked = {"model": "", "stream": True, "stream_options": {"include_usage": True}, **body}
    data = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    return head.encode() + data


async def complete(port: int, body: dict[str, Any]) -> Answer:
    """A streamed completion over a connection of its own."""
    answer = Answer(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(request(body))
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                if not line.startswith(b"HTTP/1.1 200") and line.startswith(b"HTTP/"):
                    answer.error = line.decode().strip()
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["message"]
            elif event["choices"]:
                answer.times.append(time.perf_counter())
                answer.text += event["choices"][0]["text"]
            if event.get("usage"):
                answer.n_tokens = event["usage"]["completion_tokens"]
        writer.close()
    except OSError as e:
        answer.error = str(e)
    if not answer.n_tokens and not answer.error:
        answer.error = "no whole answer"
    return answer


def complete_cheaply(port: int, bodies: Sequence[dict[str, Any]]) -> tuple[list[int], float]:
    """Streamed completions by one loop that takes bytes and reads of them nothing but the end: it shares cores with a server.

    Returns:
        tokens of each; processor seconds that this took.
    """
    begin_s = time.thread_time()
    selector, ends = selectors.DefaultSelector(), [b""] * len(bodies)
    for i, body in enumerate(bodies):
        connection = socket.create_connection((HOST, port))
        connection.sendall(request(body))
        selector.register(connection, selectors.EVENT_READ, i)
    while selector.get_map():
        for key, _ in selector.select():
            if data := key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                ends[key.data] = (ends[key.data] + data)[-2048:]
            else:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    taken_s = time.thread_time() - begin_s
    counts = [json.loads(end[end.index(b'"usage":') + 8 :].split(b"}\n\n")[0]) for end in ends]
    return [one["completion_tokens"] for one in counts], taken_s


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server; its port and process."""
    command = [sys.executable, str(SRC / "serve.py"), "--ckpt", str(args.ckpt), "--nodes", str(args.nodes)]
    with answering([*command, "--max-running", "1024", "--draft", "none", *args.flags]) as found:
        yield found


@contextlib.contextmanager
def answering(command: list[str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server that takes --port and has /v1/models, once it answers; its port and process."""
    from mdi.run.local import free_ports

    (port,) = free_ports(1)
    process = subprocess.Popen([*command, "--port", str(port)])
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://{HOST}:{port}/v1/models")
                break
            time.sleep(0.1)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@dataclass(frozen=True)
class Held:
    """What one process has of the system."""

    rss_bytes: int
    threads: int
    sockets: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Held:
        import psutil

        process, names = psutil.Process(pid), list[str]()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that the listing itself had is closed again
                names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        n_sockets = sum(name.startswith("socket:") for name in names)
        return cls(process.memory_info().rss, process.num_threads(), n_sockets, len(names) - n_sockets)


def rss_bytes(process: subprocess.Popen[bytes]) -> int:
    """Of the server with all its processes."""
    import psutil

    own = psutil.Process(process.pid)
    return sum(one.memory_info().rss for one in [own, *own.children(recursive=True)])


def p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else float("nan")
