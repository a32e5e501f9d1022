#!/usr/bin/env python3
"""Section 4.2 of Petals (Borzunov et al. 2023), table 3: what links, clients and uneven nodes leave of the speed of devices.

Nodes of a standing swarm and their clients are processes, each client on the host of a node (slow_hosts.py). Computing takes
as long as in the paper: each node waits until its share of the time of BLOOM's 70 blocks is over. That time follows from the
paper's local pipeline (one device after the other, no links): a + b a row, and c a position of a text that decodes. Its blocks
themselves are small, and real. Rows have a sixteenth of BLOOM's width, and links a sixteenth of the paper's rate.

For 64 x 128 one client sends 32 texts, and several share them, with eight each at least: rates are the same.

Offloading is one device that has all blocks in a window of a tenth: reading all of them takes as long as in its appendix B.

    petals.py --models FOLDER --until-s 180     root; cells that this machine has not measured yet, as many as begin in time
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import on_path  # noqa: F401
from records import add_json_flag, machine, save

FORK = multiprocessing.get_context("fork")
PORT, RING_PORT, CLIENT_PORT = 8088, 5088, 9088
PART = 16  # of the paper's width of rows, and of its rates
LOCAL = {"128": 2.46, "2048": 2.28, "1x128": 98.4}  # steps/s and tokens/s of three A100 in one machine
N_BLOCKS = 70
PASS_S = 5.5  # of 176 GB over PCIe 4.0 with 16 lanes
OFFLOADED_BLOCKS = 10  # of the model, in a window
SHARES = {1: (70,), 3: (23, 23, 24), 10: (7,) * 10, 12: (7,) * 9 + (3, 2, 2)}  # of the blocks, by the number of nodes
N_STEPS = 7
START_S = 600.0  # that nodes have until all of them have measured themselves, on few cores and beside other programs
CONTEXTS, BATCHES = (128, 2048), (1, 64)
LENGTH = max(CONTEXTS) + N_STEPS + 2


class Case(NamedTuple):
    """A line of the paper's table. Round trips in ms. One node offloads, and has no links."""

    nodes: int
    clients: int
    mbit: int
    rtt_ms: int

    @property
    def name(self) -> str:
        return f"{self.nodes} nodes, {self.clients} clients, {self.mbit} Mbit/s, {self.rtt_ms} ms"


# Of each client: steps/s behind 128 and 2,048 tokens, and tokens/s of 1 and 64 x 128.
PAPER: dict[Case, tuple[float | None, ...]] = {
    Case(3, 1, 1000, 5): (1.71, 1.54, 70.0, 253.6), Case(3, 1, 100, 5): (1.66, 1.49, 56.4, 182.0),
    Case(3, 1, 100, 100): (1.23, 1.11, 19.7, 112.2), Case(3, 3, 1000, 5): (1.65, 1.49, None, None),
    Case(10, 1, 1000, 5): (1.65, 1.54, 59.1, 230.1), Case(10, 3, 1000, 5): (1.65, 1.54, 54.7, 221.4),
    Case(10, 10, 1000, 5): (1.17, 1.01, 31.0, 131.0), Case(10, 10, 100, 5): (1.05, 0.99, 20.1, 28.1),
    Case(10, 10, 100, 100): (0.34, 0.33, 6.5, 16.8), Case(12, 1, 1000, 5): (1.24, 1.06, 37.9, 180.0),
    Case(12, 1, 100, 5): (1.24, 1.05, 25.6, 66.0), Case(12, 1, 100, 100): (0.57, 0.53, 5.8, 44.3),
    Case(12, 12, 1000, 5): (0.90, 0.86, None, None), Case(1, 1, 0, 0): (0.18, 0.18, 2.7, 170.3),
}  # fmt: skip


def device_s(n_rows: int, position: int) -> float:
    """Of all blocks, for rows of prompts, or for one that decodes at a position."""
    one, late, many = 1 / LOCAL["128"], 1 / LOCAL["2048"], 128 / LOCAL["1x128"]
    a_row = (many - one) / 127
    of_position = (late - one) / (2048 - 128) if n_rows == 1 else 0.0
    return one + (n_rows - 1) * a_row + max(0, position - 128) * of_position


def together_s(times: Sequence[Sequence[float]]) -> list[float]:
    """Steps/s of each client while all of them decode: of the times of their tokens."""
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    inside = [[t for t in one if begin <= t <= end] for one in times]
    return [(len(one) - 1) / (one[-1] - one[0]) for one in inside if len(one) > 1]


# The processes, forked when all that they need is imported


def node(waits: Path, n_nodes: int, index: int, words: Sequence[object]) -> None:
    """A standing node with block `index`, whose stage waits."""
    import mdi.node.swarm_member as member
    from mdi.cli import main
    from mdi.stages.kernel_stage import KernelStage

    computed, share = KernelStage.__call__, SHARES[n_nodes][index] / N_BLOCKS

    def waiting(stage: KernelStage, x: Any, slices: Any, *more: Any) -> Any:
        begin = time.perf_counter()
        found = computed(stage, x, slices, *more)
        if len(x) == 1 or waits.exists():
            until = begin + share * device_s(len(x), max(one.start for one in slices))
            time.sleep(max(0.0, until - time.perf_counter()))
        return found

    KernelStage.__call__ = waiting  # type: ignore[method-assign]
    member.weakest_span = lambda served, n_blocks: index  # type: ignore[assignment]
    main(["join", *map(str, words)])


def client(model: Path, key: Path, address: str, peer: str, asked: Connection) -> None:
    """A starter over the swarm."""
    from mdi.cancel import Cancel
    from mdi.control.meeting import Peer
    from mdi.net.keys import KeyFile
    from mdi.run.nodes import SwarmNodes
    from mdi.run.run import Run
    from mdi.run.swarm import Swarm
    from mdi.spec.cluster import NodeConfig
    from mdi.spec.options import StarterOptions

    swarm = Swarm([Peer(peer, PORT)], KeyFile(key), START_S)
    place = NodeConfig("starter", address, CLIENT_PORT, CLIENT_PORT + 1)
    source = SwarmNodes(swarm, lambda: place, Cancel(), 1, None, lambda: None)
    options = StarterOptions(
        ckpt=model, prompt_style="none", device="cpu", dtype="float32", wire_dtype="int8", draft="none",
        silence_s=120.0,
    )  # fmt: skip
    with source, Run(source, options, LENGTH, n_texts=max(BATCHES)) as run:
        answer(run, asked)


def offloading(model: Path, n_blocks: int, waits: Path, asked: Connection) -> None:
    """A client that has all blocks, in a window. Reading half a block waits, and computing with it meanwhile."""
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.cluster import standalone
    from mdi.spec.options import StarterOptions
    from mdi.spec.window import WindowMemory, WindowOptions
    from mdi.stages import window
    from mdi.stages.kernel_stage import KernelStage

    computed, in_memory, read = KernelStage.__call__, window.Window.unit, window.read_unit
    read_s = compute_s = 0.0  # of half a block

    def waiting(stage: KernelStage, x: Any, slices: Any, *more: Any) -> Any:
        nonlocal read_s, compute_s
        is_slow = len(x) == 1 or waits.exists()
        whole = PASS_S, device_s(len(x), max(one.start for one in slices))
        read_s, compute_s = (is_slow * seconds / (2 * n_blocks) for seconds in whole)
        return computed(stage, x, slices, *more)

    @contextlib.contextmanager
    def unit(of: window.Window, part: str, piece: int) -> Iterator[None]:
        with in_memory(of, part, piece):
            yield
            time.sleep(compute_s if part != "head" else 0.0)

    def read_slowly(one: window.Unit, memory: Any) -> Iterator[int]:
        until = time.perf_counter() + (read_s if one.part != "head" else 0.0)
        yield from read(one, memory)
        time.sleep(max(0.0, until - time.perf_counter()))

    KernelStage.__call__ = waiting  # type: ignore[method-assign]
    window.Window.unit, window.read_unit = unit, read_slowly  # type: ignore[method-assign, assignment]
    options = StarterOptions(
        ckpt=model, prompt_style="none", device="cpu", dtype="float32", quantize="bf16", draft="none",
        weight_memory=WindowMemory(window=WindowOptions(units=2)), cache_dir=waits.parent,
    )  # fmt: skip
    with Run(GivenNodes(standalone()), options, LENGTH, n_texts=max(BATCHES)) as run:
        answer(run, asked)


def answer(run: Any, asked: Connection) -> None:
    """Take ("steps", context) or ("forward", texts), and answer with the times of the tokens."""
    from mdi.engine.sequence import SamplingParams

    asked.send([])
    while True:
        what, n = asked.recv()
        n_texts, n_ids, n_tokens = (1, n, N_STEPS + 1) if what == "steps" else (n, 128, 1)
        times = [time.monotonic()] if what == "forward" else []
        for k in range(n_texts):
            ids = [1 + (7 * k + 3 * i) % 200 for i in range(n_ids)]
            note(run.submit("", ids, SamplingParams(n_tokens, temperature=0.0)), times)
        run.read()
        asked.send(times)


def answers(clients: Sequence[Connection], log: Path) -> list[list[float]]:
    """Of all of them. Raises SystemExit, with the last lines of all processes: one has ended."""
    try:
        return [one.recv() for one in clients]
    except EOFError:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise SystemExit("\n".join(["a client has ended:", *lines[-30:]])) from None


def note(sample: Any, times: list[float]) -> None:
    """Have the times of its tokens appended."""
    take = sample.take

    def taken(event: Any) -> None:
        take(event)
        times.extend(time.monotonic() for _ in event.tokens)

    sample.take = taken


class Setup:
    """Nodes that stand, and clients, on hosts of their own."""

    def __init__(self, models: Path, n_nodes: int, n_clients: int, stack: contextlib.ExitStack) -> None:
        import mdi.cli.join  # noqa: F401  so that processes need not import it
        import mdi.node.secondary
        import mdi.run.run  # noqa: F401
        from mdi.net.keys import new_secret, write_keys
        from random_checkpoint import make_checkpoint
        from slow_hosts import SlowHosts

        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shape = f"links-{n_nodes if n_nodes > 1 else OFFLOADED_BLOCKS}"
        model = models / shape
        make_checkpoint(model, shape)
        write_keys(self.folder / "key", (new_secret(),))
        self.hosts = SlowHosts(max(2, n_nodes), 0.0)  # a switch has two ports
        stack.callback(self.hosts.close)
        self._stack, self._waits = stack, self.folder / "prompts-wait"
        self.clients: list[Connection] = []
        where = [self.hosts.address(i % n_nodes) for i in range(n_nodes + 1)]
        for i in range(n_nodes if n_nodes > 1 else 0):
            words = ["--model", model, "--key", self.folder / "key", "--addr", where[i], "--max-blocks", 1]
            words += ["--port", PORT, "--port-in", RING_PORT, "--threads", 1, "--no-announce"]
            words += ["--cache-dir", models / "cache", "--peer", f"{where[i + 1]}:{PORT}"]
            self._fork(i, node, self._waits, n_nodes, i, words)
        for i in range(n_clients):
            own, its = FORK.Pipe()
            if n_nodes == 1:
                self._fork(i, offloading, model, OFFLOADED_BLOCKS, self._waits, its)
            else:
                self._fork(i, client, model, self.folder / "key", where[i], where[i + 1], its)
            its.close()  # so that its end is seen
            self.clients.append(own)
        answers(self.clients, self.folder / "log")

    def _fork(self, host: int, target: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            self.hosts.enter(host)
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            target(*args)

        process = FORK.Process(target=run, daemon=True)
        process.start()
        self._stack.callback(process.join)
        self._stack.callback(process.kill)

    def asked(self, n_clients: int, what: str, n: int) -> list[list[float]]:
        """What so many clients took, who began at the same time."""
        self._waits.touch() if what == "forward" else self._waits.unlink(missing_ok=True)
        for one in self.clients[:n_clients]:
            one.send((what, n))
        return answers(self.clients[:n_clients], self.folder / "log")

    def measure(self, case: Case, paper: Sequence[float | None]) -> dict[str, list[float]]:
        """Rates of each client. What the paper leaves out is left out."""
        if case.nodes > 1:
            self.hosts.join(case.rtt_ms / 2e3, case.mbit / PART)
            self.asked(case.clients, "steps", 16)  # links have found their rate
        found = {f"steps {n}": together_s(self.asked(case.clients, "steps", n)) for n in CONTEXTS}
        for n, theirs in zip(BATCHES, paper[2:], strict=True):
            if theirs is not None:
                n_own = max(min(n, 8), 0 if case.nodes == 1 else n // 2 // case.clients)
                times = self.asked(case.clients, "forward", n_own)
                found[f"forward {n}"] = [n_own * 128 / (one[-1] - one[0]) for one in times]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, action="append", choices=tuple(SHARES), help="may be repeated (all)")
    parser.add_argument("--models", type=Path, required=True, help="folder for random models, which are made once")
    parser.add_argument("--until-s", type=float, default=1e9, help="no cell begins later than this (no end)")
    add_json_flag(parser, "petals")
    args = parser.parse_args()
    begin, cells = time.monotonic(), {}
    if args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))
        cells = found["cells"] if found["machine"] == machine() else {}
    for n_nodes in args.nodes or SHARES:
        left = [case for case in PAPER if case.nodes == n_nodes and case.name not in cells]
        with contextlib.ExitStack() as stack:
            setup: Setup | None = None
            for case in left:
                if time.monotonic() - begin > args.until_s:
                    return
                if setup is None:
                    setup = Setup(args.models, n_nodes, max(one.clients for one in left), stack)
                    print(f"{time.monotonic() - begin:4.0f} s: {n_nodes} nodes and their clients are ready", flush=True)
                cells[case.name] = setup.measure(case, PAPER[case])
                print(f"{time.monotonic() - begin:4.0f} s: {case.name}: {cells[case.name]}", flush=True)
                save(args.json, {"cells": cells})


if __name__ == "__main__":
    main()
