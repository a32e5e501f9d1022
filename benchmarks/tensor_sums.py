"""Sums over the nodes of a group: how long one takes in each way, by processes, bytes, and the delay of links.

    tensor_sums.py --nodes 2 4 --bytes 8192
        processes of this machine over loopback
    tensor_sums.py --nodes 2 4 6 8 --delays-ms 0.2 1 5 10
        each on a host of its own (slow_hosts.py), with so much delay between them

Prints one JSON object per line: nodes, bytes, delay_ms, algorithm, median_us, p90_us; --json keeps them, for draw_figures.py.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from link_speed import agree_on_speed  # noqa: E402
from mdi.placement.cost import seconds
from mdi.spec.options import DEFAULT_SUM, SUMS
from mdi.tensor.mesh import Mesh, Peer
from mdi.tensor.sums import AllReduce, Numbers
from records import save
from slow_hosts import SlowHosts

Result = dict[str, Any]
PORT = 17320  # below those that systems give to connections


def connected(rank: int, addrs: Sequence[str], is_busy: bool) -> Mesh:
    """Calls those before it, and waits for those behind it."""
    n = len(addrs)
    listener = socket.create_server((addrs[rank], PORT + rank), backlog=n)
    peers: list[Peer | None] = [None] * n
    for other in range(rank):
        deadline = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection((addrs[other], PORT + other), 5)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        sock.sendall(bytes([rank]))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[other] = Peer(f"node{other}", sock)
    for _ in range(rank + 1, n):
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other = sock.recv(1)[0]
        peers[other] = Peer(f"node{other}", sock)
    listener.close()
    return Mesh(rank, peers, is_busy)


def measure(rank: int, n: int, args: argparse.Namespace, hosts: SlowHosts | None, delay_ms: float) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    if args.pin:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if hosts is not None:
        hosts.enter(rank)
    mesh = connected(rank, addresses(n, hosts), is_busy=n + (hosts is not None) <= len(cores))
    speed = agree_on_speed(mesh)
    found = []
    for n_bytes in args.bytes:
        x = np.ones((1, n_bytes // 4), dtype=np.float32)
        for algorithm in SUMS:
            group = AllReduce(mesh, algorithm, Numbers(args.reduce_dtype))
            turns = max(10, min(args.turns, int(2.0 / max(seconds(algorithm, mesh.size, n_bytes, speed), 1e-6))))
            times = []
            for _ in range(turns):
                begin = time.perf_counter()
                group.reduce(x)
                times.append(time.perf_counter() - begin)
                x[:] = 1
            found.append({
                "nodes": mesh.size, "bytes": n_bytes, "delay_ms": delay_ms, "algorithm": algorithm,
                "median_us": round(1e6 * float(np.median(times)), 1), "mean_us": round(1e6 * float(np.mean(times)), 1),
                "p90_us": round(1e6 * float(np.quantile(times, 0.9)), 1), "turns": turns,
                "expected_us": round(1e6 * seconds(algorithm, mesh.size, n_bytes, speed), 1),
                "chosen": algorithm == DEFAULT_SUM,
                "measured_delay_us": round(1e6 * speed.delay_s, 1),
                "measured_mb_s": round(speed.bytes_s / 1e6, 1),
            })  # fmt: skip
    return found


def addresses(n: int, hosts: SlowHosts | None) -> list[str]:
    return ["127.0.0.1" if hosts is None else hosts.address(rank) for rank in range(n)]


def in_forks(n: int, work: Callable[[int], list[Result]]) -> list[Result]:
    """Do `work(rank)` in a process for each rank, and wait for all of them; what the first found."""
    children = []
    with tempfile.TemporaryFile("w+") as told:
        for rank in range(n):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    found = work(rank)
                    if rank == 0:
                        told.write("\n".join(map(json.dumps, found)))
                        told.flush()
                    status = 0
                except BaseException:  # told here: nobody above this process would
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        told.seek(0)
        lines = told.read().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2])
    parser.add_argument("--bytes", type=int, nargs="+", default=[8192])
    parser.add_argument("--delays-ms", type=float, nargs="*", default=[])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--reduce-dtype", default="float32")
    parser.add_argument("--pin", action="store_true", help="each process on one core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers are written")
    args = parser.parse_args()
    results = []

    def done(found: list[Result]) -> None:
        print(*map(json.dumps, found), sep="\n", flush=True)
        results.extend(found)

    for n in args.nodes:
        if not args.delays_ms:
            done(in_forks(n, lambda rank, n=n: measure(rank, n, args, None, 0.0)))
        for delay_ms in args.delays_ms:
            hosts = SlowHosts(n, delay_ms / 1000)
            try:
                done(in_forks(n, lambda rank, n=n, d=delay_ms, h=hosts: measure(rank, n, args, h, d)))
            finally:
                hosts.close()
    if args.json is not None:
        save(args.json, {"sums": results})


if __name__ == "__main__":
    main()
