#!/usr/bin/env python3
"""How long texts wait when a node is killed: with a hot spare, with a spare that gets the rows again, or all tokens; and what a
hot spare costs while nothing is lost.

hot_spare.py --ckpt FOLDER --positions 100,1000 --times 3 --json hot_spare

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from records import add_json_flag, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it
ROOT = Path(__file__).resolve().parents[1]
N_TOKENS_BEFORE = 20  # of each text, before the node is lost
DEADLINE_S = 300.0
SILENCE_S = 6.0
REPLAY_BYTES = 256 << 20  # where rows are sent again

WAYS: dict[str, dict[str, Any]] = {
    "hot spare": {"hot_spare": ("secondary0",)},
    "spare, rows again": {},
    "spare, tokens again": {"replay_memory": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="of the ring, beside one spare (%(default)s)")
    parser.add_argument("--times", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--positions", default="100,1000", help="of the text when the node is killed (%(default)s)")
    parser.add_argument("--texts", default="1,4", help="at the same time, where nothing is lost (%(default)s)")
    parser.add_argument("--n-tokens", type=int, default=100, help="of each text (%(default)s)")
    parser.add_argument("--quantize", default=None)
    add_json_flag(parser, "hot_spare")
    args = parser.parse_args()
    settings = {key: getattr(args, key) for key in ("nodes", "times", "positions", "texts", "n_tokens", "quantize")}
    calm = [speed(args, hot, int(n)) for n in args.texts.split(",") for _ in range(args.times) for hot in (False, True)]
    kills: list[dict[str, Any]] = []
    for n in args.positions.split(","):
        kills += [kill(args, way, int(n)) for _ in range(args.times) for way in WAYS]
        save(args.json, {"model": args.ckpt.name, "settings": settings, "kills": kills, "speeds": calm})
    show(kills, calm)


def kill(args: argparse.Namespace, way: str, n_positions: int) -> dict[str, Any]:
    """One text of which the first secondary is lost; its tokens are those of a run without a loss."""
    from mdi.run.local import LocalRing

    args.n_samples, args.n_prompt = 1, n_positions - N_TOKENS_BEFORE
    with LocalRing(args.nodes, None, 1, args.ckpt, False, False, n_spares=1) as ring:
        ids, found = run(args, ring, lambda: os.kill(ring.pids[0], signal.SIGKILL), **WAYS[way])
    known = args.__dict__.setdefault("ids", {}).setdefault(n_positions, ids)
    names = ("from_loss_s", "formed_s", "seconds", "restored_by")
    row = {"way": way, "positions": n_positions, **{name: found[name] for name in names}, "is_same": ids == known}
    print(row, flush=True)
    return row


def speed(args: argparse.Namespace, has_hot: bool, n_texts: int) -> dict[str, Any]:
    """Tokens of all texts in a second, where no node is lost."""
    from mdi.run.local import LocalRing

    args.n_samples, args.n_prompt = n_texts, 8
    with LocalRing(args.nodes, None, 1, args.ckpt, False, False, n_spares=1) as ring:
        _, found = run(args, ring, None, **(WAYS["hot spare"] if has_hot else {}))
    row = {"has_hot": has_hot, "texts": n_texts, "tokens_s": found["tokens_s"]}
    print(row, flush=True)
    return row


def run(args: argparse.Namespace, ring: Any, lose: Any, **changes: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids, with `changes` of the options; and how long after the loss the ring was formed and the next token came."""
    from mdi.engine.sequence import SamplingParams
    from mdi.files import default_cache_dir
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.options import StarterOptions

    options = StarterOptions(
        ckpt=args.ckpt, device="cpu", quantize=args.quantize, quantize_head=args.quantize, placement="even", wait_s=120,
        cache_dir=default_cache_dir(), threads=1, silence_s=SILENCE_S, replay_memory=REPLAY_BYTES,
        draft="none",
    )  # fmt: skip
    options = replace(options, **changes)
    node = Run(
        GivenNodes(ring.cluster, look=ring.check), options, args.n_prompt + args.n_tokens, n_texts=args.n_samples
    )
    times = {"lost": 0.0, "formed": 0.0, "first": 0.0}
    result: dict[str, Any] = {}
    try:
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
            result |= {"from_loss_s": times["first"] - lost_s, "formed_s": times["formed"] - lost_s, **recovery}
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


def show(kills: list[dict[str, Any]], calm: list[dict[str, Any]]) -> None:
    print("\nway                  positions  without a token, s (median; all)    from the kill to the ring, s")
    for way, n in dict.fromkeys((row["way"], row["positions"]) for row in kills):
        rows = [row for row in kills if (row["way"], row["positions"]) == (way, n)]
        waits = sorted(row["seconds"] for row in rows)
        formed = statistics.median(row["formed_s"] for row in rows)
        told = ", ".join(f"{s:.2f}" for s in waits)
        same = "" if all(row["is_same"] for row in rows) else "  OTHER TOKENS"
        print(f"{way:20} {n:9}  {statistics.median(waits):.2f} ({told})  {formed:.2f}{same}")
    print("\ntexts  tokens/s without  with a hot spare  ratio")
    for n in dict.fromkeys(row["texts"] for row in calm):
        pair = [[r["tokens_s"] for r in calm if r["texts"] == n and r["has_hot"] is hot] for hot in (False, True)]
        before, after = map(statistics.median, pair)
        print(f"{n:5}  {before:16.1f}  {after:16.1f}  {after / before:.2f}")


if __name__ == "__main__":
    main()
