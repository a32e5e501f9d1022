"""A node of a standing swarm: it holds blocks of one model for all runs, tells others so, and moves where blocks are lacking.

It is no public swarm: all its machines have one key, and trust each other. Which blocks a node holds is decided by pure
functions (`mdi.placement.balance`) of what all nodes have announced (`mdi.control.swarm`).
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdi.cancel import Cancel, CancelledError, Periodic
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.weights import WeightSource
from mdi.control.client import ControlClient
from mdi.control.meeting import Exchanges, Peer
from mdi.control.messages import ForwardRequest, InitRequest, PartSpec, ProfileRequest
from mdi.control.swarm import Announced, ModelFacts, ModelRequest, SwarmTable
from mdi.errors import Code, ControlError, MdiError, NoMemoryError, UsageError
from mdi.host.resources import free_memory_bytes, memory_bytes
from mdi.net.keys import KeyFile
from mdi.node.secondary import SecondaryNode
from mdi.node.swarm_model import SwarmModel
from mdi.placement.balance import Served, plan, speeds, weakest_span
from mdi.placement.cost import time_of
from mdi.placement.profile import NodeProfile
from mdi.spec.cluster import NodeConfig
from mdi.spec.extent import Extent
from mdi.stages.spec import StageSpec
from mdi.stages.store import Claim, HeldStage

SPARE_SHARE = 0.05  # of the memory that a node may use
MARGIN_SHARE = 0.3  # of the free memory, that is left for caches
ECHO_BYTES = 1 << 20  # with which the way to another node is measured
N_ASKED = 2, 1  # nodes that are known, and nodes that were given or found, in each look
N_NEAR = 32  # nodes of which the nearest is sought
CLOSE_S = 8.0  # a service has 30 for its whole end
ROW_BYTES = 4  # of one number of a row on the way

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class SwarmWaits:
    """Seconds.

    Attributes:
        tell_s: between two exchanges with others.
        refresh_s: until a node says again what has not changed.
        look_s: between two looks at whether blocks should move.
        leave_s: for the rings of a node that moves, to go on without it.
    """

    tell_s: float = 2.0
    refresh_s: float = 15.0
    look_s: float = 10.0
    leave_s: float = 30.0


class SwarmMember:
    """Works in a thread of its own from `start` to `close`.

    Args:
        node: that is open, and computes.
        source: the whole model on this machine; or the name of one whose parts come from the nearest node that has them.
        peers: nodes of the swarm, if some are known.
        found: more of them, as they announce themselves in the network: addresses and ring ports.
        most_blocks: that it may hold; None: as many as fit.
        spare_bytes: memory that is left to others: with less free, the node gives its own back. None: SPARE_SHARE of all.
        free_bytes: the free memory.
    """

    def __init__(
        self, node: SecondaryNode, source: WeightSource | str, peers: Sequence[Peer], keys: KeyFile | None,
        most_blocks: int | None = None, found: Callable[[], Sequence[NodeConfig]] = lambda: (),
        waits: SwarmWaits | None = None, spare_bytes: int | None = None,
        free_bytes: Callable[[], int] = free_memory_bytes,
    ) -> None:  # fmt: skip
        self._node, self._source, self._keys = node, source, keys
        self._ways: dict[str, float] = {}  # seconds of an exchange with other nodes, by their labels
        self._most_blocks = most_blocks
        self._waits = waits or SwarmWaits()
        self.table: SwarmTable = node.table
        self._cancel = Cancel()
        self._version = 0
        self._told_s = float("-inf")
        self._spare_bytes = int(memory_bytes() * SPARE_SHARE) if spare_bytes is None else spare_bytes
        self._free_bytes = free_bytes
        self._n_blocks = self._gave_bytes = 0
        place = node.config.addr, node.ring_port
        self._exchanges = Exchanges(self.table, peers, keys, found, (node.process, place))
        self.held: HeldStage | None = None
        self._own: Announced | None = None
        self._is_measured, self._next_look = False, 0.0
        self._trouble = ""  # that was told last
        self._error: BaseException | None = None
        self._random = random.Random(node.process)
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Say that this node leaves, and end, within CLOSE_S; harmless if repeated."""
        self._cancel.cancel()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    @property
    def announced(self) -> Announced | None:
        """The last announcement of this node."""
        return self._own

    def check(self) -> None:
        """Raise the error that has ended this node's part in the swarm, if one has."""
        if self._error is not None:
            raise self._error

    # Its thread

    def _run(self) -> None:
        try:
            while not self._cancel.is_cancelled:
                try:
                    self._round()
                    if self._own is not None and self._own.is_ready:
                        self._trouble = ""
                except NoMemoryError as e:  # others may give some back
                    self._tell_trouble(e)
                except UsageError:  # what it was started with does not change
                    raise
                except Exception as e:
                    self._tell_trouble(e)
                with contextlib.suppress(CancelledError):
                    self._cancel.wait(self._waits.tell_s * self._random.uniform(0.7, 1.3))
        except BaseException as e:
            self._error = e
            self._node.turns.close()  # so that the process ends, with this error: one that lives on looks healthy
        if self._own is not None:
            with contextlib.suppress(Exception):  # the others notice it anyway, later
                self._exchanges.tell(*N_ASKED, self._announce(is_leaving=True))

    def _round(self) -> None:
        """Take part first, then do what is due. Raises whatever goes wrong: the next round continues where this one ended."""
        if not self._is_measured:
            self._join()
            self._is_measured = True
            # Others may have come, too.
            self._next_look = time.monotonic() + self._waits.tell_s * self._random.uniform(1, 3)
            return self._take_weakest()
        self._keep_told()
        self._mind_memory()
        if not self.has_given_back and time.monotonic() >= self._next_look:
            try:
                self._look()
            finally:
                self._next_look = time.monotonic() + self._waits.look_s * self._random.uniform(0.7, 1.3)

    def _tell_trouble(self, error: Exception) -> None:
        """Once, as long as it stays the same."""
        if self._cancel.is_cancelled:
            return
        own, words = self._own, str(error) if isinstance(error, MdiError) else f"{type(error).__name__}: {error}"
        state = "" if own is not None and own.is_ready else " holds no blocks at the moment, and"
        logger.debug("a round of the swarm failed", exc_info=True)
        if words != self._trouble:
            self._trouble = words
            logger.warning("warning: %s%s tries again: %s", self._node.config.name, state, words)

    def _join(self) -> None:
        """Measure this node, and learn of the others."""
        node = self._node
        node.wait_for_kernels(self._cancel)
        model = node.swarm_model = (
            self._found(self._source) if isinstance(self._source, str) else SwarmModel.of(self._source)
        )
        facts, n_layer = model.facts, model.n_layer
        computing = node.weights.computing(self._request(n_layer - 1, n_layer))
        if computing.packing is None:
            raise UsageError(
                f"a standing node computes in the kernels, on a CPU; this one would compute {computing.path}"
            )
        answer = node.profile(ProfileRequest(model=facts.model))
        profile = NodeProfile.from_json(answer["profile"], "the node's own profile")
        block_s = time_of(profile.block_s, 1)
        self._n_blocks = n_blocks = min(n_layer, self._most_blocks or n_layer, self._fitting())
        self._own = Announced(
            node.config.name[:80], node.process, 0, node.config.addr, node.control_port, node.ring_port, facts.model.name,
            model.weights, computing.arithmetic("auto"), n_layer, 0, 0, is_ready=False, speed=0.0,
            block_s=block_s, is_whole=model.is_whole,
        )  # fmt: skip
        self._ask_others()
        bytes_s = self._way_bytes_s()
        row_bytes = facts.model.spec.widest_row * ROW_BYTES
        self._own = replace(self._own, speed=min(1 / (block_s * n_blocks), bytes_s / row_bytes))

    def _take_weakest(self) -> None:
        """Hold the span that is served slowest."""
        assert self._own is not None
        self._drop()
        served = speeds([served_of(one) for one in self._others], self._own.n_layer)
        start = weakest_span(served, self._n_blocks)
        self._say(start=start, stop=start + self._n_blocks)
        self._hold(start, start + self._n_blocks)

    def _fitting(self) -> int:
        """How many blocks fit into the memory, with some left for caches. Raises NoMemoryError if none does."""
        spec = self._spec(self._model.n_layer - 1, self._model.n_layer)  # of the block whose part each node knows
        block_bytes = max(1, spec.weight_bytes({}))
        free = self._node.stages.available(spec.computing.device)
        n = int(free * (1 - MARGIN_SHARE) // block_bytes)
        if n < 1:
            raise NoMemoryError(
                f"not one block of {self._model.facts.model.name} fits into the memory of {self._node.config.name}"
            )
        return n

    def _way_bytes_s(self) -> float:
        """The rate to another node, as far as one can be asked."""
        others = [one.config() for one in self._others]
        self._random.shuffle(others)
        for config in others[:3]:
            begin = time.monotonic()
            try:
                ControlClient(config, self._keys).echo(ECHO_BYTES, self._cancel)
            except ControlError as e:  # it computes, or is gone
                logger.debug("the way to %s was not measured: %s", config.name, e)
                continue
            return ECHO_BYTES / max(1e-6, time.monotonic() - begin)
        return float("inf")

    def _hold(self, start: int, stop: int) -> None:
        """Load these blocks, and keep them until `_drop`. Raises MdiError."""
        spec = self._spec(start, stop)
        claim = Claim(secrets.token_hex(8), self._node.process)
        with self._node.store.in_use({part.sha256 for part in spec.parts}):
            self._get_parts(spec)
            self.held = self._node.stages.acquire(spec, claim, self._node.weights, self._cancel)
        self._say(start=start, stop=stop, is_ready=True)
        logger.info("%s holds %s of %s for all runs", self._node.config.name, spec, self._model.facts.model.name)

    def _drop(self) -> None:
        if self.held is not None:
            self._node.stages.remove(self.held)
        self.held = None

    def _spec(self, start: int, stop: int) -> StageSpec:
        return self._node.weights.spec(self._request(start, stop))

    def _request(self, start: int, stop: int) -> InitRequest:
        """As a starter would ask for these blocks, for a text of one token: the stage itself needs no caches."""
        model, name = self._model, self._node.config.name
        facts, parts = model.facts, model.parts(stage_parts(start, stop, starter=False), self._told_parts)
        return InitRequest(
            run="0" * 16, epoch="0" * 16, index=1, names=("starter", name), placement="", next_addr="", next_port=1,
            model=facts.model, blocks=(start, stop), parts=parts, extent=Extent(n_sequences=1),
        )  # fmt: skip

    # A model that is not here

    @property
    def _model(self) -> SwarmModel:
        model = self._node.swarm_model
        assert model is not None
        return model

    def _found(self, name: str) -> SwarmModel:
        """A model as the other nodes know it; waits for one that has it. Raises the error of the `Cancel`."""
        report = Periodic()
        while True:
            self._ask_others()
            for one in self._nearest([one for one in self.table.nodes if is_named(one, name) and one.is_ready]):
                try:
                    last = ModelRequest(one.weights, (f"block.{one.n_layer - 1}",))
                    model = SwarmModel(self._asked(one).model(last, self._cancel))
                    if model.weights == one.weights:
                        return model
                    logger.warning("warning: %s tells of another model than it has announced", one.label)
                except ControlError as e:
                    logger.debug("%s does not tell of %s: %s", one.label, name, e)
            if report.is_due():
                logger.info("%s waits for a node that has %s", self._node.config.name, name)
            self._cancel.wait(self._waits.tell_s)

    def _told_parts(self, names: Sequence[str]) -> ModelFacts:
        """The hashes of parts, from other nodes. Raises ControlError: nobody knows all of them."""
        error = ControlError(f"no other node has the weights of {', '.join(names)}", code=Code.WEIGHTS)
        found: dict[str, PartSpec] = {}
        weights = self._model.weights
        for one in self._nearest([one for one in self.table.nodes if one.weights == weights]):
            wanted = tuple(name for name in names if name not in found and _has(one, name))
            if wanted:
                with contextlib.suppress(ControlError):
                    told = self._asked(one).model(ModelRequest(weights, wanted), self._cancel)
                    found |= {part.name: part for part in told.parts}
            if len(found) == len(names):
                return replace(self._model.facts, parts=tuple(found.values()))
        raise error

    def _get_parts(self, spec: StageSpec) -> None:
        """Have the missing parts sent by the nearest nodes that have them. Raises ControlError: nobody has one."""
        node, weights = self._node, self._node.weights
        missing = weights.missing(spec, (), self._cancel)
        if not missing or self._model.is_whole:
            return
        weights.check_disk(spec, missing)
        parts = {part.sha256: PartSpec(part.name, part.sha256, part.n_bytes) for part in missing}
        node.expected = parts
        self._ways.clear()  # all are asked again: a node sends parts only to one that it has heard of
        try:
            for part in parts.values():
                self._cancel.check()
                self._get_part(part)
        finally:
            node.expected = {}

    def _get_part(self, part: PartSpec) -> None:
        node = self._node
        others = [one for one in self.table.nodes if one.weights == self._model.weights and _has(one, part.name)]
        for one in self._nearest(others):
            asked = ForwardRequest(
                node.process,
                part,
                node.store.partial_bytes(part.sha256),
                node.config.name,
                node.config.addr,
                node.ring_port,
            )
            try:
                self._asked(one).forward(asked, self._cancel)
                logger.debug("%s has sent %s", one.label, part.name)
                return
            except ControlError as e:
                self._cancel.check()
                if node.store.has(part.sha256):
                    return
                logger.info("%s has not sent %s: %s", one.label, part.name, e)
        raise ControlError(f"no node has sent {part.name}", code=Code.WEIGHTS)

    def _asked(self, one: Announced) -> ControlClient:
        return ControlClient(one.config(), self._keys)

    def _nearest(self, nodes: Sequence[Announced]) -> list[Announced]:
        """Some other nodes, the shortest way first; those that do not answer are left out. They know this node then."""
        others = [one for one in nodes if one.process != self._node.process and not one.is_leaving]
        others = [one for one in others if not self._exchanges.is_avoided(one.config())]
        new = [one.config() for one in others if one.label not in self._ways]
        n_new = max(0, N_NEAR - (len(others) - len(new)))
        self._note_ways(self._exchanges.ask(self._random.sample(new, min(n_new, len(new))), self._told, self._cancel))
        return sorted((one for one in others if one.label in self._ways), key=lambda one: self._ways[one.label])

    # Announcements

    @property
    def _others(self) -> list[Announced]:
        """Nodes of the same model, in the same format."""
        own = self._own
        assert own is not None
        return [
            one for one in self.table.nodes
            if one.process != own.process and one.kind == own.kind and one.stop > one.start and not one.is_leaving
        ]  # fmt: skip

    def _say(self, **changes: Any) -> None:
        """Announce something new of this node, to as many others as can be reached at once."""
        self._announce(**changes)
        self._ask_others()

    def _announce(self, **changes: Any) -> Announced:
        assert self._own is not None
        self._version += 1
        spec_free = self._node.stages.available(str(self._node.weights.device))
        own = self._own = replace(
            self._own, version=self._version, n_runs=len(self._node.runs.active), cache_bytes=spec_free, **changes
        )
        self._told_s = time.monotonic()
        self.table.add([own])
        return own

    def _keep_told(self) -> None:
        """Exchange what is known; say the own announcement again before it expires, or when another number of runs is here."""
        own = self._own
        assert own is not None
        is_old = time.monotonic() - self._told_s > self._waits.refresh_s
        if is_old or own.n_runs != len(self._node.runs.active):
            self._say()
        else:
            self._ask_others()

    @property
    def _told(self) -> Announced | None:
        """What others learn of this node."""
        return self._own if self._own is not None and self._own.version else None

    def _ask_others(self) -> None:
        """Exchange announcements with some nodes that are known, and with one that was given or found."""
        self._note_ways(self._exchanges.look(*N_ASKED, self._told, self._cancel))

    def _note_ways(self, found: Mapping[str, float]) -> None:
        """The shortest times are kept, of nodes that something was heard of lately."""
        shortest = {name: min(taken_s, self._ways.get(name, taken_s)) for name, taken_s in found.items()}
        present = {one.label for one in self.table.nodes}
        self._ways = {name: taken_s for name, taken_s in (self._ways | shortest).items() if name in present}

    # Memory

    @property
    def has_given_back(self) -> bool:
        """Whether it holds no blocks, because others on this machine need the memory."""
        return self._gave_bytes > 0

    def _mind_memory(self) -> None:
        """While too little is free, give back the memory of runs that have ended, then the blocks. Take some again later."""
        free, spare = self._free_bytes(), self._spare_bytes
        name = self._node.config.name
        if self.has_given_back:
            if free > 2 * spare + self._gave_bytes:
                self._gave_bytes = 0
                return self._take_weakest()
            if free < spare:
                self._end_rings()  # one may have been formed while the blocks were still here
            self._node.stages.drop_unused()  # of rings that have ended only now
            return
        if free >= spare or (self._node.stages.drop_unused() and self._free_bytes() >= spare):
            return
        logger.warning("warning: memory is short: %s gives its blocks back", name)
        gave_bytes = max(1, 0 if self.held is None else self.held.weight_bytes)
        self._say(start=0, stop=0, is_ready=False)
        self._leave_rings()
        self._end_rings()  # nobody could take over: the run forms another ring, or ends
        self._drop()
        self._node.stages.drop_unused()
        self._gave_bytes = gave_bytes

    def _end_rings(self) -> None:
        for worker in self._node.runs.active:
            worker.quit("its memory is needed")

    # Moves

    def _look(self) -> None:
        """Move if it is this node's turn in the plan for all."""
        own = self._own
        assert own is not None
        if not own.is_ready or self.held is None or self.held not in self._node.stages.listed:
            return self._hold_again()
        others = self._others
        moves = plan([served_of(one) for one in (own, *others)], own.n_layer)
        if not moves or moves[0].name != own.process:
            return
        active = [one for one in self._node.runs.active if not one.has_ended.is_set()]
        if active and not all(
            any(one.is_ready and one.start <= block < one.stop for one in others)
            for block in range(own.start, own.stop)
        ):
            return  # a ring needs what nobody else has
        self._move(moves[0].start)

    def _hold_again(self) -> None:
        """The blocks that it has announced, else those that are served slowest: what was begun before has failed."""
        own = self._own
        assert own is not None
        if own.start == own.stop:
            return self._take_weakest()
        self._drop()
        self._hold(own.start, own.stop)

    def _move(self, start: int) -> None:
        own = self._own
        assert own is not None
        n_blocks, before = own.stop - own.start, own
        logger.info(
            "%s moves from blocks %d-%d to %d-%d, which the swarm lacks",
            own.name, own.start, own.stop - 1, start, start + n_blocks - 1,
        )  # fmt: skip
        self._say(start=start, stop=start + n_blocks, is_ready=False)
        if not self._leave_rings():
            logger.info("%s stays: its rings did not go on without it", own.name)
            return self._say(start=before.start, stop=before.stop, is_ready=True)
        self._drop()
        self._hold(start, start + n_blocks)

    def _leave_rings(self) -> bool:
        """Ask all rings to go on without this node; whether they have done so in time."""
        asked: set[str] = set()
        end = time.monotonic() + self._waits.leave_s
        while active := [one for one in self._node.runs.active if not one.has_ended.is_set()]:
            for worker in active:
                if worker.is_running and worker.request.epoch not in asked:
                    asked.add(worker.request.epoch)
                    worker.announce_leave()
            if time.monotonic() > end:
                return False
            self._cancel.wait(0.1)
        return True


def is_named(one: Announced, name: str) -> bool:
    """Whether a node holds blocks of the model of this name; the name of its owner does not count."""
    return one.model.rsplit("/")[-1].lower() == name.rsplit("/")[-1].lower()


def _has(one: Announced, part: str) -> bool:
    """Whether a node has said that a part is there."""
    block = part.removeprefix("block.")
    return one.is_whole or (one.is_ready and block.isdigit() and one.start <= int(block) < one.stop)


def served_of(one: Announced) -> Served:
    """For the plan of moves; nodes are told apart by their processes."""
    return Served(one.process, one.speed, one.start, one.stop - one.start)
