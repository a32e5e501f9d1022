#!/usr/bin/env python3
"""The ring beside the best of its rivals, in one run, on the same random weights: one scenario after another.

    compare.py --prepare                                    only make the files, which takes many minutes
    compare.py --all --minutes 25                           what matters most first, until the time is up
    compare.py --scenario sixteen                           one thread per process, pinned; TinyLlama's shape
    compare.py --all --shape small-30m --quick              does it work?
    compare.py --scenario sets-one --llama-libs avx2=DIR,avx512=DIR    instruction sets, each beside a llama.cpp built for it
    compare.py --check-gguf                                 does llama.cpp compute the same model?

Every system loads once, in a process of its own; then the cases take turns, and ratios are formed within a round. Each
scenario's result is written when it is done, with the processor time that other programs took. Documents are not written
from results that others disturbed. llama.cpp, transformers and gguf
come from the extra `bench` (`pip install '.[bench]'`), in this interpreter's environment or in another one's
(--peers-python). Checkpoints, chunks and GGUF files are made once and kept in the work folder: 45 GB for TinyLlama's shape
and the 7 B weights beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any

import on_path
from random_checkpoint import PACKED_ONLY, SHAPES
from records import RESULTS, Usage, disturbed, save
from side_by_side.figure import draw
from side_by_side.files import make_all
from side_by_side.measures import medians
from side_by_side.runner import run_scenario, say
from side_by_side.scenario import Outcome, Scenario
from side_by_side.scenarios import PER_SET, SCENARIOS
from side_by_side.setup import Setup
from side_by_side.tables import PROCESSORS, all_medians, fill, overview, scenario_table, sets_table

DOCUMENT = on_path.ROOT / "benchmarks" / "RESULTS.md"
FIGURE = on_path.ROOT / "assets" / "speed.svg"
WIDTH = 150  # of lines of text


def run_one(scenario: Scenario, args: argparse.Namespace, setup: Setup, budget_s: float) -> None:
    """Run a scenario, and write its result."""
    say(f"{scenario.name}: {scenario.title}, {setup.shape}")
    make_all(setup.needs, args.peers_python)
    pythons = {"": sys.executable, "llama.cpp": args.peers_python, "transformers": args.peers_python}
    begin = Usage.now()
    outcome = run_scenario(scenario, pythons, setup.work / "logs", args.repeats, budget_s)
    result = to_json(scenario, outcome, setup)
    path = args.results / f"{scenario.name}.json"
    save(path, result, begin)
    if why := disturbed(json.loads(path.read_text(encoding="utf-8"))):
        say(f"{scenario.name}: not for documents: {why}")
    print(f"\n### {scenario.title}\n\n{scenario_table(result)}\n", flush=True)


def to_json(scenario: Scenario, outcome: Outcome, setup: Setup) -> dict[str, Any]:
    peaks = {}
    for name, end in outcome.ends.items():
        nodes = [node["peak_rss_bytes"] for node in end.get("nodes", [])] or [end.get("peak_rss_bytes", 0)]
        peaks[name] = ", ".join(f"{n / 1e6:.0f}" for n in nodes if n)
    return {
        "name": scenario.name, "title": scenario.title, "shape": setup.shape, "brevity": setup.brevity,
        "checks": [check.to_json() for check in scenario.results(outcome)],
        "medians": {label: medians(rounds) for label, rounds in outcome.rounds.items()},
        "systems": {run.label: run.system for run in scenario.runs}, "settings": settings(scenario),
        "cases": {run.label: run.case.to_json() for run in scenario.runs},
        "rounds": outcome.rounds, "peak_mb": peaks, "ends": outcome.ends, "errors": outcome.errors,
    }  # fmt: skip


def settings(scenario: Scenario) -> dict[str, dict[str, str]]:
    """Of each system: the instruction set that it was made to use and the number type of its caches, where it has such.

    What it used itself is in "ends": the ring's kernels; llama.cpp's library, and what that says of its build.
    """
    found = {}
    for spec in scenario.systems:
        flags = spec.options.get("flags", [])
        cache = flags[flags.index("--kv-dtype") + 1] if "--kv-dtype" in flags else spec.options.get("cache", "")
        found[spec.name] = {"instruction_set": spec.instructions, "cache": cache}
    return found


def run_all(names: list[str], args: argparse.Namespace, setup: Setup) -> int:
    """Scenario after scenario, until the time is up; one that fails does not stop the others. Returns how many failed."""
    n_failed = 0
    end = time.monotonic() + 60 * args.minutes
    for name in names:
        if time.monotonic() > end:
            say(f"{name}: left out, the time is up")
            continue
        try:
            setup.needs.clear()
            run_one(SCENARIOS[name](setup), args, setup, min(args.budget, max(0.0, end - time.monotonic())))
        except Exception:
            n_failed += 1
            say(f"{name} FAILED:\n{traceback.format_exc()}")
    return n_failed


def write_documents(args: argparse.Namespace) -> None:
    """Tables of what lies in the results folder into benchmarks/RESULTS.md, and the figure into assets/.

    Raises SystemExit if a result was disturbed by other programs.
    """
    results = results_in(args.results)
    busy = [f"{result['name']}: {why}" for result in results if (why := disturbed(result))]
    if busy:
        raise SystemExit("error: measure these again on a machine that does nothing else:\n  " + "\n  ".join(busy))
    if not results:
        raise SystemExit(f"error: no results in {args.results}: run some scenarios first")
    text = DOCUMENT.read_text(encoding="utf-8")
    for_all = [result for result in results if result["name"] not in PER_SET]
    text = fill(text, "overview", f"{overview(for_all)}\n\n{conditions(results)}")
    text = fill(text, "medians", all_medians(for_all))
    text = fill(text, "sets", sets_table(results))
    DOCUMENT.write_text(text, encoding="utf-8")
    draw(results, FIGURE)


def results_in(folder: Path) -> list[dict[str, Any]]:
    """Those of scenarios, in the order of their weight."""
    found = [r for path in folder.glob("*.json") if (r := json.loads(path.read_text())).get("name") in SCENARIOS]
    return sorted(found, key=lambda r: list(SCENARIOS).index(r["name"]))


def conditions(results: list[dict[str, Any]]) -> str:
    """On what and when it was measured; where scenarios differ in it, all that there was."""
    found: dict[str, set[str]] = {}
    for result in results:
        found.setdefault(f"{result['machine']}, shape {result['shape']}", set()).add(result["date"][:10])
    said = "; ".join(f"{where}, {', '.join(sorted(days))}" for where, days in found.items())
    return textwrap.fill(f"Measured on: {said}.", WIDTH)


def folders(text: str) -> dict[str, Path]:
    """NAME=FOLDER,NAME=FOLDER; the names are instruction sets."""
    found = {}
    for field in text.split(","):
        name, _, folder = field.partition("=")
        if name not in PROCESSORS or not folder:
            raise argparse.ArgumentTypeError(f"{field!r}: expected SET=FOLDER, SET one of {', '.join(PROCESSORS)}")
        found[name] = Path(folder).resolve()
    return found


def numbers(text: str) -> list[int]:
    return [int(field) for field in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--scenario", choices=SCENARIOS, action="append", help="may be repeated")
    what.add_argument("--all", action="store_true", help="all scenarios, unattended")
    what.add_argument("--prepare", action="store_true", help="only make the files that all scenarios need")
    what.add_argument("--check-gguf", action="store_true", help="compare greedy tokens in float32")
    what.add_argument("--write-docs", action="store_true", help="only bring the results into RESULTS.md and assets/")
    shapes = [shape for shape in SHAPES if shape not in PACKED_ONLY]
    parser.add_argument("--shape", choices=shapes, default="tiny-llama-1.1b")
    parser.add_argument("--work-dir", type=Path, help="for checkpoints (default: mdi-bench in the temporary folder)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON files (%(default)s)")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has llama-cpp-python, gguf and "
                        "transformers (default: this one)")  # fmt: skip
    parser.add_argument("--llama-libs", type=folders, default={}, metavar="SET=FOLDER,...", help="for scenarios of "
                        "instruction sets: where the libllama.so is that was built for each set")  # fmt: skip
    parser.add_argument("--cores", type=numbers, help="cores to pin to (default: the first two that there are)")
    parser.add_argument("--repeats", type=int, help="rounds (default: 5, or 1 where it says so)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no scenario and no round later")
    parser.add_argument("--budget", type=float, default=600, help="seconds per scenario after which no round is begun "
                        "(%(default)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one round of few tokens")
    args = parser.parse_args()
    if args.quick:
        args.repeats = args.repeats or 1
    if not args.llama_libs and (without := [name for name in args.scenario or () if name in PER_SET]):
        parser.error(f"{without[0]} needs --llama-libs")
    return args


def main() -> int:
    args = parse()
    if args.write_docs:
        write_documents(args)
        return 0
    work = args.work_dir or Path(tempfile.gettempdir()) / "mdi-bench"
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    cores = tuple(args.cores or available[:2])
    setup = Setup(args.shape, work, cores, brevity=4 if args.quick else 1, llama_libs=args.llama_libs)
    if args.check_gguf:
        from peers.check_gguf import check

        return check(setup, args.peers_python)
    if args.prepare:
        for scenario in SCENARIOS.values():
            scenario(setup)  # says what it needs
        return 1 if make_all(setup.needs, args.peers_python) else 0
    every = [name for name in SCENARIOS if args.llama_libs or name not in PER_SET]
    n_failed = run_all(every if args.all else args.scenario, args, setup)
    if args.all and not args.quick:
        write_documents(args)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
