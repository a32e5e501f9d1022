"""One text over several nodes that share every block out, against one node: processes of one thread on this machine.

    MDI_KERNELS=plain tensor_speed.py --chunk CHUNK --nodes 1 2 --head shared --tokens 24
    tensor_speed.py --chunk CHUNK --nodes 1 2 --prompt 512 --tokens 8
    MDI_KERNELS=plain tensor_speed.py --chunk CHUNK --nodes 1 2 4 8 --head shared --quota 0.25 [--delay-ms 1 --mbit 300]
        each node has a quarter of a core (ring/quota.py), and may be on a host of its own (slow_hosts.py)
    tensor_speed.py --chunk INT8 INT4 --rounds 5 --head shared --tokens 64 [--key]
        the two cores of a machine: one node with a thread and with two, two nodes kept on a core each and not, in turns
    tensor_speed.py --chunk INT4 --rounds 5 --nodes 1 2 4 --head shared --wait-ms 400
        blocks that take 400 ms on one node, of which each of several nodes waits its share: four of them on two cores
    tensor_speed.py --chunk INT4 --nodes 1 2 4 8 --head shared --wait-ms 400 800 1600 --delay-ms 1 --mbit 100 300 1000
        TPI-LLM's figure 5: each of these times over links of each of these rates; --laptops has the links of its table 7

CHUNK is a starter's chunk for one node (prepare_model.py MODEL --n-nodes 1 --quantize int8). Each process is kept on one core,
but in some of the ways of two cores. The times are those of the first node: embedding, all blocks, head.
With --wait-ms each half of a block ends when its share of that time is over, however many rows it has, and the sum follows.
The blocks are computed, too, which has to be a small part of the time; the head does not wait.
Prints one JSON object per line. Of the sums of decoding it has the mean and the median that the first node took. read_gb_s is
how fast each process reads its packed weights while all of them do, before the tokens and after them; weights_gb_s is what a
token of median time reads of all weights.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import on_path  # noqa: F401
from link_speed import agree_on_speed
from mdi.checkpoint.chunks import ChunkFile
from mdi.checkpoint.packing import PartWeights
from mdi.kernels.layout import Matrix
from mdi.kernels.library import instruction_set
from mdi.kernels.slices import Slice
from mdi.model.plain import spec_of
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.tensor.mesh import Mesh, Tally
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from mdi.tensor.sums import AllReduce, Numbers
from records import save
from ring.quota import SHORTEST_US, Quotas
from slow_hosts import SlowHosts
from tensor_sums import Meeting, Result, connected, in_forks

CHUNK_ROWS = 64
READ_TIMES = 4  # before the tokens and after them
# TPI-LLM's table 7, Mac Pro, Mac Air, Dell, Dell: Mbit/s, and milliseconds, which are taken as the way to the router and back.
LAPTOPS = ((510.0, 5.0), (320.0, 7.0), (610.0, 3.0), (610.0, 3.0))


@dataclass(frozen=True)
class Way:
    """How many nodes compute, with how many threads each, whether their cores are chosen by the system, and whether their sums
    are sealed with a key.
    """

    name: str
    nodes: int
    threads: int = 1
    is_unbound: bool = False
    is_sealed: bool = False


TWO_CORES = (  # of --rounds without --nodes
    Way("one node, one thread", 1),
    Way("one node, two threads", 1, threads=2),
    Way("two nodes, each kept on a core", 2),
    Way("two nodes", 2, is_unbound=True),
)


class WaitingHalves(Resident):
    """Weights of blocks whose halves end when a time is over.

    Args:
        half_s: of attention, and of the MLP.
    """

    def __init__(
        self, parts: Iterable[str], weights: Callable[[str], PartWeights], half_s: tuple[float, float]
    ) -> None:
        super().__init__(parts, weights)
        self._half_s = half_s

    @contextlib.contextmanager
    def ready(self, block: int, half: int) -> Iterator[None]:
        """Around a half of a block, before its sum."""
        due = time.perf_counter() + self._half_s[half]
        yield
        time.sleep(max(0.0, due - time.perf_counter()))


def halves_s(share: Share, n_blocks: int, whole_s: float) -> tuple[float, float]:
    """A node's part of the halves of a block, if all blocks take `whole_s` on one node and both halves as long."""
    half_s, width = whole_s / (2 * n_blocks), share.shares.columns[-1]
    a, b = share.of(0).columns(width)
    return half_s * share.n_heads / share.shares.heads[-1], half_s * (b - a) / width


class Node:
    """One process: its share, and on the first the embedding and the head."""

    def __init__(
        self, rank: int, way: Way, args: argparse.Namespace, hosts: SlowHosts | None, meeting: Meeting
    ) -> None:
        n, source = way.nodes, ChunkFile(args.chunk)
        self.config, blocks = source.config, [f"block.{i}" for i in range(source.config.n_layer)]
        is_head_shared = args.head == "shared" and n > 1
        self.share = Share(share_out(self.config, [1.0] * n, is_head_shared), rank, self.config)
        assert source.packing is not None
        shards = ShardSource(source, self.share, source.packing)
        self.matrices: list[Matrix] = []

        def of_part(part: str) -> PartWeights:
            is_cut = part.startswith("block.") or (part == "head" and is_head_shared)
            found = (shards if is_cut else source).weights(part)
            self.matrices += [weight for weight in found.values() if isinstance(weight, Matrix)]
            return found

        ends = ["embedding", "head"] if rank == 0 else ["head"] if is_head_shared else []
        place = GroupSum(self.share)
        if args.wait_ms is None:
            weights = Resident([*blocks, *ends], of_part)
        else:
            weights = WaitingHalves([*blocks, *ends], of_part, halves_s(self.share, len(blocks), args.wait_ms / 1e3))
        self._n_threads = way.threads
        self.stage = KernelStage(spec_of(self.config), 0, len(blocks), weights, way.threads, group=place)
        is_busy = args.quota is None and n + (hosts is not None) <= args.cores
        self.mesh: Mesh = connected(rank, meeting, is_busy, way.is_sealed)
        self.speed = agree_on_speed(self.mesh)
        self.group = AllReduce(self.mesh, "auto", Numbers("float32"))
        place.join("all nodes", self.group)
        self.stage.prepare(args.prompt + args.tokens + 1, 1 << 30)
        self.first = self.stage.ends
        self.head_s: list[float] = []

    def step(self, ids: np.ndarray, start: int) -> int:
        """The next token; nodes other than the first compute what that one has sent them."""
        n_embd = self.config.n_embd
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

    def read_gb_s(self) -> float:
        """Of its packed weights, while all nodes read theirs."""
        others = [rank for rank in range(self.mesh.size) if rank != self.mesh.rank]
        self.mesh.swap([(rank, b"x") for rank in others], [(rank, 1) for rank in others])
        return read_packed(self.matrices, self._n_threads, READ_TIMES) / 1e9


def read_packed(matrices: Sequence[Matrix], n_threads: int, n_times: int = 8) -> float:
    """Bytes per second of all packed pages, of so many times the best.

    Each thread has a range of the panels of each matrix, as in the kernels.
    """
    pieces: list[list[np.ndarray]] = [[] for _ in range(n_threads)]
    for matrix in matrices:
        words = matrix.data.reshape(-1).view(np.uint8)
        words = words[: words.size // 64 * 64].view(np.int64)
        for thread, piece in enumerate(np.array_split(words, n_threads)):
            pieces[thread].append(piece)

    def read(own: list[np.ndarray]) -> None:
        for piece in own:
            piece.max()

    best_s = float("inf")
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(n_times):
            begin = time.perf_counter()
            list(pool.map(read, pieces))
            best_s = min(best_s, time.perf_counter() - begin)
    return sum(matrix.data.nbytes for matrix in matrices) / best_s


def measure(rank: int, way: Way, args: argparse.Namespace, hosts: SlowHosts | None, meeting: Meeting) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    args.cores = len(cores)
    is_bound = not way.is_unbound and way.threads == 1
    if is_bound:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if hosts is not None:
        hosts.enter(rank)
    node = Node(rank, way, args, hosts, meeting)
    quotas = Quotas() if args.quota is None else Quotas(round(SHORTEST_US / args.quota))  # nodes wait 44 times a token
    if args.quota is not None:
        quotas.limit(os.getpid(), args.quota)
    node.step(np.ones(4, dtype=np.int64), 0)
    begin = time.perf_counter()
    for first in range(0, args.prompt, CHUNK_ROWS):
        node.step(np.arange(first, min(first + CHUNK_ROWS, args.prompt)) % 1000, first)
    prompt_s, token = time.perf_counter() - begin, 1
    read = [node.read_gb_s()]
    node.mesh.tally = tally = Tally()
    times, ids = [], []
    for i in range(args.tokens):
        begin = time.perf_counter()
        token = node.step(np.array([token]), args.prompt + i)
        times.append(time.perf_counter() - begin)
        ids.append(token)
    read.append(node.read_gb_s())
    quotas.close()
    n_bytes = sum(matrix.data.nbytes for matrix in node.matrices)
    told = {"read_gb_s": read, "bytes": n_bytes}
    file_of(args.folder, rank).write_text(json.dumps(told))
    return [{
        "nodes": way.nodes, "threads": way.threads, "bound": is_bound, "key": node.mesh.is_sealed, "wait_ms": args.wait_ms,
        "kernels": instruction_set(), "head": args.head, "quota": args.quota, "delay_ms": args.delay_ms,
        "mbit": args.mbit, "prompt": args.prompt, "prompt_s": round(prompt_s, 3),
        "token_ms": round(1e3 * float(np.mean(times)), 2), "median_ms": round(1e3 * float(np.median(times)), 2),
        "head_ms": round(1e3 * float(np.mean(node.head_s[-args.tokens :] or [0.0])), 2), "sums": tally.n_sums,
        "link": asdict(node.speed),
        "sum_us": round(1e6 * tally.reduce_s / max(1, tally.n_sums), 1),
        "sum_median_us": round(1e6 * tally.median_s, 1), "ids": ids[:8],
    }]  # fmt: skip


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def measured(way: Way, args: argparse.Namespace) -> Result:
    """One run in processes of its own; what the first node found, and what follows from all."""
    hosts = None
    if args.laptops and way.nodes > 1:
        hosts = SlowHosts(way.nodes, 0.0, *(mbit for mbit, _ in LAPTOPS))
        for a, b in itertools.combinations(range(way.nodes), 2):
            hosts.slow(a, b, (LAPTOPS[a][1] + LAPTOPS[b][1]) / 2000)
    elif args.delay_ms is not None and way.nodes > 1:
        hosts = SlowHosts(way.nodes, args.delay_ms / 1000, args.mbit)
    try:
        with Meeting(way.nodes, hosts) as meeting:
            (result,) = in_forks(way.nodes, lambda rank: measure(rank, way, args, hosts, meeting))
    finally:
        if hosts is not None:
            hosts.close()
    told = [json.loads(file_of(args.folder, rank).read_text()) for rank in range(way.nodes)]
    return {
        **result,
        "read_gb_s": [[round(rate, 1) for rate in one["read_gb_s"]] for one in told],
        "weights_gb_s": round(1e-6 * sum(one["bytes"] for one in told) / result["median_ms"], 1),
    }  # fmt: skip


def ways_of(args: argparse.Namespace) -> list[Way]:
    """What is measured, in this order; sums with a key beside the same without one."""
    if args.rounds and args.nodes is None:
        ways = list(TWO_CORES)
    else:
        ways = [Way(f"{n} nodes" if n > 1 else "one node", n) for n in args.nodes or (1, 2)]
    sealed = {way: replace(way, name=f"{way.name}, with a key", is_sealed=True) for way in ways if way.nodes > 1}
    return [each for way in ways for each in (way, *([sealed[way]] if args.key and way in sealed else []))]


def in_turns(args: argparse.Namespace) -> Iterator[Result]:
    """Each way in each round, one right after the other; then the medians of all rounds for each chunk."""
    found: dict[str, dict[str, list[Result]]] = {}
    for i in range(args.rounds):
        for chunk in args.chunks:
            for way in ways_of(args):
                args.chunk = chunk
                result = measured(way, args)
                of_chunk = found.setdefault(ChunkFile(chunk).packing.blocks, {})
                of_chunk.setdefault(way.name, []).append(result)
                print(f"round {i + 1} of {args.rounds}, {way.name}: {json.dumps(result)}", file=sys.stderr, flush=True)
    for packing, ways in found.items():
        for name, results in ways.items():
            times = [one["median_ms"] for one in results]
            alone = [one["median_ms"] for one in ways[next(iter(ways))]]
            gains = [one / both for one, both in zip(alone, times, strict=True)]
            reading = [sum(map(statistics.mean, one["read_gb_s"])) for one in results]
            yield {
                "packing": packing, "way": name, "token_ms": statistics.median(times), "least_ms": min(times),
                "most_ms": max(times), "gain": round(statistics.median(gains), 3),
                "sum_us": statistics.median(one["sum_median_us"] for one in results),
                "wait_ms": args.wait_ms, "weights_gb_s": statistics.median(one["weights_gb_s"] for one in results),
                "read_gb_s": round(statistics.median(reading), 1),
                "rounds": [{key: one[key] for key in ("median_ms", "weights_gb_s", "read_gb_s")} for one in results],
            }  # fmt: skip


def one_after_the_other(args: argparse.Namespace) -> Iterator[Result]:
    """Each way once, for each time to wait and each rate of links."""
    one: Result | None = None
    for wait_ms, mbit, way in itertools.product(args.waits_ms, args.mbits, ways_of(args)):
        args.wait_ms, args.mbit = wait_ms, mbit
        if way.nodes > 1 or one is None or one["wait_ms"] != wait_ms:  # one node has no links
            result = measured(way, args)
            one = result if way.nodes == 1 else one
            yield result


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", dest="chunks", type=Path, nargs="+", required=True, help="several with --rounds")
    parser.add_argument(
        "--rounds", type=int, help="take turns, so many times; without --nodes: one node and two on two cores"
    )
    parser.add_argument("--nodes", type=int, nargs="+", help="(1 2); the first is what the others are compared with")
    parser.add_argument("--head", choices=("starter", "shared"), default="starter")
    parser.add_argument("--key", action="store_true", help="measure sums with a cluster key, too")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument(
        "--wait-ms", type=float, nargs="+", dest="waits_ms", default=[None],
        help="that all blocks take on one node: halves of blocks wait for it",
    )  # fmt: skip
    parser.add_argument("--quota", type=float, metavar="CORES", help="each node's part of a core, such as 0.25")
    parser.add_argument("--delay-ms", type=float, help="each node on a host of its own, so far away from the others")
    parser.add_argument(
        "--mbit", type=float, nargs="+", dest="mbits", default=[0.0], help="... that each may send (0: no limit)"
    )
    parser.add_argument(
        "--laptops", action="store_true", help="links of TPI-LLM's table 7 instead, of up to four nodes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers are written")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    args.chunk, results = args.chunks[0], list[Result]()
    args.wait_ms, args.mbit = args.waits_ms[0], args.mbits[0]
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        for result in in_turns(args) if args.rounds else one_after_the_other(args):
            results.append(result)
            print(json.dumps(result), flush=True)
            if args.json is not None:
                save(args.json, {"tokens": results})


if __name__ == "__main__":
    main()
