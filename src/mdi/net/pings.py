"""What PINGs say of a node's computing, so that its neighbours notice a computing thread that never returns.

A thread that waits for a page of a dying disk cannot be woken, while the threads of the links go on. So a PING carries how many
blocks the node has finished and, while it has a frame in hand, for how long that number may stay as it is.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from mdi.net.wire import Frame, FrameType

STUCK = "stuck"  # code of the error of a node that is lost in this way
STUCK_S = 60.0  # without a finished block: a frame of 64 rows takes a small board 30 s
STUCK_BLOCKS = 20  # the same in blocks, of the longest time that one took

_LIMIT = struct.Struct("<d")


class Work(NamedTuple):
    """Of a node's computing thread: blocks that it has finished, of all rings; and, while a frame is in hand, seconds without
    another one after which it is stuck."""

    n_finished: int = 0
    limit_s: float | None = None


def ping(epoch: int, work: Work) -> Frame:
    """The PING that says so."""
    payload = b"" if work.limit_s is None else _LIMIT.pack(work.limit_s)
    n_rows = 1 if payload else 0
    return Frame(FrameType.PING, epoch, work.n_finished, n_rows=n_rows, n_cols=len(payload), payload=payload)


def work_in(frame: Frame) -> Work:
    """What a PING says. One of a node that says nothing of its computing is as if there was nothing in hand."""
    limit_s = _LIMIT.unpack(frame.payload)[0] if len(frame.payload) == _LIMIT.size else math.nan
    return Work(frame.number, limit_s if limit_s > 0 else None)


class Watch:
    """Follows what a node says of its computing. Pure: the time is given to it."""

    def __init__(self) -> None:
        self._n_finished: int | None = None
        self._since = 0.0

    def stuck_s(self, work: Work, now: float) -> float | None:
        """For how long it has not finished a block, if that is too long."""
        if work.limit_s is None or work.n_finished != self._n_finished:
            self._n_finished, self._since = work.n_finished, now
            return None
        passed = now - self._since
        return passed if passed > work.limit_s else None
