#!/usr/bin/env python3
"""How long a run waits when one of its nodes is lost, and what failures at a given rate leave of its speed.

recovery.py kill --times 5                    a node of three is killed (sockets closed) or stopped (silent); there is a spare
recovery.py kill --ckpt FOLDER --n-samples 16 --n-prompt 1000 --n-tokens 320 --quantize int8 --nodes 2 --how killed --predict
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from records import add_json_flag, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

N_TOKENS_BEFORE = 20  # of each text, before the node is lost
DEADLINE_S = 300.0
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
    parser.add_argument("--how", choices=list(KINDS), help="default: both")
    parser.add_argument("--replay-memory", type=int, default=256, metavar="MB", help="(%(default)s)")
    parser.add_argument("--predict", action="store_true", help="what the cost model says of restoring, beside it")
    parser.add_argument("--silence-s", type=float, default=6.0, help="(%(default)g)")
    add_json_flag(parser, "recovery")
    args = parser.parse_args()
    hows = [args.how] if args.how else list(KINDS)
    rows = [measure_kill(args, how) for how in hows for _ in range(args.times)]
    for how in hows:
        found = [row for row in rows if row["how"] == how]
        waits = [row["from_loss_s"] for row in found]
        print(f"{how:8} from the loss to the next token: {', '.join(f'{s:.2f}' for s in waits)} s; median "
              f"{statistics.median(waits):.2f} s; texts as undisturbed: {all(row['is_same'] for row in found)}")  # fmt: skip
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("json", "ckpt")}
    save(args.json, {"model": args.ckpt.name, "settings": settings, "kills": rows})


def measure_kill(args: argparse.Namespace, how: str) -> dict[str, Any]:
    """One run whose first secondary is lost in the middle, and the same one undisturbed."""
    from mdi.run.local import LocalRing

    with LocalRing(args.nodes, None, 1, args.ckpt, False, False, n_spares=1) as ring:
        disturbed, found = run(args, ring, lambda: os.kill(ring.pids[0], KINDS[how]))
        if how == "stopped":
            os.kill(ring.pids[0], signal.SIGCONT)
    with LocalRing(args.nodes, None, 1, args.ckpt, False, False) as ring:
        undisturbed, _ = run(args, ring, None)
    row = {"how": how, "is_same": disturbed == undisturbed, **found}
    print(row, flush=True)
    return row


def run(args: argparse.Namespace, ring: Any, lose: Any, **changes: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids, with `changes` of the options; and how long after the loss the ring was formed, the next token came, and all
    texts went on."""
    from mdi.engine.sequence import SamplingParams
    from mdi.files import default_cache_dir
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.options import StarterOptions

    options = StarterOptions(
        ckpt=args.ckpt, device="cpu", quantize=args.quantize, quantize_head=args.quantize, placement="even", wait_s=120,
        cache_dir=default_cache_dir(), threads=1, silence_s=args.silence_s, replay_memory=args.replay_memory << 20,
        draft="none",
    )  # fmt: skip
    options = replace(options, **changes)
    node = Run(
        GivenNodes(ring.cluster, look=ring.check), options, args.n_prompt + args.n_tokens, n_texts=args.n_samples
    )
    times = {"lost": 0.0, "formed": 0.0, "first": 0.0}
    result: dict[str, Any] = {}
    try:
        if args.predict and lose is not None:
            result["predicted_s"] = predicted_s(ring, options, args)
        node.open()
        note_forming(node, times)
        for i in range(args.n_samples):
            prompt = [1 + (7 * i + k) % 200 for k in range(args.n_prompt)]
            node.submit("", prompt, SamplingParams(args.n_tokens, temperature=0.0))
        thread = threading.Thread(target=disturb, args=(node, lose, times))
        if lose is not None:
            thread.start()
        node.read()
        if lose is not None:
            thread.join()
            (recovery,) = node.metrics().recoveries
            lost_s = times["lost"]
            after = ([sample._begin + s for s in sample.token_times_s] for sample in node.samples)
            next_s = [found[0] for times_s in after if (found := [s for s in times_s if s > times["formed"]])]
            result["prompts_s"] = max(sample.token_times_s[0] for sample in node.samples)
            result |= {"from_loss_s": times["first"] - lost_s, "formed_s": times["formed"] - lost_s,
                       "all_s": max(next_s) - lost_s, "n_texts": len(next_s), **recovery}  # fmt: skip
        began = max(sample._begin + sample.token_times_s[0] for sample in node.samples)
        ended = min(sample._begin + sample.token_times_s[-1] for sample in node.samples)
        n_between = sum(began <= s._begin + t <= ended for s in node.samples for t in s.token_times_s)
        result["tokens_s"] = (n_between - len(node.samples)) / (ended - began)  # while all texts decode
        node.close()
        return [list(sample.token_ids) for sample in node.samples], result
    finally:
        node.close()


def note_forming(node: Any, times: dict[str, float]) -> None:
    """Note when another ring is formed."""
    policy = node.loop.policy
    formed = policy.formed

    def noted(*args: Any) -> Any:
        times["formed"] = time.perf_counter()
        return formed(*args)

    policy.formed = noted


def predicted_s(ring: Any, options: Any, args: argparse.Namespace) -> float:
    """How long the node in the lost one's place takes for the rows of all texts, and the caches that they look at."""
    from mdi.engine.scheduler import CHUNK_ROWS
    from mdi.placement.cost import CostModel
    from mdi.placement.model import Workload, model_shape
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run

    nodes = GivenNodes(ring.cluster, look=ring.check)
    with Run(
        nodes, replace(options, placement="throughput"), args.n_prompt + args.n_tokens, n_texts=args.n_samples
    ) as run:
        model = run.model
    length = args.n_prompt + N_TOKENS_BEFORE
    shape = model_shape(model.weights.config, model.computing.format, model.cache_type)
    cost = CostModel(model.profile, shape, Workload(args.n_samples, args.n_prompt + args.n_tokens))
    start, stop = model.weights.blocks[1]
    n_chunks = args.n_samples * length / CHUNK_ROWS
    read_s = cost.cache_read_s(1, 1) * shape.reference.read_bytes(length // 2)
    # Texts that go on have a frame after each piece: half of them, on average.
    going_s = cost.block_s(1, max(1, args.n_samples // 4))
    return float(n_chunks * (stop - start) * (cost.block_s(1, CHUNK_ROWS) + read_s + going_s))


def disturb(node: Any, lose: Any, times: dict[str, float]) -> None:
    """Lose a node when every text has some tokens, and wait for the next one."""
    deadline = time.monotonic() + DEADLINE_S
    while min(len(s.token_ids) for s in node.samples) < N_TOKENS_BEFORE and time.monotonic() < deadline:
        time.sleep(0.002)
    lose()
    times["lost"] = time.perf_counter()
    while time.monotonic() < deadline:
        recoveries = node.metrics().recoveries
        if recoveries and recoveries[-1]["seconds"] is not None:
            times["first"] = node.engine.first_token_s
            return
        time.sleep(0.002)


if __name__ == "__main__":
    main()
