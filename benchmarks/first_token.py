#!/usr/bin/env python3
"""The time to the first token: what a plan says before, and what is measured then, over prompts of several lengths.

    benchmarks/first_token.py [--shape nano-llama-304m] [--format int8] [--lengths 96 384 1024] [--rounds 3] [--json FILE]

Nodes are processes of one thread on this machine; those of a ring or a group have a core each. They measure themselves, as for
`mdi plan`; then the plan is made, and the prompts are run, each length in turn, in three ways: a ring of two nodes, every block
on two nodes (--parallel tensor), and one node with a window of weights (--memory). A way's first prompt is not counted; of the
others the table has the median. Weights are random, which changes no time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from peers.protocol import Case
from random_checkpoint import SHAPES, config_of, make_chunks
from records import add_json_flag, save
from rings import alone

WAYS = ("ring", "tensor", "window")
# Of its nodes, each of which has one; a window is read by a thread of its own, beside computing.
CORES: dict[str, list[int] | None] = {"ring": [0, 1], "tensor": [0, 1], "window": None}
NODES = {way: len(cores or [0]) for way, cores in CORES.items()}
FLAGS = {"ring": (), "tensor": ("--parallel", "tensor"), "window": ()}
LIMIT_BYTES = 330_000_000  # of the process with a window: less than weights and process take together
LONGEST = 2048


@dataclass(frozen=True)
class Row:
    """Seconds to the first token of a prompt."""

    way: str
    n_tokens: int
    predicted_s: float
    measured_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.predicted_s / statistics.median(self.measured_s)


def predictions(args: argparse.Namespace, folder: Path, way: str, config: Any) -> list[float]:
    """Of each length, by what the nodes measure of themselves now."""
    from mdi.cancel import Cancel
    from mdi.checkpoint.manifest import config_hash
    from mdi.host.threads import choose_threads
    from mdi.placement.model import Workload, model_shape
    from mdi.placement.plan import plan
    from mdi.placement.planning import measure_live
    from mdi.placement.windows import NodeWindows
    from mdi.run.local import LocalRing
    from mdi.spec.model_id import ModelId
    from mdi.spec.options import Requested

    model = ModelId(config.name, config, config_hash(config), "float32")
    asked = Requested(device="cpu", quantize=args.format, quantize_head=args.format)
    with LocalRing(NODES[way], None, 1, None, False, False, cores=CORES[way]) as ring:
        choose_threads(1, ring.cluster.starter.cores)
        profile = measure_live(ring.cluster, model, asked, folder / "cache", 120.0, True, Cancel())
    shape, work = model_shape(config, args.format), Workload(1, LONGEST)
    windows = None
    if way == "window":
        profile = replace(profile, nodes=tuple(replace(node, window_bytes=args.memory) for node in profile.nodes))
        windows = NodeWindows(config, shape, profile, work)
    found = []
    for n_tokens in args.lengths:
        report = plan(profile, shape, work, method="even", windows=windows, prompt_tokens=n_tokens)
        assert report.first_token is not None
        found.append(report.first_token.tensor_s if way == "tensor" else report.first_token.seconds)
    return [seconds or 0.0 for seconds in found]


def measure(args: argparse.Namespace, chunks: Path, way: str) -> list[tuple[float, ...]]:
    """Seconds of each length."""
    from ring.ring_worker import RingSystem

    system = RingSystem(
        {
            "nodes": NODES[way],
            "threads": 1,
            "cores": CORES[way],
            "texts": 1,
            "max_length": LONGEST,
            "flags": [*FLAGS[way], *(("--memory", str(args.memory)) if way == "window" else ())],
            "chunks": str(chunks),
        }
    )
    try:
        system.run(Case(1, 64, 2))
        found: list[list[float]] = [[] for _ in args.lengths]
        for number in range(args.rounds):
            for times, n_tokens in zip(found, args.lengths, strict=True):
                times.append(system.run(Case(1, n_tokens + number, 1))["times_s"][0][0])
    finally:
        system.end()
    return [tuple(times) for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="nano-llama-304m", choices=SHAPES)
    parser.add_argument("--format", default="int8")
    parser.add_argument("--lengths", type=int, nargs="+", default=[96, 384, 1024], metavar="P")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--memory", type=int, default=LIMIT_BYTES, help="limit of the node with a window, in bytes")
    parser.add_argument("--folder", type=Path, help="for the chunks, which are kept there (default: a temporary one)")
    add_json_flag(parser, "first_token")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mdi.model.plain import ModelConfig

    config = ModelConfig.from_litgpt(config_of(args.shape))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        print("| way | tokens of the prompt | predicted | measured, median (least to most) | predicted / measured |")
        print("| --- | --- | --- | --- | --- |")
        for way in args.ways:
            chunks = folder / "chunks" / f"{NODES[way]}nodes-{args.format}"
            if not chunks.is_dir():
                make_chunks(folder, args.shape, args.format, NODES[way])
            predicted = alone(predictions, args, Path(temporary), way, config)
            for n_tokens, guess, times in zip(args.lengths, predicted, alone(measure, args, chunks, way), strict=True):
                rows.append(row := Row(way, n_tokens, guess, times))
                print(
                    f"| {way} | {n_tokens} | {guess:.2f} s | {statistics.median(times):.2f} s ({min(times):.2f} to "
                    f"{max(times):.2f}) | {row.ratio:.2f} |",
                    flush=True,
                )
    result = [{**vars(row), "ratio": row.ratio} for row in rows]
    save(args.json, {"shape": args.shape, "format": args.format, "memory": args.memory, "rows": result})


if __name__ == "__main__":
    main()
