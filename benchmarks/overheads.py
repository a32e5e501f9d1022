#!/usr/bin/env python3
"""What the ring costs beside the computing: the numbers of benchmarks/RESULTS.md, "Overheads".

    benchmarks/overheads.py [--json FILE] [--quick]

The round trip of an 8 KB activation between two processes over our links (queues, threads, CRC and all), beside a bare socket,
and our frames alone. They take turns in each round, so that a noisy neighbour hits all of them. And the bytes of frames beyond
their payload. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import on_path  # noqa: F401
from records import add_json_flag, machine, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it

N_COLS = 2048  # float32: 8 KB
HOST = "127.0.0.1"


def seat_of(index: int, epoch: int, next_port: int) -> Any:
    """A place in a ring of two nodes on loopback."""
    from mdi.net.ring import Seat

    return Seat(epoch, index, ("starter", "secondary0"), "overheads", HOST, next_port)


def open_listener(name: str) -> Any:
    from mdi.net.listener import RingListener, open_socket

    return RingListener(open_socket(HOST, 0, name), name)


def read_exactly(sock: socket.socket, view: memoryview) -> bool:
    """Fill `view`; False if the peer has closed."""
    done = 0
    while done < len(view):
        n = sock.recv_into(view[done:])
        if not n:
            return False
        done += n
    return True


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback."""
    from mdi.net.wire import tune

    with socket.create_server((HOST, 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    for sock in ends:
        tune(sock)
    return ends


def echo(raw: socket.socket, framed: socket.socket, ring_port: int, epoch: int) -> None:
    """The other process: sends everything back, on two bare connections, and as node 1 of a ring."""
    import torch

    from mdi.engine.rows import TensorRows
    from mdi.errors import RingEndedError
    from mdi.net.handshake import join_ring
    from mdi.net.wire import PLAIN, Limits, read_frame, send_frame

    rows = TensorRows(torch.device("cpu"), torch.float32)
    listener, seat = open_listener("secondary0"), seat_of(1, epoch, ring_port)
    expectation = listener.expect(epoch, seat.prev_hello)
    raw.sendall(b"%-16d" % listener.port)

    def echo_raw() -> None:
        view = memoryview(bytearray(N_COLS * 4))
        while read_exactly(raw, view):
            raw.sendall(view)

    def echo_framed() -> None:
        while (frame := read_frame(framed, PLAIN)) is not None:
            send_frame(framed, frame)

    for target in (echo_raw, echo_framed):
        threading.Thread(target=target, daemon=True).start()
    sock = expectation.wait(30)
    if sock is None:
        raise SystemExit("the first process did not connect")
    ring = join_ring(sock, seat, 2, Limits(max_cols=N_COLS))
    while True:
        try:
            frame = ring.recv()
        except RingEndedError:
            break
        if frame is not None:
            x = rows.read(frame, N_COLS).clone()
            ring.release(frame)
            ring.send(replace(frame, payload=rows.payload(x, "auto")[1]))
    ring.close()
    listener.close()


def round_trips(n_rounds: int, n_trips: int, n_warm: int) -> dict[str, dict[str, float]]:
    """Microseconds there and back, by way of transport."""
    import torch

    from mdi.engine.rows import TensorRows
    from mdi.host.threads import choose_threads
    from mdi.net.handshake import close_starter_ring
    from mdi.net.wire import PLAIN, Frame, FrameType, Limits, Slice, read_frame, send_frame

    choose_threads(1)
    x = torch.randn(1, N_COLS)
    bare, epoch = bytearray(x.numpy().tobytes()), secrets.randbits(64)
    listener = open_listener("starter")
    (raw, *echo_raw), (framed, *echo_framed) = pair(), pair()
    ends = (*echo_raw, *echo_framed)
    child = multiprocessing.get_context("fork").Process(target=echo, args=(*ends, listener.port, epoch))
    child.start()
    for sock in ends:
        sock.close()
    head = bytearray(16)
    read_exactly(raw, memoryview(head))
    ring = close_starter_ring(listener, seat_of(0, epoch, int(head)), 2, Limits(max_cols=N_COLS))
    rows = TensorRows(torch.device("cpu"), torch.float32)

    numbers = itertools.count()  # a link drops a frame whose number it has had

    def frame(number: int = 0) -> Frame:
        dtype, payload = rows.payload(x, "auto")
        return Frame(FrameType.BATCH, epoch, number, dtype, 1, N_COLS, (Slice(0, 0, 1, 1),), payload=payload)

    def over_socket() -> None:
        raw.sendall(bare)
        read_exactly(raw, memoryview(bare))

    def over_frames() -> None:
        send_frame(framed, frame())
        read_frame(framed, PLAIN)

    def over_links() -> None:
        ring.send(frame(next(numbers)))
        back = ring.recv()
        rows.read(back, N_COLS)
        ring.release(back)

    ways = {
        "bare socket": over_socket,
        "our frames, without threads and queues": over_frames,
        "our links": over_links,
    }
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(n_rounds):
        for name, trip in ways.items():
            times[name].append(timed(trip, n_trips, n_warm))
    ring.stop("measured")
    ring.close()
    listener.close()
    for sock in (raw, framed):
        sock.close()
    child.join(30)
    return {name: summary(rounds) for name, rounds in times.items()}


def timed(trip: Callable[[], None], n: int, n_warm: int) -> list[float]:
    for _ in range(n_warm):
        trip()
    times = []
    for _ in range(n):
        begin = time.perf_counter()
        trip()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def summary(rounds: list[list[float]]) -> dict[str, float]:
    every = sorted(t for times in rounds for t in times)
    medians = [statistics.median(times) for times in rounds]
    return {"median_us": statistics.median(every), "p99_us": every[int(0.99 * len(every))],
            "lowest_round_median_us": min(medians), "highest_round_median_us": max(medians)}  # fmt: skip


def wire_bytes() -> dict[str, int]:
    """Bytes of a frame beyond its payload."""
    from mdi.net.wire import PLAIN, Frame, FrameType, Slice

    def beyond(n_slices: int) -> int:
        slices = tuple(Slice(i, 100, 1, 1) for i in range(n_slices))
        payload = bytes(n_slices * N_COLS * 4)
        return len(PLAIN.head(Frame(FrameType.BATCH, 1, 1, "float32", n_slices, N_COLS, slices, (), payload)))

    return {"1 slice": beyond(1), "8 slices": beyond(8), "ping": len(PLAIN.head(Frame(FrameType.PING, 1)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_flag(parser, "overheads")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it works")
    args = parser.parse_args()
    result: dict[str, Any] = {"round_trip": round_trips(*((2, 50, 10) if args.quick else (9, 500, 50)))}
    result["wire_bytes"] = wire_bytes()
    print(machine())
    print("\nround trip of 8 KB between two processes, us     median      p99   (medians of the rounds)")
    for name, t in result["round_trip"].items():
        low, high = t["lowest_round_median_us"], t["highest_round_median_us"]
        print(f"  {name:<44} {t['median_us']:8.0f} {t['p99_us']:8.0f}   ({low:.0f} to {high:.0f})")
    print("\nbytes of a frame beyond its payload: " + ", ".join(f"{k} {v}" for k, v in result["wire_bytes"].items()))
    if not args.quick:
        save(args.json, result)


if __name__ == "__main__":
    main()
