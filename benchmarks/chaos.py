#!/usr/bin/env python3
"""Random faults, by the hundred: does every text come out as on an undisturbed ring, does anybody hang, is anything left?

Runs of 3 to 5 nodes (the starter in this process, the others as processes of their own, behind links that can be broken), each
with several faults of a seeded schedule (tests/faults): nodes are killed, halted, paused, their links reset or cut in the
middle of a frame, their disks filled, and some come back late; a third of it during load, prefill, recovery or hand-over, a
tenth two at once. Greedy and sampled texts, in float32, int8 and int4, are compared with those of one node alone.

example:
  chaos.py --faults 1000 --minutes 240 --seed 1 --json chaos.json
  chaos.py --faults 1000 --minutes 240 --draft model
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

import on_path  # noqa: F401

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it

if TYPE_CHECKING:
    from fault_ring import FaultRing, Outcome, Wanted

FORMATS = ("float32", "int8", "int4")
N_NODES = 5
HANG_S = 240.0  # of one run; far beyond what it takes with all its faults


@dataclass
class Tally:
    """What was seen so far.

    Attributes:
        counts: by name. "recovered" are nodes that were lost and replaced; "early" runs that a fault ended before the first
            token, while the nodes loaded; "alone" texts that were under way when two nodes were lost, one after the other.
        done: faults, by what they did and by when.
        recovery_s: from the last token before a loss to the first one after it.
        gaps_s: the longest wait for a token in runs in which nothing but one link broke.
    """

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    recovery_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="stop after so many (%(default)s)")
    parser.add_argument("--minutes", type=float, default=240.0, help="or after so long (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of all schedules (%(default)s)")
    parser.add_argument("--silence-s", type=float, default=2.0, help="after which a node is lost (%(default)g)")
    parser.add_argument("--tokens", type=int, default=80, help="of each text (%(default)s)")
    parser.add_argument("--draft", choices=("none", "auto", "model"), default="none",
                        help="guess tokens, whatever that costs; model: by a copy of the model (%(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tally there")
    args = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="mdi-chaos-") as folder:
        try:
            attack(args, Path(folder), tally)
        finally:
            show(tally)
            if args.json is not None:
                args.json.write_text(json.dumps(vars(tally), indent=1) + "\n", encoding="utf-8")
    return 1 if any(tally.counts[name] for name in ("hangs", "wrong", "lost", "left")) else 0


def attack(args: argparse.Namespace, folder: Path, tally: Tally) -> None:
    """Run after run, until there have been enough faults or the time is over."""
    from fault_ring import fault_ring, texts

    from tiny_checkpoint import write_checkpoint

    checkpoint = write_checkpoint(folder / "tiny", with_end=False)
    expected: dict[tuple[str, int], list[list[int]]] = {}
    begin = time.monotonic()
    with fault_ring(folder / "ring", N_NODES) as ring:
        while tally.counts["faults"] < args.faults and time.monotonic() - begin < args.minutes * 60:
            number = tally.counts["runs"]
            chance = random.Random(f"{args.seed} {number}")
            form, text_seed = FORMATS[number % len(FORMATS)], number // len(FORMATS) % 4
            wanted = texts(4, args.tokens, text_seed)
            if (form, text_seed) not in expected:
                expected[form, text_seed] = alone(checkpoint, form, wanted)
            ring.start_all()
            one_run(args, ring, checkpoint, form, wanted, expected[form, text_seed], chance, tally)
            tally.seconds = time.monotonic() - begin
            if number % 10 == 9:
                show(tally)
        tally.counts["left"] += len(ring.close())


def options(args: argparse.Namespace | None, checkpoint: Path, form: str) -> Any:
    from mdi.spec.options import StarterOptions

    fields: dict[str, Any] = {"ckpt": checkpoint, "prompt_style": "none", "device": "cpu", "placement": "even"}
    if args is not None:
        draft = str(checkpoint) if args.draft == "model" else args.draft
        fields |= {"silence_s": args.silence_s, "draft": draft}
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
    expected: list[list[int]], chance: random.Random, tally: Tally,
) -> None:  # fmt: skip
    """One run with faults, whose texts must be the expected ones, of one node."""
    from fault_ring import Outcome, Running, run
    from fault_schedule import ACTIONS, Saboteur, complaint, schedule

    n_nodes = chance.randint(3, N_NODES)
    faults = schedule(chance.randrange(1 << 30), n_nodes, chance.randint(2, 4), ACTIONS)
    cluster = ring.cluster(n_nodes)
    if chance.random() < 0.5:
        others = ring.cluster(N_NODES).secondaries[n_nodes - 1 :]
        cluster = replace(cluster, spares=tuple(replace(node, is_spare=True) for node in others))
    running, found = Running(), [Outcome()]
    saboteur = Saboteur(ring, faults, sum(map(len, expected)), args.silence_s, running)
    begin = time.monotonic()

    def work() -> None:
        found[0] = run(cluster, options(args, checkpoint, form), wanted, running)

    thread = threading.Thread(target=work, name="run", daemon=True)
    thread.start()
    thread.join(HANG_S)
    if thread.is_alive():
        tally.counts["hangs"] += 1
        tally.complaints.append(f"run {tally.counts['runs']}: hangs after {[str(f) for f in saboteur.done]}")
        faulthandler.dump_traceback(all_threads=True)
        raise SystemExit("a run hangs; its threads are above")
    saboteur.join()
    what = complaint(found[0], expected, False, saboteur.done)
    judge(what, found[0], saboteur, tally)
    done, seconds = ", ".join(map(str, saboteur.done)), time.monotonic() - begin
    print(f"{n_nodes} nodes, {form}, {seconds:.1f} s: {done}: {what or 'as it must be'}", flush=True)
    ring.let_go_on()
    with contextlib.suppress(AssertionError):
        ring.wait_waiting(HANG_S)
        tally.counts["runs"] += 1
        return
    tally.counts["hangs"] += 1
    tally.complaints.append(f"run {tally.counts['runs']}: a node does not wait for the next run")
    raise SystemExit(tally.complaints[-1])


def judge(what: str, outcome: Outcome, saboteur: Any, tally: Tally) -> None:
    is_early = outcome.error is not None and not any(outcome.ids)
    if is_early and any(fault.point == "load" for fault in saboteur.done):
        tally.counts["early"] += 1  # a run that has not begun has lost nothing
    elif what:
        tally.counts[what.split()[0]] += 1
        tally.complaints.append(f"run {tally.counts['runs']}: {what} after {[str(fault) for fault in saboteur.done]}")
    moments = collections.Counter((fault.point, fault.after) for fault in saboteur.done)
    tally.counts.update(
        faults=len(saboteur.done), guessed=outcome.guesses[0], confirmed=outcome.guesses[1], alone=sum(outcome.is_ended_alone),
        recovered=len(outcome.recoveries), double=sum(n for n in moments.values() if n > 1),
    )  # fmt: skip
    tally.done.update(word for fault in saboteur.done for word in (fault.action, fault.point))
    tally.recovery_s += [one["seconds"] for one in outcome.recoveries if one["seconds"] is not None]
    if len(saboteur.done) == 1 and saboteur.done[0].action in ("reset", "half a frame") and outcome.error is None:
        tally.gaps_s.append(outcome.gap_s)


def show(tally: Tally) -> None:
    print(f"{tally.seconds / 60:.1f} min: {dict(tally.counts)}\n  {dict(tally.done)}")
    if tally.recovery_s:
        middle, longest = statistics.median(tally.recovery_s), max(tally.recovery_s)
        print(f"  from the last token before a loss to the next: {middle:.2f} s (median), {longest:.2f} s at most")
    if tally.gaps_s:
        print(f"  longest wait for a token after one reset: {max(tally.gaps_s):.2f} s ({len(tally.gaps_s)} runs)")
    print(*("  " + line for line in tally.complaints[-5:]), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
