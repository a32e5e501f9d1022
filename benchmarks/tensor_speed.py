"""One text over several nodes that share every block out, against one node: processes of one thread on this machine.

    MDI_KERNELS=plain tensor_speed.py --chunk CHUNK --nodes 1 2 --head shared --tokens 24
    tensor_speed.py --chunk CHUNK --nodes 1 2 --prompt 512 --tokens 8

CHUNK is a starter's chunk for one node (prepare_model.py MODEL --n-nodes 1 --quantize int8). Each process is kept on one core.
The times are those of the first node: embedding, all blocks, head. Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np

from mdi.checkpoint.chunkfile import ChunkFile
from mdi.kernels.kernel_stage import KernelStarterStage
from mdi.kernels.library import instruction_set
from mdi.tensor.allreduce import AllReduce
from mdi.tensor.joining import agree_on_speed
from mdi.tensor.mesh import Mesh
from mdi.tensor.numbers import Numbers
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shard_stage import ShardStage
from mdi.tensor.shared_head import SharedHeadStage
from mdi.tensor.shares import Share, share_out
from tensor_sums import Result, addresses, connected, in_forks

CHUNK_ROWS = 64


class Node:
    """One process: its share, and on the first the embedding and the head."""

    def __init__(self, rank: int, n: int, args: argparse.Namespace) -> None:
        source = ChunkFile(args.chunk)
        self.config, blocks = source.config_dict, [f"block.{i}" for i in range(source.config_dict["n_layer"])]
        is_head_shared = args.head == "shared" and n > 1
        self.share = Share(share_out(self.config, [1.0] * n, is_head_shared), rank, self.config)
        assert source.packing is not None
        shards = ShardSource(source, self.share, source.packing)
        self.stage = ShardStage(self.share, 0, self.config["n_layer"])
        self.stage.load([*blocks, *(["head"] if is_head_shared and rank else [])], shards.weights)
        self.mesh: Mesh = connected(
            rank, addresses(n, None), is_busy=n <= len(os.sched_getaffinity(0)) or args.cores >= n
        )
        self.group = AllReduce(self.mesh, args.reduce, Numbers(args.reduce_dtype), agree_on_speed(self.mesh))
        self.stage.join("all nodes", self.group)
        self.stage.prepare(args.prompt + args.tokens + 1, 1 << 30)
        self.first = None
        if rank == 0:
            if is_head_shared:
                self.first = SharedHeadStage(self.config, self.share, lambda: self.mesh, 1, "float32")
            else:
                self.first = KernelStarterStage(self.config, 0)
            self.first.load(
                ["embedding", "head"],
                lambda part: (shards if is_head_shared and part == "head" else source).weights(part),
            )
            self.first.prepare(16)

    def step(self, ids: np.ndarray, start: int) -> int:
        """The next token; nodes other than the first compute what that one has sent them."""
        n_embd = self.config["n_embd"]
        x = np.zeros((len(ids), n_embd), dtype=np.float32)
        others = range(1, self.mesh.size)
        if self.first is not None:
            x = self.first.embed(ids)
            self.mesh.swap([(rank, x.reshape(-1).view(np.uint8).data) for rank in others], [])
        else:
            x = np.frombuffer(self.mesh.swap([], [(0, x.nbytes)])[0], dtype=np.float32).reshape(x.shape)
        rows = self.stage.forward(x, [(0, start, len(ids))])[-1:]
        if self.first is None:
            self.stage.tell_logits(rows)
            return 0
        return int(self.first.head(rows)[0].argmax())


def measure(rank: int, n: int, args: argparse.Namespace) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    args.cores = len(cores)
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    node = Node(rank, n, args)
    node.step(np.ones(4, dtype=np.int64), 0)
    begin = time.perf_counter()
    for first in range(0, args.prompt, CHUNK_ROWS):
        node.step(np.arange(first, min(first + CHUNK_ROWS, args.prompt)) % 1000, first)
    prompt_s, token = time.perf_counter() - begin, 1
    node.mesh.tally.n_sums, node.mesh.tally.reduce_s = 0, 0.0
    times, ids = [], []
    for i in range(args.tokens):
        begin = time.perf_counter()
        token = node.step(np.array([token]), args.prompt + i)
        times.append(time.perf_counter() - begin)
        ids.append(token)
    tally = node.mesh.tally
    return [{
        "nodes": n, "kernels": instruction_set(), "head": args.head, "prompt": args.prompt, "prompt_s": round(prompt_s, 3),
        "token_ms": round(1e3 * float(np.median(times)), 2), "sums": tally.n_sums,
        "sum_us": round(1e6 * tally.reduce_s / max(1, tally.n_sums), 1), "ids": ids[:8],
    }]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=Path, required=True)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--head", choices=("starter", "shared"), default="starter")
    parser.add_argument("--reduce", default="auto")
    parser.add_argument("--reduce-dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    for n in args.nodes:
        in_forks(n, lambda rank, n=n: measure(rank, n, args))


if __name__ == "__main__":
    main()
