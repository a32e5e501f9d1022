#!/usr/bin/env python3
"""A step of beams beside a step of as many samples, and a prompt with several texts beside the same with one.

    python benchmarks/beams.py [--shape nano-llama-304m] [--beams 4] [--texts 8] [--prompt 1000] [--rounds 5]

Random weights on one node. Both sides of a comparison take turns in one run, so that a
noisy neighbour hits both. A step is the time of a search of N tokens, without its first token, divided by the others; the time
of a prompt ends with the first token of its last text. Medians; nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import on_path  # noqa: F401
from mdi.engine.cohort import Beams
from mdi.engine.sequence import SamplingParams
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from random_checkpoint import SHAPES, make_checkpoint
from records import add_json_flag, save

N_TOKENS, N_FIRST = 40, 8
SHORT = 40  # tokens of the prompt of a search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="nano-llama-304m")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_flag(parser, "beams")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / args.shape
        make_checkpoint(checkpoint, args.shape)
        options = StarterOptions(ckpt=checkpoint, prompt_style="none", device="cpu", draft="none")
        length = max(args.prompt, SHORT + N_TOKENS) + N_TOKENS
        with Run(GivenNodes(standalone()), options, length, n_texts=max(args.texts, args.beams)) as run:
            found = measure(run, args)
    for name, times in found.items():
        print(f"{name:24} {1e3 * statistics.median(times):9.2f} ms")
    names = list(found)
    for one, other in (names[:2], names[2:]):
        ratio = statistics.median(found[one]) / statistics.median(found[other])
        print(f"{one} / {other}: {ratio:.3f}")
    save(args.json, {"shape": args.shape, "seconds": found})


def measure(run: Run, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round, by what was done. Each round has another prompt, so that no kept cache helps."""

    def beams(ids: list[int], n_tokens: int) -> None:
        run.submit_beams("", ids, SamplingParams(n_tokens), Beams(args.beams))

    def samples(ids: list[int], n_tokens: int) -> None:
        for seed in range(args.beams):
            run.submit("", ids, SamplingParams(n_tokens, seed=seed))

    def texts(n: int) -> Callable[[list[int]], None]:
        def submit(ids: list[int]) -> None:
            for _ in range(n):
                run.submit("", ids, SamplingParams(1))

        return submit

    found: dict[str, list[float]] = {}

    def keep(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for round_number in range(args.rounds + 1):
        short = [3 + (7 * k + round_number) % 200 for k in range(SHORT)]
        long = [3 + (11 * k + round_number) % 200 for k in range(args.prompt)]
        for name, submit in ((f"step of {args.beams} beams", beams), (f"step of {args.beams} samples", samples)):
            begun = timed(run, partial(submit, short, N_FIRST))
            whole = timed(run, partial(submit, short, N_TOKENS))
            if round_number:  # the first one warms up
                keep(name, (whole - begun) / (N_TOKENS - N_FIRST))
        for n in (args.texts, 1):
            seconds = timed(run, partial(texts(n), long))
            if round_number:
                keep(f"prompt with n = {n}", seconds)
    return found


def timed(run: Run, submit: Callable[[], None]) -> float:
    begin = time.perf_counter()
    submit()
    run.read()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
