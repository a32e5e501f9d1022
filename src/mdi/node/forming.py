"""The limits and buffers of a node in a ring, on both sides, and the time to leave one."""

from __future__ import annotations

from mdi.net.wire import HANDSHAKE_LIMITS, Allocate, Limits

HAND_OVER_S = 30.0  # time for other nodes to take the blocks of a leaving node


def ring_limits(widest_row: int) -> Limits:
    """Limits of a run's frames. The text of a STOP or ERROR has a byte per column: a narrow model must not refuse it."""
    return Limits(max_cols=max(widest_row, HANDSHAKE_LIMITS.max_cols))


def receive_buffers(device: str) -> Allocate | None:
    """Memory that frames are received into, on a node that computes on `device`; None is ordinary memory."""
    if not device.startswith("cuda"):
        return None
    from mdi.engine.rows import pinned_buffer

    return pinned_buffer
