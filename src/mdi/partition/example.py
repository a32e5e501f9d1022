"""An example profile: three single-board computers behind a gigabit switch.

Round numbers of the kind that such boards have, not measurements; without times of blocks, so that they do for any model.
"""

from __future__ import annotations

from mdi.partition.profile import ClusterProfile, LinkProfile, NodeProfile

_GB = 10**9


def boards() -> ClusterProfile:
    """Three boards with 4 GB each."""
    nodes = (
        _board("starter", int(3.2 * _GB), 5e9),
        _board("secondary0", int(3.2 * _GB), 5e9),
        _board("secondary1", int(3.2 * _GB), 5e9),
    )
    names = [node.name for node in nodes]
    links = tuple(LinkProfile(a, b, 400e-6, 110e6) for a in names for b in names if a != b)
    return ClusterProfile(nodes, links, model="", config_hash="", format="int8")


def _board(name: str, memory_bytes: int, read_bytes_s: float) -> NodeProfile:
    return NodeProfile(
        name=name,
        device="cpu",
        n_cores=4.0,
        memory_bytes=memory_bytes,
        disk_bytes=20 * _GB,
        disk_read_bytes_s=80e6,
        read_bytes_s=read_bytes_s,
        block_s=(),
        head_s=(),
        process_bytes=400_000_000,
    )
