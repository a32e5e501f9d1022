#!/usr/bin/env python3
"""Speed, start-up and memory of two checkouts of this project, in turns on one machine.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/compare_commits.py /tmp/before . --rounds 5
    python benchmarks/compare_commits.py /tmp/before . --stages       blocks of 1.1 B weights alone, in all formats
    python benchmarks/compare_commits.py /tmp/before . --log FILE     what such runs have printed, see below

Each round measures every case with the one checkout and then with the other, and the next round the other way round. It
prints medians, and the median of the ratios within a round (second over first). The model is the embedded one, where most of a
token's time is the ring's own work, and a larger random one, where it is computing.

A log has the output of stage_profile.py behind lines "== NAME ROUND ...", whose names are those of the checkouts' folders. A
case counts in the rounds in which both checkouts have it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from random_checkpoint import make_checkpoint  # noqa: E402
from records import machine, save  # noqa: E402

IMPORTS = (
    "import time; t = time.perf_counter(); import mdi.cli.secondary, mdi.node.secondary; print(time.perf_counter() - t)"
)
STAGES = "us a block of 1.1 B weights, by sequences at position 100"
STAGE_FLAGS = (
    "--shape", "tiny-llama-1.1b", "--blocks", "6", "--formats", "float32,bf16,fp16,int8,int4", "--sequences", "1,4,16,64",
)  # fmt: skip
BLOCK_TIME = re.compile(r"^(\w+), (\d+) sequences at \d+: (\d+) us a block", re.MULTILINE)
TURN = re.compile(r"^== (\S+) (\d+).*$", re.MULTILINE)

Found = dict[str, dict[str, list[list[float]]]]  # of a case and a number: [before, after] of each round


def generate(checkout: Path, ckpt: Path, nodes: int, texts: int, tokens: int, flags: list[str]) -> dict[str, float]:
    """tokens/s, time to the first token, seconds of the whole command, and MB of the largest secondary."""
    command = [
        sys.executable, "src/local_ring.py", "--nodes", str(nodes), "--ckpt", str(ckpt), "--prompt", "ROMEO:",
        "--n-samples", str(texts), "--n-tokens", str(tokens), "--temperature", "0", "--placement", "even", "--threads", "1",
        "--json", *flags,
    ]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    result = json.loads(done.stdout)
    return {
        "tokens/s": result["tokens_per_s"],
        "first token, s": statistics.median(sample["ttft_s"] for sample in result["samples"]),
        "whole command, s": time.perf_counter() - begin,
        "secondary, MB": max(node["peak_rss_bytes"] for node in result["nodes"][-1:]) / 1e6,
    }


def start_up(checkout: Path) -> dict[str, float]:
    """Seconds of imports of a secondary, inside the process and with it, and of `--help`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True)
    whole = time.perf_counter() - begin
    begin = time.perf_counter()
    subprocess.run([sys.executable, "src/starter.py", "--help"], cwd=checkout, capture_output=True, check=True)
    return {
        "imports of a secondary, s": float(done.stdout),
        "process, s": whole,
        "--help, s": time.perf_counter() - begin,
    }


def cases(nano: Path, large: Path) -> dict[str, Any]:
    int8 = ["--quantize", "int8"]
    return {
        "embedded model, 2 nodes, 1 text": lambda at: generate(at, nano, 2, 1, 400, []),
        "embedded model, 2 nodes, 16 texts": lambda at: generate(at, nano, 2, 16, 400, []),
        "304 M int8, 2 nodes, 1 text": lambda at: generate(at, large, 2, 1, 100, int8),
        "304 M int8, 2 nodes, 16 texts": lambda at: generate(at, large, 2, 16, 100, int8),
        "start-up": start_up,
    }


def block_times(printed: str) -> dict[str, float]:
    """Microseconds a block by format and sequences, from the output of stage_profile.py."""
    return {f"{form}, {n} sequences": float(us) for form, n, us in BLOCK_TIME.findall(printed)}


def stages(checkout: Path) -> dict[str, float]:
    command = [sys.executable, "benchmarks/stage_profile.py", *STAGE_FLAGS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    return block_times(done.stdout)


def in_turns(checkouts: list[Path], n_rounds: int, made: Mapping[str, Callable[[Path], dict[str, float]]]) -> Found:
    """All cases with both checkouts, one right after the other, in each round."""
    found: Found = {}
    for i in range(n_rounds):
        for name, measure in made.items():
            both = {at: measure(at) for at in (checkouts if i % 2 == 0 else checkouts[::-1])}
            add(found, name, *(both[at] for at in checkouts))
        print(f"round {i + 1} of {n_rounds}", file=sys.stderr, flush=True)
    return found


def add(found: Found, name: str, before: dict[str, float], after: dict[str, float]) -> None:
    """What both have of one round."""
    for what in before:
        if what in after:
            found.setdefault(name, {}).setdefault(what, []).append([before[what], after[what]])


def from_log(text: str, before: str, after: str) -> Found:
    """The pairs of a log's rounds."""
    pieces = TURN.split(text)[1:]
    turns = {(name, n): block_times(out) for name, n, out in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)}
    found: Found = {}
    for name, n in turns:
        if name == before:
            add(found, STAGES, turns[name, n], turns.get((after, n), {}))
    return found


def summary(found: Found) -> dict[str, dict[str, dict[str, float]]]:
    """Of each case and number the medians of both, and the median, least and most of the ratios within a round."""
    made: dict[str, dict[str, dict[str, float]]] = {}
    for name, measures in found.items():
        for what, pairs in measures.items():
            before, after = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratios = [second / first for first, second in pairs]
            made.setdefault(name, {})[what] = {
                "before": before, "after": after, "ratio": statistics.median(ratios), "least": min(ratios),
                "most": max(ratios), "rounds": len(pairs),
            }  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stages", action="store_true", help="measure blocks alone, with stage_profile.py")
    what.add_argument("--log", type=Path, metavar="FILE", help="measure nothing: read the rounds of this file")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "mdi-commits", help="%(default)s")
    parser.add_argument("--json", type=Path, help="write all numbers to a file")
    args = parser.parse_args()
    checkouts = [args.before.resolve(), args.after.resolve()]
    if args.log is not None:
        found = from_log(args.log.read_text(encoding="utf-8"), checkouts[0].name, checkouts[1].name)
    elif args.stages:
        found = in_turns(checkouts, args.rounds, {STAGES: stages})
    else:
        large = args.models / "nano-llama-304m"
        make_checkpoint(large, "nano-llama-304m")
        found = in_turns(checkouts, args.rounds, cases(checkouts[1] / "assets" / "nano-llama", large))
    print(machine())
    made = summary(found)
    for name, measures in made.items():
        print(name)
        for what, one in measures.items():
            print(f"  {what:<28} {one['before']:10.5g} {one['after']:10.5g}   {one['ratio']:.3f}x "
                  f"[{one['least']:.3f} .. {one['most']:.3f}] of {one['rounds']}")  # fmt: skip
    if args.json is not None:
        save(args.json, {"summary": made, "found": found})


if __name__ == "__main__":
    main()
