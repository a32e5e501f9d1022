"""The starter's side of closing a ring, and what both sides accept in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mdi.config import ClusterConfig
from mdi.errors import NodeLostError
from mdi.net.handshake import close_starter_ring
from mdi.net.listener import RingListener
from mdi.net.ring import LoopbackRing, Seat, TcpRing
from mdi.net.wire import HANDSHAKE_LIMITS, Allocate, Limits
from mdi.node.setup import with_true_port

logger = logging.getLogger("mdi")


def ring_limits(widest_row: int) -> Limits:
    """What frames of a run may hold. The text of a STOP or ERROR has a byte per column: a narrow model must not refuse it."""
    return Limits(max_cols=max(widest_row, HANDSHAKE_LIMITS.max_cols))


def receive_buffers(device: str) -> Allocate | None:
    """What frames are received into on a node that computes on `device`; None is ordinary memory."""
    if not device.startswith("cuda"):
        return None
    from mdi.engine.rows import pinned_buffer

    return pinned_buffer


def form_ring(
    listener: RingListener | None, cluster: ClusterConfig, seat: Seat, n_frames: int, widest_row: int, device: str,
    ring_ports: Mapping[str, int],
) -> LoopbackRing | TcpRing:  # fmt: skip
    """The closed ring of a cluster, as its starter.

    Args:
        ring_ports: that the nodes say they really have, by name.

    Raises:
        NodeLostError, RingError: a link could not be made; the message names it.
    """
    if n_frames != cluster.n_nodes:
        logger.info(
            "%d frames in flight over %d nodes (set by --frames N; more frames hide transfers)",
            n_frames,
            cluster.n_nodes,
        )
    if listener is None or not cluster.secondaries:  # none there, or all left out
        return LoopbackRing(n_frames, seat.epoch)
    try:
        ring = close_starter_ring(
            listener, seat, n_frames, ring_limits(widest_row), allocate=receive_buffers(device)
        )  # fmt: skip
    except NodeLostError as e:
        first = cluster.secondaries[0]
        lost = next((node for node in cluster.secondaries if node.name == e.node), first)
        raise with_true_port(e, lost, ring_ports.get(e.node)) from None
    logger.info("the ring is closed: %s", " -> ".join([*seat.names, seat.names[0]]))
    return ring
