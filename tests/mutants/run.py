"""Applies each mutant to a copy of the project and runs its tests there; prints the mutants that no test notices.

    make mutants
    .venv/bin/python tests/mutants/run.py --only scheduler     # those whose function, words or tests contain this

The kernels are compiled once with all their mutants. A variable of the environment chooses one of them.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.mutant import CSRC, PROJECT, Mutant, NotFoundError, all_mutants  # noqa: E402

CHOICE = "MDI_MUTANT"
SWITCH = f'#pragma once\n#include <cstdlib>\ninline const int mdi_mutant = std::atoi(std::getenv("{CHOICE}") ?: "0");\n'
# The sets that most processors have; the others would double the time of the compiler.
SETS = ("avx2", "neon", "plain")
TESTS_S = 600.0


@dataclass(frozen=True)
class Trial:
    """What the tests of one mutant said: "killed", "survived", or an error in the mutant itself."""

    mutant: Mutant
    result: str
    output: str = ""


class Copy:
    """A copy of the project in which one mutant at a time is applied."""

    def __init__(self, directory: Path, cpp: Sequence[Mutant]) -> None:
        """Args: the mutants of the kernels, all of which are compiled into this copy's library."""
        self._directory = directory
        self._numbers = {mutant: number for number, mutant in enumerate(cpp, start=1)}
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=PROJECT, check=True, capture_output=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (PROJECT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(PROJECT / name, directory / name)
        if cpp:
            self._switch_kernels(cpp)

    def _switch_kernels(self, cpp: Sequence[Mutant]) -> None:
        (self._directory / CSRC / "mutant.h").write_text(SWITCH)
        by_file = defaultdict(list)
        for mutant in cpp:
            path, offset = mutant.place()
            by_file[path].append((offset, mutant))
        for path, places in by_file.items():
            text = (self._directory / path).read_text()
            for offset, mutant in sorted(places, key=lambda place: -place[0]):
                both = f"(mdi_mutant == {self._numbers[mutant]} ? ({mutant.new}) : ({mutant.old}))"
                text = text[:offset] + both + text[offset + len(mutant.old) :]
            (self._directory / path).write_text('#include "mutant.h"\n' + text)
        build = self._directory / "src/mdi/kernels/build.py"
        fewer = f"\nINSTRUCTION_SETS = tuple(s for s in INSTRUCTION_SETS if s.name in {SETS})\n"
        build.write_text(re.sub(r"^COMMON = ", fewer + r"COMMON = ", build.read_text(), count=1, flags=re.MULTILINE))

    def why_no_kernels(self) -> str:
        """Compiles the kernels with all their mutants; why that failed, or "". Without kernels their tests are skipped."""
        program = "from mdi.kernels import library; library.load(); print(library.why_not())"
        done = subprocess.run(
            [sys.executable, "-B", "-c", program],
            cwd=self._directory / "src", env=self._environment(), capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip() or (done.stderr.strip() if done.returncode else "")

    def try_one(self, mutant: Mutant) -> Trial:
        if mutant.is_cpp:
            return self._trial(mutant, {CHOICE: str(self._numbers[mutant])})
        path, offset = mutant.place()
        original = (self._directory / path).read_text(encoding="utf-8")
        changed = original[:offset] + mutant.new + original[offset + len(mutant.old) :]
        try:
            (self._directory / path).write_text(changed, encoding="utf-8")
            return self._trial(mutant, {})
        finally:
            (self._directory / path).write_text(original, encoding="utf-8")

    def _trial(self, mutant: Mutant, environment: dict[str, str]) -> Trial:
        status, output = self.test(mutant.tests.split(), environment)
        result = {0: "survived", 1: "killed", None: "killed"}.get(status, f"error: pytest ended with {status}")
        return Trial(mutant, result, output)

    def _environment(self) -> dict[str, str]:
        return os.environ | {"MDI_CACHE_DIR": str(self._directory.parent / "cache")}

    def test(self, tests: Sequence[str], environment: dict[str, str]) -> tuple[int | None, str]:
        """The exit status of pytest, None if it took too long, and the end of its output."""
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
        # A group of its own, so that the processes that a test started end with it if it takes too long.
        process = subprocess.Popen(
            command, cwd=self._directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=self._environment() | environment,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=TESTS_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return None, process.communicate()[0][-2000:]
        return process.returncode, output[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="WORD", help="mutants whose function, words or tests contain WORD"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="trials at a time (all cores)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, drawn at random (by --seed)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    args = parser.parse_args()
    chosen = [m for m in all_mutants() if args.only.lower() in f"{m.function} {m.what} {m.tests}".lower()]
    if args.sample is not None:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    if args.list:
        print("\n".join(f"{m.function}: {m.what}" for m in chosen))
        return 0
    lost = [f"{m.what}: {e}" for m in chosen if (e := _why_lost(m))]
    if lost or not chosen:
        print("\n".join(lost) or f"no mutant has {args.only!r}")
        return 2
    with tempfile.TemporaryDirectory(prefix="mdi-mutants-") as directory:
        return _try_all(chosen, Path(directory), max(1, args.processes))


def _why_lost(mutant: Mutant) -> str:
    try:
        mutant.place()
    except NotFoundError as e:
        return str(e)
    return ""


def _try_all(chosen: list[Mutant], directory: Path, n_processes: int) -> int:
    cpp = [mutant for mutant in chosen if mutant.is_cpp]
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(n_processes):
        copies.put(Copy(directory / str(number), cpp))
    print(f"{len(chosen)} mutants; first their tests without any of them", flush=True)
    untouched = copies.get()
    if cpp and (why := untouched.why_no_kernels()):
        print(f"the kernels cannot be compiled with their mutants, two of which may overlap: {why}")
        return 2
    status, output = untouched.test(sorted({test for m in chosen for test in m.tests.split()}), {})
    copies.put(untouched)
    if status:
        print(output + "\nthe tests fail without a mutant: correct this first")
        return 2

    def trial(mutant: Mutant) -> Trial:
        copy = copies.get()
        try:
            return copy.try_one(mutant)
        finally:
            copies.put(copy)

    trials, begin = [], time.monotonic()
    with ThreadPoolExecutor(n_processes) as pool:
        for done in as_completed([pool.submit(trial, mutant) for mutant in chosen]):
            trials.append(done.result())
            if trials[-1].result != "killed":
                print(
                    f"{trials[-1].result.upper()}: {trials[-1].mutant.function}: {trials[-1].mutant.what}", flush=True
                )
            elif len(trials) % 20 == 0:
                print(f"{len(trials)} of {len(chosen)}, {time.monotonic() - begin:.0f} s", flush=True)
    killed = sum(trial.result == "killed" for trial in trials)
    for trial_ in trials:
        if trial_.result.startswith("error"):
            print(f"--- {trial_.mutant.function}: {trial_.mutant.what}\n{trial_.output}")
    print(f"{killed} of {len(chosen)} mutants were killed, {sum(t.result == 'survived' for t in trials)} survived")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
