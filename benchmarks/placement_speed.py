#!/usr/bin/env python3
"""How long placing takes, from three nodes to a thousand; and how near the guess for many nodes is to the exact search.

placement_speed.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace

import on_path  # noqa: F401
from mdi.model.caches import PageClass
from mdi.placement import search
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.model import BlockShape, ModelShape, Workload
from mdi.placement.profile import ClusterProfile, LinkProfile, NodeProfile

GB = 10**9


def node(rnd: random.Random, i: int) -> NodeProfile:
    """A machine of any kind: 0.2 to 4 times the speed of a common one, 2 to 8 GB."""
    speed = rnd.choice([0.2, 0.5, 1, 2, 4]) * rnd.uniform(0.9, 1.1)
    times = tuple((rows, s / speed) for rows, s in ((1, 8e-3), (4, 10e-3), (16, 25e-3), (128, 160e-3)))
    memory = int(rnd.uniform(2, 8) * GB) if i else 8 * GB
    return NodeProfile(f"n{i}", "cpu", 4.0, memory, 0, 0.0, 10e9, times, (), 400_000_000)


def cluster(n_nodes: int, n_layer: int, n_sequences: int, link_share: float, differ: bool, seed: int) -> CostModel:
    rnd = random.Random(seed)
    nodes = tuple(node(rnd, i) for i in range(n_nodes))
    links = tuple(
        LinkProfile(a.name, b.name, rnd.uniform(1e-4, 5e-3), rnd.uniform(1e7, 1e9))
        for a in nodes
        for b in nodes
        if a is not b and rnd.random() < link_share
    )
    block = BlockShape(100_000_000, 400_000_000, 100_000_000, PageClass(None, 2048))
    dense = replace(block, weight_bytes=30_000_000, macs=30_000_000)
    blocks = tuple(dense if differ and i < 3 else block for i in range(n_layer))
    shape = ModelShape("m", "", "int8", 4096, 16384, blocks, 500_000_000, 130_000_000, 500_000_000, 130_000_000, 32, 32000,
                       200_000, 1024)  # fmt: skip
    return CostModel(ClusterProfile(nodes, links, "m", "", "int8"), shape, Workload(n_sequences, 2048))


def seconds(cost: CostModel) -> tuple[float, int]:
    times = []
    for _ in range(5):
        fresh = CostModel(cost.profile, cost.shape, cost.workload)
        begin = time.perf_counter()
        found = place(fresh)
        times.append(time.perf_counter() - begin)
    return statistics.median(times), len(found.order)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| nodes | blocks | sequences | links measured | blocks | used | seconds |\n|---|---|---|---|---|---|---|")
    for n, n_layer, s, share, differ in (
        (3, 32, 8, 1, False), (8, 32, 16, 0, False), (8, 128, 16, 1, False), (8, 61, 16, 0, True), (8, 61, 16, 1, True),
        (30, 64, 16, 1, False), (1000, 128, 1, 0, False), (1000, 128, 16, 0, False), (1000, 128, 256, 0, False),
        (1000, 128, 64, 0.01, False), (1000, 61, 64, 0, True),
    ):  # fmt: skip
        taken, used = seconds(cluster(n, n_layer, s, share, differ, seed=1))
        print(
            f"| {n} | {n_layer} | {s} | {share:.0%} | {'differ' if differ else 'alike'} | {used} | {taken:.3f} |",
            flush=True,
        )
    ratios = []
    for seed in range(60):
        cost = cluster(8, 48, (1, 4, 16, 40)[seed % 4], float(seed % 3 > 0), False, seed)
        exact = search.fastest(cost)
        search.EXACT_NODES = 0
        guess = search.fastest(CostModel(cost.profile, cost.shape, cost.workload))
        search.EXACT_NODES = 8
        if exact is not None and guess is not None:
            ratios.append(guess.round_s / exact.round_s)
    print(f"\nguess against exact search, {len(ratios)} clusters of eight: {sum(r < 1 + 1e-6 for r in ratios)} equal, "
          f"worst {max(ratios):.3f}, mean {statistics.mean(ratios):.4f} times the round")  # fmt: skip


if __name__ == "__main__":
    main()
