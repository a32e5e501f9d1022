"""A socket with one deadline for all its reads. A timeout alone begins again with every byte, so a peer that sends one byte a
second could block this side for ever.
"""

from __future__ import annotations

import socket
import time


class DeadlineSocket(socket.socket):
    """Takes the place of a socket that is read through a file object, as `http.client` and cheroot do."""

    _deadline: float | None = None

    @classmethod
    def around(cls, sock: socket.socket) -> DeadlineSocket:
        """The same connection; `sock` must not be used any more."""
        return cls(fileno=sock.detach())

    def read_within(self, seconds: float) -> None:
        """Set a deadline for all reads together; after it, reads raise TimeoutError."""
        self._deadline = time.monotonic() + seconds

    def read_each_within(self, seconds: float) -> None:
        """Set a timeout for each single read."""
        self._deadline = None
        self.settimeout(seconds)

    def recv_into(self, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self.settimeout(left)
        return super().recv_into(*args, **kwargs)
