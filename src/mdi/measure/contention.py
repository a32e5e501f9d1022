"""A node's share of its machine while it computes: measured alone, and together with the machine's other nodes.

All nodes of a machine get their times to compute at the same moment: first one after the other, then all together. This takes a
second or two, so that the machine is equally busy in both cases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mdi.control.messages import Slots
from mdi.measure.reading import reader

SLOT_S = 0.3
LEAD_S = 0.7  # from the request to the first slot: for the request's way, and for memory to be filled
WORKING_SET_BYTES = 64 << 20  # usually more than a processor's cache


def slots_of(n_nodes: int, begin: float) -> list[Slots]:
    """For the nodes of one machine, in their order; the first slot begins at `begin` of this process' monotonic clock."""
    after_ms = max(0, round(1e3 * (begin - time.monotonic())))
    return [Slots(after_ms, place, n_nodes) for place in range(n_nodes)]


def machine_share(slots: Slots, n_bytes: int, device: str) -> float:
    """The part of its machine that this node takes while it reads as much memory as its blocks have; 0 if it came too late.

    If n nodes are s times as slow together as one alone, each takes s / n of the machine: no less than 1 / n, or they
    would not have been slowed down, and at most all of it.

    Args:
        n_bytes: of the weights that a token reads; what fits a processor's cache is shared differently than what does not.
    """
    begin = time.monotonic() + slots.after_ms / 1e3
    read, _ = reader(min(n_bytes, WORKING_SET_BYTES), device)
    read()
    alone = rate(read, begin + slots.place * SLOT_S)
    together = rate(read, begin + slots.n_nodes * SLOT_S)
    if not alone or not together:
        return 0.0
    return min(1.0, max(1.0, alone / together) / slots.n_nodes)


def rate(call: Callable[[], object], begin: float) -> float:
    """Calls per second in the slot that begins then; 0 if it is half over already."""
    left = begin - time.monotonic()
    if left < -SLOT_S / 2:
        return 0.0
    if left > 0:
        threading.Event().wait(left)
    first, n_calls = time.monotonic(), 0
    while n_calls == 0 or time.monotonic() < begin + SLOT_S:
        call()
        n_calls += 1
    return n_calls / (time.monotonic() - first)
