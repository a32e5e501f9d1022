"""Messages between the API process and the engine process: one JSON object per line, over a pair of sockets.

Neither trusts the length of what comes: a line beyond LIMIT_BYTES ends the connection. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from mdi.errors import WireError

LIMIT_BYTES = 32 << 20  # a prompt of a million tokens has 8 MB
_BLOCK = 1 << 16


def packed(message: Mapping[str, Any]) -> bytes:
    """A message as its line. ValueError if it holds a number that JSON has no form for."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def unpacked(line: bytes) -> dict[str, Any]:
    """Raises WireError if the line is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise WireError("a line between API and engine is not JSON") from None
    if not isinstance(message, dict):
        raise WireError("a line between API and engine is not a JSON object")
    return message


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
        read = bytearray()
        while True:
            try:
                block = self._sock.recv(_BLOCK)
            except OSError:
                return
            if not block:
                return
            *whole, rest = block.split(b"\n")
            for part in whole:
                read += part
                yield unpacked(bytes(read))
                read.clear()
            read += rest
            if len(read) > LIMIT_BYTES:
                raise WireError(f"a line between API and engine has more than {LIMIT_BYTES} bytes")

    def close(self) -> None:
        """Wakes a thread that reads."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
