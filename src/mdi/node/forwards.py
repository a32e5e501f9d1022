"""Sends parts that are here to other nodes, when a starter asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from mdi.checkpoint.parts import from_offset
from mdi.control.client import PART_ANSWER_S, ControlClient
from mdi.control.messages import ForwardRequest, PartSpec
from mdi.errors import Code, ControlError
from mdi.net.keys import KeyFile
from mdi.spec.cluster import NodeConfig

N_FORWARDS = 8  # at a time
FORWARD_ANSWER_S = 60.0  # for a part that is sent to another node, for each piece, and to be stored there


class Forwards:
    """Parts that a secondary sends to other nodes when a starter asks it to, a few at a time.

    Each holds a thread of the ring port, and the other node may be a stranger that takes nothing and never answers.

    Args:
        name: of the node.
        pieces: gives the bytes of a part that is here. ControlError if it is not.
    """

    def __init__(
        self, name: str, pieces: Callable[[PartSpec], Iterator[bytes | memoryview]], keys: KeyFile | None
    ) -> None:
        self._name, self._pieces, self._keys = name, pieces, keys
        self._places = threading.BoundedSemaphore(N_FORWARDS)

    def send(self, request: ForwardRequest) -> None:
        """Send the rest of a part. Raises ControlError: it is not here, others are being sent, or it is not taken in time."""
        if not self._places.acquire(blocking=False):
            raise ControlError(f"{self._name} sends {N_FORWARDS} parts to other nodes already", 409, code=Code.BUSY)
        try:
            end = time.monotonic() + PART_ANSWER_S  # the starter does not wait any longer
            pieces = until(end, from_offset(self._pieces(request.part), request.offset))
            client = ControlClient(NodeConfig(request.node, request.addr, 0, request.port_in), self._keys)
            client.send_part(request.part, request.run, request.offset, pieces, FORWARD_ANSWER_S)
        finally:
            self._places.release()


def until(
    end_s: float, pieces: Iterable[bytes | memoryview], clock: Callable[[], float] = time.monotonic
) -> Iterator[bytes | memoryview]:
    """The pieces. ControlError (504) if they have not been taken at a time."""
    for piece in pieces:
        if clock() > end_s:
            raise ControlError("the other node takes the part too slowly", 504)
        yield piece
