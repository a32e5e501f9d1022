#!/usr/bin/env python3
"""The thesis' evaluation (chapter 4) on this machine: NanoGPT, GPT-2 and Llamas over one, two and three nodes.

Every node is a process of its own with one thread, on a host of its own over Gigabit Ethernet (slow_hosts.py: needs root).
The smallest NanoGPT is trained first, once; other models have random weights. Each run is written at once, so that an
evaluation can be done in pieces; the figures in assets/ and the tables in docs/seeds.md show the runs that there are.

    thesis.py                  everything that is missing, hours on two cores; needs 12 GB of memory and 5 GB of disk
    thesis.py --only nanogpt-7,tiny-llama --nodes 1,3 --within 240
    thesis.py --quick          three models, a few tokens, under five minutes; writes into the work folder only
    thesis.py --draw           no runs, only figures and tables from the results that are there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import on_path
from records import LIMIT_BYTES, RESULTS, Usage, machine, rounded
from rings import alone
from thesis_case import Case, reference_ids, run_case
from thesis_numbers import BY_KEY, MODELS, Model

N_NODES = (1, 2, 3)
MOST_POINTS = 100  # of a curve, behind its first tokens
MOST_CHARACTERS = 200  # of a text
GREEDY_TOKENS = 150  # more than a NanoGPT's context


class Results:
    """What was measured so far, in one JSON file that is replaced whole after each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"runs": {}}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8"))

        self.runs: dict[str, Any] = self.data["runs"]

    def add(self, name: str, run: dict[str, Any]) -> None:
        self.runs[name] = run
        self.write()

    def write(self) -> None:
        from mdi.files import replacing

        for key in ("date", "machine") if self.runs else ():  # of the last run
            self.data[key] = max(self.runs.values(), key=lambda run: run["date"])[key]
        lines = {key: json.dumps(rounded(run)) for key, run in sorted(self.runs.items())}
        text = ",\n".join(f"{json.dumps(key)}: {line}" for key, line in lines.items())
        rest = {key: value for key, value in self.data.items() if key != "runs"}
        whole = f'{json.dumps(rest)[:-1]}{", " if rest else ""}"runs": {{\n{text}\n}}}}\n'
        if len(whole) > LIMIT_BYTES:
            raise ValueError(f"{self.path.name} would take {len(whole):,} bytes, more than {LIMIT_BYTES:,}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(whole.encode())


def measure(args: argparse.Namespace, models: list[Model], results: Results) -> int:
    """All runs that are missing; what fails is told and left out. Returns how many failed."""
    todo: list[tuple[Model, int, int]] = []
    for model in models:
        n_tokens = args.tokens or (model.quick_tokens if args.quick else model.n_tokens)
        for n_nodes in (n for n in args.nodes if model.rates[n]):  # the thesis has no others: it did not fit
            is_done = results.runs.get(f"{model.key}/{n_nodes}", {}).get("asked") == n_tokens
            if args.again or not is_done:
                todo.append((model, n_nodes, n_tokens))
    n_failed, begin = 0, time.monotonic()
    for i, (model, n_nodes, n_tokens) in enumerate(todo):
        if time.monotonic() - begin > args.within:
            print(f"no time for {model.title} on {n_nodes}", flush=True)
            continue
        print(f"[{i + 1}/{len(todo)}] {model.title} on {n_nodes}, {n_tokens} tokens per sample", flush=True)
        try:
            ckpt = checkpoint_of(args, model, results)
            run = measured_run(Case(model.key, str(ckpt), n_nodes, n_tokens, is_loopback=args.loopback))
        except Exception as e:
            n_failed += 1
            told = f"failed: {str(e)[-60:]}"
        else:
            results.add(f"{model.key}/{n_nodes}", run)
            told = f"{run['n_tokens']} tokens, {run['n_tokens'] / run['points'][-1][0]:.2f}/s"
        print(f"    {told}", flush=True)
        is_last = i + 1 == len(todo) or todo[i + 1][0] is not model
        if is_last and not args.keep:
            shutil.rmtree(args.work_dir / model.key, ignore_errors=True)
    return n_failed


def checkpoint_of(args: argparse.Namespace, model: Model, results: Results) -> Path:
    """The model's weights: trained ones, with a check that they say the same on every ring, or random ones."""
    from thesis_models import make_checkpoint
    from thesis_train import FULL_STEPS, QUICK_STEPS, trained_checkpoint, training_result

    if not model.is_trained or args.untrained:
        return make_checkpoint(args.work_dir, model.key)
    n_steps = QUICK_STEPS if args.quick else FULL_STEPS
    ckpt = trained_checkpoint(args.work_dir, n_steps)
    if results.data.get("training", {}).get("steps") != n_steps or "same" not in results.data["training"]:
        same = same_everywhere(model, ckpt, 40 if args.quick else GREEDY_TOKENS, args.loopback)
        results.data["training"] = {**training_result(ckpt), **same}
        results.write()
    return ckpt


def same_everywhere(model: Model, ckpt: Path, n_tokens: int, is_loopback: bool) -> dict[str, Any]:
    """Whether one, two and three nodes continue a text greedily as the model alone does."""
    expected = reference_ids(ckpt, n_tokens)
    same = {}
    for n_nodes in N_NODES:
        case = Case(model.key, str(ckpt), n_nodes, n_tokens, is_greedy=True, is_loopback=is_loopback)
        found = alone(run_case, case)["ids"]
        same[str(n_nodes)] = found == [expected]
        print(f"{model.title} on {n_nodes}, {n_tokens} tokens, greedy: "
              f"{'as' if same[str(n_nodes)] else 'NOT as'} the model alone", flush=True)  # fmt: skip
    return {"greedy_tokens": n_tokens, "same": same}


def measured_run(case: Case) -> dict[str, Any]:
    """A run as it is kept: fewer points, the beginning of the first text, and what other programs took meanwhile."""
    begin = Usage.now()
    run = thinned(alone(run_case, case))
    del run["ids"]
    now = time.strftime("%Y-%m-%d %H:%M")
    told = {"date": now, "machine": machine(), "loopback": case.is_loopback, "asked": case.n_tokens}
    return {**run, "texts": [run["texts"][0][:MOST_CHARACTERS]], **told, **Usage.now().since(begin)}


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
    parser.add_argument("--nodes", default="1,2,3", metavar="N,N", help="some of 1,2,3")
    parser.add_argument("--again", action="store_true", help="run also what there are results of")
    parser.add_argument("--draw", action="store_true", help="only figures and tables, of the results that are there")
    parser.add_argument("--tokens", type=int, metavar="N", help="so many per sample, to try something out")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--work-dir", type=Path, default=on_path.ROOT / "build" / "thesis", metavar="DIR")
    parser.add_argument("--untrained", action="store_true", help="random weights for all: rates do not depend on them")
    parser.add_argument("--loopback", action="store_true", help="all nodes on one host, without root")
    parser.add_argument("--within", type=float, default=math.inf, metavar="S", help="begin no run later")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="(benchmarks/results/thesis.json; --quick: work folder)"
    )
    parser.add_argument("--docs", action=argparse.BooleanOptionalAction, help="write assets/ and docs/seeds.md, or not")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the children inherit it
    keys = args.only.split(",") if args.only else list(BY_KEY)
    if unknown := [key for key in keys if key not in BY_KEY]:
        parser.error(f"no such model: {unknown[0]}; there are {', '.join(BY_KEY)}")
    args.nodes = [int(n) for n in args.nodes.split(",")]
    models = [m for m in MODELS if m.key in keys and (m.quick_tokens or not args.quick)]
    results = Results(args.results or (args.work_dir / "quick.json" if args.quick else RESULTS / "thesis.json"))
    n_failed = 0 if args.draw else measure(args, models, results)
    from thesis_report import write_report

    is_for_docs = args.docs if args.docs is not None else not args.quick
    write_report(results.data, on_path.ROOT if is_for_docs else None, args.work_dir)
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
