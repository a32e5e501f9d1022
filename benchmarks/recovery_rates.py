#!/usr/bin/env python3
"""What failures at a given rate leave of the speed of one text: table 1 of Petals (Borzunov et al. 2023), on a ring of three.

With probability p, each time that rows are sent to the next stage, that stage drops its caches and connections; its process
lives. "restored" goes on from what the nodes have (mdi.recovery); "restart" begins the text again after each failure;
"no cache" computes the whole text again for each token. All in one process over loopback, one thread, in the same run.

    recovery_rates.py --tokens 128 --rates 0,1e-4,1e-3,1e-2
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records import add_json_flag, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

PROMPT = [1, 5, 9, 40]
N_NODES = 3


class Ring:
    """A starter and its secondaries in this process."""

    def __init__(
        self, ckpt: Path, n_tokens: int, rate: float, seed: int, replay_bytes: int, stack: contextlib.ExitStack
    ) -> None:
        from mdi.config import ClusterConfig, NodeConfig
        from mdi.control.requested import Requested
        from mdi.node.options import StarterOptions
        from mdi.node.secondary import SecondaryNode
        from mdi.node.starter import StarterNode

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.nodes = []
        for i in range(N_NODES - 1):
            node = SecondaryNode(
                NodeConfig(f"secondary{i}", "127.0.0.1", 0, 0), None, folder / str(i), Requested(device="cpu")
            )
            node.open()
            thread = threading.Thread(target=node.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(node.close)
            self.nodes.append(node)
        entries = tuple(NodeConfig(n.config.name, "127.0.0.1", n.control_port, n.ring_port) for n in self.nodes)
        cluster = ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), entries)
        options = StarterOptions(
            ckpt=ckpt, device="cpu", placement="even", prompt_style="none", replay_memory=replay_bytes
        )
        self.starter = StarterNode(cluster, options)
        stack.callback(self.starter.close)
        self.starter.open()
        self.starter.prepare(len(PROMPT) + n_tokens)
        self.starter.start()
        self.starter._recovery.keeper._absences._step_s = 0.0  # here nodes fail on purpose: they need not wait
        self._random = random.Random(seed)
        self._rate = rate
        self.n_failures = 0

    def generate(self, ids: list[int], n_tokens: int, on_token: Callable[[], None] = lambda: None) -> list[int]:
        from mdi.engine.sequence import SamplingParams

        def show(_: Any, text: str) -> None:
            on_token()

        sample = self.starter.submit("", ids, SamplingParams(n_tokens, temperature=0.0), on_text=show)
        self.starter.generate()
        return list(sample.token_ids)

    def fail(self) -> bool:
        """Perhaps a stage fails now: one that rows of the next token would be sent to."""
        from mdi.net.hello import Fault

        for node in self.nodes:
            if self._random.random() < self._rate:
                job = node._runs.latest
                ring = None if job is None else job._ring
                if ring is not None:
                    self.n_failures += 1
                    name = node.config.name
                    ring.fail(Fault(name, "its caches and connections are dropped", name, "failed"))
                    return True
        return False


def restored(ring: Ring, n_tokens: int) -> list[int]:
    return ring.generate(PROMPT, n_tokens, ring.fail)


def restart(ring: Ring, n_tokens: int) -> list[int]:
    """Each failure ends the text; the time of what it had reached is lost."""
    while True:
        ids, has_failed = list(PROMPT), False
        while len(ids) < len(PROMPT) + n_tokens and not has_failed:
            lasting = next((k for k in range(n_tokens) if ring._random.random() < 1 - (1 - ring._rate) ** 2), n_tokens)
            n = min(lasting + 1, n_tokens)
            ids += ring.generate(ids, n)
            has_failed = n < n_tokens
            ring.n_failures += has_failed
        if not has_failed:
            return ids[len(PROMPT) :]


def no_cache(ring: Ring, n_tokens: int) -> list[int]:
    """A failure costs the step that it happens in."""
    ids = list(PROMPT)
    for _ in range(n_tokens):
        while ring._random.random() < 1 - (1 - ring._rate) ** 2:
            ring.generate(ids, 1)
            ring.n_failures += 1
        ids += ring.generate(ids, 1)
    return ids[len(PROMPT) :]


WAYS: dict[str, tuple[Callable[[Ring, int], list[int]], int]] = {
    "restored by replay": (restored, 64 << 20), "restored from tokens": (restored, 0),
    "restart": (restart, 0), "no cache": (no_cache, 0),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--rates", default="0,1e-4,1e-3,1e-2", help="(%(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    add_json_flag(parser, "recovery_rates")
    args = parser.parse_args()
    logging.getLogger("mdi").setLevel(logging.ERROR)
    rows, expected = [], None
    for rate in map(float, args.rates.split(",")):
        for name in args.ways.split(","):
            way, replay_bytes = WAYS[name]
            with contextlib.ExitStack() as stack:
                ring = Ring(args.ckpt, args.tokens, rate, args.seed, replay_bytes, stack)
                begin = time.perf_counter()
                ids = way(ring, args.tokens)
                seconds = time.perf_counter() - begin
                ring.starter.end()
            expected = expected or ids
            rows.append({"rate": rate, "way": name, "tokens": len(ids), "seconds": seconds, "failures": ring.n_failures,
                         "tokens_s": len(ids) / seconds, "is_same": ids == expected})  # fmt: skip
            print(rows[-1], flush=True)
    save(args.json, {"tokens": args.tokens, "seed": args.seed, "rows": rows})


if __name__ == "__main__":
    main()
