#!/usr/bin/env python3
"""Random faults, by the hundred: does every text come out as on an undisturbed ring, does anybody hang, is anything left?

Runs of 3 to 5 nodes (the starter in this process, the others as processes of their own, behind links that can be broken), each
with several faults of a seeded schedule (tests/faults): nodes are killed, halted, paused, their links reset or cut in the
middle of a frame, their disks filled, and some come back late; a third of it during load, prefill, recovery or hand-over, a
tenth two at once. Greedy and sampled texts, in float32, int8 and int4, are compared with those of one node alone.

example:
  chaos.py --faults 1000 --minutes 240 --seed 1 --json chaos.json
  chaos.py --faults 1000 --minutes 240 --draft model
  chaos.py --faults 200 --draft model --tensor      all nodes share each block; compared as far as the run says that bits stay
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tests/faults")]

if TYPE_CHECKING:
    from fault_ring import FaultRing, Outcome, Wanted

FORMATS = ("float32", "int8", "int4")
N_NODES = 5
HANG_S = 240.0  # of one run; far beyond what it takes with all its faults


@dataclass
class Tally:
    """What was seen so far."""

    runs: int = 0
    faults: int = 0
    by_action: collections.Counter[str] = field(default_factory=collections.Counter)
    by_point: collections.Counter[str] = field(default_factory=collections.Counter)
    double: int = 0
    recovered: int = 0  # nodes that were lost and replaced
    recovery_s: list[float] = field(default_factory=list)  # from the last token before to the first one after
    hangs: int = 0
    wrong: int = 0
    lost: int = 0
    ended_before: int = 0  # runs that a fault ended before the first token, while the nodes loaded
    ended_alone: int = 0  # texts that were under way when two nodes were lost, one after the other
    left: int = 0
    guessed: int = 0  # tokens of all texts
    confirmed: int = 0
    gaps_s: list[float] = field(default_factory=list)  # the longest of runs in which nothing but links broke, and once
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="stop after so many (%(default)s)")
    parser.add_argument("--minutes", type=float, default=240.0, help="or after so long (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of all schedules (%(default)s)")
    parser.add_argument("--silence-s", type=float, default=2.0, help="after which a node is lost (%(default)g)")
    parser.add_argument("--tokens", type=int, default=80, help="of each text (%(default)s)")
    parser.add_argument("--actions", metavar="A,A,...", help="what is done, of all that there is")
    parser.add_argument("--per-run", type=int, metavar="N", help="faults of a run (default: 2 to 4)")
    parser.add_argument("--fixed", action="store_true", help="no lost node is replaced")
    parser.add_argument("--tensor", action="store_true", help="nodes are a group (--parallel tensor)")
    parser.add_argument("--draft", choices=("none", "auto", "model"), default="none",
                        help="guess tokens, whatever that costs; model: by a copy of the model (%(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tally there")
    parser.add_argument("-v", "--verb", action="store_true", help="say what each run did")
    args = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="mdi-chaos-") as folder:
        try:
            attack(args, Path(folder), tally)
        finally:
            show(tally)
            if args.json is not None:
                args.json.write_text(json.dumps(vars(tally), indent=1) + "\n", encoding="utf-8")
    return 1 if tally.hangs or tally.wrong or tally.lost or tally.left else 0


def attack(args: argparse.Namespace, folder: Path, tally: Tally) -> None:
    """Run after run, until there have been enough faults or the time is over."""
    from fault_ring import fault_ring, texts

    from tiny_checkpoint import write_checkpoint

    checkpoint = write_checkpoint(folder / "tiny", with_end=False)
    expected: dict[tuple[str, int], list[list[int]]] = {}
    by_groups: dict[tuple[str, int], dict[int, list[list[int]]]] = {}
    begin = time.monotonic()
    with fault_ring(folder / "ring", N_NODES) as ring:
        while tally.faults < args.faults and time.monotonic() - begin < args.minutes * 60:
            chance = random.Random(f"{args.seed} {tally.runs}")
            form, text_seed = FORMATS[tally.runs % len(FORMATS)], tally.runs // len(FORMATS) % 4
            wanted = texts(4, args.tokens, text_seed)
            if (form, text_seed) not in expected:
                expected[form, text_seed] = alone(checkpoint, form, wanted)
            ring.start_all()
            undisturbed = by_groups.setdefault((form, text_seed), {})
            one_run(args, ring, checkpoint, form, wanted, expected[form, text_seed], chance, tally, undisturbed)
            tally.seconds = time.monotonic() - begin
            if tally.runs % 10 == 0:
                show(tally)
        tally.left += len(ring.close())


def options(args: argparse.Namespace | None, checkpoint: Path, form: str) -> Any:
    from mdi.spec.options import ParallelOptions, StarterOptions

    fields: dict[str, Any] = {"ckpt": checkpoint, "prompt_style": "none", "device": "cpu", "placement": "even"}
    if args is not None:
        draft = str(checkpoint) if args.draft == "model" else args.draft
        fields |= {"silence_s": args.silence_s, "fixed": args.fixed, "draft": draft}
        if args.tensor:
            fields["parallel"] = ParallelOptions("tensor", reduce_dtype="float32")
    return StarterOptions(**fields, quantize=form, quantize_head=form, wait_s=60.0)


def alone(checkpoint: Path, form: str, wanted: list[Wanted]) -> list[list[int]]:
    from fault_ring import run

    from mdi.spec.cluster import standalone

    outcome = run(standalone(), options(None, checkpoint, form), wanted)
    if outcome.error is not None:
        raise outcome.error
    return outcome.ids


def one_run(
    args: argparse.Namespace, ring: FaultRing, checkpoint: Path, form: str, wanted: list[Wanted],
    expected: list[list[int]], chance: random.Random, tally: Tally, undisturbed: dict[int, list[list[int]]],
) -> None:  # fmt: skip
    """One run with faults.

    Args:
        expected: by one node; undisturbed: by a group of so many, as far as that is known.
    """
    from fault_ring import Outcome, Running, run
    from fault_schedule import ACTIONS, Saboteur, complaint, schedule

    n_nodes = chance.randint(3, N_NODES)
    actions = args.actions.split(",") if args.actions else ACTIONS
    faults = schedule(chance.randrange(1 << 30), n_nodes, args.per_run or chance.randint(2, 4), actions)
    cluster = ring.cluster(n_nodes)
    if not args.fixed and chance.random() < 0.5:
        others = ring.cluster(N_NODES).secondaries[n_nodes - 1 :]
        cluster = replace(cluster, spares=tuple(replace(node, is_spare=True) for node in others))
    if args.tensor and n_nodes not in undisturbed:
        plain = replace(options(args, checkpoint, form), draft="none")
        undisturbed[n_nodes] = run(ring.cluster(n_nodes), plain, wanted).ids
        ring.wait_waiting(HANG_S)
    running, found = Running(), [Outcome()]
    saboteur = Saboteur(ring, faults, sum(map(len, expected)), args.silence_s, running)
    begin = time.monotonic()

    def work() -> None:
        found[0] = run(cluster, options(args, checkpoint, form), wanted, running)

    thread = threading.Thread(target=work, name="run", daemon=True)
    thread.start()
    thread.join(HANG_S)
    if thread.is_alive():
        tally.hangs += 1
        tally.complaints.append(f"run {tally.runs}: hangs after {[str(f) for f in saboteur.done]}")
        faulthandler.dump_traceback(all_threads=True)
        raise SystemExit("a run hangs; its threads are above")
    saboteur.join()
    if args.tensor:
        expected = undisturbed[n_nodes]
        for i, (ids, n) in enumerate(zip(found[0].ids, found[0].may_differ_from, strict=False)):
            if n is not None and (found[0].is_whole[i] or found[0].error is not None):
                found[0].ids[i] = [*ids[:n], *expected[i][n : max(n, len(ids))]]  # the others may be any
    what = complaint(found[0], expected, args.fixed and saboteur.loses_a_node, saboteur.done)
    judge(what, found[0], saboteur, tally)
    if args.verb or what:
        told = ", ".join(map(str, saboteur.done))
        seconds = time.monotonic() - begin
        print(
            f"run {tally.runs} ({n_nodes} nodes, {form}, {seconds:.1f} s): {told}: {what or 'as it must be'}",
            flush=True,
        )
    ring.let_go_on()
    with contextlib.suppress(AssertionError):
        ring.wait_waiting(HANG_S)
        tally.runs += 1
        return
    tally.hangs += 1
    tally.complaints.append(f"run {tally.runs}: a node does not wait for the next run")
    raise SystemExit(tally.complaints[-1])


def judge(what: str, outcome: Outcome, saboteur: Any, tally: Tally) -> None:
    is_early = outcome.error is not None and not any(outcome.ids)
    if is_early and any(fault.point == "load" for fault in saboteur.done):
        tally.ended_before += 1  # a run that has not begun has lost nothing
    elif what:
        tally.wrong += what.startswith("wrong")
        tally.lost += what.startswith("lost")
        tally.complaints.append(f"run {tally.runs}: {what} after {[str(fault) for fault in saboteur.done]}")
    tally.faults += len(saboteur.done)
    tally.guessed += outcome.guesses[0]
    tally.confirmed += outcome.guesses[1]
    tally.by_action.update(fault.action for fault in saboteur.done)
    tally.by_point.update(fault.point for fault in saboteur.done)
    moments = collections.Counter((fault.point, fault.after) for fault in saboteur.done)
    tally.double += sum(n for n in moments.values() if n > 1)
    tally.recovered += len(outcome.recoveries)
    tally.ended_alone += sum(outcome.is_ended_alone)
    tally.recovery_s += [one["seconds"] for one in outcome.recoveries if one["seconds"] is not None]
    if len(saboteur.done) == 1 and saboteur.done[0].action in ("reset", "half a frame") and outcome.error is None:
        tally.gaps_s.append(outcome.gap_s)


def show(tally: Tally) -> None:
    print(
        f"{tally.faults} faults in {tally.runs} runs, {tally.seconds / 60:.1f} min: {tally.hangs} hangs, {tally.wrong} wrong, "
        f"{tally.lost} lost, {tally.ended_before} ended while loading, {tally.ended_alone} texts ended alone, {tally.left} "
        f"processes left, {tally.recovered} lost nodes were replaced, "
        f"{tally.confirmed} of {tally.guessed} guesses right\n  {dict(tally.by_action)}\n  "
        f"{dict(tally.by_point)}, {tally.double} at once with another",
        flush=True,
    )
    if tally.recovery_s:
        middle, longest = statistics.median(tally.recovery_s), max(tally.recovery_s)
        print(
            f"  from the last token before a loss to the next: {middle:.2f} s (median), {longest:.2f} s at most",
            flush=True,
        )
    if tally.gaps_s:
        print(
            f"  longest wait for a token after one reset: {max(tally.gaps_s):.2f} s ({len(tally.gaps_s)} runs)",
            flush=True,
        )
    for line in tally.complaints[-5:]:
        print("  " + line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
