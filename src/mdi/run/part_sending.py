"""Sends a node the parts that it lacks: other nodes send those that they have, the starter the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mdi.cancel import Cancel
from mdi.checkpoint.parts import from_offset
from mdi.control.client import ControlClient
from mdi.control.messages import ForwardRequest, PartSpec
from mdi.errors import Code, ControlError, NodeLostError

STALL_S = 300.0  # without any progress: a slow card reads a large part, and a slow board packs one, in less
AGAIN_S = 0.2  # before a part that another node sends is tried again
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
                if (e.status, e.code) in ((404, Code.WEIGHTS), (409, Code.RUN)):
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
