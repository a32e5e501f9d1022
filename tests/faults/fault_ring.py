"""A ring of real processes behind faulty links: nodes that can be killed, halted, cut off, and brought back."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from faulty_links import BACK, FRONT, FaultyLink, Network, Pace

from mdi.control.client import ControlClient
from mdi.engine.sequence import SamplingParams
from mdi.errors import ControlError, MdiError
from mdi.run.local import free_ports
from mdi.run.nodes import GivenNodes
from mdi.run.policy import BROUGHT_DOWN, Decision, Event, Lost
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig, load_cluster
from mdi.spec.options import StarterOptions
from processes import Process, Reader, is_running

DEADLINE_S = 120.0
NO_LIMIT = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Wanted:
    """A text that a run is to generate."""

    prompt: str
    params: SamplingParams


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        ids: of each text, as far as it came.
        is_whole: which texts have ended by themselves.
        is_ended_alone: which were taken for what brought two nodes down, one after the other (mdi.run.policy).
        losses: what was under way when nodes were lost, in order: of each text its positions, and the tokens that it had.
        error: what ended the run, if it did not end by itself.
        seconds: from the first text's submission to the end.
        gap_s: the longest time between two tokens of a text.
        recoveries: of each node that was lost, what replaced it and how long that took, as --json has it.
        guesses: tokens that were guessed, and those of them that were right.
        may_differ_from: of each text the first token that the run says may be another one; None: none.
    """

    ids: list[list[int]] = field(default_factory=list)
    may_differ_from: list[int | None] = field(default_factory=list)
    is_whole: list[bool] = field(default_factory=list)
    is_ended_alone: list[bool] = field(default_factory=list)
    guesses: tuple[int, int] = (0, 0)
    losses: list[dict[int, tuple[int, int, int]]] = field(default_factory=list)
    error: MdiError | None = None
    seconds: float = 0.0
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    gap_s: float = 0.0


class FaultRing:
    """Secondaries as processes, and faulty links before all ports of a ring of up to `n_nodes` nodes, the starter among them.

    Args:
        folder: for the nodes files and the caches of the secondaries.
        n_spares: of the secondaries, the last ones.
        pace: of the ring's links.
    """

    def __init__(
        self, folder: Path, n_nodes: int, n_spares: int = 0, pace: Pace | None = None, reader: Reader | None = None
    ):
        self._own_reader = Reader() if reader is None else None
        self._reader = reader or self._own_reader
        self.folder = folder
        self.n_nodes = n_nodes
        self.n_spares = n_spares
        folder.mkdir(parents=True, exist_ok=True)
        self.network = Network()
        ports = iter(free_ports(2 * n_nodes))
        self.ports = [(next(ports), next(ports)) for _ in range(n_nodes)]
        self.links: list[FaultyLink] = [self.network.link(port_in, pace) for _, port_in in self.ports]
        for port, _ in self.ports:
            self.network.link(port)
        self.secondaries: list[Process | None] = [None] * (n_nodes - 1)
        self._told_to_end: set[int] = set()
        self._closed = False
        self._path = self._write(range(n_nodes - 1), n_spares)

    def _write(self, secondaries: Sequence[int], n_spares: int) -> Path:
        entries = [
            {"addr": FRONT, "bind": BACK, "communication": {"port": port}, "inference": {"port_in": port_in}}
            for port, port_in in self.ports
        ]
        for entry in entries[len(entries) - n_spares :]:
            entry["spare"] = True
        path = self.folder / f"nodes{len(secondaries)}.json"
        path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}), encoding="utf-8")
        return path

    def cluster(self, n_nodes: int | None = None) -> ClusterConfig:
        """The nodes of a run: the first `n_nodes`, and the spares."""
        whole = load_cluster(self._path)
        n_secondaries = self.n_nodes - self.n_spares - 1 if n_nodes is None else n_nodes - 1
        return replace(whole, secondaries=whole.secondaries[:n_secondaries])

    # Processes

    def start(self, index: int) -> Process:
        """Start a secondary, with weights of an earlier life only if that had the same folder."""
        old = self.secondaries[index]
        if old is not None:
            old.end()
        cache = self.folder / f"cache{index}"
        process = Process(
            self._reader, "secondary", "--until-stdin-closes", "--nodes-config", self._path, index, "--cache-dir", cache, "-v",
            stdin=subprocess.PIPE, env={"GOMP_SPINCOUNT": "0", "MKL_NUM_THREADS": "1"},
        )  # fmt: skip
        self.secondaries[index] = process
        self._told_to_end.discard(index)
        return process

    def start_all(self) -> None:
        """Start what does not run, let go on what was halted, mend all links; return when all nodes wait for a starter."""
        self.let_go_on()
        for index in range(self.n_nodes - 1):
            process = self.secondaries[index]
            if process is None or process.child.poll() is not None or index in self._told_to_end:
                self.start(index)
            else:
                self.fill_disk(index, is_full=False)
        self.wait_waiting()

    def let_go_on(self) -> None:
        """What was halted goes on, and what was held back passes."""
        for link in self.links:
            link.thaw()
        for index in range(len(self.secondaries)):
            self.signal(index, signal.SIGCONT)

    def wait_waiting(self, deadline_s: float = DEADLINE_S) -> None:
        """Until every secondary that runs waits for a run, as it was before the first one."""
        deadline = time.monotonic() + deadline_s
        for index, process in enumerate(self.secondaries):
            while process is not None and process.child.poll() is None:
                state = self.state(index)
                if state in ("IDLE", "READY"):
                    break
                if time.monotonic() > deadline:
                    raise AssertionError(f"secondary{index} is still {state}: {process.story()}")
                threading.Event().wait(0.02)

    def state(self, index: int) -> str:
        """What a secondary says of itself; "" if it says nothing."""
        return str(self._status(index).get("state", ""))

    def knows(self, index: int, run: str) -> bool:
        """Whether a secondary has been told of a run."""
        return self._status(index, run).get("epoch") is not None

    def _status(self, index: int, run: str | None = None) -> dict[str, Any]:
        try:
            return ControlClient(NodeConfig("", BACK, *self.ports[index + 1])).status(run, 5.0)
        except ControlError:
            return {}

    def is_alive(self, index: int) -> bool:
        process = self.secondaries[index]
        return process is not None and process.child.poll() is None

    def kill(self, index: int) -> None:
        process = self.secondaries[index]
        if process is not None:
            process.signal(signal.SIGKILL)
            process.child.wait(DEADLINE_S)

    def signal(self, index: int, number: int) -> None:
        process = self.secondaries[index]
        if process is not None and process.child.poll() is None:
            process.signal(number)
            if number == signal.SIGTERM:  # it may live a little longer
                self._told_to_end.add(index)

    def fill_disk(self, index: int, is_full: bool = True) -> None:
        """From now on no file of the node can grow; or all can again."""
        process = self.secondaries[index]
        if process is not None and process.child.poll() is None:
            limit = 0 if is_full else NO_LIMIT
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, NO_LIMIT))

    def close(self) -> list[int]:
        """End everything; the processes that would not go. Harmless if repeated."""
        if self._closed:
            return []
        self._closed = True
        pids = [process.pid for process in self.secondaries if process is not None]
        for process in self.secondaries:
            if process is not None:
                process.end()
        self.network.close()
        if self._own_reader is not None:
            self._own_reader.close()
        return [pid for pid in pids if is_running(pid)]


@contextlib.contextmanager
def fault_ring(folder: Path, n_nodes: int, **options: object) -> Iterator[FaultRing]:
    ring = FaultRing(folder, n_nodes, **options)  # type: ignore[arg-type]
    try:
        yield ring
    finally:
        ring.close()


class Running:
    """A run, as the one who breaks something sees it."""

    def __init__(self) -> None:
        self.node: Run | None = None
        self.over = threading.Event()

    @property
    def state(self) -> str:
        return "" if self.node is None else self.node.state

    @property
    def n_tokens(self) -> int:
        return 0 if self.node is None else sum(len(sample.token_ids) for sample in list(self.node.samples))

    def wait_until(self, is_so: Callable[[], bool]) -> bool:
        """False if the run ended first."""
        while not self.over.wait(0.005):
            if is_so():
                return True
        return False


def run(
    cluster: ClusterConfig, options: StarterOptions, wanted: Sequence[Wanted], running: Running | None = None
) -> Outcome:
    """One run from its set-up to its end, with the starter in this process; whatever goes wrong is in the outcome."""
    running = running or Running()
    outcome = Outcome()
    longest = max(one.params.n_tokens for one in wanted)
    node = Run(GivenNodes(cluster), options, longest, [one.prompt for one in wanted])
    running.node = node
    begin = time.perf_counter()
    try:
        node.open()
        if (speculation := node.engine.speculation) is not None:  # guesses whatever they cost
            speculation.limits = lambda sequence, n_places, *_: (n_places, 3)  # type: ignore[method-assign]
        _note_losses(node, outcome)
        begin = time.perf_counter()
        for one, ids in zip(wanted, node.prompt_ids, strict=True):
            node.submit(one.prompt, ids, one.params)
        node.read()
    except MdiError as e:
        outcome.error = e
    finally:
        outcome.seconds = time.perf_counter() - begin
        try:
            node.close()
        except MdiError as e:
            outcome.error = outcome.error or e
        outcome.recoveries = list(node.metrics().to_json().get("recoveries", []))
        outcome.may_differ_from = [sample.may_differ_from for sample in node.metrics().samples]
        node.close()
        running.over.set()
    outcome.ids = [list(sample.token_ids) for sample in node.samples]
    outcome.guesses = node.metrics().guesses
    outcome.gap_s = max((b - a for s in node.samples for a, b in pairwise(s.token_times_s)), default=0.0)
    outcome.is_whole = [sample.finish_reason is not None for sample in node.samples]
    outcome.is_ended_alone = [sample.finish_reason == BROUGHT_DOWN for sample in node.samples]
    return outcome


def _note_losses(node: Run, outcome: Outcome) -> None:
    policy = node.loop.policy
    decide = policy.next

    def note(event: Event | None, now: float) -> Decision:
        if isinstance(event, Lost):
            known = event.n_known
            outcome.losses.append({i: (*span, known[i]) for i, span in event.in_flight.items() if i in known})
        return decide(event, now)

    policy.next = note  # type: ignore[method-assign]


def texts(n: int, n_tokens: int, seed: int) -> list[Wanted]:
    """Half of them greedy, half of them sampled."""
    prompts = ("The ring", "Who are you?", "Every node keeps a cache for each sequence.", "One")
    return [
        Wanted(
            prompts[i % len(prompts)] * (1 + i % 3), SamplingParams(n_tokens, 0.0 if i % 2 else 0.9, 40, seed=seed + i)
        )
        for i in range(n)
    ]
