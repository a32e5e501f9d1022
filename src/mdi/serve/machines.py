"""Invitations of machines to a server's ring: one code at a time, for one board, for fifteen minutes, revocable.

The code is in the answer to the operator who asked for it and nowhere else: not in the log, not in a snapshot.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import mdi
from mdi.control.discovery import Guests
from mdi.control.server import ControlServer, StatusOnly
from mdi.errors import UsageError
from mdi.net.invitation import VALID_S, GuestNode, Invitation
from mdi.net.keys import KeyFile, text_of

logger = logging.getLogger("mdi")


class Inviting(StatusOnly):
    """Answers for the port of an invitation."""

    def status(self, run: str | None) -> dict[str, Any]:
        return {"name": "invitation", "version": mdi.__version__, "state": "IDLE"}


class Machines:
    """Methods are for any thread.

    Args:
        keys: of the ring's nodes; None: nobody can be invited.
        addr: on which a board finds this machine.
        port: chooses the port to listen on; 0 is any.
        guests: is told where a machine that has joined will be.
        clock: seconds, rising.
    """

    def __init__(
        self, keys: KeyFile | None = None, addr: str = "", port: Callable[[], int] = lambda: 0,
        guests: Guests | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._keys, self._addr, self._port, self._guests, self._clock = keys, addr, port, guests, clock
        self._lock = threading.Lock()
        self._invitation: Invitation | None = None
        self._server: ControlServer | None = None
        self._end = 0.0
        self._last = ""  # how the last invitation ended

    def invite(self, who: str) -> dict[str, Any]:
        """A new invitation in the place of an open one: the line to type on the board, and its QR code as rows of 0 and 1.

        Raises:
            UsageError: the ring has no key, or consists of processes on this machine; or the port cannot be had.
        """
        import segno

        if self._keys is None:
            raise UsageError(
                "this server's ring has no cluster key, so no machine can join it: make one with `mdi key FILE`, and start "
                "the server with --key FILE (without --nodes)"
            )
        with self._lock:
            self._close()
            invitation = Invitation(text_of(self._keys.keys).encode(), self._clock, on_guest=self._welcome)
            server = ControlServer(Inviting(), self._addr, self._port(), "invitation", self._keys, invitation)
            self._invitation, self._server, self._end = invitation, server, self._clock() + VALID_S
            line = f"mdi join {self._addr}:{server.port} {invitation.code}"
            rows = ["".join("1" if dark else "0" for dark in row) for row in segno.make(line, micro=False).matrix]
            logger.info("a machine may join within %.0f minutes (invited by %s)", VALID_S / 60, who)
            return {"line": line, "qr": rows, "seconds_left": self._seconds_left()}

    def revoke(self, who: str) -> dict[str, Any]:
        """Close the invitation, if one is open."""
        self.look()
        with self._lock:
            if self._invitation is not None:
                self._close()
                self._last = "revoked"
                logger.info("the invitation is revoked (by %s)", who)
        return self.state()

    def state(self) -> dict[str, Any]:
        """Whether an invitation is open, for how long, and how the last one ended: "joined", "revoked", "too late" or ""."""
        self.look()
        with self._lock:
            return {"is_open": self._invitation is not None, "seconds_left": self._seconds_left(), "last": self._last}

    def look(self) -> None:
        """Close an invitation that was used or is too old; called again and again."""
        with self._lock:
            invitation = self._invitation
            if invitation is None:
                return
            if invitation.used.is_set():
                logger.info("a machine has fetched the key; the invitation is used up")
                self._last = "joined"
            elif invitation.is_over:
                logger.info("no machine has joined within %.0f minutes; the invitation is over", VALID_S / 60)
                self._last = "too late"
            else:
                return
            self._close()

    def _welcome(self, node: GuestNode, addr: str) -> None:
        logger.info("%s at %s:%d has fetched the key", node.name, node.addr, node.port)
        if self._guests is not None:
            self._guests.add(node, addr)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._invitation = self._server = None

    def _seconds_left(self) -> int:
        return 0 if self._invitation is None else max(0, math.ceil(self._end - self._clock()))
