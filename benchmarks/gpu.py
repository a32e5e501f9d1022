#!/usr/bin/env python3
"""One GPU beside transformers, litgpt and llama.cpp in the same run: 1.1 B and 7 B weights, bf16 and int4, one text and 32.

THIS NEVER RAN ON A GPU: none was at hand. With --device cpu and a tiny shape it ran, so that files, systems and ratios fit.

    gpu.py --all --peers-python PYTHON                        on a machine with a GPU; llama-cpp-python built for CUDA
    gpu.py --scenario one --shape llama-2-7b
    gpu.py --all --shape tiny-3m --device cpu --quick         does it work?

The interpreter of --peers-python has llama-cpp-python (CMAKE_ARGS="-DGGML_CUDA=on"), gguf, transformers and a torch for CUDA.
Weights are random; where the checkpoint would be too large to make, each system makes its own. What is not loaded, for want
of memory or of a library, is told and left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from compare import run_all  # noqa: E402
from peers.protocol import Case  # noqa: E402
from random_checkpoint import SHAPES  # noqa: E402
from side_by_side.files import Checkpoint  # noqa: E402
from side_by_side.scenario import Check, Run, Scenario, SystemSpec  # noqa: E402
from side_by_side.scenarios import SCENARIOS  # noqa: E402
from side_by_side.setup import Setup  # noqa: E402

LARGE = ("tiny-llama-1.1b", "llama-2-7b")
N_PROMPT, N_NEW = 64, 128


class Gpu:
    """The systems of a setup on a device, with all of the machine's cores beside it."""

    def __init__(self, setup: Setup, device: str) -> None:
        self.setup, self.device = setup, device
        self._is_gpu = device != "cpu"
        self.read = SystemSpec("memory", "device read", {"device": device}, setup.cores)

    def ring(self, fmt: str, *devices: str) -> SystemSpec:
        """One node, or one for each of the devices."""
        flags = ("--device", self.device, "--dtype", "bfloat16") if self._is_gpu else ()
        threads = max(1, len(self.setup.cores) // max(1, len(devices)))
        spec = self.setup.ring(fmt, len(devices) or 1, N_PROMPT + N_NEW + 8, flags, threads)
        if not devices:
            return replace(spec, name=f"ring {fmt}")
        options = {**spec.options, "devices": ",".join(devices), "flags": list(flags[2:])}
        return replace(spec, name=f"ring {fmt} on {' and '.join(devices)}", options=options)

    def llama(self, fmt: str) -> SystemSpec:
        spec = self.setup.llama(fmt)
        return replace(spec, options={**spec.options, "gpu_layers": 999 if self._is_gpu else 0}, cores=self.setup.cores)

    def framework(self, name: str) -> SystemSpec:
        spec = self.setup.framework(name, "bfloat16", max_length=N_PROMPT + N_NEW + 8)
        self.setup.needs[Checkpoint(self.setup.ckpt, self.setup.shape)] = None
        return replace(spec, options={**spec.options, "device": self.device}, cores=self.setup.cores)


def one(gpu: Gpu) -> Scenario:
    """One text: beside the others, and against the speed at which the memory is read."""
    case = gpu.setup.case(1, N_PROMPT, N_NEW)
    memory = Run(gpu.read.name, gpu.read.name, Case(0, 0, 0))
    transformers, litgpt = gpu.framework("transformers"), gpu.framework("litgpt")
    systems, checks = [transformers, litgpt], []
    for fmt in ("bf16", "int4"):
        ours, llama = gpu.ring(fmt), gpu.llama(fmt)
        systems += [ours, llama]
        share = ("decode_tokens_per_s", "read_bytes_per_s")
        checks += [
            Check(f"{fmt} against transformers bfloat16", ours.name, (transformers.name,)),
            Check(f"{fmt} against litgpt bfloat16", ours.name, (litgpt.name,)),
            Check(f"{fmt} against llama.cpp", ours.name, (llama.name,)),
            Check(f"{fmt}: weight bytes per second, against what the memory gives", ours.name, (memory.label,), share,
                   factor=gpu.setup.weight_bytes(fmt), unit="%"),
        ]  # fmt: skip
    runs = (memory, *(Run(s.name, s.name, case) for s in systems))
    return Scenario("gpu-one", "One text on one GPU", (gpu.read, *systems), runs, tuple(checks))


def many(gpu: Gpu) -> Scenario:
    """32 texts at once; litgpt generates one."""
    case = gpu.setup.case(32, N_PROMPT, N_NEW)
    transformers = gpu.framework("transformers")
    systems, checks = [transformers], []
    for fmt in ("bf16", "int4"):
        ours, llama = gpu.ring(fmt), gpu.llama(fmt)
        systems += [ours, llama]
        checks += [
            Check(f"{fmt} against transformers bfloat16", ours.name, (transformers.name,)),
            Check(f"{fmt} against llama.cpp", ours.name, (llama.name,)),
        ]
    runs = tuple(Run(s.name, s.name, case) for s in systems)
    return Scenario("gpu-many", "32 texts on one GPU", tuple(systems), runs, tuple(checks))


def rings(gpu: Gpu) -> Scenario:
    """Two processes on one GPU as two nodes, and a GPU and the CPU, beside one node."""
    case = gpu.setup.case(8, N_PROMPT, N_NEW)
    alone, twice, mixed = (
        gpu.ring("bf16"),
        gpu.ring("bf16", gpu.device, gpu.device),
        gpu.ring("bf16", gpu.device, "cpu"),
    )
    runs = tuple(Run(f"{i + 1}: {s.name}", s.name, case) for i, s in enumerate((alone, twice, mixed)))
    check = Check("two processes on one GPU against one", runs[1].label, (runs[0].label,))
    systems = tuple({s.name: s for s in (alone, twice, mixed)}.values())
    return Scenario("gpu-rings", "Two nodes on one GPU; a GPU and a CPU", systems, runs, (check,))


GPU_SCENARIOS = {"one": one, "many": many, "rings": rings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--scenario", choices=GPU_SCENARIOS, action="append")
    what.add_argument("--all", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, action="append", help=f"(default: {' and '.join(LARGE)})")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "mdi-bench")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="(%(default)s)")
    parser.add_argument("--repeats", type=int, help="rounds (default: 5)")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--budget", type=float, default=180, help="seconds of a scenario (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens")
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.quick else None)
    cores = tuple(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    n_failed = 0
    for shape in args.shape or LARGE:
        setup = Setup(shape, args.work_dir, cores, brevity=8 if args.quick else 1)
        for name in args.scenario or GPU_SCENARIOS:
            full = f"gpu-{name}-{shape}"
            SCENARIOS[full] = lambda made, name=name, full=full: replace(  # type: ignore[misc]
                GPU_SCENARIOS[name](Gpu(made, args.device)), name=full
            )
            n_failed += run_all([full], args, setup)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
