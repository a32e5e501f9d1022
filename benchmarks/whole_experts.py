#!/usr/bin/env python3
"""Whole experts on each node, beside columns of every expert on each: what the fullest node has to compute.

    benchmarks/whole_experts.py [--nodes 2 4 8] [--rows 1 16 64] [--alike 0 0.5] [--tokens 1024] [--json FILE]

The kernels compute the experts of one block, 128 of which a row chooses 8 by a router of random weights, for rows of chance.
The rows of a frame have --alike of their variance in common: with 0 no model's router chooses more evenly. --tokens come in
frames of --rows (of a prompt 64). A node with whole experts computes the rows that chose one of its own, and the sum waits for
the fullest node; with columns all nodes compute the same. Times are those of the processor, of one thread, so that other
programs change them little.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

import on_path  # noqa: F401
from experts_window import FORM, N_EXPERTS, N_USED, SIZES
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import model_shapes
from mdi.host.threads import computing_threads
from mdi.kernels.slices import Slice
from mdi.model.plain import ModelConfig, spec_of
from mdi.placement.kernel_bench import random_weights
from mdi.stages.kernel_stage import KernelStage, Resident
from records import add_json_flag, save

WIDTH = SIZES["moe_intermediate_size"]


@dataclass
class NodeByNode:
    """An ExpertReader of weights in memory: the experts of one node after those of the other, as many on each.

    Attributes:
        seconds: of each frame and node.
    """

    n_nodes: int
    seconds: list[list[float]] = field(default_factory=list)

    def ready(self, block: int, chosen: Sequence[int]) -> Generator[tuple[int, list[tuple[int, int]]], None, None]:
        taken = []
        for node in range(self.n_nodes):
            end = sum(expert < (node + 1) * N_EXPERTS // self.n_nodes for expert in chosen)
            begin = time.process_time()
            yield end, []
            taken.append(time.process_time() - begin)
        self.seconds.append(taken)


class Weights(Resident):
    """A block whose experts are computed by a reader."""

    experts: NodeByNode  # type: ignore[assignment]

    @staticmethod
    def ready(block: int, half: int) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def seconds(n_nodes: int, n_columns: int, n_rows: int, n_frames: int, alike: float) -> np.ndarray:
    """(n_frames, n_nodes) of experts with so many columns each; after a frame that does not count."""
    from litgpt.config import Config

    sizes = {**SIZES, "moe_intermediate_size": n_columns, "intermediate_size": n_columns}
    config = ModelConfig.from_litgpt(Config.from_name("Qwen3-30B-A3B", n_layer=1, **sizes))
    shapes = {name: shape for name, shape in model_shapes(config, "a block").items() if part_of(name) == "block.0"}
    weights = Weights(["block.0"], lambda part: random_weights(shapes, Packing(FORM, FORM)))
    weights.experts = NodeByNode(n_nodes)
    stage = KernelStage(spec_of(config), 0, 1, weights, 1)
    stage.prepare(SIZES["block_size"])
    random = np.random.default_rng(2)
    for _ in range(n_frames + 1):
        own, common = (random.standard_normal((n, SIZES["n_embd"]), dtype=np.float32) for n in (n_rows, 1))
        stage(alike**0.5 * common + (1 - alike) ** 0.5 * own, [Slice(0, 0, n_rows, n_rows)])
        stage.caches.clear()
    return np.array(weights.experts.seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--alike", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--tokens", type=int, default=1024)
    add_json_flag(parser, "whole_experts")
    args = parser.parse_args()
    rows = []
    print(f"{N_EXPERTS} experts, of which a row chooses {N_USED}; ms a frame")
    with computing_threads(1):
        for n_rows, alike, n_nodes in itertools.product(args.rows, args.alike, args.nodes):
            if n_rows == 1 and alike:
                continue
            of = n_rows, max(1, args.tokens // n_rows), alike
            whole = seconds(n_nodes, WIDTH, *of)
            columns_s = seconds(1, WIDTH // n_nodes, *of).mean()
            fullest_s, even_s = whole.max(axis=1).mean(), whole.mean()
            rows.append({"rows": n_rows, "alike": alike, "nodes": n_nodes,
                         "fullest_s": fullest_s, "even_s": even_s, "columns_s": columns_s})  # fmt: skip
            print(
                f"{n_rows:3} rows, {alike:.1f} alike, {n_nodes} nodes: fullest {1e3 * fullest_s:7.3f}, "
                f"{fullest_s / even_s:.2f} of the mean node; columns {1e3 * columns_s:7.3f}: {fullest_s / columns_s:.2f} times",
                flush=True,
            )
    save(args.json, {"experts": N_EXPERTS, "used": N_USED, "tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
