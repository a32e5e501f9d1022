"""Standing nodes inside this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mdi.checkpoint.source import open_source
from mdi.control.meeting import Peer
from mdi.host.resources import free_memory_bytes
from mdi.node.secondary import SecondaryNode
from mdi.node.swarm_member import SwarmMember, SwarmWaits
from secondaries import secondary
from waiting import until

SPAN_S = 0.01  # for which each thing is measured
SOON = SwarmWaits(tell_s=0.1, refresh_s=5.0, look_s=0.3, leave_s=20.0)


@contextlib.contextmanager
def member_without_files(
    index: int, folder: Path, model: str, peers: Sequence[SecondaryNode], most_blocks: int | None = None
) -> Iterator[tuple[SecondaryNode, SwarmMember]]:
    """One that has no weights, and a cache of its own."""
    with secondary(index, folder / f"own{index}") as node:
        node.profiler.span_s = SPAN_S
        member = SwarmMember(
            node, model, [Peer("127.0.0.1", one.control_port) for one in peers], None, most_blocks, waits=SOON,
            spare_bytes=0,
        )  # fmt: skip
        member.start()
        try:
            yield node, member
        finally:
            member.close()


@contextlib.contextmanager
def swarm_member(
    index: int, folder: Path, checkpoint: Path, peers: Sequence[SecondaryNode] = (), most_blocks: int | None = None,
    spare_bytes: int | None = 0, free_bytes: Callable[[], int] = free_memory_bytes, waits: SwarmWaits = SOON, **options: Any,
) -> Iterator[tuple[SecondaryNode, SwarmMember]]:  # fmt: skip
    """One that holds blocks of a checkpoint; it ends with its `with`."""
    source = open_source(checkpoint)
    try:
        with secondary(index, folder / "cache", weights=source, **options) as node:
            node.profiler.span_s = SPAN_S
            own = open_source(checkpoint)
            member = SwarmMember(
                node, own, [Peer("127.0.0.1", one.control_port) for one in peers], options.get("keys"), most_blocks,
                waits=waits, spare_bytes=spare_bytes, free_bytes=free_bytes,
            )  # fmt: skip
            member.start()
            try:
                yield node, member
            finally:
                member.close()
                own.close()
    finally:
        source.close()


def held_by(member: SwarmMember) -> range | None:
    """The blocks that a node has announced as loaded."""
    own = member.announced
    return range(own.start, own.stop) if own is not None and own.is_ready else None


def wait_covered(nodes: Callable[[], Sequence[SwarmMember]], n_layer: int) -> None:
    """Until each block is on a node."""
    until(lambda: {block for one in nodes() for block in held_by(one) or ()} == set(range(n_layer)))
