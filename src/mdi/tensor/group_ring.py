"""The ring as the nodes of a group see it. A frame goes through a group from node to node. Each node passes it on before it
computes its share, and the last one sends the result to the next stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mdi.engine.rows import ArrayRows, rows_of
from mdi.engine.worker import FrameStage, SecondaryLoop
from mdi.net.ring import Ring, TcpRing
from mdi.net.wire import Frame
from mdi.tensor.group import Group


class LogitSender(Protocol):
    """A member's stage: mdi.stages.kernel_stage.KernelStage."""

    n_embd: int

    def send_logits(self, x: np.ndarray) -> None:
        """Its part of the logits of rows (M, n_embd), to the group's first node."""


class MemberRing:
    """What SecondaryLoop sees on a node of a group.

    Args:
        stage: the node's share.
        is_whole: the group is the whole ring: its first node, the starter, has the result as well, and nothing leaves but
            this node's part of the logits. The loop must keep only the rows that need some.
    """

    def __init__(self, inner: Any, stage: LogitSender, group: Group, is_whole: bool) -> None:
        self._inner, self._stage = inner, stage
        self._passes_on, self._sends = not group.is_last, group.is_last and not is_whole
        self._is_whole = is_whole

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        return self._taken(self._inner.recv(timeout_s))

    def poll(self) -> Frame | None:
        return self._taken(self._inner.poll())

    def _taken(self, frame: Frame | None) -> Frame | None:
        if frame is not None and self._passes_on:
            self._inner.send(
                replace(frame, payload=bytes(frame.payload))
            )  # the buffer is used again when it is released
        return frame

    def send(self, frame: Frame) -> None:
        if self._sends:
            self._inner.send(frame)
        elif self._is_whole and frame.n_rows:
            self._stage.send_logits(rows_of(frame, self._stage.n_embd))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LeaderRing:
    """What the starter's engine sees where its node computes a share: frames that it sends hold embedded rows.

    Args:
        stage: the starter's share of the blocks.
        is_whole: as MemberRing's; then the rows come back at once, and one frame is in flight.
    """

    def __init__(self, inner: TcpRing, stage: FrameStage, is_whole: bool) -> None:
        self._inner, self._is_whole = inner, is_whole
        self._loop = _Share(stage, inner)
        self.capacity = 1 if is_whole else inner.capacity

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    @property
    def n_nodes(self) -> int:
        return self._inner.n_nodes

    @property
    def compute_s(self) -> float:
        return self._loop.compute_s

    def send(self, frame: Frame) -> None:
        self._inner.send(frame)
        done = self._loop.computed(frame)
        if self._is_whole:
            self._inner.inbox.put(done)

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        return self._inner.recv(timeout_s)

    def release(self, frame: Frame) -> None:
        if not self._is_whole:
            self._inner.release(frame)

    def wake(self) -> None:
        self._inner.wake()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Share(SecondaryLoop):
    """A loop's computing, without its ring: rows that need logits come back, as from a ring's last node."""

    def __init__(self, stage: FrameStage, ring: Ring) -> None:
        super().__init__(stage, ArrayRows(), ring, is_last=True)

    def computed(self, frame: Frame) -> Frame:
        return self._compute(frame)
