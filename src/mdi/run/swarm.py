"""A run over a standing swarm: it takes nodes that hold the blocks already, and knows others for when one is lost.

It is no public swarm: all machines have one key, and trust each other. Blocks stay where they are; only the ring is new.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mdi.cancel import Cancel
from mdi.control.client import ControlClient
from mdi.control.meeting import Exchanges, Peer
from mdi.control.swarm import Announced, Kind, SwarmTable
from mdi.errors import ControlError, PlacementError
from mdi.kernels.format_maps import shown
from mdi.net.keys import KeyFile
from mdi.placement.chain import Chain, Holder, choose_chain
from mdi.run.policy import Form, Stage
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.units import duration

N_ASKED = 3  # nodes that are known, and as many that were given or found, in each look
POLL_S = 0.3  # while the blocks are not all there
N_PER_BLOCK = 6  # nodes that are asked for each block, the fastest first
N_TRIPS = 6  # ways of a message there or back until it is answered, with its connection and its meeting

FORGET_S = 180.0  # after which a node that nothing is heard of is forgotten: longer than any ring is sought

logger = logging.getLogger("mdi")


class Swarm:
    """The standing nodes of a key, as far as they are known. For several threads.

    Args:
        peers: nodes that are asked first; found: others, as they announce themselves in the network.
        wait_s: how long to wait for nodes that hold all blocks.
    """

    def __init__(
        self, peers: Sequence[Peer], keys: KeyFile | None, wait_s: float,
        found: Callable[[], Sequence[NodeConfig]] = lambda: (),
    ) -> None:  # fmt: skip
        self.keys = keys
        self._wait_s = wait_s
        self._table = SwarmTable()
        self._exchanges = Exchanges(self._table, peers, keys, found)
        self._delays: dict[str, float] = {}  # by label, of a frame's way there

    def look(self, cancel: Cancel | None = None) -> None:
        """Ask some nodes what has changed; `cancel` ends the waiting for answers."""
        self._exchanges.look(N_ASKED, N_ASKED, cancel=cancel)

    def first(self, cancel: Cancel) -> NodeConfig:
        """Any node that holds blocks. Raises ControlError: there is none in time."""
        end = time.monotonic() + self._wait_s
        while True:
            self.look(cancel)
            if there := self.usable:
                return there[0].config()
            if time.monotonic() > end:
                raise ControlError(
                    f"no standing node of this key came within {duration(self._wait_s)}: run `mdi join --model NAME` on some "
                    "machines, or give the address of one that runs (--swarm ADDR:PORT)"
                )
            cancel.wait(POLL_S)

    def choose(
        self, weights: str, arithmetic: Arithmetic, cuts: Sequence[int], model: str, cancel: Cancel
    ) -> SwarmPart:  # fmt: skip
        """The chain of a first ring, and the nodes that may take part later.

        Args:
            weights: of the model, see Announced.
            cuts: where the model may be cut.
            arithmetic: of this node. Others must have weights in the same formats; the same class of kernels is rather taken.

        Raises:
            PlacementError: not all blocks are on nodes that answer, after a time.
        """
        end, n_layer = time.monotonic() + self._wait_s, cuts[-1]
        while True:
            wanted = weights, arithmetic.formats, n_layer
            nodes = [one for one in self.usable if (one.weights, one.arithmetic.formats, one.n_layer) == wanted]
            for kind in sorted({one.kind for one in nodes}, key=lambda kind: (kind[1] != arithmetic, str(kind[1]))):
                able = self._answering([one for one in nodes if one.kind == kind], cancel)
                if (chain := choose_chain([self.holder(one) for one in able], n_layer, cuts)) is not None:
                    return SwarmPart(self, kind, chain, [one.config() for one in able])
            if time.monotonic() > end:
                raise PlacementError(self._lacking(nodes, weights, arithmetic.formats.only, n_layer, model))
            cancel.wait(POLL_S)
            self.look(cancel)

    @property
    def usable(self) -> list[Announced]:
        """Nodes that hold blocks, and go on doing so."""
        return [one for one in self.present if one.is_ready]

    @property
    def present(self) -> list[Announced]:
        """Nodes that hold blocks, or will."""
        return [one for one in self._table.nodes if not one.is_leaving]

    @property
    def known(self) -> set[str]:
        """Labels of all nodes that something was heard of lately."""
        return {one.label for one in self._table.nodes}

    def _lacking(self, nodes: Sequence[Announced], weights: str, form: str, n_layer: int, model: str) -> str:
        held = {block for one in nodes for block in range(one.start, one.stop)}
        lacking = [block for block in range(n_layer) if block not in held]
        forms = {one.arithmetic.formats.only for one in self.usable if one.weights == weights}
        others = sorted(map(shown, forms - {form}))
        has = f" (there are nodes with it in {', '.join(others)}: see --quantize, --dtype)" if others else ""
        which = f"block {lacking[0]} and {len(lacking) - 1} others" if len(lacking) > 1 else f"block {(*lacking, 0)[0]}"
        more = f"run `mdi join --model {model}` on more machines"
        return f"no standing node that answers holds {which} of {model} in {shown(form)}{has}: {more}"

    def _answering(self, nodes: Sequence[Announced], cancel: Cancel) -> list[Announced]:
        """Of these, some fast ones for each block that answer; their delays are known then."""
        few = fastest([one for one in nodes if not self._exchanges.is_avoided(one.config())])
        found = self._exchanges.ask([one.config() for one in few], cancel=cancel)
        self._delays = {label: delay_s for label, delay_s in self._delays.items() if label in self.known}
        self._delays |= {label: taken_s / N_TRIPS for label, taken_s in found.items()}
        return [one for one in few if one.label in found]

    def holder(self, one: Announced) -> Holder:
        """A node that takes part in other runs computes for each of them in turn."""
        return Holder(one.label, one.start, one.stop, one.block_s * (1 + one.n_runs), self._delays.get(one.label, 0.0))


class SwarmPart:
    """The nodes of a swarm that one run can use.

    Args:
        kind: see Announced.

    Attributes:
        chain: of the first ring.
        nodes: that answered then, in the chain and outside of it.
    """

    def __init__(self, swarm: Swarm, kind: Kind, chain: Chain, nodes: Sequence[NodeConfig]) -> None:
        self.chain, self.nodes = chain, list(nodes)
        self._swarm, self._kind = swarm, kind

    def look(self, cancel: Cancel) -> None:
        """Ask some nodes what has changed."""
        self._swarm.look(cancel)

    @property
    def present(self) -> dict[str, Announced]:
        """Nodes that the run can use, by their names in its rings."""
        return {one.label: one for one in fastest([one for one in self._swarm.usable if one.kind == self._kind])}

    @property
    def known(self) -> set[str]:
        """Names of all nodes that something was heard of lately."""
        return self._swarm.known

    def replacing(self, ring: Sequence[Stage], present: frozenset[str], others: Sequence[str]) -> Form | None:
        """A ring of nodes that hold their blocks already; None if there is none.

        Those that are present keep their places and their caches, if others hold all the lost blocks; else all is chosen anew.

        Args:
            present: nodes of the ring that live.
            others: nodes outside of it that may be used.
        """
        holders = {name: self._swarm.holder(one) for name, one in self.present.items()}
        stages, free = [], sorted((holders[name] for name in others if name in holders), key=lambda one: one.block_s)
        for stage in ring:
            if stage.name not in present:
                found = next((one for one in free if one.start <= stage.start and stage.stop <= one.stop), None)
                if found is None:
                    break
                free.remove(found)
                stage = Stage(found.name, stage.start, stage.stop)
            stages.append(stage)
        else:
            return Form(tuple(stages), is_moved=False)
        able = [
            holders[name] for name in (*(s.name for s in ring[1:] if s.name in present), *others) if name in holders
        ]
        chain = choose_chain(able, ring[-1].stop)
        if chain is None:
            return None
        return Form(
            (Stage(ring[0].name, 0, 0), *(Stage(part.name, part.start, part.stop) for part in chain)), is_moved=True
        )


def fastest(nodes: Sequence[Announced]) -> list[Announced]:
    """A few nodes for each block, the fastest first."""
    n_held: dict[int, int] = {}
    found = []
    for one in sorted(nodes, key=lambda one: (one.block_s * (1 + one.n_runs), one.process)):
        if any(n_held.get(block, 0) < N_PER_BLOCK for block in range(one.start, one.stop)):
            found.append(one)
            for block in range(one.start, one.stop):
                n_held[block] = n_held.get(block, 0) + 1
    return found


class Admitting(Protocol):
    """The nodes of a run."""

    @property
    def clients(self) -> Mapping[str, ControlClient]: ...

    def admit(self, node: NodeConfig) -> ControlClient: ...

    def forget(self, name: str) -> None: ...


class SwarmLook:
    """Keeps the nodes that may replace lost ones known to a run. Not for several threads.

    Args:
        cancel: of the run.
    """

    def __init__(
        self, nodes: Admitting, swarm: SwarmPart, cancel: Cancel, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._nodes, self._swarm, self._cancel, self._clock = nodes, swarm, cancel, clock
        self._missed: dict[str, float] = {}  # names of nodes that nothing is heard of, and since when

    def best(self, ring: Sequence[Stage], processes: Mapping[str, str]) -> Form | None:
        """Admits nodes that have come, and forgets those that have gone. No better ring: one that goes on is left alone."""
        self.while_sought()
        self._forget({stage.name for stage in ring})
        return None

    def while_sought(self) -> None:
        """Blocks move while a ring is sought, and what is known of nodes expires."""
        self._swarm.look(self._cancel)
        for name, one in self._swarm.present.items():
            if name not in self._nodes.clients:
                self._nodes.admit(one.config())

    def _forget(self, used: set[str]) -> None:
        """A node that was started again is another one: in a long run there would be ever more."""
        now, known = self._clock(), self._swarm.known | used
        self._missed = {
            name: self._missed.get(name, now) for name in self._nodes.clients if name not in known
        }  # fmt: skip
        for name, since in self._missed.items():
            if now - since > FORGET_S:
                self._nodes.forget(name)


def with_chain(cluster: ClusterConfig, part: SwarmPart) -> ClusterConfig:
    """The nodes of a chain, after a starter that has no blocks itself."""
    by_name = {node.name: node for node in part.nodes}
    return replace(cluster, secondaries=tuple(by_name[one.name] for one in part.chain))
