"""Sums by torch.distributed, if all nodes of a group have torch: Gloo on CPUs, and NCCL, which was never run.

They go over connections of torch's own, which nothing encrypts, to ports that the system chooses.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from mdi.errors import RingError, UsageError
from mdi.partition.sum_cost import AUTO, LinkSpeed
from mdi.tensor.allreduce import AllReduce
from mdi.tensor.mesh import VERDICT_S, Mesh
from mdi.tensor.numbers import EXACT

WAIT = timedelta(seconds=60)
_PORT = struct.Struct("<H")
_SAMPLE = 4099  # numbers whose sum depends on the order of adding


class TorchSums(AllReduce):
    """As AllReduce, in float32.

    Args:
        addrs: of all nodes, by rank: torch listens there.
        backend: one of sum_cost.TORCH_SUMS.

    Raises:
        RingError: torch cannot connect the nodes. UsageError: there is no NCCL, or no GPU.
    """

    def __init__(self, mesh: Mesh, addrs: Sequence[str], backend: str) -> None:
        super().__init__(mesh, AUTO, EXACT, LinkSpeed(0.0, 1e9))
        if backend == "nccl" and not (torch.cuda.is_available() and distributed.is_nccl_available()):
            raise UsageError("--reduce nccl takes a GPU and NCCL on each node: use --reduce auto or gloo")
        self._device = "cuda" if backend == "nccl" else "cpu"
        try:
            self._group = _process_group(mesh, addrs, backend)
        except RuntimeError as e:
            raise RingError(f"torch.distributed cannot connect the nodes with {backend}: {e}") from None
        self.is_spread = False
        self.is_spread = not self._agrees()

    def _sum(self, x: np.ndarray) -> None:
        whole = torch.from_numpy(x).to(self._device)  # on CPUs the memory of `x` itself
        try:
            self._group.allreduce([whole]).wait()
            if self.is_spread:
                self._group.broadcast(whole, 0).wait()
        except RuntimeError as e:
            self.mesh.check(VERDICT_S)  # the ring names the lost node
            raise RingError(f"a sum by torch.distributed broke: {e}") from None
        if self._device != "cpu":
            x[:] = whole.cpu().numpy()

    def _agrees(self) -> bool:
        """Whether all nodes get the same bits; the first node tells all."""
        mesh, others = self.mesh, range(1, self.mesh.size)
        sample = np.random.default_rng(mesh.rank).standard_normal((1, _SAMPLE), dtype=np.float32)
        self._sum(sample)
        own = sample.tobytes()
        if mesh.rank != 0:
            mesh.swap([(0, own)], [])
            return bytes(mesh.swap([], [(0, 1)])[0]) == b"="
        is_same = all(bytes(data) == own for data in mesh.swap([], [(rank, len(own)) for rank in others]).values())
        mesh.swap([(rank, b"=" if is_same else b"!") for rank in others], [])
        return is_same


def _process_group(mesh: Mesh, addrs: Sequence[str], backend: str) -> Any:
    """A group of torch's: its first node has the store through which the others find it."""
    others = range(1, mesh.size)
    if mesh.rank == 0:
        store = distributed.TCPStore(addrs[0], 0, is_master=True, wait_for_workers=False, timeout=WAIT)
        mesh.swap([(rank, _PORT.pack(store.port)) for rank in others], [])
    else:
        (port,) = _PORT.unpack(mesh.swap([], [(0, _PORT.size)])[0])
        store = distributed.TCPStore(addrs[0], port, is_master=False, wait_for_workers=False, timeout=WAIT)
    made: Any = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    options = made.Options() if backend == "nccl" else made._Options()
    options._timeout = WAIT
    if backend == "gloo":
        options._devices = [made.create_device(hostname=addrs[mesh.rank])]
    return made(store, mesh.rank, mesh.size, options)
