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
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from records import add_json_flag, save
from recovery import N_TOKENS_BEFORE, ROOT, run

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
    args.replay_memory, args.silence_s, args.predict = 256, 6.0, False
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
