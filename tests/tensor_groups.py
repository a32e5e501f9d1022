"""Groups of nodes inside this process: a thread for each rank, connected by socket pairs; and their shares of small models."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from litgpt.model import GPT

from families import CONTEXT
from mdi.checkpoint.packing import PartWeights
from mdi.checkpoint.parts import part_of
from mdi.kernels.layout import cut, pack
from mdi.kernels.weight_formats import is_packable
from mdi.model.plain import ModelConfig, spec_of
from mdi.net.keys import KEY_BYTES, SealedSession
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.tensor.mesh import Mesh, Peer
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shares import Share, Shares, piece_of
from mdi.tensor.sums import AllReduce, Numbers

T = TypeVar("T")
DEADLINE_S = 60.0


@contextlib.contextmanager
def meshes(n: int, is_sealed: bool = False) -> Iterator[list[Mesh]]:
    """The mesh of each rank."""
    peers: list[list[Peer | None]] = [[None] * n for _ in range(n)]
    for a in range(n):
        for b in range(a + 1, n):
            one, other = socket.socketpair()
            keys = bytes([a]) * KEY_BYTES, bytes([b]) * KEY_BYTES
            sessions = (SealedSession(*keys, True), SealedSession(*reversed(keys), True)) if is_sealed else (None, None)
            peers[a][b] = Peer(f"node{b}", one, sessions[0])
            peers[b][a] = Peer(f"node{a}", other, sessions[1])
    found = [Mesh(rank, peers[rank]) for rank in range(n)]
    try:
        yield found
    finally:
        for mesh in found:
            mesh.close()


def sums(found: list[Mesh], algorithm: str = "auto", reduce_dtype: str = "float32") -> list[AllReduce]:
    return [AllReduce(mesh, algorithm, Numbers(reduce_dtype)) for mesh in found]


def on_all(n: int, work: Callable[[int], T]) -> list[T]:
    """What `work(rank)` gives on each rank, all at the same time; raises what the first of them raised."""
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as e:  # told to the thread that waits
            errors.append(e)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if errors:
        raise errors[0]
    return results


def shard_weights(gpt: GPT, share: Share, form: str, part: str) -> PartWeights:
    """A node's share of a part, cut out of packed weights."""
    found: PartWeights = {}
    for name, tensor in gpt.state_dict().items():
        if part_of(name) != part or (piece := piece_of(name, share)) is None:
            continue
        array = tensor.numpy()
        if is_packable(name, array.shape):
            found[name] = cut(pack(form, array), piece.rows, piece.columns)
        else:
            found[name] = array if piece.rows is None else np.concatenate([array[a:b] for a, b in piece.rows])
    return found


def stages_of(
    gpt: GPT, shares: Shares, groups: list[AllReduce], form: str = "float32", cache: str = "float32"
) -> list[KernelStage]:
    return [stage_of(gpt, shares, rank, group, form=form, cache=cache) for rank, group in enumerate(groups)]


def stage_of(
    gpt: GPT, shares: Shares, rank: int, group: AllReduce | None, start: int = 0, stop: int | None = None,
    has_ends: bool = False, form: str = "float32", cache: str = "float32",
) -> KernelStage:  # fmt: skip
    """A share of blocks; without a group, shares of one node."""
    config = ModelConfig.from_litgpt(gpt.config)
    stop, share = config.n_layer if stop is None else stop, Share(shares, rank, config)
    parts = [*(f"block.{i}" for i in range(start, stop)), *(("embedding", "head") if has_ends else ())]
    place = None if group is None else GroupSum(share)
    weights = Resident(parts, lambda part: shard_weights(gpt, share, form, part))
    stage = KernelStage(spec_of(config), start, stop, weights, cache_type=cache, group=place)
    stage.prepare(CONTEXT, 64 << 20)
    if place is not None and group is not None:
        place.join("all", group)
    return stage
