"""The API process as the engine process sees it: start, messages, end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from mdi.errors import UsageError
from mdi.serve.lines import Lines
from mdi.serve.serve_settings import DRAIN_S, ServeSettings

END_S = 3.0  # in addition to the time of requests under way


class ApiProcess:
    """Started at once. It has the listening socket and one end of a pair, and follows this process if that ends.

    Attributes:
        lines: the other end of the pair.

    Raises:
        UsageError: the port cannot be had.
    """

    def __init__(self, settings: ServeSettings, home: Path, first: Path) -> None:
        if os.name != "posix":
            raise UsageError("serve.py needs Linux or macOS: on Windows run it in WSL")
        listener = listening_socket(settings.host, settings.port)
        self.host, self.port = settings.host, listener.getsockname()[1]
        ours, theirs = socket.socketpair()
        values = {
            "settings": settings.to_json(),
            "home": str(home),
            "first": str(first),
            "listener": listener.fileno(),
            "engine": theirs.fileno(),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mdi.serve.api"], pass_fds=(listener.fileno(), theirs.fileno()),
                stdin=subprocess.PIPE, env=module_environment(), start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(json.dumps(values).encode())
        finally:
            listener.close()
            theirs.close()
        self._sock = ours
        self.lines = Lines(ours)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

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


def module_environment() -> dict[str, str]:
    """The environment in which another interpreter finds this package. What panics in a library is told without a backtrace."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "RUST_BACKTRACE": "0"}


def listening_socket(host: str, port: int) -> socket.socket:
    """Raises UsageError if the port cannot be had."""
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
        raise UsageError(f"cannot listen on {host}:{port}: {e.strerror or e} (--port chooses another)") from None
    return sock
