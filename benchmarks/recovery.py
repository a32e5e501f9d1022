#!/usr/bin/env python3
"""How long a run waits when one of its nodes is lost, and what failures at a given rate leave of its speed.

recovery.py kill --times 5                    a node of three is killed (sockets closed) or stopped (silent); there is a spare
recovery.py kill --ckpt FOLDER --n-samples 16 --n-prompt 1000 --quantize int8 --nodes 2
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from records import add_json_flag, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

N_TOKENS_BEFORE = 20  # of each text, before the node is lost
DEADLINE_S = 120.0
KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill"])
    parser.add_argument("--ckpt", type=Path, default=ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="of the ring, beside one spare (%(default)s)")
    parser.add_argument("--times", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--n-samples", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--n-prompt", type=int, default=8, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--n-tokens", type=int, default=200, help="of each text (%(default)s)")
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--silence-s", type=float, default=6.0, help="(%(default)g)")
    add_json_flag(parser, "recovery")
    args = parser.parse_args()
    rows = [measure_kill(args, how) for how in KINDS for _ in range(args.times)]
    for how in KINDS:
        found = [row for row in rows if row["how"] == how]
        waits = [row["from_loss_s"] for row in found]
        print(f"{how:8} from the loss to the next token: {', '.join(f'{s:.2f}' for s in waits)} s; median "
              f"{statistics.median(waits):.2f} s; texts as undisturbed: {all(row['is_same'] for row in found)}")  # fmt: skip
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("json", "ckpt")}
    save(args.json, {"model": args.ckpt.name, "settings": settings, "kills": rows})


def measure_kill(args: argparse.Namespace, how: str) -> dict[str, Any]:
    """One run whose first secondary is lost in the middle, and the same one undisturbed."""
    from mdi.node.local import LocalRing

    with LocalRing(args.nodes, None, 1, args.ckpt, False, False, n_spares=1) as ring:
        disturbed, recoveries, lost_s, first_s = run(args, ring, lambda: os.kill(ring.pids[0], KINDS[how]))
        if how == "stopped":
            os.kill(ring.pids[0], signal.SIGCONT)
    with LocalRing(args.nodes, None, 1, args.ckpt, False, False) as ring:
        undisturbed, *_ = run(args, ring, None)
    (recovery,) = recoveries
    row = {
        "how": how, "from_loss_s": first_s - lost_s, "is_same": disturbed == undisturbed, **recovery,
    }  # fmt: skip
    print(row, flush=True)
    return row


def run(args: argparse.Namespace, ring: Any, lose: Any) -> tuple[list[list[int]], list[dict[str, Any]], float, float]:
    """Token ids, recoveries, and when the node was lost and the next token came."""
    from mdi.engine.sequence import SamplingParams
    from mdi.machine.threads import choose_threads
    from mdi.node.options import StarterOptions
    from mdi.node.starter import StarterNode

    choose_threads(1)
    options = StarterOptions(
        ckpt=args.ckpt, device="cpu", quantize=args.quantize, quantize_head=args.quantize, placement="even", wait_s=120,
        silence_s=args.silence_s,
    )  # fmt: skip
    node = StarterNode(ring.cluster, options)
    times = [0.0, 0.0]
    try:
        node.open()
        node.prepare(args.n_prompt + args.n_tokens, ring.check)
        node.start()
        for i in range(args.n_samples):
            prompt = [1 + (7 * i + k) % 200 for k in range(args.n_prompt)]
            node.submit("", prompt, SamplingParams(args.n_tokens, temperature=0.0))
        thread = threading.Thread(target=disturb, args=(node, lose, times))
        if lose is not None:
            thread.start()
        node.generate()
        if lose is not None:
            thread.join()
        recoveries = [one for one in node.metrics().recoveries]
        node.end()
        return [list(sample.token_ids) for sample in node.samples], recoveries, times[0], times[1]
    finally:
        node.close()


def disturb(node: Any, lose: Any, times: list[float]) -> None:
    """Lose a node when every text has some tokens, and wait for the next one."""
    deadline = time.monotonic() + DEADLINE_S
    while min(len(s.token_ids) for s in node.samples) < N_TOKENS_BEFORE and time.monotonic() < deadline:
        time.sleep(0.002)
    lose()
    times[0] = time.perf_counter()
    while time.monotonic() < deadline:
        recoveries = node.metrics().recoveries
        if recoveries and recoveries[-1]["seconds"] is not None:
            times[1] = node.engine.first_token_s
            return
        time.sleep(0.002)


if __name__ == "__main__":
    main()
