"""Sums over the nodes of a group: how long one takes in each way, by processes, bytes, and the delay of links.

    tensor_sums.py --nodes 2 4 --bytes 8192
        processes of this machine over loopback
    tensor_sums.py --nodes 2 4 6 8 --delays-ms 0.2 1 5 10
        each on a host of its own (slow_hosts.py), with so much delay between them

Prints one JSON object per line: nodes, bytes, delay_ms, algorithm, median_us, p90_us; --json keeps them, for draw_figures.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

import on_path  # noqa: F401
from link_speed import agree_on_speed
from mdi.net.keys import SealedSession, has_fast_aes
from mdi.placement.cost import seconds
from mdi.spec.options import DEFAULT_SUM, SUMS
from mdi.tensor.mesh import Mesh, Peer
from mdi.tensor.sums import AllReduce, Numbers
from records import save
from slow_hosts import SlowHosts

Result = dict[str, Any]
PORT = 17320  # on hosts of their own; below those that systems give to connections


class Meeting:
    """Where nodes of a group listen, made before their processes: on free ports of this machine, or on hosts of their own.

    Attributes:
        places: address and port of each.
    """

    def __init__(self, n: int, hosts: SlowHosts | None) -> None:
        self._made = [] if hosts is not None else [socket.create_server(("127.0.0.1", 0), backlog=n) for _ in range(n)]
        self.places = [listener.getsockname() for listener in self._made]
        if hosts is not None:
            self.places = [(hosts.address(rank), PORT) for rank in range(n)]

    def listener(self, rank: int) -> socket.socket:
        """Of one node, in its process."""
        n = len(self.places)
        return self._made[rank] if self._made else socket.create_server(self.places[rank], backlog=n)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._made:
            listener.close()


def connected(rank: int, meeting: Meeting, is_busy: bool, is_sealed: bool = False) -> Mesh:
    """Calls those before it, and waits for those behind it.

    Args:
        is_sealed: encrypt what is sent, as with a cluster key.
    """
    n = len(meeting.places)
    listener = meeting.listener(rank)
    peers: list[Peer | None] = [None] * n

    def add(other: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[other] = Peer(f"node{other}", sock, session(rank, other) if is_sealed else None)

    for other in range(rank):
        deadline = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection(meeting.places[other], 5)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        sock.sendall(bytes([rank]))
        add(other, sock)
    for _ in range(rank + 1, n):
        sock, _ = listener.accept()
        add(sock.recv(1)[0], sock)
    listener.close()
    return Mesh(rank, peers, is_busy)


def session(rank: int, other: int) -> SealedSession:
    """Of two nodes, with keys that anybody can make: what it costs does not depend on them."""
    keys = (hashlib.sha256(f"{a} to {b}".encode()).digest() for a, b in ((rank, other), (other, rank)))
    return SealedSession(*keys, is_aes=has_fast_aes())


def measure(
    rank: int, n: int, args: argparse.Namespace, hosts: SlowHosts | None, meeting: Meeting, delay_ms: float
) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    if hosts is not None:
        hosts.enter(rank)
    mesh = connected(rank, meeting, is_busy=n + (hosts is not None) <= len(cores))
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


def in_forks(n: int, work: Callable[[int], list[Result]]) -> list[Result]:
    """Do `work(rank)` in a process for each rank, and wait for all of them; what the first found.

    Raises:
        SystemExit: one of them failed, and has told why; the others are ended, as they would wait for it.
    """
    fork, is_well = multiprocessing.get_context("fork"), True
    told, its = fork.Pipe(duplex=False)

    def one(rank: int) -> None:
        found = work(rank)
        if rank == 0:
            its.send(found)  # a pipe holds it

    children = [fork.Process(target=one, args=(rank,)) for rank in range(n)]
    for child in children:
        child.start()
    while waiting := [child for child in children if child.is_alive()]:
        if is_well and any(child.exitcode for child in children):  # before the wait: one may have failed already
            is_well = False
            for child in children:
                child.terminate()
        connection.wait([child.sentinel for child in waiting])
    if not is_well or any(child.exitcode for child in children):
        raise SystemExit(1)
    found: list[Result] = told.recv()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2])
    parser.add_argument("--bytes", type=int, nargs="+", default=[8192])
    parser.add_argument("--delays-ms", type=float, nargs="*", default=[])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--reduce-dtype", default="float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers are written")
    args = parser.parse_args()
    results = []

    def done(found: list[Result]) -> None:
        print(*map(json.dumps, found), sep="\n", flush=True)
        results.extend(found)

    for n in args.nodes:
        for delay_ms in args.delays_ms or [None]:
            hosts = None if delay_ms is None else SlowHosts(n, delay_ms / 1000)
            try:
                with Meeting(n, hosts) as meeting:
                    arguments = n, args, hosts, meeting, delay_ms or 0.0
                    done(in_forks(n, lambda rank, given=arguments: measure(rank, *given)))
            finally:
                if hosts is not None:
                    hosts.close()
    if args.json is not None:
        save(args.json, {"sums": results})


if __name__ == "__main__":
    main()
