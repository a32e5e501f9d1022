"""Runs a scenario: load every system once, warm up, then let the cases take turns."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from peers.protocol import Case
from side_by_side.measures import measured
from side_by_side.scenario import Outcome, Run, Scenario, SystemSpec
from side_by_side.workers import Worker, WorkerError

MODULES = {
    "ring": "ring.ring_worker",
    "ready": "ring.ready_worker",
    "read": "peers.read_test",
    "litgpt": "peers.litgpt_peer",
    "transformers": "peers.transformers_peer",
    "llama.cpp": "peers.llama_cpp_peer",
}
LOAD_S = 300.0
CASE_S = 400.0  # a prompt of 8,000 tokens on one thread
WARM_UP = (32, 4)  # prompt and new tokens of a warm-up, at most


def run_scenario(
    scenario: Scenario, pythons: dict[str, str], log_folder: Path, repeats: int | None, budget_s: float
) -> Outcome:
    """Run all of it; what fails is told in the outcome and does not stop the rest.

    Args:
        pythons: interpreter by kind of system; "" for the others.
        repeats: rounds; None takes the scenario's own number.
        budget_s: no round is begun that would, if as long as the last one, end later. One is always run. Groups of
            systems have equal parts of it.
    """
    outcome = Outcome()
    groups = list(dict.fromkeys(spec.group for spec in scenario.systems))
    for group in groups:
        systems = [spec for spec in scenario.systems if spec.group == group]
        names = {spec.name for spec in systems}
        runs = [run for run in scenario.runs if run.system in names]
        _run_group(systems, runs, outcome, pythons, log_folder, repeats or scenario.repeats, budget_s / len(groups))
    return outcome


def _run_group(
    systems: list[SystemSpec], runs: list[Run], outcome: Outcome, pythons: dict[str, str], log_folder: Path,
    repeats: int, budget_s: float,
) -> None:  # fmt: skip
    begin = time.monotonic()
    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as stack:
        for spec in systems:
            worker = _load(spec, pythons, log_folder, outcome)
            if worker is not None:
                workers[spec.name] = worker
                stack.callback(worker.kill)
        for run in runs:
            case = run.case
            short = Case(case.n_sequences, min(case.n_prompt, WARM_UP[0]), min(case.n_new, WARM_UP[1]))
            _run(run, short, workers, outcome, keep=False)
        _rounds(runs, workers, outcome, repeats, begin + budget_s)
        for name, worker in workers.items():
            outcome.ends[name] = worker.end()


def _load(spec: SystemSpec, pythons: dict[str, str], log_folder: Path, outcome: Outcome) -> Worker | None:
    python = pythons.get(spec.kind, pythons[""])
    begin = time.monotonic()
    worker: Worker | None = None
    try:
        worker = Worker(
            spec.name, python, MODULES[spec.kind], spec.options, list(spec.cores), log_folder, spec.environment
        )
        worker.wait_ready(LOAD_S)
    except WorkerError as e:
        outcome.errors[spec.name] = str(e)
        say(f"  {spec.name}: NOT LOADED: {e}")
        if worker is not None:
            worker.kill()
        return None
    say(f"  {spec.name}: loaded in {time.monotonic() - begin:.1f} s")
    return worker


def _rounds(runs: list[Run], workers: dict[str, Worker], outcome: Outcome, repeats: int, deadline: float) -> None:
    round_s = 0.0
    for number in range(repeats):
        begin = time.monotonic()
        if number and begin + round_s > deadline:
            say(f"  {number} of {repeats} rounds: no time for more")
            return
        # There and back, so that no system always comes first.
        for run in runs if number % 2 == 0 else runs[::-1]:
            _run(run, run.case, workers, outcome, keep=True)
        round_s = time.monotonic() - begin
        say(f"  round {number + 1} of {repeats}: {round_s:.1f} s  " + _line(runs, outcome))


def _run(run: Run, case: Case, workers: dict[str, Worker], outcome: Outcome, keep: bool) -> None:
    """One case; a failure ends the system's part in the scenario, and rounds of unlike length are no pairs."""
    worker = workers.get(run.system)
    if worker is None:
        return
    try:
        answer = worker.run(case.to_json(), CASE_S)
    except WorkerError as e:
        say(f"  {run.label}: FAILED: {e}")
        outcome.errors[run.system] = str(e)
        worker.kill()
        del workers[run.system]
        return
    if keep:
        outcome.rounds.setdefault(run.label, []).append(measured(answer, case.n_prompt))
        outcome.ids[run.label] = answer.get("ids") or []


def _line(runs: list[Run], outcome: Outcome) -> str:
    keys = ("decode_tokens_per_s", "read_bytes_per_s", "prefill_tokens_per_s")
    last = {run.label: found[-1] for run in runs if (found := outcome.rounds.get(run.label))}
    return "; ".join(f"{label} {next((one[k] for k in keys if k in one), 0.0):.4g}" for label, one in last.items())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
