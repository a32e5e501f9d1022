#!/usr/bin/env python3
"""What failures at a given rate leave of the speed of one text: table 1 of Petals (Borzunov et al. 2023), on four stages.

With probability p, each time that rows are sent to the next stage, that stage drops its caches and connections; its process
lives. "replay" and "tokens" go on from what the nodes have (mdi.run); "restart" begins the text again after each failure;
"no cache" computes the whole text again for each token. All in one process over loopback, one thread, in the same run: the
rates take turns. A node that failed often would have to wait before it is used again: here it need not.

Where failures are rare, short texts see none: "computed" is what the mean cost of a failure leaves, with as many failures as
are to be expected. Restarts that would take more than --limit texts are only computed, and "no cache" is measured
at some of its lengths.

    recovery_rates.py --tokens 128 --repeat 10
    recovery_rates.py --tokens 1020 --repeat 2 --limit 2
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import on_path
from records import add_json_flag, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

PROMPT = [1, 5, 9, 40]
LAYERS = (0, 2, 2, 2, 2)  # of the starter and four stages, as 8, 7, 8, 7 in the paper
N_STAGES = len(LAYERS) - 1
N_LENGTHS = 8  # of "no cache", of which the time is measured
RESTORED = {"replay": 64 << 20, "tokens": 0}  # bytes of rows that nodes keep


@dataclass
class Row:
    """What one text took. `failures` that came; `is_same`: whether it was the text of the first run."""

    way: str
    rate: float
    seconds: float
    failures: int
    is_same: bool


def secondaries(ckpt: Path, stack: contextlib.ExitStack) -> list[Any]:
    """Nodes in this process, which have the weights."""
    from mdi.checkpoint.source import open_source
    from mdi.node.secondary import SecondaryNode
    from mdi.spec.cluster import NodeConfig
    from mdi.spec.options import Requested

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    nodes = []
    for i in range(N_STAGES):
        source = open_source(ckpt)
        stack.callback(source.close)
        config = NodeConfig(f"secondary{i}", "127.0.0.1", 0, 0)
        node = SecondaryNode(config, source, folder / str(i), Requested(device="cpu", threads=1))
        node.open()
        thread = threading.Thread(target=node.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(node.close)
        nodes.append(node)
    return nodes


class Ring:
    """A starter over secondaries of this process, which can be made to fail."""

    def __init__(self, nodes: list[Any], args: argparse.Namespace, replay_bytes: int) -> None:
        from mdi.run.nodes import GivenNodes
        from mdi.run.run import Run
        from mdi.spec.cluster import ClusterConfig, NodeConfig
        from mdi.spec.options import StarterOptions

        self._nodes = nodes
        options = StarterOptions(
            ckpt=args.ckpt, device="cpu", layers=",".join(map(str, LAYERS)), prompt_style="none", replay_memory=replay_bytes,
            draft="none",
        )  # fmt: skip
        places = tuple(NodeConfig(n.config.name, "127.0.0.1", n.control_port, n.ring_port) for n in nodes)
        cluster = ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), places)
        self.starter = Run(GivenNodes(cluster), options, len(PROMPT) + args.tokens, n_texts=1)
        self.starter.open()
        self.starter.loop.policy.absences.step_s = 0.0  # here nodes fail on purpose: they need not wait
        self._random = random.Random()
        self._rate = 0.0
        self.n_failures = 0

    def close(self) -> None:
        self.starter.close()
        self.starter.close()

    def may_fail(self, rate: float, seed: int) -> None:
        self._random.seed(f"{rate} {seed}")
        self._rate = rate
        self.n_failures = 0

    def generate(self, ids: list[int], n_tokens: int, on_token: Callable[[], object] = lambda: None) -> list[int]:
        """`on_token` is called for each token, whether that makes text or not."""
        from mdi.engine.sequence import SamplingParams

        sample = self.starter.submit("", ids, SamplingParams(n_tokens, temperature=0.0))
        take = sample.take

        def taken(event: Any) -> None:
            take(event)
            for _ in event.tokens:
                on_token()

        sample.take = taken
        self.starter.read()
        return list(sample.token_ids)

    def restored(self, n_tokens: int) -> list[int]:
        return self.generate(PROMPT, n_tokens, self._perhaps_fail)

    def restarted(self, n_tokens: int) -> list[int]:
        """Each failure ends the text; the time of what it had reached is lost."""
        q = per_token(self._rate)
        while True:
            lasting = next((k + 1 for k in range(n_tokens) if self._random.random() < q), None)
            ids = self.generate(PROMPT, n_tokens if lasting is None else lasting)
            if lasting is None:
                return ids
            self.n_failures += 1

    def _perhaps_fail(self) -> None:
        """A stage fails now, perhaps: one that rows of the next token would be sent to."""
        for i in range(len(self._nodes)):
            if self._random.random() < self._rate and self._fail(i):
                self.n_failures += 1
                return

    def _fail(self, i: int) -> bool:
        """Secondary `i` drops its caches and connections; False if it has none now."""
        from mdi.errors import Code
        from mdi.net.hello import Fault

        job, name = self._nodes[i].runs.latest, self._nodes[i].config.name
        ring = None if job is None else job.ring
        if ring is not None:
            ring.fail(Fault(name, "its caches and connections are dropped", name, Code.FAILED))
        return ring is not None


def per_token(rate: float) -> float:
    """The probability that a stage fails while a token goes round."""
    return 1 - (1 - rate) ** N_STAGES


def n_restarts(rate: float, n_tokens: int) -> float:
    """Tokens that are computed in vain, in texts, if each failure begins the text again: expected."""
    q = per_token(rate)
    return (((1 - q) ** -n_tokens - 1) / q - n_tokens) / n_tokens if q else 0.0


def measure(args: argparse.Namespace, rates: list[float]) -> tuple[list[Row], float]:
    """All texts that are measured, and the time of a text without caches and failures."""
    rows: list[Row] = []
    expected: list[int] = []
    without_s = 0.0
    with contextlib.ExitStack() as stack:
        nodes = secondaries(args.ckpt, stack)
        for way, replay_bytes in RESTORED.items():
            ring = Ring(nodes, args, replay_bytes)
            try:
                expected = expected or ring.generate(PROMPT, args.tokens)
                ring.generate(PROMPT, min(32, args.tokens))  # warm
                for seed in range(args.seed, args.seed + args.repeat):
                    for rate in rates:
                        rows.append(one(way, ring.restored, ring, rate, seed, expected))
                        if way == "tokens" and n_restarts(rate, args.tokens) < args.limit:
                            rows.append(one("restart", ring.restarted, ring, rate, seed, expected))
                if way == "tokens":
                    without_s = no_cache_s(ring, [*PROMPT, *expected])
            finally:
                ring.close()
    return rows, without_s


def one(way: str, generate: Callable[[int], list[int]], ring: Ring, rate: float, seed: int, expected: list[int]) -> Row:
    ring.may_fail(rate, seed)
    begin = time.perf_counter()
    ids = generate(len(expected))
    row = Row(way, rate, time.perf_counter() - begin, ring.n_failures, ids == expected)
    print(row, flush=True)
    return row


def no_cache_s(ring: Ring, ids: list[int]) -> float:
    """The time of all tokens, each computed with the whole text before it: of lengths in equal steps, the mean."""
    n_tokens = len(ids) - len(PROMPT)
    times = []
    for i in range(N_LENGTHS):
        n = len(PROMPT) + round((i + 0.5) * n_tokens / N_LENGTHS)
        begin = time.perf_counter()
        assert ring.generate(ids[:n], 1) == ids[n : n + 1]
        times.append(time.perf_counter() - begin)
    return n_tokens * statistics.mean(times)


def summary(rows: list[Row], without_s: float, rates: list[float], n_tokens: int) -> list[dict[str, Any]]:
    """A line for each way and rate: what is left of the same way's speed without failures, measured and computed.

    The rates of a way take turns; the ways do not, and the machine's speed changes from one to the next.
    """
    plain_s = statistics.mean(row.seconds for row in rows if not row.rate)
    lines = []
    for way in (*RESTORED, "restart", "no cache"):
        own = [row for row in rows if row.way == way]
        failed = [row for row in own if row.failures]
        n_failures = sum(row.failures for row in failed)
        own_s = statistics.mean([row.seconds for row in own if not row.rate] or [plain_s])
        cost_s = sum(row.seconds - own_s for row in failed) / n_failures if n_failures else 0.0
        for rate in rates:
            found = [row for row in own if row.rate == rate]
            if way == "no cache":
                computed_s = without_s / (1 - per_token(rate))
            elif way == "restart":
                computed_s = own_s * (1 + n_restarts(rate, n_tokens))
            else:
                computed_s = own_s + cost_s * per_token(rate) * n_tokens
            measured_s = statistics.mean(row.seconds for row in found) if found else None
            lines.append({
                "way": way, "rate": rate, "texts": len(found), "failures": sum(row.failures for row in found),
                "left": own_s / measured_s if measured_s else None, "computed": own_s / computed_s,
                "s_per_failure": cost_s if way in RESTORED else None,
            })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=on_path.ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--rates", default="0,1e-4,1e-3,1e-2,5e-2", help="(%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="texts of each way and rate (%(default)s)")
    parser.add_argument("--limit", type=float, default=10.0, help="texts that restarts may cost (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of the failures (%(default)s)")
    add_json_flag(parser, "recovery_rates")
    args = parser.parse_args()
    sys.setswitchinterval(5e-4)  # nodes of one process wait for each other as little as processes do
    logging.getLogger("mdi").setLevel(logging.ERROR)
    rates = [float(rate) for rate in args.rates.split(",")]
    rows, without_s = measure(args, rates)
    lines = summary(rows, without_s, rates, args.tokens)
    for line in lines:
        print(line)
    plain = [row.seconds / args.tokens for row in rows if not row.rate]
    is_same = all(row.is_same for row in rows)
    print(f"without failures: {1e3 * statistics.median(plain):.2f} ms per token; all texts the same: {is_same}")
    settings = {"model": args.ckpt.name, "tokens": args.tokens, "seed": args.seed}
    save(args.json, {**settings, "no_cache_s": without_s, "lines": lines, "texts": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
