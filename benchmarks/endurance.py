#!/usr/bin/env python3
"""One set of nodes for thousands of runs, and thousands of texts that come and are cancelled: does anything grow?

Three nodes on this machine, the starter in this process. Memory, threads, sockets and files of each process are counted between
the runs. A text of every run is compared with the first run's.

example:
  endurance.py --runs 2000 --texts 5000 --json endurance.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the children inherit it
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests")]

N_SAMPLES = 20  # of what the processes hold, over all runs
# Python's own allocator and the system's keep what they have had; more than this, from the middle of the runs on, is growth.
MEMORY_SLACK = 0.05
MEMORY_SLACK_BYTES = 8 << 20


@dataclass(frozen=True)
class Held:
    """What one process has of the system."""

    rss_bytes: int
    threads: int
    sockets: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Held:
        import psutil

        process = psutil.Process(pid)
        names = _open_files(pid)
        n_sockets = sum(name.startswith("socket:") for name in names)
        return cls(process.memory_info().rss, process.num_threads(), n_sockets, len(names) - n_sockets)


def _open_files(pid: int) -> list[str]:
    """What the descriptors of a process stand for."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that the listing itself had is closed again
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return names


def growth(samples: list[list[Held]]) -> list[str]:
    """What grew from the middle of the runs to their end, a line for each process and thing; the starter is process 0.

    Of memory, what a process has most of the time counts: what it may give back goes up and down.
    """
    third = max(1, len(samples) // 3)
    lines = []
    for i in range(len(samples[0])):
        before, after = _usual(samples[third : 2 * third] or samples[:1], i), _usual(samples[-third:], i)
        for name in ("threads", "sockets", "files"):
            if getattr(after, name) > getattr(before, name):
                lines.append(f"process {i}: {name} {getattr(before, name)} -> {getattr(after, name)}")
        if after.rss_bytes > before.rss_bytes * (1 + MEMORY_SLACK) + MEMORY_SLACK_BYTES:
            lines.append(f"process {i}: memory {before.rss_bytes / 1e6:.1f} MB -> {after.rss_bytes / 1e6:.1f} MB")
    return lines


def _usual(samples: list[list[Held]], i: int) -> Held:
    """The median of everything that process `i` had."""
    names = ("rss_bytes", "threads", "sockets", "files")
    return Held(*(statistics.median_low(getattr(sample[i], name) for sample in samples) for name in names))


class Nodes:
    """Two secondaries as processes, and one starter after the other in this one."""

    def __init__(self, ring: Any, checkpoint: Path) -> None:
        self._ring = ring
        self._checkpoint = checkpoint

    def starter(self) -> Any:
        from mdi.run.nodes import GivenNodes
        from mdi.run.run import Run
        from mdi.spec.options import StarterOptions

        options = StarterOptions(
            ckpt=self._checkpoint, prompt_style="none", device="cpu", placement="even", wait_s=60.0, draft="none"
        )
        return Run(GivenNodes(self._ring.cluster), options, 40)

    def held(self) -> list[Held]:
        gc.collect()
        return [Held.of(pid) for pid in (os.getpid(), *self._ring.pids)]


def short_runs(nodes: Nodes, n_runs: int) -> tuple[list[list[Held]], int]:
    """What the processes held between runs, and how many runs gave another text than the first."""
    from mdi.engine.sequence import SamplingParams

    samples: list[list[Held]] = []
    first: list[int] | None = None
    n_wrong = 0
    every = max(1, n_runs // N_SAMPLES)
    for n in range(n_runs):
        node = nodes.starter()
        try:
            node.open()
            text = node.submit("The ring", node.model.codec.encode_prompt("The ring"), SamplingParams(6, 0.0))
            node.read()
            node.close()
        finally:
            node.close()
        first = text.token_ids if first is None else first
        n_wrong += text.token_ids != first
        if n % every == every - 1:
            samples.append(nodes.held())
    return samples, n_wrong


def busy_texts(nodes: Nodes, n_texts: int, seed: int) -> list[list[Held]]:
    """One long run in which texts come and are cancelled, most of them before they end."""
    from mdi.engine.sequence import SamplingParams
    from mdi.run.texts import SampleReader

    chance = random.Random(seed)
    samples: list[list[Held]] = []
    every = max(1, n_texts // N_SAMPLES)
    node = nodes.starter()
    try:
        node.open()
        prompt = node.model.codec.encode_prompt("Every node keeps a cache for each sequence.")
        for n in range(0, n_texts, 10):
            reader = SampleReader()
            texts = [
                node.submit("", prompt, SamplingParams(chance.randint(1, 30), 0.8), reader=reader) for _ in range(10)
            ]
            for text in texts:
                if chance.random() < 0.7:
                    text.cancel()
            reader.read()
            node.samples.clear()  # what a report would show of them
            if n % every < 10:
                samples.append(nodes.held())
        node.close()
    finally:
        node.close()
    return samples


def measure(n_runs: int, n_texts: int, seed: int = 1) -> dict[str, Any]:
    """Both, on one set of nodes."""
    from mdi.run.local import LocalRing
    from tiny_checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="mdi-endurance-") as folder:
        checkpoint = write_checkpoint(Path(folder) / "tiny", with_end=False)
        with LocalRing(3, None, 1, None, False, False) as ring:
            nodes = Nodes(ring, checkpoint)
            begin = time.monotonic()
            runs, n_wrong = short_runs(nodes, n_runs)
            middle = time.monotonic()
            texts = busy_texts(nodes, n_texts, seed)
            end = time.monotonic()
    return {
        "runs": n_runs, "wrong": n_wrong, "runs_s": middle - begin, "texts": n_texts, "texts_s": end - middle,
        "growth": [*growth(runs), *growth(texts)],
        "held_between_runs": [[asdict(one) for one in sample] for sample in runs],
        "held_while_busy": [[asdict(one) for one in sample] for sample in texts],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="short runs (%(default)s)")
    parser.add_argument("--texts", type=int, default=5000, help="texts, most of them cancelled (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was counted there")
    args = parser.parse_args()
    found = measure(args.runs, args.texts)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{found['runs']} runs in {found['runs_s']:.0f} s, {found['wrong']} with another text; "
          f"{found['texts']} texts in {found['texts_s']:.0f} s")  # fmt: skip
    for name in ("held_between_runs", "held_while_busy"):
        for i, (before, after) in enumerate(zip(found[name][0], found[name][-1], strict=True)):
            print(f"{name} {i}: " + ", ".join(f"{key} {before[key]} -> {after[key]}" for key in before))
    print("grown: " + ("; ".join(found["growth"]) or "nothing"))
    return 1 if found["growth"] or found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
