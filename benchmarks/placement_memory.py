#!/usr/bin/env python3
"""Memory and time of a stage, predicted and measured.

Each case is a process of its own, which imports what a secondary imports, builds a stage of random weights in a format, and
runs some sequences through it. Resident memory is what the system says at its peak. Times are CPU times of one thread.

    placement_memory.py --json memory.json
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from mdi.model.plain import spec_of
from records import add_json_flag, save
from rings import alone

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the children inherit it

CASES = [(width, blocks, fmt) for width in (512, 1024, 2048) for blocks in (2, 4, 8) for fmt in ("float32", "int8")]
SEQUENCES, LENGTH = 4, 512


def config_of(width: int) -> Any:
    from mdi.model.plain import ModelConfig

    return ModelConfig(
        name=f"llama-{width}", n_layer=16, n_embd=width, n_head=width // 64, n_query_groups=4,
        intermediate_size=11 * width // 4,
        block_size=2048, vocab_size=32000, padded_vocab_size=32000, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    )  # fmt: skip


def measured(width: int, n_blocks: int, fmt: str) -> dict[str, Any]:
    """What a stage takes: in a process of its own."""
    import torch

    import mdi.node.secondary  # noqa: F401  what a secondary has loaded
    from mdi.checkpoint.packing import Packing
    from mdi.kernels.slices import Slice
    from mdi.metrics import peak_rss_bytes
    from mdi.placement.kernel_bench import random_weights
    from mdi.stages.kernel_stage import KernelStage, Resident
    from mdi.stages.torch_stage import Stage

    torch.set_num_threads(1)
    time.perf_counter = time.process_time  # CPU time, ours and the node's: other programs must not count
    before = peak_rss_bytes()
    plain = Stage(spec_of(config_of(width)), 0, n_blocks)
    stage: Stage | KernelStage = plain
    shapes = {name: t.shape for name, t in plain.state_dict().items()}

    def tensors(part: str) -> dict[str, Any]:
        prefix = f"transformer.h.{part.removeprefix('block.')}."
        return {n: torch.empty(shape).normal_(0, 0.02) for n, shape in shapes.items() if n.startswith(prefix)}

    parts = [f"block.{i}" for i in range(n_blocks)]
    if fmt == "int8":
        weights = Resident(parts, lambda part: random_weights(
            {n: tuple(s) for n, s in shapes.items() if n.startswith(f"transformer.h.{part[6:]}.")}, Packing("int8", "int8")
        ))  # fmt: skip
        stage = KernelStage(spec_of(config_of(width)), 0, n_blocks, weights)
        stage.prepare(LENGTH)
    else:
        plain.load(parts, tensors, torch.device("cpu"), torch.float32)
        plain.prepare(LENGTH, torch.device("cpu"), torch.float32)

    def rows_of(n: int) -> Any:
        rows = torch.randn(n, width)
        return rows.numpy() if isinstance(stage, KernelStage) else rows

    for start in range(0, LENGTH, 64):  # prompts of full length, in the pieces that frames have
        for seq_id in range(SEQUENCES):
            stage(rows_of(64), [Slice(seq_id, start, 64)])
    peak = peak_rss_bytes()
    rows = rows_of(SEQUENCES)
    slices = [Slice(seq_id, LENGTH // 2, 1) for seq_id in range(SEQUENCES)]

    def mean_s(span_s: float = 0.8) -> float:
        n_calls, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < span_s:
            stage(rows, slices)
            n_calls += 1
        return (time.perf_counter() - begin) / n_calls

    # Before and after measuring as a node does, so that what else the machine does slows both.
    first, of_node, last = mean_s(), speeds(width, fmt), mean_s()
    return {"before": before, "peak": peak, "stage_s": (first + last) / 2, "read_bytes_s": of_node.read_bytes_s,
            "block_s": of_node.block_s}  # fmt: skip


def speeds(width: int, fmt: str) -> Any:
    """Measured as a node measures itself."""
    import tempfile

    import torch

    from mdi.checkpoint.packing import Packing
    from mdi.host.computing import Computing
    from mdi.placement.profiler import bench_of
    from mdi.placement.profiling import SPAN_S, Subject

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        packing = Packing("int8", "int8") if fmt == "int8" else None
        subject = Subject(config_of(width), "", Computing("cpu", "float32", packing=packing))
        return bench_of(subject, SPAN_S, lambda *told: None).run(Path(folder), False)


def predicted(width: int, n_blocks: int, fmt: str, process_bytes: int, measured: dict[str, Any]) -> tuple[int, float]:
    from mdi.placement.cost import CostModel
    from mdi.placement.model import Workload, model_shape
    from mdi.placement.profile import ClusterProfile, NodeProfile

    block_s = tuple((rows, seconds) for rows, seconds in measured["block_s"])
    nodes = tuple(
        NodeProfile(name, "cpu", 1.0, 10**12, 0, 0.0, measured["read_bytes_s"], block_s, (), process_bytes)
        for name in ("starter", "secondary0")
    )
    shape = model_shape(config_of(width), fmt)
    cost = CostModel(ClusterProfile(nodes, (), "m", "", fmt), shape, Workload(SEQUENCES, LENGTH))
    use = cost.memory(1, 16 - n_blocks, 16, 2)
    stage_s = (
        CostModel(cost.profile, shape, Workload(2 * SEQUENCES, LENGTH))
        .predict((0, 1), (16 - n_blocks, n_blocks))
        .stage_s[1]
    )
    return use.total, stage_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_flag(parser, "placement-memory")
    args = parser.parse_args()
    rows = []
    print("| width | blocks | format | memory MB | predicted | error | stage ms | predicted | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for width, blocks, fmt in CASES:
        done = alone(measured, width, blocks, fmt)
        total, stage_s = predicted(width, blocks, fmt, done["before"], done)
        rows.append({"width": width, "blocks": blocks, "format": fmt, "memory": done["peak"], "predicted": total,
                     "stage_s": done["stage_s"], "predicted_s": stage_s})  # fmt: skip
        errors = (total / done["peak"] - 1, stage_s / done["stage_s"] - 1)
        print(f"| {width} | {blocks} | {fmt} | {done['peak'] / 1e6:.0f} | {total / 1e6:.0f} | {errors[0]:+.1%} "
              f"| {done['stage_s'] * 1e3:.2f} | {stage_s * 1e3:.2f} | {errors[1]:+.0%} |", flush=True)  # fmt: skip
    save(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
