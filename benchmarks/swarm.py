#!/usr/bin/env python3
"""How well nodes that come and go share out a model's blocks: simulated with the functions that `mdi join --model` uses.

    swarm.py                        Petals' appendix E (Borzunov et al. 2023), one day
    swarm.py --short                an hour of it, in seconds
    swarm.py --out results.json     keep the numbers, for draw_figures.py

Appendix E: 206 servers with t ~ U[0, 100] tokens/s for b ~ U[1, 10] of 70 blocks; their active number follows a sine between
15-25 and 100-110. Every minute each server looks whether it should move, and throughput is that of the slowest block.

The bound is the best that linear programming gives if servers may divide their time between spans: no more than the mean speed
of all blocks, sum(t b) / 70. A real assignment cannot always reach it, above all with few servers.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import on_path  # noqa: F401
from mdi.placement.balance import Served, moved, plan, speeds, weakest_span
from records import save

N_LAYER, N_SERVERS, MINUTES = 70, 206, 24 * 60
MARGINS = (0.01, 0.2)
LOAD_S = 10.0  # a block, where moves take time: a node that loads serves nothing
NEAR = 0.85  # of the bound: Petals' "within 15 %"


@dataclass(frozen=True)
class Day:
    """Servers and when they are there.

    Attributes:
        servers: with their first blocks, at random.
        present: indices of those that are there, for each minute.
    """

    servers: list[Served]
    present: list[list[int]]


def appendix_e(seed: int, minutes: int = MINUTES) -> Day:
    rng = random.Random(seed)
    servers = []
    for i in range(N_SERVERS):
        n_blocks = rng.randint(1, 10)
        servers.append(Served(f"{i:04d}", rng.uniform(0, 100), rng.randint(0, N_LAYER - n_blocks), n_blocks))
    low, high = rng.uniform(15, 25), rng.uniform(100, 110)
    there: list[int] = []
    present = []
    for minute in range(minutes):
        wanted = round((low + high) / 2 - (high - low) / 2 * math.cos(2 * math.pi * minute / MINUTES))
        while len(there) < wanted:
            there.append(rng.choice([i for i in range(N_SERVERS) if i not in there]))
        while len(there) > wanted:
            there.remove(rng.choice(there))
        present.append(list(there))
    return Day(servers, present)


Balance = Callable[[list[Served], int], list[Served]]


def nobody_moves(nodes: list[Served], n_layer: int) -> list[Served]:
    return nodes


def ours(margin: float) -> Balance:
    return lambda nodes, n_layer: moved(nodes, plan(nodes, n_layer, margin))


def of_petals(margin: float) -> Balance:
    """Appendix D as it is written: a server moves by rule 1 if, once all others have moved by it, enough is gained."""

    def better(nodes: list[Served], i: int, n_layer: int) -> int | None:
        others = speeds([*nodes[:i], *nodes[i + 1 :]], n_layer)
        start = weakest_span(others, nodes[i].n_blocks)
        span = lambda k: np.sort(others[k : k + nodes[i].n_blocks]).tolist()  # noqa: E731
        return start if start != nodes[i].start and span(start) < span(nodes[i].start) else None

    def balance(nodes: list[Served], n_layer: int) -> list[Served]:
        nodes = list(nodes)
        mean = sum(node.speed * node.n_blocks for node in nodes) / n_layer
        if mean <= speeds(nodes, n_layer).min() * (1 + margin):
            return nodes  # no assignment serves its slowest block faster than the mean
        for i in range(len(nodes)):
            if (start := better(nodes, i, n_layer)) is None:
                continue
            then = [*nodes[:i], replace(nodes[i], start=start), *nodes[i + 1 :]]
            for _ in range(3):  # rounds until nobody moves
                before = list(then)
                for k in range(len(then)):
                    if k != i and (other := better(then, k, n_layer)) is not None:
                        then[k] = replace(then[k], start=other)
                if then == before:
                    break
            if speeds(then, n_layer).min() > speeds(nodes, n_layer).min() * (1 + margin):
                nodes = then
                break  # the others have made their moves, too
        return nodes

    return balance


@dataclass
class Outcome:
    """Attributes:
    share: of the bound, for each minute; throughput, bound: in tokens/s.
    loading: the same throughput, if a move takes LOAD_S a block.
    n_moves, n_blocks: servers that have moved, and blocks that they have loaded.
    """

    throughput: list[float]
    bound: list[float]
    loading: list[float]
    n_moves: int = 0
    n_blocks: int = 0

    @property
    def share(self) -> list[float]:
        return [a / b for a, b in zip(self.throughput, self.bound, strict=True)]

    def summary(self) -> dict[str, Any]:
        share, hours = self.share, len(self.share) / 60
        return {
            "near": sum(s >= NEAR for s in share) / len(share),
            "zero": sum(s == 0 for s in share) / len(share),
            "median": statistics.median(share),
            "loading": sum(self.loading) / sum(self.bound),
            "moves_per_hour": self.n_moves / hours,
            "blocks_per_hour": self.n_blocks / hours,
        }


def simulate(day: Day, balance: Balance, joins_at_random: bool = False) -> Outcome:
    """A day under one rule; moves take no time, as in appendix E, and then once more as long as they take."""
    found = Outcome([], [], [])
    nodes: dict[int, Served] = {}
    left_s: dict[int, float] = {}  # of loading
    for present in day.present:
        nodes = {i: node for i, node in nodes.items() if i in present}
        for i in present:
            if i not in nodes:
                node = day.servers[i]
                if not joins_at_random:
                    served = speeds(list(nodes.values()), N_LAYER)
                    node = replace(node, start=weakest_span(served, node.n_blocks))
                nodes[i] = node
        after = balance(list(nodes.values()), N_LAYER)
        for (i, old), new in zip(list(nodes.items()), after, strict=True):
            if new.start != old.start:
                found.n_moves += 1
                n_blocks = min(abs(new.start - old.start), new.n_blocks)
                found.n_blocks += n_blocks
                left_s[i] = n_blocks * LOAD_S
                nodes[i] = new
        there = [replace(node, speed=node.speed * max(0.0, 1 - left_s.get(i, 0.0) / 60)) for i, node in nodes.items()]
        left_s = {i: s - 60 for i, s in left_s.items() if s > 60}
        found.loading.append(float(speeds(there, N_LAYER).min()))
        found.throughput.append(float(speeds(after, N_LAYER).min()))
        found.bound.append(sum(n.speed * n.n_blocks for n in after) / N_LAYER)
    return found


def figure_two(day: Day) -> dict[str, Outcome]:
    cases: dict[str, tuple[Balance, bool]] = {
        "random": (nobody_moves, True),
        "new servers only": (nobody_moves, False),
        **{f"full, p = {margin:.0%}": (ours(margin), False) for margin in MARGINS},
        **{f"Petals' rule, p = {margin:.0%}": (of_petals(margin), False) for margin in MARGINS},
    }
    found = {}
    for name, (balance, at_random) in cases.items():
        begin = time.monotonic()
        found[name] = simulate(day, balance, at_random)
        s = found[name].summary()
        print(
            f"{name:22}{s['near']:8.0%} near{s['zero']:8.1%} zero{s['median']:8.3f} median{s['loading']:8.3f} loading"
            f"{s['moves_per_hour']:8.1f} moves/h"
            f"{s['blocks_per_hour']:8.1f} blocks/h   ({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = figure_two(appendix_e(options.seed, 60 if options.short else MINUTES))
    if options.out is not None:
        curves = {name: [round(x, 1) for x in one.throughput[::5]] for name, one in found.items()}
        curves["bound"] = [round(x, 1) for x in next(iter(found.values())).bound[::5]]
        save(options.out, {"figure": {n: one.summary() for n, one in found.items()}, "curves": curves})


if __name__ == "__main__":
    main()
