"""Sums over the nodes of a group: how long one takes in each way, by processes, bytes, and the delay of links.

    tensor_sums.py --nodes 2 4 --bytes 8192
        processes of this machine over loopback
    tensor_sums.py --nodes 2 4 8 --delays-ms 0.2 1 5 10
        the same through a process that hands on what it gets after a delay

Prints one JSON object per line: nodes, bytes, delay_ms, algorithm, median_us, p90_us.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from mdi.partition.sum_cost import ALGORITHMS, fastest, seconds
from mdi.tensor.allreduce import AllReduce
from mdi.tensor.joining import agree_on_speed
from mdi.tensor.mesh import Mesh, Peer
from mdi.tensor.numbers import Numbers

PORT, RELAY_PORT = 17320, 17420  # below those that systems give to connections


def connected(rank: int, n: int, towards: int, is_busy: bool) -> Mesh:
    """Calls those before it, and waits for those behind it."""
    listener = socket.create_server(("127.0.0.1", PORT + rank), backlog=n)
    peers: list[Peer | None] = [None] * n
    for other in range(rank):
        deadline = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", towards + other), 5)
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


def measure(rank: int, n: int, args: argparse.Namespace, towards: int, delay_ms: float) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if args.pin:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    mesh = connected(rank, n, towards, is_busy=n + (towards != PORT) <= len(cores))
    speed = agree_on_speed(mesh)
    for n_bytes in args.bytes:
        x = np.ones((1, n_bytes // 4), dtype=np.float32)
        for algorithm in ALGORITHMS:
            group = AllReduce(mesh, algorithm, Numbers(args.reduce_dtype), speed)
            turns = max(10, min(args.turns, int(2.0 / max(seconds(algorithm, mesh.size, n_bytes, speed), 1e-6))))
            times = []
            for _ in range(turns):
                begin = time.perf_counter()
                group.reduce(x)
                times.append(time.perf_counter() - begin)
                x[:] = 1
            if rank == 0:
                tell = {
                    "nodes": mesh.size, "bytes": n_bytes, "delay_ms": delay_ms, "algorithm": algorithm,
                    "median_us": round(1e6 * float(np.median(times)), 1),
                    "p90_us": round(1e6 * float(np.quantile(times, 0.9)), 1),
                    "expected_us": round(1e6 * seconds(algorithm, mesh.size, n_bytes, speed), 1),
                    "chosen": algorithm == fastest(mesh.size, n_bytes, speed),
                    "measured_delay_us": round(1e6 * speed.delay_s, 1),
                    "measured_mb_s": round(speed.bytes_s / 1e6, 1),
                }  # fmt: skip
                print(json.dumps(tell), flush=True)


def in_processes(n: int, args: argparse.Namespace, towards: int, delay_ms: float) -> None:
    in_forks(n, lambda rank: measure(rank, n, args, towards, delay_ms))


def in_forks(n: int, work: Callable[[int], None]) -> None:
    """Do `work(rank)` in a process for each rank, and wait for all of them."""
    children = []
    for rank in range(n):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(rank)
                status = 0
            except BaseException:  # told here: nobody above this process would
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def relay(n: int, delay_s: float) -> None:
    """Stands between all nodes, like a network with a delay: what comes in goes out `delay_s` later."""
    listeners = {socket.create_server(("127.0.0.1", RELAY_PORT + rank), backlog=n): rank for rank in range(n)}
    open_socks, queues, other = [*listeners], {}, {}
    while True:
        now = time.perf_counter()
        due = min((queue[0][0] for queue in queues.values() if queue), default=now + 1)
        for sock in select.select(open_socks, [], [], max(0.0, due - now - 5e-5))[0]:
            if sock in listeners:
                caller, _ = sock.accept()
                target = socket.create_connection(("127.0.0.1", PORT + listeners[sock]))
                for one in (caller, target):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    open_socks.append(one)
                    queues[one] = collections.deque()
                other[caller], other[target] = target, caller
            elif data := sock.recv(1 << 20):
                queues[other[sock]].append((time.perf_counter() + delay_s, data))
            else:  # it has ended; what it sent before is still on its way
                open_socks.remove(sock)
        now = time.perf_counter()
        for sock, queue in queues.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):
                    sock.sendall(queue.popleft()[1])


def with_delay(n: int, args: argparse.Namespace, delay_ms: float) -> None:
    between = os.fork()
    if between == 0:
        try:
            relay(n, delay_ms / 1000)
        finally:
            os._exit(0)
    time.sleep(0.2)
    in_processes(n, args, RELAY_PORT, delay_ms)
    os.kill(between, signal.SIGKILL)
    os.waitpid(between, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2])
    parser.add_argument("--bytes", type=int, nargs="+", default=[8192])
    parser.add_argument("--delays-ms", type=float, nargs="*", default=[])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--reduce-dtype", default="float32")
    parser.add_argument("--pin", action="store_true", help="each process on one core")
    args = parser.parse_args()
    for n in args.nodes:
        if not args.delays_ms:
            in_processes(n, args, PORT, 0.0)
        for delay_ms in args.delays_ms:
            with_delay(n, args, delay_ms)


if __name__ == "__main__":
    main()
