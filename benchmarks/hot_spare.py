#!/usr/bin/env python3
"""How long texts wait when a node is killed: with a hot spare, with a spare that gets the rows again, or all tokens.

    hot_spare.py --ckpt FOLDER --positions 100,1000 --times 3

All nodes are processes of this machine, and share its cores: a hot spare then computes in the time of the others, which it does
not on a machine of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import on_path
from records import add_json_flag, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it
N_TOKENS_BEFORE = 20  # of the text, before the node is lost
DEADLINE_S = 300.0
REPLAY_BYTES = 256 << 20  # where rows are sent again
WAYS: dict[str, dict[str, Any]] = {
    "hot spare": {"hot_spare": ("secondary0",)},
    "spare, rows again": {},
    "spare, tokens again": {"replay_memory": 0},
}


def kill(args: argparse.Namespace, way: str, n_positions: int) -> dict[str, Any]:
    """One text of which the first secondary is lost: its tokens, and how long after the loss the next one came."""
    from mdi.engine.sequence import SamplingParams
    from mdi.run.local import LocalRing
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.options import StarterOptions

    n_prompt = n_positions - N_TOKENS_BEFORE
    options = StarterOptions(
        ckpt=args.ckpt, device="cpu", quantize=args.quantize, quantize_head=args.quantize, placement="even", wait_s=120,
        threads=1, silence_s=6.0, draft="none", **{"replay_memory": REPLAY_BYTES, **WAYS[way]},
    )  # fmt: skip
    with LocalRing(args.nodes, None, 1, args.ckpt, False, False, n_spares=1) as ring:
        nodes = GivenNodes(ring.cluster, look=ring.check)
        with Run(nodes, options, n_prompt + args.n_tokens, n_texts=1) as run:
            prompt = [1 + k % 200 for k in range(n_prompt)]
            text = run.submit("", prompt, SamplingParams(args.n_tokens, temperature=0.0))
            lost_s: list[float] = []

            def lose() -> None:
                deadline = time.monotonic() + DEADLINE_S
                while len(text.token_ids) < N_TOKENS_BEFORE and time.monotonic() < deadline:
                    time.sleep(0.002)
                os.kill(ring.pids[0], signal.SIGKILL)
                lost_s.append(time.perf_counter())

            thread = threading.Thread(target=lose)
            thread.start()
            run.read()
            thread.join()
            (recovery,) = run.metrics().recoveries
            first_s = run.engine.first_token_s
            run.close()
    return {"way": way, "positions": n_positions, "from_loss_s": first_s - lost_s[0],
            **{name: recovery[name] for name in ("seconds", "restored_by")}, "token_ids": list(text.token_ids)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=on_path.ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="of the ring, beside one spare (%(default)s)")
    parser.add_argument("--times", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--positions", default="100,1000", help="of the text when the node is killed (%(default)s)")
    parser.add_argument("--n-tokens", type=int, default=100, help="of the text (%(default)s)")
    parser.add_argument("--quantize", default=None)
    add_json_flag(parser, "hot_spare")
    args = parser.parse_args()
    settings = {key: getattr(args, key) for key in ("nodes", "times", "positions", "n_tokens", "quantize")}
    kills: list[dict[str, Any]] = []
    for n in map(int, args.positions.split(",")):
        texts: set[tuple[int, ...]] = set()
        for way in [*WAYS] * args.times:
            kills.append(found := kill(args, way, n))
            texts.add(tuple(found.pop("token_ids")))
            found["is_same"] = len(texts) == 1
            print(found, flush=True)
        save(args.json, {"model": args.ckpt.name, "settings": settings, "kills": kills})
        for way in WAYS:
            waits = [one["seconds"] for one in kills if (one["way"], one["positions"]) == (way, n)]
            print(f"{way}, at {n}: {statistics.median(waits):.2f} s without a token (median)")


if __name__ == "__main__":
    main()
