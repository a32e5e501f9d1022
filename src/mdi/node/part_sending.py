"""Sends a node the parts that it lacks: other nodes send those that they have, the starter the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mdi.cancel import Cancel
from mdi.control.client import PART_ANSWER_S, ControlClient
from mdi.control.messages import ForwardRequest, PartSpec
from mdi.errors import Code, ControlError, NodeLostError
from mdi.net.keys import KeyFile
from mdi.spec.cluster import NodeConfig

STALL_S = 300.0  # without any progress: a slow card reads a large part, and a slow board packs one, in less
AGAIN_S = 0.2  # before a part that another node sends is tried again
N_FORWARDS = 8  # at a time
FORWARD_ANSWER_S = 60.0  # for a part that is sent to another node, for each piece, and to be stored there
N_BROKEN = 3  # connections that break one after the other without a byte that arrives


@dataclass(frozen=True)
class Holders:
    """Other nodes that may have parts.

    Attributes:
        known: those that have had parts in one of the run's rings before, by the parts' sha256.
        beside: those that are not in the ring, and may have parts of earlier runs.
    """

    known: Mapping[str, Sequence[ControlClient]] = field(default_factory=dict)
    beside: Sequence[ControlClient] = ()


logger = logging.getLogger("mdi")


class PartSource(Protocol):
    """The weights that a node needs: parts of StarterWeights, or shares of them."""

    def spec(self, part: str) -> PartSpec: ...

    def pieces(self, part: str) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a part, to be sent."""


class _Tries:
    """To send a part to a node: it may be coming from another starter, and a connection may break."""

    def __init__(self, name: str, part: PartSpec) -> None:
        self._name = name
        self._part = part
        self._n_broken, self._deadline = 0, time.monotonic() + STALL_S

    def begin_again(self) -> None:
        """Counts bytes of the part that have arrived from any node."""
        self._n_broken, self._deadline = 0, time.monotonic() + STALL_S

    def add(self, error: ControlError) -> None:
        """One transfer has failed; raises if there will be no other."""
        if error.status is None:
            self._n_broken += 1
            if self._n_broken > N_BROKEN:
                words = f"{self._name} was lost while {self._part.name} was sent to it: {error}"
                raise NodeLostError(self._name, words) from None
        elif not error.code.again or time.monotonic() > self._deadline:
            raise error


class PartSending:
    """To one node, in one run.

    Args:
        client: of the node.
        weights: where parts come from that no other node has.
        holders: other nodes that may have parts. If none has a part, or sending it fails, this node sends it.
        cancel: its end ends the sending, before the next piece.
        missing: asks the node which parts it lacks, and how many bytes of each it has.
    """

    def __init__(
        self, client: ControlClient, run: str, weights: PartSource, holders: Holders, cancel: Cancel,
        missing: Callable[[], Mapping[PartSpec, int]],
    ) -> None:  # fmt: skip
        self._client = client
        self._run = run
        self._weights = weights
        self._holders = holders
        self._cancel = cancel
        self._missing = missing
        self._n_sent: dict[str, int] = {}  # by holder

    def send(self, part: PartSpec, have: int) -> None:
        """Have a part sent from byte `have` on. Returns when the node has it.

        Raises:
            NodeLostError: the node is not there any more; ControlError: it does not take it.
        """
        for holder in self._holders_of(part):
            try:
                return self._forward(holder, part, have)
            except ControlError as e:
                if (e.status, e.code) in ((404, "weights"), (409, "run")):
                    continue  # it does not have the part, or not any more, or has had no part in this run
                logger.info("%s comes from this node: %s", part.name, e)
            self._cancel.check()
            rest = self._missing().get(part)
            if rest is None:
                return
            have = rest
            break
        tries = _Tries(self._client.node.name, part)
        while True:
            try:
                return self._client.send_part(part, self._run, have, self._pieces(part, have))
            except ControlError as e:
                tries.add(e)
            self._cancel.wait(AGAIN_S)
            there = self._missing().get(part)  # the node is asked: that tells whether it is lost
            if there is None:
                return
            if there > have:
                tries.begin_again()
            have = there

    def _holders_of(self, part: PartSpec) -> list[ControlClient]:
        """Nodes to ask for the part: first those that should have it and have sent the fewest."""
        own, known = self._client.node.name, self._holders.known.get(part.sha256, ())
        asked = sorted(known, key=lambda one: self._n_sent.get(one.node.name, 0))
        asked += [one for one in self._holders.beside if one not in known]
        return [one for one in asked if one.node.name != own]

    def _forward(self, holder: ControlClient, part: PartSpec, have: int) -> None:
        """Have another node send the rest of a part. Raises ControlError, with status 404 if it does not have it."""
        node = self._client.node
        holder.forward(ForwardRequest(self._run, part, have, node.name, node.addr, node.port_in))
        self._n_sent[holder.node.name] = self._n_sent.get(holder.node.name, 0) + 1
        logger.debug("%s has sent %s to %s", holder.node.name, part.name, node.name)

    def _pieces(self, part: PartSpec, skip: int) -> Iterator[bytes | memoryview]:
        """The bytes of a part from `skip` on, until the set-up is interrupted."""
        for piece in from_offset(self._weights.pieces(part.name), skip):
            self._cancel.check()
            yield piece


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


def from_offset(pieces: Iterable[bytes | memoryview], skip: int) -> Iterator[bytes | memoryview]:
    """The chunks without their first `skip` bytes."""
    for piece in pieces:
        if skip >= len(piece):
            skip -= len(piece)
        else:
            yield piece[skip:]
            skip = 0
