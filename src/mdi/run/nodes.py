"""The nodes of a run: those of a file or a network, this process alone, or processes that are started for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from mdi.spec.cluster import ClusterConfig, NodeConfig

if TYPE_CHECKING:
    from mdi.control.arrivals import Arrivals
    from mdi.node.local import LocalRing

# Nodes that were found during a run, by the numbers of their processes.
Newcomers = Callable[[], Mapping[str, NodeConfig]]


def nobody() -> Mapping[str, NodeConfig]:
    return {}


class NodeSource:
    """The nodes that `find` finds, searched again before each run; this process is their starter.

    Args:
        find: raises MdiError if they cannot be had.
        threads, cores: for this process; None: those of the nodes file, else its share of the machine.
        arrivals: nodes that start during a run.
    """

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
        from mdi.host.neighbours import threads_of_others
        from mdi.host.threads import choose_threads

        cores = starter.cores if self._cores is None else self._cores
        choose_threads(self._threads or starter.threads, cores, threads_of_others(starter, cluster.nodes))
        return cluster

    def check(self) -> None:
        """Called again and again, while a run gets ready at least. Raises NodeLostError if that has become pointless."""

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
        is_revived: `check` starts an ended process again, and the others continue; else `check` raises.
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

    def close(self) -> None:
        self._ring = None
        self._stack.close()


class GivenNodes(NodeSource):
    """A cluster that is known; this process keeps the threads that it has; `look` is called instead of `check`."""

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

    def check(self) -> None:
        self._look()
