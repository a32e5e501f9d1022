"""The nodes of a run: where they come from, the starter's own ports, asking all nodes at the same time, and their dismissal."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from mdi.cancel import Cancel, CancelledError
from mdi.control.client import ControlClient, FanOut
from mdi.control.meeting import ASK_S, Unanswered
from mdi.control.message_server import EchoOnly, MessageServer
from mdi.control.server import ControlServer, StatusOnly
from mdi.errors import Code, ControlError, NodeLostError
from mdi.net.listener import RingListener, open_socket
from mdi.run.policy import Answer, Roll
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.stages.store import StageStore

if TYPE_CHECKING:
    from mdi.control.discovery import Arrivals
    from mdi.run.local import LocalRing
    from mdi.run.swarm import Swarm

LOOK_S = 0.1  # how often processes of this machine are looked at

# Nodes that were found during a run, by the numbers of their processes.
Newcomers = Callable[[], Mapping[str, NodeConfig]]


def nobody() -> Mapping[str, NodeConfig]:
    return {}


class Losses:
    """Ended processes of nodes, while a ring is sought. Each ends the present attempt or, if that does not notice, the next.

    Args:
        cancel: of the run.
    """

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._errors: deque[NodeLostError] = deque()
        self._attempt: Cancel | None = None

    def add(self, error: NodeLostError) -> None:
        """From any thread."""
        with self._lock:
            self._errors.append(error)
            attempt = self._attempt
        if attempt is not None:
            attempt.cancel(error)

    @contextmanager
    def attempt(self) -> Iterator[Cancel]:
        """Within: a child of the run's `Cancel` that a loss ends, too."""
        with self._cancel.child() as attempt:
            with self._lock:
                self._attempt, error = attempt, self._errors[0] if self._errors else None
            if error is not None:
                attempt.cancel(error)
            try:
                yield attempt
            except BaseException:
                with self._lock, suppress(ValueError):  # a loss is reported once
                    self._errors.remove(attempt.error)  # type: ignore[arg-type]
                raise
            finally:
                self._attempt = None


@contextmanager
def watching(look: Callable[[], None], losses: Losses) -> Iterator[None]:
    """Within: a thread looks again and again, and adds the NodeLostErrors that `look` raises."""
    has_ended = threading.Event()

    def run() -> None:
        while not has_ended.wait(LOOK_S):
            try:
                look()
            except NodeLostError as e:
                losses.add(e)

    thread = threading.Thread(target=run, name="node-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


class NodeSource:
    """The nodes that `find` finds, searched again before each run; this process is their starter.

    Args:
        find: raises MdiError if they cannot be had.
        threads, cores: for this process; None: those of the nodes file, else its share of the machine.
        arrivals: nodes that start during a run.

    Attributes:
        swarm: whose nodes hold the blocks already; None: runs give nodes their blocks.
    """

    swarm: Swarm | None = None

    def __init__(
        self, find: Callable[[], ClusterConfig], threads: int | None = None, cores: Sequence[int] | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:  # fmt: skip
        self._find = find
        self._threads = threads
        self._cores = cores
        self._arrivals = arrivals

    @property
    def newcomers(self) -> Newcomers:
        """Nodes that have come during a run."""
        return nobody if self._arrivals is None else self._arrivals.nodes

    def cluster(self) -> ClusterConfig:
        """The nodes; this process computes with its share of its machine from now on. Raises MdiError."""
        cluster = self._find()
        starter = cluster.starter
        from mdi.host.threads import choose_threads, threads_of_others

        cores = starter.cores if self._cores is None else self._cores
        choose_threads(self._threads or starter.threads, cores, threads_of_others(starter, cluster.nodes))
        return cluster

    def watched(self, losses: Losses) -> AbstractContextManager[None]:
        """Within: ended processes of nodes are added, as far as this one started them."""
        return nullcontext()

    def check(self) -> None:
        """Start ended processes again, or raise NodeLostError, once for each; does nothing for nodes that others started."""

    def close(self) -> None:
        """End the started processes; harmless if repeated."""
        if self._arrivals is not None:
            self._arrivals.close()

    def __enter__(self) -> NodeSource:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OwnProcesses(NodeSource):
    """A ring of processes on this machine, started for the first run.

    Args:
        make: the ring, not started yet.
        begun: called with a started ring; its nodes as the starter sees them.
        is_revived: `check` starts an ended process again, and the others continue; else it raises NodeLostError.
    """

    def __init__(
        self, make: Callable[[], LocalRing], begun: Callable[[LocalRing], ClusterConfig], is_revived: bool = False
    ) -> None:
        super().__init__(self._started)
        self._is_revived = is_revived
        self._make = make
        self._begun = begun
        self._stack = ExitStack()
        self._ring: LocalRing | None = None

    def _started(self) -> ClusterConfig:
        if self._ring is None:
            self._ring = self._stack.enter_context(self._make())
        return self._begun(self._ring)

    def check(self) -> None:
        if self._ring is not None and self._is_revived:
            self._ring.revive()
        elif self._ring is not None:
            self._ring.check()

    def watched(self, losses: Losses) -> AbstractContextManager[None]:
        return watching(self.check, losses)

    def close(self) -> None:
        self._ring = None
        self._stack.close()


class GivenNodes(NodeSource):
    """A cluster that is known; this process keeps the threads that it has.

    Args:
        look: raises NodeLostError, once for each, if a node has ended; called by a thread while a ring is sought.
    """

    def __init__(
        self, cluster: ClusterConfig, newcomers: Newcomers = nobody, look: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(lambda: cluster)
        self._look = look
        self._found = newcomers

    @property
    def newcomers(self) -> Newcomers:
        return self._found

    def cluster(self) -> ClusterConfig:
        return self._find()

    def watched(self, losses: Losses) -> AbstractContextManager[None]:
        return watching(self._look, losses)


class SwarmNodes(NodeSource):
    """The standing nodes of a swarm; this process is the starter of rings over some of them.

    Args:
        starter: makes its entry, with free ports.
        close: gives back what finds nodes.
    """

    def __init__(
        self, swarm: Swarm, starter: Callable[[], NodeConfig], cancel: Cancel, threads: int | None,
        cores: Sequence[int] | None, close: Callable[[], None],
    ) -> None:  # fmt: skip
        def found() -> ClusterConfig:
            return ClusterConfig(starter(), (swarm.first(cancel),), swarm.keys)

        super().__init__(found, threads, cores)
        self.swarm = swarm
        self._close = close

    def close(self) -> None:
        super().close()
        self._close()


class RunStatus(Protocol):
    """A run that can be asked for its status."""

    @property
    def run_id(self) -> str: ...

    def status(self, run: str | None) -> dict[str, Any]: ...

    def check_echo(self) -> None: ...


class StarterPorts(StatusOnly, EchoOnly):
    """Opened by the first run. A ring of one node has no ring port, and no control port if its number is 0."""

    def __init__(self) -> None:
        self.caches = StageStore()
        self.control: ControlServer | None = None
        self.listener: RingListener | None = None
        self._messages: MessageServer | None = None
        self._runs: list[RunStatus] = []
        self._opening = threading.Lock()

    def add(self, run: RunStatus, cluster: ClusterConfig) -> None:
        """From now on, answer for this one, too. Raises UsageError if a port cannot be had."""
        node = cluster.starter
        with self._opening:
            self._runs.append(run)
            if self.control is None and (cluster.secondaries or node.port):
                self.control = ControlServer(self, node.listen_addr, node.port, node.name, cluster.keys)
            if self.listener is None and cluster.secondaries:
                sock = open_socket(node.listen_addr, node.port_in, "starter's inference port_in")
                self.listener = RingListener(sock, node.name, cluster.keys)
                self._messages = MessageServer(self, self.listener)

    def with_ports(self, cluster: ClusterConfig) -> ClusterConfig:
        """A cluster of several nodes with the ports that this one really has."""
        assert self.listener is not None and self.control is not None
        return replace(cluster, starter=replace(cluster.starter, port=self.control.port, port_in=self.listener.port))

    def remove(self, run: RunStatus) -> None:
        """Harmless if repeated."""
        if run in self._runs:
            self._runs.remove(run)

    def status(self, run: str | None) -> dict[str, Any]:
        """The status of the requested run, else of the latest one."""
        if not self._runs:
            raise ControlError("this starter has no run yet", 503, code=Code.STARTING)
        return next((one for one in self._runs if one.run_id == run), self._runs[-1]).status(run)

    def check_echo(self) -> None:
        for run in self._runs:
            run.check_echo()

    def close(self) -> None:
        """Harmless if repeated."""
        if self.control is not None:
            self.control.close()
        if self._messages is not None:
            self._messages.close()
        if self.listener is not None:
            self.listener.close()
        self.control = self.listener = None


# If nothing listens on a port, the process is gone; the machine itself reports that.
GONE = ("refused",)
GRACE_S = 0.5

# A `RollCall`, or another one in its place.
CallRoll = Callable[[Sequence[ControlClient], frozenset[str], float], Roll]

logger = logging.getLogger(__name__)


class RollCall:
    """Asks all nodes at the same time; a node that did not answer lately gets less time than the others. From any thread."""

    def __init__(self) -> None:
        self._unanswered = Unanswered()

    def __call__(self, clients: Sequence[ControlClient], suspected: frozenset[str], timeout_s: float) -> Roll:
        """Who answers.

        Args:
            suspected: nodes that get GRACE_S to answer; the others get `timeout_s`.
        """
        begin = time.monotonic()
        gone: set[str] = set()

        def ask(client: ControlClient) -> Answer:
            try:
                return Answer.from_json(client.node.name, client.status(timeout_s=timeout_s))
            except ControlError as e:
                logger.debug("%s does not answer: %s", client.node.name, e)
                if e.problem in GONE:
                    gone.add(client.node.name)
                raise

        calls = {client.node.name: partial(ask, client) for client in clients}
        hurried = {name for name in calls if name in suspected or self._unanswered.is_avoided(name)}
        first = FanOut({name: call for name, call in calls.items() if name not in hurried})
        others = FanOut({name: call for name, call in calls.items() if name in hurried})
        first.join(timeout_s)
        others.join(max(0.0, begin + GRACE_S - time.monotonic()))
        found = {**first.results, **others.results}
        for name in calls:
            if name in found:
                self._unanswered.remove(name)
            elif name not in hurried and name not in gone:
                self._unanswered.add(name)
        return Roll({name: found[name] for name in calls if name in found}, frozenset(gone))


def free_nodes(clients: Sequence[ControlClient]) -> list[str]:
    """Names of those nodes that a run can be begun with now."""
    answers = RollCall()(clients, frozenset(), ASK_S).answers
    return [name for name, answer in answers.items() if answer.is_free]


METRICS_DEADLINE_S = 5.0

logger = logging.getLogger("mdi")


def dismiss(clients: Sequence[ControlClient], run: str, leave: bool, patient: bool) -> list[dict[str, Any]]:
    """Let all secondaries go, at the same time; what each has measured, {} where that is not known.

    Args:
        run: the id of the run that has ended.
        leave: end their processes as well.
        patient: wait until they have noticed the end themselves; else tell them, and do not wait.
    """
    asked = FanOut({client.node.name: partial(_dismiss, client, run, leave, patient) for client in clients})
    asked.join(METRICS_DEADLINE_S * 3)
    return [asked.results.get(client.node.name, {}) for client in clients]


def _dismiss(client: ControlClient, run: str, leave: bool, patient: bool) -> dict[str, Any]:
    timeout_s = METRICS_DEADLINE_S if patient else 1.5
    measured: dict[str, Any] = {}
    try:
        with suppress(CancelledError):  # it does not notice the end in time
            for status in client.watch(run, None, Cancel(timeout_s)) if patient else ():
                if status["state"] != "RUNNING":
                    measured = status.get("metrics") or {}
                    break
        if leave or not patient:
            client.stop(run, leave, timeout_s)
    except ControlError as e:
        if leave:
            logger.warning("%s did not get the request to end: %s", client.node.name, e)
        logger.debug("dismissing %s: %s", client.node.name, e)
    return measured
