#!/usr/bin/env python3
"""The thesis' evaluation (chapter 4) on this machine: NanoGPT, GPT-2 and Llamas over one, two and three nodes.

Every node is a process of its own with one thread; models have random weights. Results are kept after each run, so that a
broken-off evaluation goes on where it was; then the figures in assets/ and the tables in docs/thesis.md are written.

    thesis.py                  everything, under an hour on two cores; needs 12 GB of memory and 5 GB of disk
    thesis.py --quick          three models, a few tokens, under five minutes; writes beside its results only
    thesis.py --only gpt2,nano-llama --again
    thesis.py --draw           no runs, only figures and tables from the results that are there
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the children inherit it
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "old")]

from thesis_numbers import BY_KEY, MODELS, Model  # noqa: E402

N_NODES = (1, 2, 3)
RUN_LIMIT_S = 1800
MOST_POINTS = 400  # of a curve


def run_case(key: str, ckpt: Path, n_nodes: int, n_tokens: int) -> dict[str, Any]:
    """One run, in this process and the children that it starts."""
    from gpt.kinds import GPT2Kind, NanoKind
    from gpt.rings import GPT2Ring, NanoRing
    from mdi.engine.sequence import SamplingParams
    from mdi.metrics import tokens_over_time
    from mdi.node.device import set_threads
    from mdi.node.kind import ModelKind
    from mdi.node.local import LocalRing
    from mdi.node.starter import StarterNode, StarterOptions

    model = BY_KEY[key]
    kinds: dict[str, tuple[type[LocalRing], ModelKind]] = {
        "nanogpt": (NanoRing, NanoKind()),
        "gpt2": (GPT2Ring, GPT2Kind()),
        "llama": (LocalRing, ModelKind()),
    }
    make_ring, kind = kinds[model.system]
    set_threads(1)
    layers = ",".join(map(str, model.cuts[n_nodes]))
    with make_ring(n_nodes, None, 1, ckpt, False, False) as ring:
        options = StarterOptions(ckpt=ckpt, device="cpu", dtype="float32", layers=layers, wait_s=120)
        node = StarterNode(ring.cluster, options, kind)
        try:
            node.open()
            node.prepare(n_tokens + 1, ring.check)
            node.start()
            params = SamplingParams(n_tokens=n_tokens, temperature=0.8, top_k=200)
            for i in range(model.n_samples(n_nodes)):
                node.submit("", [i], params)
            node.generate()
            node.end()
            measured = node.metrics()
        finally:
            node.close()
    points = tokens_over_time(measured.samples)
    return {
        "n_tokens": measured.n_tokens,
        "n_samples": len(measured.samples),
        "points": points,
        "nodes": [found.to_json() for found in measured.nodes],
    }


def spawn_case(key: str, ckpt: Path, n_nodes: int, n_tokens: int) -> dict[str, Any]:
    """`run_case` in a process of its own, so that each starter's memory is its own."""
    case = json.dumps([key, str(ckpt), n_nodes, n_tokens])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--case", case],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, timeout=RUN_LIMIT_S, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Results:
    """What was measured so far, in one JSON file that is replaced whole after each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"runs": {}}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8"))

    @property
    def runs(self) -> dict[str, Any]:
        found: dict[str, Any] = self.data["runs"]
        return found

    def add(self, name: str, run: dict[str, Any]) -> None:
        from mdi.checkpoint.files import replacing

        self.runs[name] = run
        self.data |= {"date": date.today().isoformat(), "machine": machine()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(json.dumps(self.data).encode())


def machine() -> str:
    """The machine in a few words."""
    import psutil
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = lines[0] if lines else name
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 1e9
    return f"{n_cores} cores of {name}, {memory:.0f} GB, torch {torch.__version__}"


def measure(args: argparse.Namespace, models: list[Model], results: Results) -> int:
    """All runs that are missing; what fails is told and left out. Returns how many failed."""
    from thesis_models import make_checkpoint

    n_failed = 0
    for model in models:
        n_tokens = args.tokens or (model.quick_tokens if args.quick else model.n_tokens)
        done = {n for n in N_NODES if results.runs.get(f"{model.key}/{n}", {}).get("asked") == n_tokens}
        todo = [n for n in N_NODES if args.again or n not in done]
        if not todo:
            continue
        ckpt = make_checkpoint(args.work_dir, model.key)
        for n_nodes in todo:
            begin = time.monotonic()
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
            try:
                run = {
                    **thinned(spawn_case(model.key, ckpt, n_nodes, n_tokens)),
                    "load_before": load,
                    "asked": n_tokens,
                }
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
                n_failed += 1
                print(f"{model.title} on {n_nodes} failed: {str(e)[-60:]}", flush=True)
                continue
            results.add(f"{model.key}/{n_nodes}", run)
            rate = run["n_tokens"] / run["points"][-1][0]
            took_s = time.monotonic() - begin
            print(f"{model.title} on {n_nodes}: {run['n_tokens']} tokens, {rate:.2f}/s ({took_s:.0f} s)", flush=True)
        if not args.keep:
            shutil.rmtree(ckpt)
    return n_failed


def thinned(run: dict[str, Any]) -> dict[str, Any]:
    """Fewer points, for the file: all of the first, for the detail at the origin, and the very last."""
    points = run["points"]
    step = max(1, len(points) // MOST_POINTS)
    kept = [p for i, p in enumerate(points) if i < 60 or i % step == 0 or i == len(points) - 1]
    return {**run, "points": [[round(time_s, 5), n] for time_s, n in kept]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="does it work? A few tokens of three models")
    parser.add_argument("--only", metavar="KEY,KEY", help=f"some of {', '.join(BY_KEY)}")
    parser.add_argument("--again", action="store_true", help="run also what there are results of")
    parser.add_argument("--draw", action="store_true", help="only figures and tables, of the results that are there")
    parser.add_argument("--tokens", type=int, metavar="N", help="so many per sample, to try something out")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "thesis", metavar="DIR")
    parser.add_argument("--results", type=Path, metavar="FILE", help="(results.json or quick.json in the work folder)")
    parser.add_argument(
        "--docs", action=argparse.BooleanOptionalAction, help="write assets/ and docs/thesis.md, or not"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        key, ckpt, n_nodes, n_tokens = json.loads(args.case)
        json.dump(run_case(key, Path(ckpt), n_nodes, n_tokens), sys.stdout)
        return
    keys = args.only.split(",") if args.only else list(BY_KEY)
    if unknown := [key for key in keys if key not in BY_KEY]:
        parser.error(f"no such model: {unknown[0]}; there are {', '.join(BY_KEY)}")
    models = [m for m in MODELS if m.key in keys and (m.quick_tokens or not args.quick)]
    results = Results(args.results or args.work_dir / ("quick.json" if args.quick else "results.json"))
    n_failed = 0 if args.draw else measure(args, models, results)
    from thesis_report import write_report

    is_for_docs = args.docs if args.docs is not None else not args.quick
    write_report(results.data, ROOT if is_for_docs else None, results.path.parent)
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
