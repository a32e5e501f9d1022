#!/usr/bin/env python3
"""Section 4.2 of Petals (Borzunov et al. 2023), table 3: what links, clients and uneven nodes leave of the speed of devices.

Nodes of a standing swarm and their clients are processes, each client on the host of a node (slow_hosts.py). Computing takes
as long as in the paper: each node waits until its share of the time of BLOOM's 70 blocks is over. That time follows from the
paper's local pipeline (one device after the other, no links): a + b a row, and c a position of a text that decodes. Its blocks
themselves are small, and real. Rows have a sixteenth of BLOOM's width, and links a sixteenth of the paper's rate.

Several clients have as many texts in all as one, at least eight each.

    petals.py --until-s 180     root; the cells that are not in the file of results yet, as many as can begin in that time
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import on_path  # noqa: F401
from records import add_json_flag, save

ROOT = Path(__file__).resolve().parents[1]
PORT, RING_PORT, CLIENT_PORT = 8088, 5088, 9088
PART = 16  # of the paper's width of rows, and of its rates
LOCAL = {"128": 2.46, "2048": 2.28, "1x128": 98.4}  # steps/s and tokens/s of three A100 in one machine
N_BLOCKS = 70
SHARES = {3: (23, 23, 24), 10: (7,) * 10, 12: (7,) * 9 + (3, 2, 2)}  # of the blocks, by the number of nodes
N_STEPS = 7
CONTEXTS, BATCHES = (128, 2048), (1, 64)


class Case(NamedTuple):
    """A line of the paper's table. Round trips in ms."""

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
    Case(12, 12, 1000, 5): (0.90, 0.86, None, None),
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


# The processes


def node(folder: Path, n_nodes: int, index: int, *words: str) -> None:
    """A standing node with block `index`, whose stage waits."""
    import mdi.node.swarm_member as member
    from mdi.cli import main
    from mdi.stages.kernel_stage import KernelStage

    computed, share, prompts_wait = KernelStage.__call__, SHARES[n_nodes][index] / N_BLOCKS, folder / "prompts-wait"

    def waiting(stage: KernelStage, x: Any, slices: Any, *more: Any) -> Any:
        begin = time.perf_counter()
        found = computed(stage, x, slices, *more)
        if len(x) == 1 or prompts_wait.exists():
            until = begin + share * device_s(len(x), max(one.start for one in slices))
            time.sleep(max(0.0, until - time.perf_counter()))
        return found

    KernelStage.__call__ = waiting  # type: ignore[method-assign]
    member.weakest_span = lambda served, n_blocks: index  # type: ignore[assignment]
    sys.exit(main(["join", *words]))


def client(folder: Path, address: str, peer: str) -> None:
    """A starter that reads what to measure: `steps CONTEXT` or `forward TEXTS`, and writes what it took."""
    from mdi.cancel import Cancel
    from mdi.control.meeting import Peer
    from mdi.engine.sequence import SamplingParams
    from mdi.net.keys import KeyFile
    from mdi.run.nodes import SwarmNodes
    from mdi.run.run import Run
    from mdi.run.swarm import Swarm
    from mdi.spec.cluster import NodeConfig
    from mdi.spec.options import StarterOptions

    swarm = Swarm([Peer(peer, PORT)], KeyFile(folder / "key"), 120.0)
    place = NodeConfig("starter", address, CLIENT_PORT, CLIENT_PORT + 1)
    source = SwarmNodes(swarm, lambda: place, Cancel(), 1, None, lambda: None)
    options = StarterOptions(
        ckpt=folder / "model", prompt_style="none", device="cpu", dtype="float32", wire_dtype="int8", draft="none",
        silence_s=120.0,
    )  # fmt: skip
    with source, Run(source, options, max(CONTEXTS) + N_STEPS + 2, n_texts=max(BATCHES)) as run:
        print("ready", flush=True)
        for line in sys.stdin:
            what, n = line.split()[0], int(line.split()[1])
            n_texts, n_ids, n_tokens = (1, n, N_STEPS + 1) if what == "steps" else (n, 128, 1)
            times = [time.monotonic()] if what == "forward" else []
            for k in range(n_texts):
                ids = [1 + (7 * k + 3 * i) % 200 for i in range(n_ids)]
                sample = run.submit("", ids, SamplingParams(n_tokens, temperature=0.0))
                note(sample, times)
            run.read()
            print(json.dumps(times), flush=True)


def note(sample: Any, times: list[float]) -> None:
    """Have the times of its tokens appended."""
    take = sample.take

    def taken(event: Any) -> None:
        take(event)
        times.extend(time.monotonic() for _ in event.tokens)

    sample.take = taken


class Setup:
    """Nodes that stand, and clients, on hosts of their own."""

    def __init__(self, n_nodes: int, n_clients: int, stack: contextlib.ExitStack) -> None:
        from mdi.net.keys import new_secret, write_keys
        from random_checkpoint import make_checkpoint
        from slow_hosts import SlowHosts

        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_checkpoint(self.folder / "model", f"links-{n_nodes}")
        write_keys(self.folder / "key", (new_secret(),))
        self.hosts = SlowHosts(n_nodes, 0.0)
        stack.callback(self.hosts.close)
        self._stack, self._n = stack, n_nodes
        for i in range(n_nodes):
            words = ["--model", self.folder / "model", "--key", self.folder / "key", "--addr", self.hosts.address(i)]
            words += ["--port", PORT, "--port-in", RING_PORT, "--max-blocks", 1, "--threads", 1, "--no-announce"]
            words += ["--cache-dir", self.folder / "cache", "--peer", f"{self.hosts.address((i + 1) % n_nodes)}:{PORT}"]
            self._start(i, "node", n_nodes, i, *words)
        where = [self.hosts.address(i % n_nodes) for i in range(n_clients + 1)]
        self.clients = [self._start(i, "client", where[i], where[i + 1]) for i in range(n_clients)]
        for one in self.clients:
            self._answer(one)

    def _start(self, host: int, what: str, *words: object) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self.folder / f"{what}{host}.log").open("wb"))
        command = [sys.executable, __file__, f"--{what}", self.folder, *words]
        out = subprocess.PIPE if what == "client" else log
        one = subprocess.Popen(
            self.hosts.command(host, *map(str, command)), stdin=subprocess.PIPE, stdout=out,
            stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        self._stack.callback(one.wait)
        self._stack.callback(one.kill)
        return one

    def _answer(self, one: subprocess.Popen[str]) -> str:
        assert one.stdout is not None
        if line := one.stdout.readline():
            return line
        logs = [path.read_text()[-500:] for path in sorted(self.folder.glob("*.log"))]
        raise SystemExit("\n".join(["a client has ended:", *logs]))

    def asked(self, n_clients: int, what: str, n: int) -> list[list[float]]:
        """What so many clients took, who began at the same time."""
        waits = self.folder / "prompts-wait"
        waits.touch() if what == "forward" else waits.unlink(missing_ok=True)
        for one in self.clients[:n_clients]:
            assert one.stdin is not None
            print(what, n, file=one.stdin, flush=True)
        return [json.loads(self._answer(one)) for one in self.clients[:n_clients]]

    def measure(self, case: Case, paper: Sequence[float | None]) -> dict[str, list[float]]:
        """Rates of each client. What the paper leaves out is left out."""
        self.hosts.join(case.rtt_ms / 2e3, case.mbit / PART)
        self.asked(case.clients, "steps", 16)  # links have found their rate
        found = {f"steps {n}": together_s(self.asked(case.clients, "steps", n)) for n in CONTEXTS}
        for n, theirs in zip(BATCHES, paper[2:], strict=True):
            if theirs is not None:
                n_own = max(min(n, 8), n // case.clients)
                times = self.asked(case.clients, "forward", n_own)
                found[f"forward {n}"] = [n_own * 128 / (one[-1] - one[0]) for one in times]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, action="append", choices=tuple(SHARES), help="may be repeated (all)")
    parser.add_argument("--until-s", type=float, default=1e9, help="no cell begins later than this (no end)")
    add_json_flag(parser, "petals")
    args = parser.parse_args()
    begin, cells = time.monotonic(), {}
    if args.json.exists():
        cells = json.loads(args.json.read_text(encoding="utf-8"))["cells"]
    for n_nodes in args.nodes or SHARES:
        left = [case for case in PAPER if case.nodes == n_nodes and case.name not in cells]
        with contextlib.ExitStack() as stack:
            setup: Setup | None = None
            for case in left:
                if time.monotonic() - begin > args.until_s:
                    return
                setup = setup or Setup(n_nodes, max(one.clients for one in left), stack)
                cells[case.name] = setup.measure(case, PAPER[case])
                print(f"{time.monotonic() - begin:4.0f} s: {case.name}: {cells[case.name]}", flush=True)
                save(args.json, {"cells": cells})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--node"]:
        node(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
    elif sys.argv[1:2] == ["--client"]:
        client(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
