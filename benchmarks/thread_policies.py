#!/usr/bin/env python3
"""Threads and how they wait: decoding speed on an idle machine, beside busy processes, and under CPU quotas.

A process per setting (threads, GOMP_SPINCOUNT) holds a model with random weights and decodes one sequence when it is told
to; settings take turns in every situation, so that all see the same machine. Needs GNU's OpenMP (torch on Linux); quotas
need root and control groups, and are left out otherwise.

    thread_policies.py --repeats 3
    thread_policies.py --shape wide --spins default,0
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import on_path  # noqa: F401
from mdi.model.plain import spec_of
from records import add_json_flag, save

ROOT = Path(__file__).resolve().parents[1]

SHAPES = {
    "nano": {"n_layer": 8, "n_embd": 192, "n_head": 6, "intermediate_size": 512, "padded_vocab_size": 1024},
    "wide": {"n_layer": 4, "n_embd": 2048, "n_head": 32, "intermediate_size": 5632, "padded_vocab_size": 1024},
}
SPAN_S = 1.0
BUSY = "while True: pass"


def decode(shape: str, n_threads: int) -> None:
    """The child: a line on stdin begins a measurement, a line on stdout is its tokens/s."""
    import torch

    from mdi.model.plain import ModelConfig
    from mdi.stages.torch_stage import StarterStage

    torch.set_num_threads(n_threads)
    config = ModelConfig(
        name=shape, block_size=512, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", vocab_size=1024, **SHAPES[shape],
    )  # fmt: skip
    stage = StarterStage(spec_of(config), config.n_layer)
    stage.load_state_dict({n: torch.randn(t.shape) * 0.02 for n, t in stage.state_dict().items()}, assign=True)
    stage.requires_grad_(False)
    stage.prepare(512, torch.device("cpu"), torch.float32)
    print("ready", flush=True)
    for _ in sys.stdin:
        begin, n_tokens = time.perf_counter(), 0
        while (taken := time.perf_counter() - begin) < SPAN_S:
            stage.head(stage(stage.embed(torch.tensor([7])), [(0, n_tokens % 500, 1)]))
            n_tokens += 1
        stage.caches.free(0)
        print(n_tokens / taken, flush=True)


class Setting:
    """One child process with its threads and its way of waiting."""

    def __init__(self, shape: str, n_threads: int, spin: str) -> None:
        self.name = f"{n_threads} thread{'s' * (n_threads > 1)}, {spin}"
        env = {**os.environ, "OMP_NUM_THREADS": str(n_threads)}
        env.pop("OMP_WAIT_POLICY", None)
        env.pop("GOMP_SPINCOUNT", None)
        if spin != "default":
            env["GOMP_SPINCOUNT"] = spin
        command = [sys.executable, __file__, "--child", shape, "--threads", str(n_threads)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def measure(self) -> float:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def busy(n: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def quota(cores: float, settings: list[Setting]) -> Iterator[None]:
    """Each setting in a control group of its own with this part of the machine."""
    from placement_ring import Quota

    groups = []
    try:
        for i, setting in enumerate(settings):
            groups.append(Quota(str(i)))
            groups[-1].limit(cores)
            for task in Path(f"/proc/{setting.process.pid}/task").iterdir():
                groups[-1].hold(int(task.name))
        yield
    finally:
        for setting in settings:
            root = (
                Path("/sys/fs/cgroup")
                if Path("/sys/fs/cgroup/cgroup.controllers").exists()
                else Path("/sys/fs/cgroup/cpu")
            )
            (root / "cgroup.procs").write_text(str(setting.process.pid))
        for group in groups:
            group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="nano")
    parser.add_argument("--spins", default="default,0,1000,10000,100000", help="GOMP_SPINCOUNT of each (%(default)s)")
    parser.add_argument("--threads", default="1,2", help="(%(default)s)")
    parser.add_argument("--busy", default="0,1,2", help="busy processes beside (%(default)s)")
    parser.add_argument("--quotas", default="1,1.5", help="cores; empty leaves them out (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    add_json_flag(parser, "thread-policies")
    parser.add_argument("--child", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        decode(args.child, int(args.threads))
        return
    pairs = itertools.product(map(int, args.threads.split(",")), args.spins.split(","))
    settings = [Setting(args.shape, n, spin) for n, spin in pairs if n > 1 or spin == "default"]
    situations: list[tuple[str, contextlib.AbstractContextManager[None]]] = [
        (f"{n} busy" if n else "idle", busy(n)) for n in map(int, args.busy.split(","))
    ]
    situations += [(f"quota {cores}", quota(float(cores), settings)) for cores in filter(None, args.quotas.split(","))]
    print(f"tokens/s, {args.shape}; load before: {os.getloadavg()[0]:.1f}")
    results: dict[str, dict[str, list[float]]] = {}
    try:
        for name, situation in situations:
            found: dict[str, list[float]] = {setting.name: [] for setting in settings}
            with situation:
                for _ in range(args.repeats):
                    for setting in settings:
                        found[setting.name].append(setting.measure())
            results[name] = found
            for key, rates in found.items():
                print(
                    f"| {name} | {key} | {statistics.median(rates):.4g} | {min(rates):.4g} to {max(rates):.4g} |",
                    flush=True,
                )
    finally:
        for setting in settings:
            setting.close()
    save(args.json, {"shape": args.shape, "tokens_s": results})


if __name__ == "__main__":
    main()
