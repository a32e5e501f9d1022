"""The present connection of a link, and its replacement."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mdi.net.hello import Hello
from mdi.net.wire import FrameCodec


class NotBackError(Exception):
    """The neighbour cannot be connected with again: it is lost. The words say why."""


@dataclass(eq=False)
class Connection:
    """A connected socket whose handshake is done.

    Attributes:
        codec: for its frames from here on.
        received: number of the last BATCH frame that the neighbour had before, if it had any.
    """

    sock: socket.socket
    codec: FrameCodec
    received: int | None = None


class Reconnect(Protocol):
    """Makes the next connection with the same neighbour, see `mdi.net.reconnect`.

    Attributes:
        on_call: called from any thread when the neighbour connects again; its broken connection may look intact from here.
    """

    on_call: Callable[[], None]

    def connect(self, received: int | None, until: float) -> Connection:
        """The link's receiving thread calls it, and reads nothing meanwhile.

        Args:
            received: number of the last BATCH frame that came from the neighbour, if one did.
            until: time.monotonic() at which the neighbour is lost.

        Raises:
            NotBackError: it is lost, or `stop` was called.
        """

    def stop(self) -> None:
        """End a `connect` that is under way, and let no other begin. From any thread, as often as one likes."""


class Returning(Protocol):
    """Receives the further calls of a neighbour from the listener.

    Attributes:
        epoch: of the ring.
        caller: its HELLO when the ring was closed.
    """

    epoch: int
    caller: Hello

    def take(self, sock: socket.socket, codec: FrameCodec, hello: Hello) -> None:
        """It has called; the connection belongs to the receiver from here on."""
