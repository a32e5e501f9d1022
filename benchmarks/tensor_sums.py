"""Sums over the nodes of a group: how long one takes in each way, by processes, bytes, and the delay of links.

    tensor_sums.py --nodes 2 4 --bytes 8192
        processes of this machine over loopback
    sudo tensor_sums.py --nodes 2 4 8 --delays-ms 0.2 1 5 10
        each process in a network namespace of its own, links with a delay (needs root, ip and tc)

Prints one JSON object per line: nodes, bytes, delay_ms, algorithm, median_us, p90_us.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from mdi.partition.sum_cost import ALGORITHMS, fastest, seconds
from mdi.tensor.allreduce import AllReduce
from mdi.tensor.joining import agree_on_speed
from mdi.tensor.mesh import Mesh, Peer
from mdi.tensor.numbers import Numbers

NET = "10.213.7"
PORT = 17320  # below those that systems give to connections


def connected(rank: int, addresses: list[str], is_busy: bool) -> Mesh:
    """Calls those before it, and waits for those behind it."""
    n = len(addresses)
    listener = socket.create_server((addresses[rank], PORT + rank), backlog=n)
    peers: list[Peer | None] = [None] * n
    for other in range(rank):
        deadline = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection((addresses[other], PORT + other), 5)
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


def measure(rank: int, args: argparse.Namespace, addresses: list[str], delay_ms: float) -> None:
    if args.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    mesh = connected(
        rank,
        addresses,
        is_busy=len(addresses) <= len(os.sched_getaffinity(0)) or (args.pin and len(addresses) <= os.cpu_count()),
    )
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


def in_processes(
    n: int, args: argparse.Namespace, addresses: list[str], delay_ms: float, names: list[str | None]
) -> None:
    children = []
    for rank in range(n):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if names[rank] is not None:
                    enter(f"/var/run/netns/{names[rank]}")
                measure(rank, args, addresses, delay_ms)
                status = 0
            except BaseException:  # told here: nobody above this process would
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def enter(namespace: str) -> None:
    """os.setns came with Python 3.12."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def with_delay(n: int, args: argparse.Namespace, delay_ms: float) -> None:
    """Namespaces on a bridge; what leaves each of them is delayed by `delay_ms`."""
    names = [f"mdi{rank}" for rank in range(n)]
    try:
        ip("ip", "link", "add", "mdibr", "type", "bridge")
        ip("ip", "link", "set", "mdibr", "up")
        for rank, name in enumerate(names):
            ip("ip", "netns", "add", name)
            ip("ip", "link", "add", f"mdiv{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("ip", "link", "set", f"mdiv{rank}", "master", "mdibr", "up")
            ip("ip", "-n", name, "addr", "add", f"{NET}.{rank + 1}/24", "dev", "eth0")
            ip("ip", "-n", name, "link", "set", "eth0", "up")
            ip(
                "ip",
                "netns",
                "exec",
                name,
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "netem",
                "delay",
                f"{delay_ms}ms",
                "limit",
                "10000",
            )
        in_processes(n, args, [f"{NET}.{rank + 1}" for rank in range(n)], delay_ms, list(names))
    finally:
        for rank, name in enumerate(names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"mdiv{rank}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", "mdibr"], capture_output=True, check=False)


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
            in_processes(n, args, ["127.0.0.1"] * n, 0.0, [None] * n)
        for delay_ms in args.delays_ms:
            with_delay(n, args, delay_ms)


if __name__ == "__main__":
    main()
