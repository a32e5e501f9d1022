"""Delay and rate of the links of a group, as its first node measures them."""

from __future__ import annotations

import struct
import time

import on_path  # noqa: F401
from mdi.placement.cost import LinkSpeed
from mdi.tensor.joining import open_windows
from mdi.tensor.mesh import Mesh

N_PINGS, N_BULKS, BULK_BYTES = 6, 2, 1 << 18
_SPEED = struct.Struct("<dd")


def agree_on_speed(mesh: Mesh) -> LinkSpeed:
    """The slowest link's delay and rate, as the first node measures them; the same numbers on all nodes."""
    if mesh.size == 1:
        return LinkSpeed(0.0, 1e9)
    bulk = bytes(BULK_BYTES)
    open_windows(mesh)
    if mesh.rank != 0:
        for n_bytes in (1,) * N_PINGS + (BULK_BYTES,) * N_BULKS:
            mesh.swap([], [(0, n_bytes)])
            mesh.swap([(0, bulk[:n_bytes])], [])
        delay_s, bytes_s = _SPEED.unpack(mesh.swap([], [(0, _SPEED.size)])[0])
        return LinkSpeed(delay_s, bytes_s)
    delays, rates = [], []
    for rank in range(1, mesh.size):
        delay = min(_round_trip(mesh, rank, b"x") for _ in range(N_PINGS)) / 2
        whole = min(_round_trip(mesh, rank, bulk) for _ in range(N_BULKS)) / 2
        delays.append(delay)
        rates.append(BULK_BYTES / max(whole - delay, 1e-9))
    speed = LinkSpeed(max(delays), min(rates))
    mesh.swap([(rank, _SPEED.pack(speed.delay_s, speed.bytes_s)) for rank in range(1, mesh.size)], [])
    return speed


def _round_trip(mesh: Mesh, rank: int, data: bytes) -> float:
    begin = time.perf_counter()
    mesh.swap([(rank, data)], [])
    mesh.swap([], [(rank, len(data))])
    return time.perf_counter() - begin
