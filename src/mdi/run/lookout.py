"""Looks for changes of a ring without a loss: a node is about to leave, one that is back or new would make it faster."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from mdi.cancel import Cancel, CancelledError
from mdi.control.client import ControlClient, FanOut
from mdi.placement.profile import NodeProfile
from mdi.run.cut import MovingCut, better_with
from mdi.run.form import Ring
from mdi.run.nodes import GRACE_S, CallRoll, Newcomers, call_roll
from mdi.run.policy import Answer, Better, Form, Stage
from mdi.spec.cluster import NodeConfig

NOTICE_S = 0.25  # how often it is asked whether a node is about to leave
LOOK_S = 5.0  # how often nodes are asked

Measure = Callable[[ControlClient], NodeProfile]

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Leaving:
    """A node of a ring is about to end, and computes until its blocks are elsewhere."""

    node: str
    ring: int


class Nodes(Protocol):
    """The nodes of a run."""

    @property
    def clients(self) -> Mapping[str, ControlClient]:
        """Of all that may take part, by name."""

    def admit(self, node: NodeConfig) -> ControlClient:
        """A node that has come may take part from now on."""

    def may_use(self, name: str) -> bool:
        """Whether a node has waited long enough since it was lost."""


class Joins:
    """Nodes outside of a ring that it would be faster with. Not for several threads.

    Args:
        nodes: that may take part; new ones are added.
        cut: how the model is cut over nodes.
        spares: those that are not added to a ring: they wait for a loss.
        newcomers: nodes that were found besides.
        measure: asks a node that has come how fast it is, which takes seconds; None where no node was measured.
    """

    def __init__(
        self, nodes: Nodes, cut: MovingCut, spares: frozenset[str], newcomers: Newcomers,
        measure: Measure | None = None, ask: CallRoll = call_roll,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._cut = cut
        self._spares = spares
        self._newcomers = newcomers
        self._measure = measure
        self._ask = ask
        self._measuring: dict[str, FanOut[NodeProfile]] = {}

    def best(self, ring: Sequence[Stage], processes: Mapping[str, str]) -> Form | None:
        """The best ring with one more present node, if it gains enough.

        Args:
            processes: of the ring's secondaries.
        """
        used = {stage.name for stage in ring}
        outside = [client for name, client in self._nodes.clients.items() if name not in used]
        answers = self._ask(outside, frozenset(), GRACE_S).answers if outside else {}
        answers |= self._admit({*processes.values(), *(answer.process for answer in answers.values())})
        for name, answer in answers.items():
            is_wanted = answer.is_free and name not in self._spares and self._nodes.may_use(name)
            if is_wanted and self._is_known(name) and (found := better_with(ring, name, self._cut)) is not None:
                return replace(found, outside=frozenset(answers) - {name})
        return None

    def _admit(self, known: set[str]) -> dict[str, Answer]:
        """Admit new nodes; returns their answers."""
        clients = self._nodes.clients
        places = {(client.node.addr, client.node.port) for client in clients.values()}
        come = []
        for process, node in self._newcomers().items():
            if process in known or (node.addr, node.port) in places:
                continue
            number = next(n for n in range(len(clients) + 1) if f"secondary{n}" not in clients)
            client = self._nodes.admit(replace(node, name=f"secondary{number}"))
            logger.info("found %s at %s:%d: it is %s", node.name, node.addr, node.port, client.node.name)
            come.append(client)
            if self._measure is not None:
                self._measuring[client.node.name] = FanOut({client.node.name: partial(self._measure, client)})
        return dict(self._ask(come, frozenset(), GRACE_S).answers) if come else {}

    def _is_known(self, name: str) -> bool:
        """Whether its times are known, if they are needed; without them it counts as a mean node."""
        asked = self._measuring.get(name)
        if asked is None:
            return True
        if asked.is_working:
            return False
        del self._measuring[name]
        if name in asked.results:
            self._cut.learn(asked.results[name])
        return True


class Lookout:
    """See the module. Works in the thread `ring-lookout`, and changes nothing: what it sees, it puts.

    Args:
        present: the ring that generates; None while there is none.
        put: gets each event.
    """

    def __init__(
        self, joins: Joins, present: Callable[[], Ring | None], put: Callable[[Leaving | Better], None], cancel: Cancel
    ) -> None:  # fmt: skip
        self._joins = joins
        self._present = present
        self._put = put
        self._cancel = cancel
        self._seen: set[Leaving] = set()
        self._thread = threading.Thread(target=self._run, name="ring-lookout", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Once it is cancelled."""
        self._thread.join()

    def _run(self) -> None:
        next_look = time.monotonic() + LOOK_S
        while True:
            try:
                self._cancel.wait(NOTICE_S)
            except CancelledError as e:
                e.with_traceback(None)  # the run keeps the error, and it this frame
                return
            ring = self._present()
            if ring is None:
                continue
            link = ring.link  # read once: another thread may close it meanwhile
            for node in getattr(link, "leaving", ()):
                if (leaving := Leaving(node, ring.number)) not in self._seen:
                    self._seen.add(leaving)
                    self._put(leaving)
            if time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_S
                try:
                    if (found := self._joins.best(ring.stages, ring.processes)) is not None:
                        self._put(Better(found, ring.stages))
                except Exception:  # texts continue in the present ring
                    logger.warning("warning: looking for a better ring failed", exc_info=True)
