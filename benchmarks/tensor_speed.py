"""One text over several nodes that share every block out, against one node: processes of one thread on this machine.

    MDI_KERNELS=plain tensor_speed.py --chunk CHUNK --nodes 1 2 --head shared --tokens 24
    tensor_speed.py --chunk CHUNK --nodes 1 2 --prompt 512 --tokens 8
    MDI_KERNELS=plain tensor_speed.py --chunk CHUNK --nodes 1 2 4 8 --head shared --quota 0.25 [--delay-ms 1 --mbit 300]
        each node has a quarter of a core (ring/quota.py), and may be on a host of its own (slow_hosts.py)
    tensor_speed.py --chunk INT8 INT4 --rounds 5 --head shared --tokens 64
        the two cores of a machine: one node with a thread and with two, two nodes kept on a core each and not, in turns

CHUNK is a starter's chunk for one node (prepare_model.py MODEL --n-nodes 1 --quantize int8). Each process is kept on one core,
unless --unbound; one node with --threads 2 has all cores. The times are those of the first node: embedding, all blocks, head.
Prints one JSON object per line. Of the sums of decoding it has the mean and the median that the first node took, and the median
from the moment when the last node began (sum_after_last_us). After a run of one node, expected_ms is what the cost model says
by that run and the measured links.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np

from link_speed import agree_on_speed  # noqa: E402
from mdi.checkpoint.chunks import ChunkFile
from mdi.checkpoint.packing import PartWeights
from mdi.kernels.library import instruction_set
from mdi.kernels.slices import Slice
from mdi.placement.cost import CostModel
from mdi.placement.model import Workload, model_shape
from mdi.placement.profile import ClusterProfile, LinkProfile, boards
from mdi.placement.tensor_plan import plan_tensor
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.tensor.mesh import Mesh, Tally
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from mdi.tensor.sums import AllReduce, Numbers
from records import save
from ring.quota import SHORTEST_US, Quotas
from slow_hosts import SlowHosts
from tensor_sums import Result, addresses, connected, in_forks

CHUNK_ROWS = 64
WAYS = {  # of --rounds: nodes, threads of a single one, unbound
    "one node, one thread": (1, 1, False),
    "one node, two threads": (1, 2, False),
    "two nodes, each kept on a core": (2, 1, False),
    "two nodes": (2, 1, True),
}


class Node:
    """One process: its share, and on the first the embedding and the head."""

    def __init__(self, rank: int, n: int, args: argparse.Namespace, hosts: SlowHosts | None) -> None:
        source = ChunkFile(args.chunk)
        self.config, blocks = source.config_dict, [f"block.{i}" for i in range(source.config_dict["n_layer"])]
        is_head_shared = args.head == "shared" and n > 1
        self.share = Share(share_out(self.config, [1.0] * n, is_head_shared), rank, self.config)
        assert source.packing is not None
        shards = ShardSource(source, self.share, source.packing)

        def of_part(part: str) -> PartWeights:
            is_cut = part.startswith("block.") or (part == "head" and is_head_shared)
            return (shards if is_cut else source).weights(part)

        ends = ["embedding", "head"] if rank == 0 else ["head"] if is_head_shared else []
        place = GroupSum(self.share)
        weights = Resident([*blocks, *ends], of_part)
        n_threads = args.threads if n == 1 else 1
        self.stage = KernelStage(self.config, 0, self.config["n_layer"], weights, n_threads, group=place)
        self.mesh: Mesh = connected(
            rank, addresses(n, hosts), is_busy=args.quota is None and n + (hosts is not None) <= args.cores
        )
        self.speed = agree_on_speed(self.mesh)
        self.group = AllReduce(self.mesh, args.reduce, Numbers(args.reduce_dtype))
        place.join("all nodes", self.group)
        self.stage.prepare(args.prompt + args.tokens + 1, 1 << 30)
        self.first = self.stage.ends
        self.head_s: list[float] = []

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
        rows = self.stage(x, [Slice(0, start, len(ids))])[-1:]
        if self.first is None:
            self.stage.send_logits(rows)
            return 0
        begin = time.perf_counter()
        token = int(self.first.head(rows)[0].argmax())
        self.head_s.append(time.perf_counter() - begin)
        return token


def measure(rank: int, n: int, args: argparse.Namespace, hosts: SlowHosts | None) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    args.cores = len(cores)
    is_bound = not args.unbound and (n > 1 or args.threads == 1)
    if is_bound:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if hosts is not None:
        hosts.enter(rank)
    node = Node(rank, n, args, hosts)
    quotas = Quotas() if args.quota is None else Quotas(round(SHORTEST_US / args.quota))  # nodes wait 44 times a token
    if args.quota is not None:
        quotas.limit(os.getpid(), args.quota)
    node.step(np.ones(4, dtype=np.int64), 0)
    begin = time.perf_counter()
    for first in range(0, args.prompt, CHUNK_ROWS):
        node.step(np.arange(first, min(first + CHUNK_ROWS, args.prompt)) % 1000, first)
    prompt_s, token = time.perf_counter() - begin, 1
    node.mesh.tally = tally = Tally()
    times, ids = [], []
    for i in range(args.tokens):
        begin = time.perf_counter()
        token = node.step(np.array([token]), args.prompt + i)
        times.append(time.perf_counter() - begin)
        ids.append(token)
    quotas.close()
    args.folder.joinpath(f"{n}-{rank}.json").write_text(json.dumps(list(tally.spans)))
    return [{
        "nodes": n, "threads": args.threads if n == 1 else 1, "bound": is_bound,
        "kernels": instruction_set(), "head": args.head, "quota": args.quota, "delay_ms": args.delay_ms,
        "mbit": args.mbit, "prompt": args.prompt, "prompt_s": round(prompt_s, 3),
        "token_ms": round(1e3 * float(np.mean(times)), 2), "median_ms": round(1e3 * float(np.median(times)), 2),
        "head_ms": round(1e3 * float(np.mean(node.head_s[-args.tokens :] or [0.0])), 2), "sums": tally.n_sums,
        "link": asdict(node.speed),
        "sum_us": round(1e6 * tally.reduce_s / max(1, tally.n_sums), 1),
        "sum_median_us": round(1e6 * tally.median_s, 1), "ids": ids[:8],
    }]  # fmt: skip


def after_last_us(folder: Path, n: int) -> float:
    """Median time of a sum from the moment when the last of its nodes began it, until all have it."""
    if n == 1:
        return 0.0
    spans = np.array([json.loads((folder / f"{n}-{rank}.json").read_text()) for rank in range(n)])
    return round(1e6 * float(np.median(spans[:, :, 1].max(0) - spans[:, :, 0].max(0))), 1)


def expected_ms(args: argparse.Namespace, one: Result, n: int, link: Mapping[str, float]) -> float:
    """Of a token on n nodes like the one that was measured, by the model of costs."""
    source = ChunkFile(args.chunk)
    assert source.packing is not None
    shape = model_shape(source.config_dict, source.packing.blocks)
    head_s = one["head_ms"] / 1e3
    block_s = (one["token_ms"] / 1e3 - head_s) / shape.n_layer
    names = [f"node{rank}" for rank in range(n)]
    node = replace(boards().nodes[0], block_s=((1, block_s),), head_s=((1, head_s),), memory_bytes=1 << 40)
    nodes = tuple(replace(node, name=name) for name in names)
    links = tuple(LinkProfile(a, b, 2 * link["delay_s"], link["bytes_s"]) for a in names for b in names if a != b)
    cost = CostModel(ClusterProfile(nodes, links, "", "", shape.format), shape, Workload(1, args.prompt + args.tokens))
    return round(1e3 * plan_tensor(cost, is_head_shared=args.head == "shared").token_s, 2)


def in_turns(args: argparse.Namespace) -> Iterator[Result]:
    """Each way of WAYS in each round, one right after the other; then the medians of all rounds for each chunk."""
    found: dict[str, dict[str, list[Result]]] = {}
    for _ in range(args.rounds):
        for chunk in args.chunks:
            for way, (n, args.threads, args.unbound) in WAYS.items():
                args.chunk = chunk
                (result,) = in_forks(n, lambda rank, n=n: measure(rank, n, args, None))
                of_chunk = found.setdefault(ChunkFile(chunk).packing.blocks, {})
                of_chunk.setdefault(way, []).append(result)
                print(json.dumps(result), file=sys.stderr, flush=True)
    for packing, ways in found.items():
        for way, results in ways.items():
            times = [one["median_ms"] for one in results]
            alone = [one["median_ms"] for one in ways[next(iter(WAYS))]]
            gains = [one / both for one, both in zip(alone, times, strict=True)]
            yield {
                "packing": packing, "way": way, "token_ms": statistics.median(times), "least_ms": min(times),
                "most_ms": max(times), "gain": round(statistics.median(gains), 3),
                "sum_us": statistics.median(one["sum_median_us"] for one in results),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", dest="chunks", type=Path, nargs="+", required=True, help="several with --rounds")
    parser.add_argument("--rounds", type=int, help="compare one node with two on this machine, so many times")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--threads", type=int, default=1, help="of one node alone; two and more have one each (%(default)s)"
    )
    parser.add_argument("--unbound", action="store_true", help="let the system choose the cores of the processes")
    parser.add_argument("--head", choices=("starter", "shared"), default="starter")
    parser.add_argument("--reduce", default="auto")
    parser.add_argument("--reduce-dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--quota", type=float, metavar="CORES", help="each node's part of a core, such as 0.25")
    parser.add_argument("--delay-ms", type=float, help="each node on a host of its own, so far away from the others")
    parser.add_argument("--mbit", type=float, default=0.0, help="... that each may send in a second (0: no limit)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers are written")
    args = parser.parse_args()
    args.chunk, results = args.chunks[0], list[Result]()
    one: Result | None = None
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        if args.rounds:
            for result in in_turns(args):
                results.append(result)
                print(json.dumps(result), flush=True)
        for n in args.nodes if not args.rounds else ():
            hosts = None if args.delay_ms is None else SlowHosts(n, args.delay_ms / 1000, args.mbit)
            try:
                (result,) = in_forks(n, lambda rank, n=n, h=hosts: measure(rank, n, args, h))
            finally:
                if hosts is not None:
                    hosts.close()
            one = result if n == 1 else one
            expected = {} if one is None else {"expected_ms": expected_ms(args, one, n, result["link"])}
            results.append({**result, **expected, "sum_after_last_us": after_last_us(args.folder, n)})
            print(json.dumps(results[-1]), flush=True)
    if args.json is not None:
        save(args.json, {"tokens": results})


if __name__ == "__main__":
    main()
