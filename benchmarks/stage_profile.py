#!/usr/bin/env python3
"""Where a stage's time goes: time per block against reading its weights, and the operations that take it.

    benchmarks/stage_profile.py --formats fp16,int8,int4 --sequences 1,8,16
    benchmarks/stage_profile.py --formats int8 --sequences 1 --position 2000 --kv-dtype bfloat16

A stage of a few blocks of a model's shape with random weights decodes rows of so many sequences, on one thread or --threads.
Times are the least of the repetitions, the reading speed the best of sums over 256 MB taken in between.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
from litgpt.config import Config
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mdi.checkpoint.packing import Packing  # noqa: E402
from mdi.kernels.layout import LAYOUTS  # noqa: E402
from mdi.kernels.stage import KernelStage  # noqa: E402
from mdi.model.cache import CACHE_TYPE_OF  # noqa: E402
from mdi.model.kernel_stage import TensorStage  # noqa: E402
from mdi.model.stage import Stage  # noqa: E402
from mdi.node.chance import chance_weights  # noqa: E402

CPU = torch.device("cpu")
CHUNK = 64
GROUPS = {
    "weights": ("aten::mm", "aten::addmm", "aten::linear"),
    "attention": ("aten::_scaled_dot", "aten::scaled_dot", "aten::bmm", "aten::_softmax"),
    "copies": ("aten::copy_", "aten::cat", "aten::index", "aten::to", "aten::_to_copy"),
}


def random_stage(shape: str, n_blocks: int, name: str, kv_dtype: torch.dtype) -> Stage | TensorStage:
    """In the kernels for the formats that they have, else in torch."""
    config = Config.from_name(shape)
    plain = Stage(config, 0, n_blocks)
    shapes = {key: tuple(tensor.shape) for key, tensor in plain.state_dict().items()}
    parts = [f"block.{i}" for i in range(n_blocks)]

    def own(part: str) -> dict[str, tuple[int, ...]]:
        return {k: s for k, s in shapes.items() if k.startswith(f"transformer.h.{part.removeprefix('block.')}.")}

    def tensors(part: str) -> dict[str, torch.Tensor]:
        return {k: torch.randn(s) * 0.02 if len(s) > 1 else torch.ones(s) for k, s in own(part).items()}

    stage: Stage | TensorStage = plain
    if name in LAYOUTS:
        inner = KernelStage(asdict(config), 0, n_blocks, torch.get_num_threads(), CACHE_TYPE_OF[kv_dtype])
        stage = TensorStage(inner)
        stage.load(parts, lambda part: chance_weights(own(part), Packing(name, name)))
    else:
        plain.load(parts, tensors, CPU, torch.bfloat16 if name == "bfloat16" else torch.float32)
    stage.prepare(config.block_size, CPU, kv_dtype)
    return stage


def weight_bytes(stage: Stage | TensorStage) -> int:
    if isinstance(stage, TensorStage):
        return stage.inner.weight_bytes
    return sum(p.numel() * p.element_size() for p in stage.parameters() if p.dim() > 1)


def fill(stage: Stage | TensorStage, n_sequences: int, position: int, dtype: torch.dtype) -> None:
    stage.caches.clear()
    for seq_id in range(n_sequences):
        for start in range(0, position, CHUNK):
            n_rows = min(CHUNK, position - start)
            stage(torch.randn(n_rows, stage.n_embd, dtype=dtype), [(seq_id, start, n_rows)])


def measure(stage: Stage | TensorStage, name: str, n_sequences: int, position: int, repeats: int) -> None:
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    fill(stage, n_sequences, position, dtype)
    rows = torch.randn(n_sequences, stage.n_embd, dtype=dtype)
    plain = torch.ones(32 << 20, dtype=torch.int64)
    times, reads = [], []
    for i in range(repeats):
        begin = time.perf_counter()
        stage(rows, [(s, position + i, 1) for s in range(n_sequences)])
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        plain.sum()
        reads.append(time.perf_counter() - begin)
    n_blocks = stage.stop - stage.start
    speed = plain.nbytes / min(reads)
    ideal = weight_bytes(stage) / speed
    print(
        f"{name}, {n_sequences} sequences at {position}: {min(times) / n_blocks * 1e6:.0f} us a block; reading its weights at "
        f"{speed / 1e9:.1f} GB/s takes {ideal / n_blocks * 1e6:.0f} us ({ideal / min(times):.0%})"
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        for i in range(repeats, repeats + 5):
            stage(rows, [(s, position + i, 1) for s in range(n_sequences)])
        total = time.perf_counter() - begin
    shares: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        group = next((g for g, names in GROUPS.items() if event.key.startswith(names)), "other operations")
        shares[group] += event.self_cpu_time_total / 1e6 / total
    # What is outside of torch's operations is Python, and our kernels.
    shares["outside of torch"] = max(0.0, 1 - sum(shares.values()))
    print("   " + ", ".join(f"{g} {share:.0%}" for g, share in sorted(shares.items(), key=lambda item: -item[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny-llama-1.1b", help="a litgpt name (%(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="more than the processor's caches hold (%(default)s)")
    parser.add_argument("--formats", default="float32,bfloat16,fp16,int8,int4")
    parser.add_argument("--sequences", default="1,8,16")
    parser.add_argument("--position", type=int, default=100, help="tokens that each has already (%(default)s)")
    parser.add_argument("--kv-dtype", default="float32", help="of the caches (%(default)s)")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.formats.split(","):
        stage = random_stage(args.shape, args.blocks, name, getattr(torch, args.kv_dtype))
        for n_sequences in (int(n) for n in args.sequences.split(",")):
            measure(stage, name, n_sequences, args.position, args.repeats)


if __name__ == "__main__":
    main()
