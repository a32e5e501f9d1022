"""How nodes of a swarm are asked: several at the same time, and less and less if they do not answer."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mdi.cancel import Cancel
from mdi.control.client import ControlClient, FanOut
from mdi.control.swarm import N_TOLD, Announced, SwarmRequest, SwarmTable
from mdi.errors import ControlError, MdiError
from mdi.net.keys import KeyFile
from mdi.spec.cluster import NodeConfig

ASK_S = 2.0  # a node that lives answers in this time: its ports wait for no computation
N_MORE = 16  # given nodes that are asked besides, while nobody is known
FORMER_EACH_S = 15.0  # between two questions where a node was, while others are known

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Peer:
    """The control port of a node of the swarm, by which others are found."""

    addr: str
    port: int

    @property
    def label(self) -> str:
        return f"{self.addr}:{self.port}"


class Exchanges:
    """Asks nodes of a swarm for what they know. For several threads.

    Args:
        table: gets what they tell.
        peers: nodes that are known by their control ports; found: others, as they announce themselves in the network.
        own: the number of this process, and where it is asked itself, if it is a node.
    """

    def __init__(
        self, table: SwarmTable, peers: Sequence[Peer], keys: KeyFile | None,
        found: Callable[[], Sequence[NodeConfig]] = lambda: (), own: tuple[str, tuple[str, int]] = ("", ("", 0)),
    ) -> None:  # fmt: skip
        self._table, self._peers, self._keys, self._found = table, tuple(peers), keys, found
        self._process, self._place = own
        self._resolved: dict[Peer, NodeConfig] = {}  # with their ring ports, until they do not answer there
        self._unanswered = Unanswered()
        self._former_due_s = 0.0

    def look(
        self, n_known: int, n_given: int, told: Announced | None = None, cancel: Cancel | None = None
    ) -> dict[str, float]:  # fmt: skip
        """Ask some nodes that are known and some that were given or found; more of these while nobody is known.

        Args:
            told: what they learn of this node.
            cancel: ends the waiting for answers.

        Returns:
            Seconds until the answer of each that answered, by its name.
        """
        self._resolve(cancel)
        chosen, more = self._chosen(n_known, n_given)
        found = self.ask(chosen, told, cancel)
        if more and not self._others and not (cancel is not None and cancel.is_cancelled):
            found |= self.ask(more[:N_MORE], told, cancel)
        return found

    def tell(self, n_known: int, n_given: int, told: Announced) -> None:
        """Ask those alone whose ring ports are known: a last word."""
        self.ask(self._chosen(n_known, n_given)[0], told)

    def ask(
        self, nodes: Sequence[NodeConfig], told: Announced | None = None, cancel: Cancel | None = None
    ) -> dict[str, float]:  # fmt: skip
        asked: dict[str, NodeConfig] = {}
        for one in nodes:
            asked.setdefault(_place(one), one)
        calls = FanOut({place: partial(self._exchange, one, told, cancel) for place, one in asked.items()})
        calls.join(2 * ASK_S, cancel)
        found = dict(calls.results)
        if cancel is None or not cancel.is_cancelled:
            for place in asked:
                self._note(place, place in found)
            for peer, config in list(self._resolved.items()):
                if _place(config) in asked.keys() - found.keys():  # it may be back at another port
                    self._resolved.pop(peer, None)
        return {asked[place].name: taken_s for place, taken_s in found.items()}

    def is_avoided(self, node: NodeConfig) -> bool:
        """Whether it did not answer lately."""
        return self._unanswered.is_avoided(_place(node))

    @property
    def _others(self) -> list[Announced]:
        return [one for one in self._table.nodes if one.process != self._process and not one.is_leaving]

    def _chosen(self, n_known: int, n_given: int) -> tuple[list[NodeConfig], list[NodeConfig]]:
        """Nodes to ask now, and other given ones."""
        known = self._able([one.config() for one in self._others])
        given = self._able([*self._found(), *self._resolved.values()])
        chosen, more = [*known[:n_known], *given[:n_given]], given[n_given:]
        now = time.monotonic()
        if not known or now >= self._former_due_s:
            self._former_due_s = now + FORMER_EACH_S
            chosen += self._able([one.config() for one in self._table.former])[:1]
        return chosen, more

    def _able(self, nodes: Sequence[NodeConfig]) -> list[NodeConfig]:
        """Those that can be asked, in a random order."""
        found = [one for one in nodes if (one.addr, one.port_in) != self._place and not self.is_avoided(one)]
        return random.sample(found, len(found))

    def _resolve(self, cancel: Cancel | None) -> None:
        """Ask the given peers for their ring ports."""
        lacking = {peer.label: peer for peer in self._peers if peer not in self._resolved}
        lacking = {label: peer for label, peer in lacking.items() if not self._unanswered.is_avoided(label)}
        calls = FanOut({label: partial(self._ring_port, peer) for label, peer in lacking.items()})
        calls.join(ASK_S, cancel)
        found = dict(calls.results)
        self._resolved |= {lacking[label]: config for label, config in found.items()}
        if cancel is None or not cancel.is_cancelled:
            for label in lacking:
                self._note(label, label in found)

    def _note(self, place: str, has_answered: bool) -> None:
        (self._unanswered.remove if has_answered else self._unanswered.add)(place)

    def _ring_port(self, peer: Peer) -> NodeConfig:
        """Raises ControlError."""
        config = NodeConfig(peer.label, peer.addr, peer.port, 0)
        try:
            port = ControlClient(config, self._keys).status(timeout_s=ASK_S).get("ring_port")
        except ControlError as e:
            logger.debug("%s", e)
            raise
        if not isinstance(port, int) or not 0 < port < 65536:
            raise ControlError(f"{config.name} has no ring port")
        return replace(config, port_in=port)

    def _exchange(self, node: NodeConfig, told: Announced | None, cancel: Cancel | None) -> float:
        """Seconds until its first answer; it is asked again as long as it has more to tell. Raises MdiError."""
        client, taken_s, begin = ControlClient(node, self._keys), None, time.monotonic()
        while True:
            try:
                found = client.swarm(SwarmRequest(told, self._table.versions), ASK_S, cancel)
            except MdiError as e:
                logger.debug("%s does not tell of the swarm: %s", node.name, e)
                if taken_s is None:
                    raise
                return taken_s
            now = time.monotonic()
            taken_s = now - begin if taken_s is None else taken_s
            self._table.add(found)
            if len(found) < N_TOLD or now - begin > ASK_S:
                return taken_s


def _place(config: NodeConfig) -> str:
    return f"{config.addr}:{config.port_in}"


class Unanswered:
    """Nodes that did not answer, each avoided for a time that doubles until it answers. For one thread at a time.

    Args:
        first_s, most_s: the first time, and the longest.
        clock: seconds, rising.
    """

    def __init__(self, first_s: float = 2.0, most_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s, self._most_s, self._clock = first_s, most_s, clock
        self._until: dict[str, tuple[int, float]] = {}  # how often it did not answer, and the end of the time

    def add(self, name: str) -> None:
        """It did not answer."""
        n = self._until.get(name, (0, 0.0))[0]
        self._until[name] = n + 1, self._clock() + min(self._most_s, self._first_s * 2 ** min(n, 30))

    def remove(self, name: str) -> None:
        """It has answered."""
        self._until.pop(name, None)

    def is_avoided(self, name: str) -> bool:
        return self._until.get(name, (0, 0.0))[1] > self._clock()
