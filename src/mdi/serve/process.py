"""The API process as the engine process sees it: its settings, start, messages, end.

Messages are one JSON object per line, over a pair of sockets. Neither side trusts the length of what comes: a line beyond
LIMIT_BYTES ends the connection. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mdi.errors import UsageError, WireError
from mdi.files import module_environment

ROLES = ("user", "operator")
DRAIN_S = 15.0  # for requests under way when the server ends


@dataclass(frozen=True)
class ApiKey:
    """Attributes:
    digest: sha256 of the key, in hex; the key itself is not kept.
    name: its name in the log and the queue.
    priority: larger goes first.
    role: one of ROLES. An operator may also load, unload and pull models, and invite machines.
    beams: of one prompt, at most; beam_tokens: new tokens of all beams of a request together, at most.
    texts: at the same time, at most; minute_tokens, day_tokens: of prompts and texts in a minute and in a day, see
        `mdi.serve.quotas`; 0: any number.
    """

    digest: str
    name: str
    priority: int = 0
    role: str = "user"
    beams: int = 8
    beam_tokens: int = 16384
    texts: int = 0
    minute_tokens: int = 0
    day_tokens: int = 0


@dataclass(frozen=True)
class ServeSettings:
    """See the flags of mdi serve.

    Attributes:
        keys: of clients; () accepts everybody who reaches the port.
        hosts: names by which the server may be called, beside its own address; "*" is any.
        origins: of foreign web pages that may use the API; () is none.
        max_running: most texts at the same time; others wait.
        max_waiting: texts that wait at most; more are refused.
        aliases: names of models for patterns of names that requests may have.
        keep_alive_s: a model that was not used for so long is unloaded; None: never.
        tool_parser: how models write calls of tools; "": as their templates say.
    ollama_host, ollama_port: where Ollama's API is served; no port: nowhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[ApiKey, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_running: int = 256
    max_waiting: int = 512
    aliases: Mapping[str, str] = field(default_factory=dict)
    keep_alive_s: float | None = None
    tool_parser: str = ""
    ollama_host: str = "127.0.0.1"
    ollama_port: int | None = None


def digest_of(key: str) -> str:
    """The digest of an API key, which is kept in its place."""
    return hashlib.sha256(key.encode()).hexdigest()


LIMIT_BYTES = 32 << 20  # a prompt of a million tokens has 8 MB
_BLOCK = 1 << 16


_line = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # json.dumps would make one for each


def packed(message: Mapping[str, Any]) -> bytes:
    """A message as its line. ValueError if it holds a number that JSON has no form for."""
    return _line(message).encode() + b"\n"


def unpacked(line: bytes) -> dict[str, Any]:
    """Raises WireError if the line is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise WireError("a line between API and engine is not JSON") from None
    if not isinstance(message, dict):
        raise WireError("a line between API and engine is not a JSON object")
    return message


class Splitter:
    """Messages out of the blocks of bytes that come."""

    def __init__(self) -> None:
        self._read = bytearray()  # of a line that has not ended

    def feed(self, block: bytes) -> Iterator[dict[str, Any]]:
        """Raises WireError."""
        *whole, rest = block.split(b"\n")
        for part in whole:
            line = bytes(self._read) + part
            self._read.clear()
            yield unpacked(line)
        self._read += rest
        if len(self._read) > LIMIT_BYTES:
            raise WireError(f"a line between API and engine has more than {LIMIT_BYTES} bytes")


class Lines:
    """One end of the connection, for threads: any may send, one reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> bool:
        """False if the other side is gone."""
        data = packed(message)
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError:
            return False
        return True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Messages until the other side closes. Raises WireError."""
        splitter = Splitter()
        while True:
            try:
                block = self._sock.recv(_BLOCK)
            except OSError:
                return
            if not block:
                return
            yield from splitter.feed(block)

    def close(self) -> None:
        """Wakes a thread that reads."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


END_S = 3.0  # in addition to the time of requests under way


class ApiProcess:
    """Started at once. It has the listening sockets and one end of a pair, and follows this process if that ends.

    Attributes:
        lines: the other end of the pair.
        url: of the API; ollama_url: of Ollama's, "" without it.

    Raises:
        UsageError: a port cannot be had.
    """

    def __init__(self, settings: ServeSettings, home: Path, first: Path, adapters: Sequence[str] = ()) -> None:
        if os.name != "posix":
            raise UsageError("mdi serve needs Linux or macOS: on Windows run it in WSL")
        listeners = [listening_socket(settings.host, settings.port)]
        self.url, self.ollama_url = url_of(settings.host, listeners[0]), ""
        if settings.ollama_port is not None:
            try:
                listeners.append(listening_socket(settings.ollama_host, settings.ollama_port, "--ollama-port"))
            except UsageError:
                listeners[0].close()
                raise
            self.ollama_url = url_of(settings.ollama_host, listeners[1])
        ours, theirs = socket.socketpair()
        numbers = [one.fileno() for one in listeners]
        values = {
            "settings": asdict(settings),
            "home": str(home),
            "first": str(first),
            "adapters": list(adapters),
            "listeners": numbers,
            "engine": theirs.fileno(),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mdi.serve.api"], pass_fds=(*numbers, theirs.fileno()),
                stdin=subprocess.PIPE, env=module_environment(), start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(json.dumps(values).encode())
        finally:
            for one in (*listeners, theirs):
                one.close()
        self._sock = ours
        self.lines = Lines(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def drain(self) -> None:
        """Accept no more requests, and wait until those under way have been answered."""
        self.lines.send({"is": "drain"})
        try:
            self._process.wait(DRAIN_S + END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def close(self) -> None:
        """End it at once."""
        self.lines.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def url_of(host: str, listener: socket.socket) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def listening_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """Raises UsageError if the port, which this option has, cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise UsageError(f"--host {host}: {e.strerror or e}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise UsageError(f"cannot listen on {host}:{port}: {e.strerror or e} ({option} chooses another)") from None
    return sock
