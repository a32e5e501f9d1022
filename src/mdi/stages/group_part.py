"""A node's part in a group that computes every block together: the same on a starter and on a secondary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mdi.cancel import Cancel
from mdi.control_groups import n_cores
from mdi.host.threads import n_threads
from mdi.metrics import ShareMetrics
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.stages.kernel_stage import KernelStage
from mdi.tensor.group import Group
from mdi.tensor.joining import GroupLinks, LeaderRing, MemberRing


class RingEnd(Cancel):
    """Cancelled by the end of a ring: `wait` and `check` raise what ended it. `on_wait` is called before each."""

    def __init__(self, ring: TcpRing, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._ring, self._on_wait = ring, on_wait

    def check(self) -> None:
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        self._on_wait()
        if self._ring.wait_end(seconds):
            self._ring.recv(0.0)


def may_look_busily(n_on_machine: int) -> bool:
    """Whether the computing thread may look for messages without sleeping: there is a core for each node of the machine."""
    return n_cores() >= max(n_on_machine, 1) * n_threads()


def share_metrics(stage: object) -> ShareMetrics | None:
    """A node's report of its share; None if it has blocks of its own."""
    if not isinstance(stage, KernelStage) or stage.group is None:
        return None
    share, tally = stage.group.share, stage.group.tally
    first, last = share.shares.columns[share.rank : share.rank + 2]
    heads, groups = share.of(0).heads, share.of(0).groups
    return ShareMetrics(
        stage.group.name, heads, groups if share.n_heads else (0, 0), (first, last), tally.n_sums, tally.reduce_s,
        tally.bytes_sent, tally.median_s,
    )  # fmt: skip


class GroupPart:
    """The connections of one ring's sums: expected before the ring is closed, and made after.

    Args:
        group: None where the node computes blocks of its own: then everything here does nothing.
        n_nodes: of the ring.
        epoch, placement: of the ring; `process` is that of this node.
        silence_s: a node that cannot be connected with again for so long is lost.

    Attributes:
        is_whole: whether all nodes of the ring compute every block together. Then the group's first node, the starter, has the
            result as well, and nothing is sent on.
    """

    def __init__(
        self, group: Group | None, n_nodes: int, listener: RingListener | None, epoch: int, placement: str, process: str,
        silence_s: float,
    ) -> None:  # fmt: skip
        self._group = group
        self.is_whole = group is not None and group.size == n_nodes
        self._links: GroupLinks | None = None
        if group is not None:
            assert listener is not None
            self._links = GroupLinks(group, listener, epoch, placement, process, silence_s)
        self._stage: KernelStage | None = None
        self._leader: LeaderRing | None = None

    def connect(self, stage: object, ring: LoopbackRing | TcpRing, on_wait: Callable[[], None] = lambda: None) -> None:
        """Once the ring is closed. Raises RingError if another node of the group is not there.

        Args:
            on_wait: called now and then while a frame waits for other nodes of the group.
        """
        if self._links is None or self._group is None:
            return
        assert isinstance(stage, KernelStage) and stage.group is not None and isinstance(ring, TcpRing)
        self._stage = stage
        try:
            links = self._links.connect(RingEnd(ring, on_wait), may_look_busily(self._group.n_neighbours))
        finally:
            self._links.close()
        stage.group.join(self._group.name, links)

    def of_starter(self, ring: LoopbackRing | TcpRing) -> Any:
        """The ring as the engine is to see it."""
        if self._group is None:
            return ring
        assert self._stage is not None and isinstance(ring, TcpRing)
        self._leader = LeaderRing(ring, self._stage, self.is_whole)
        return self._leader

    def of_member(self, ring: Any) -> Any:
        """The ring as a secondary's loop is to see it."""
        if self._group is None:
            return ring
        assert self._stage is not None
        return MemberRing(ring, self._stage, self._group, self.is_whole)

    @property
    def compute_s(self) -> float:
        """Seconds that a starter has computed besides its engine."""
        return 0.0 if self._leader is None else self._leader.compute_s

    def close(self) -> None:
        """Close the connections; harmless if repeated."""
        if self._links is not None:
            self._links.close()
        if self._stage is not None and self._stage.group is not None:
            self._stage.group.leave()
