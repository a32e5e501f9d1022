"""A secondary's part in a group that computes every block together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mdi.control.messages import InitRequest
from mdi.control_groups import n_cores
from mdi.host.threads import n_threads
from mdi.metrics import ShareMetrics
from mdi.net.listener import RingListener
from mdi.net.ring import TcpRing
from mdi.stages.kernel_stage import KernelStage
from mdi.tensor.group import group_of
from mdi.tensor.joining import GroupLinks, MemberRing


def run_check(ring: TcpRing, on_wait: Callable[[], None] = lambda: None) -> Callable[[float], None]:
    """For tensor.mesh: waits up to `timeout_s` for the end of a ring, and raises what ended it; calls `on_wait` before."""

    def check(wait_s: float) -> None:
        on_wait()
        if ring.wait_end(wait_s):
            ring.recv(0.0)

    return check


def may_look_busily(n_on_machine: int) -> bool:
    """Whether the computing thread may look for messages without sleeping: there is a core for each node of the machine."""
    return n_cores() >= max(n_on_machine, 1) * n_threads()


def share_metrics(stage: object) -> ShareMetrics | None:
    """A node's report of its share; None if it has blocks of its own."""
    if not isinstance(stage, KernelStage) or stage.group is None:
        return None
    share, tally = stage.group.share, stage.group.tally
    first, last = share.shares.columns[share.rank : share.rank + 2]
    return ShareMetrics(
        stage.group.name, share.heads, share.groups if share.n_heads else (0, 0), (first, last), tally.n_sums, tally.reduce_s,
        tally.bytes_sent, tally.median_s,
    )  # fmt: skip


class GroupPart:
    """A member's part in the sums of one ring: connections that are expected before the ring is closed, and made after.

    Args:
        request: None of it is used where the node computes blocks of its own: then everything here does nothing.
    """

    def __init__(self, request: InitRequest, listener: RingListener, process: str) -> None:
        self._group = group_of(request.extensions, request.config)
        epoch, placement = int(request.epoch, 16), request.placement
        self._links: GroupLinks | None = None
        if self._group is not None:
            self._links = GroupLinks(self._group, listener, epoch, placement, process, request.silence_s)
        self._stage: KernelStage | None = None
        # Where the group is the whole ring, its first node, the starter, has the result as well, and nothing is sent on.
        self._is_whole = self._group is not None and self._group.size == len(request.names)

    @property
    def is_whole(self) -> bool:
        """Whether all nodes of the ring compute every block together."""
        return self._is_whole

    def connect(self, stage: object, ring: TcpRing, on_wait: Callable[[], None] = lambda: None) -> None:
        """Once the ring is closed. Raises RingError if another node of the group is not there.

        Args:
            on_wait: called now and then while a frame waits for other nodes of the group.
        """
        if self._links is None:
            return
        assert isinstance(stage, KernelStage) and stage.group is not None and self._group is not None
        self._stage = stage
        links = self._links.connect(run_check(ring, on_wait), may_look_busily(self._group.n_neighbours))
        stage.group.join(self._group.name, links)

    def over(self, ring: Any) -> Any:
        """The ring as the loop is to see it."""
        if self._group is None:
            return ring
        assert self._stage is not None
        return MemberRing(ring, self._stage, self._group, self._is_whole)

    def close(self) -> None:
        """Close the connections; harmless if repeated."""
        if self._links is not None:
            self._links.close()
        if self._stage is not None and self._stage.group is not None:
            self._stage.group.leave()
