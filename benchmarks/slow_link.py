#!/usr/bin/env python3
"""Speed of a ring of four processes before, while and after one of its links is slow: the order of the nodes changes.

slow_link.py --ckpt FOLDER --more-ms 100 --json slow_link        (root: each node has a host of its own behind the slow switch)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from records import add_json_flag, save
from slow_hosts import SlowHosts

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
SETTLE_S, LONGEST_S = 2.0, 90.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--n-samples", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--delay-ms", type=float, default=0.2, help="of all links, one way (%(default)s)")
    parser.add_argument("--more-ms", type=float, default=100.0, help="of the slow one (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each speed (%(default)s)")
    add_json_flag(parser, "slow_link")
    args = parser.parse_args()
    hosts = SlowHosts(4, args.delay_ms / 1000)
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = nodes_file(Path(folder), hosts)
            command = [
                sys.executable,
                str(ROOT / "src" / "secondary.py"),
                "--insecure",
                "--threads",
                "1",
                "--no-announce",
            ]
            for i in range(3):
                cache = ("--cache-dir", f"{folder}/{i}", "--nodes-config", str(path), str(i))
                nodes.append(subprocess.Popen(hosts.command(i + 1, *command, *cache), stderr=subprocess.DEVNULL))
            hosts.enter(0)
            record = measure(args, path, hosts)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        hosts.close()
    print(json.dumps(record))
    settings = {key: getattr(args, key) for key in ("n_samples", "quantize", "delay_ms", "more_ms", "seconds")}
    save(args.json, {"model": args.ckpt.name, "settings": settings, **record})


def nodes_file(folder: Path, hosts: SlowHosts) -> Path:
    entries = [
        {"addr": hosts.address(i), "communication": {"port": 8088}, "inference": {"port_in": 5088, "port_out": 5089}}
        for i in range(4)
    ]
    path = folder / "nodes.json"
    path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}), encoding="utf-8")
    return path


def measure(args: argparse.Namespace, path: Path, hosts: SlowHosts) -> dict[str, Any]:
    from mdi.engine.sequence import SamplingParams
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.cluster import load_cluster
    from mdi.spec.options import StarterOptions

    options = StarterOptions(
        ckpt=args.ckpt, device="cpu", quantize=args.quantize, quantize_head=args.quantize, placement="throughput", wait_s=120,
        threads=1, cache_dir=path.parent / "starter",
    )  # fmt: skip
    with Run(GivenNodes(load_cluster(path)), options, 1000, n_texts=args.n_samples) as run:

        def speed() -> float:
            """Texts that end are followed by others."""
            time.sleep(SETTLE_S)
            begin, before = time.perf_counter(), run.engine.n_tokens
            time.sleep(args.seconds)
            return (run.engine.n_tokens - before) / (time.perf_counter() - begin)

        params = SamplingParams(900, temperature=0.0)
        for k in range(40 * args.n_samples):
            run.submit("", [1 + (7 * k + i) % 200 for i in range(8)], params)
        found: dict[str, Any] = {"before": list(run.names), "before_tokens_s": speed()}
        if len(run.names) < 4:
            raise SystemExit(f"the plan uses only {', '.join(run.names)}: take a larger model")
        slow = [int(name.removeprefix("secondary")) + 1 for name in run.names[1:3]]
        hosts.slow(*slow, args.more_ms / 1000)
        begin = time.perf_counter()
        found |= {"slow": list(run.names[1:3]), "slow_tokens_s": speed_now(run, 2.0)}
        while run.names == tuple(found["before"]) and time.perf_counter() - begin < LONGEST_S:
            time.sleep(0.05)
        return {**found, "after_s": time.perf_counter() - begin, "after": list(run.names), "after_tokens_s": speed()}


def speed_now(run: Any, seconds: float) -> float:
    before = run.engine.n_tokens
    time.sleep(seconds)
    return float((run.engine.n_tokens - before) / seconds)


if __name__ == "__main__":
    main()
