#!/usr/bin/env python3
"""Speed, start-up and memory of two checkouts of this project, in turns on one machine.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/compare_commits.py /tmp/before . --rounds 5

Each round measures every case with the one checkout and then with the other, and the next round the other way round. It
prints medians, and the median of the ratios within a round (second over first). The model is the embedded one, where most of a
token's time is the ring's own work, and a larger random one, where it is computing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from random_checkpoint import make_checkpoint  # noqa: E402
from records import machine, save  # noqa: E402

IMPORTS = (
    "import time; t = time.perf_counter(); import mdi.cli.secondary, mdi.node.secondary; print(time.perf_counter() - t)"
)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "mdi-commits", help="%(default)s")
    parser.add_argument("--json", type=Path, help="write all numbers to a file")
    args = parser.parse_args()
    checkouts = [args.before.resolve(), args.after.resolve()]
    large = args.models / "nano-llama-304m"
    make_checkpoint(large, "nano-llama-304m")
    found: dict[str, dict[str, list[list[float]]]] = {}
    for i in range(args.rounds):
        for name, measure in cases(checkouts[1] / "assets" / "nano-llama", large).items():
            both = {at: measure(at) for at in (checkouts if i % 2 == 0 else checkouts[::-1])}
            for what in both[checkouts[0]]:
                pair = [both[at][what] for at in checkouts]
                found.setdefault(name, {}).setdefault(what, []).append(pair)
    print(machine())
    for name, measures in found.items():
        print(name)
        for what, pairs in measures.items():
            medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
            ratios = sorted(after / before for before, after in pairs)
            print(f"  {what:<28} {medians[0]:10.4g} {medians[1]:10.4g}   {statistics.median(ratios):.3f}x "
                  f"[{ratios[0]:.3f} .. {ratios[-1]:.3f}]")  # fmt: skip
    if args.json is not None:
        save(args.json, {"rounds": args.rounds, "found": found})


if __name__ == "__main__":
    main()
