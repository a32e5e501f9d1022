#!/usr/bin/env python3
"""Placements against measurement: a ring of nodes with different CPU quotas, and every split that it can have.

Each node is a process in a control group of its own, with a quota of a part of one core (Linux, root). Every node measures
itself under its quota as it would on request; from these profiles the placements are computed. Then the ring runs with every
contiguous split of the model over all its nodes in the order of the nodes file, and the best ones again, in turns with the
default placement and with `even`. Rates are of decoding, from each sample's first token on.

    placement_ring.py --quotas 0.6,0.3,0.15 --sequences 24 --json ring.json
    placement_ring.py --quotas 0.6,0.15,0.3,0.6 --clients 1,2,4     GMA against OPA, where two nodes hold the model
    placement_ring.py --quotas 0.25,0.5,0.75,1 --profile-only       a block's time over fractions of a core
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from leftovers import by_score, gma_scores, opa_scores
from random_checkpoint import make_checkpoint
from records import add_json_flag, save
from ring.quota import Quotas

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the children inherit it
SCORES = {"gma": gma_scores, "opa": opa_scores}
MODEL = "twelve-blocks"
PERIOD_US = 20_000  # short, so that a node under a quota is slow and not now and then absent
PROMPT_IDS = 8
# What a placement is to know of nodes and links beside times.
NODE = {"memory_bytes": 4 * 10**9, "process_bytes": 500_000_000, "shared_bytes": 0, "machine": ""}
LINK = {"round_trip_s": 60e-6, "bytes_s": 1e9}


def starter(ckpt: Path, n_nodes: int, asked: Connection) -> None:
    """A starter and its secondaries: it sends their processes, then answers None with a profile and jobs with a run."""
    from mdi.cancel import Cancel
    from mdi.checkpoint.manifest import config_hash
    from mdi.checkpoint.shapes import read_config
    from mdi.host.threads import choose_threads
    from mdi.placement.planning import measure_live
    from mdi.run.local import LocalRing
    from mdi.spec.cluster import ClusterConfig
    from mdi.spec.model_id import ModelId
    from mdi.spec.options import Requested

    choose_threads(1)
    config = read_config(ckpt / "model_config.yaml")
    with LocalRing(n_nodes, None, 1, ckpt, False, False) as ring:
        asked.send(ring.pids)
        while (job := asked.recv()) != "end":
            if job is not None:
                chosen = tuple(ring.cluster.secondaries[i - 1] for i in job["order"][1:])
                asked.send(run_of(ckpt, ClusterConfig(ring.cluster.starter, chosen), job))
                continue
            model = ModelId(config.name, config, config_hash(config), "float32")
            number = Requested(device="cpu", dtype="float32")
            asked.send(measure_live(ring.cluster, model, number, ckpt.parent / "cache", 120.0, True, Cancel()))


def run_of(ckpt: Path, cluster: Any, job: dict[str, Any]) -> dict[str, Any]:
    """One run with the blocks of a job."""
    from mdi.engine.sequence import SamplingParams
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.options import StarterOptions

    layers = ",".join(map(str, job["counts"]))
    options = StarterOptions(ckpt=ckpt, layers=layers, dtype="float32", prompt_style="none", wait_s=120, draft="none")
    with Run(GivenNodes(cluster), options, PROMPT_IDS + job["n_tokens"]) as run:
        params = SamplingParams(n_tokens=job["n_tokens"], temperature=0.0, top_k=None, top_p=1.0, seed=1)
        for i in range(job["sequences"]):
            run.submit("", [i + 1] * PROMPT_IDS, params)
        run.read()
        run.close()
        metrics = run.metrics()
    rate = statistics.mean(s.tokens_per_s for s in metrics.samples) * len(metrics.samples)
    return {"tokens_s": rate, "stage_s": [n.compute_s / max(1, n.frames) for n in metrics.nodes]}


class Cluster:
    """A ring of processes, each with a part of one core."""

    def __init__(self, ckpt: Path, shares: list[float]) -> None:
        context, self.shares = multiprocessing.get_context("spawn"), shares
        self._asked, its = context.Pipe()
        self._process = context.Process(target=starter, args=(ckpt, len(shares), its))
        self._process.start()
        its.close()  # so that its end is seen
        self._quotas = Quotas(PERIOD_US)
        try:
            pids = [self._process.pid, *self._asked.recv()]
            everyone = tuple(range(len(shares)))
            self.run(everyone, _even(12, len(shares)), 2, 4)  # all have loaded what they need before quotas begin
            for pid, share in zip(pids, shares, strict=True):
                self._quotas.limit(pid, share)
        except BaseException:
            self.close()
            raise

    def measure(self) -> Any:
        """What all nodes measure of themselves at the same time, as they do before a run."""
        self._asked.send(None)
        found = self._asked.recv()
        nodes = tuple(replace(n, n_cores=s, **NODE) for n, s in zip(found.nodes, self.shares, strict=True))
        return replace(found, nodes=nodes, links=tuple(replace(link, **LINK) for link in found.links))

    def run(self, order: tuple[int, ...], counts: tuple[int, ...], sequences: int, n_tokens: int) -> dict[str, Any]:
        """One run over nodes in this order, from the starter on."""
        self._asked.send({"order": order, "counts": counts, "sequences": sequences, "n_tokens": n_tokens})
        found: dict[str, Any] = self._asked.recv()
        return found

    def close(self) -> None:
        self._quotas.close()
        if self._process.is_alive():
            self._asked.send("end")
        self._process.join(30)
        self._process.kill()


def _even(n_layer: int, n_nodes: int) -> tuple[int, ...]:
    return tuple(n_layer // n_nodes + (i < n_layer % n_nodes) for i in range(n_nodes))


def splits(n_layer: int, n_nodes: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(n_layer), n_nodes - 1):
        edges = [*cuts, n_layer]
        yield (edges[0], *(b - a for a, b in itertools.pairwise(edges)))


def compare(args: argparse.Namespace, cluster: Cluster, cost: Any) -> dict[str, Any]:
    """Every split once, then the best and the placements in turns."""
    from mdi.placement.methods import place

    n_layer, n_nodes = cost.n_layer, cost.n_nodes
    tried: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
    stages: dict[tuple[tuple[int, ...], tuple[int, ...]], list[list[float]]] = {}

    def measure(order: tuple[int, ...], counts: tuple[int, ...], n_tokens: int) -> None:
        result = cluster.run(order, counts, args.sequences, n_tokens)
        tried.setdefault((order, counts), []).append(result["tokens_s"])
        stages.setdefault((order, counts), []).append(result["stage_s"])

    listed = tuple(range(n_nodes))
    rings = [listed[:n] for n in range(2, n_nodes)] + [listed]
    for order in rings:
        for counts in splits(n_layer, len(order)):
            predicted = cost.predict(order, counts)
            if predicted.tokens_s < args.skip_below * args.best_predicted:
                continue
            measure(order, counts, args.n_tokens)
            print(
                f"{order} {counts}: {tried[order, counts][0]:.1f} tokens/s, predicted {predicted.tokens_s:.1f}",
                flush=True,
            )
    chosen = {}
    for method in ("throughput", "even", "gma", "opa", "latency"):
        placement = by_score(cost, method, SCORES[method]) if method in SCORES else place(cost, method)
        chosen[method] = (placement.order, placement.counts)
    best = sorted(tried, key=lambda key: -tried[key][0])[: args.again]
    finals = list(dict.fromkeys([*best, *chosen.values()]))
    rounds: dict[Any, list[float]] = {key: [] for key in finals}
    for _ in range(args.repeats):
        for key in finals:
            measure(*key, 2 * args.n_tokens)
            rounds[key].append(tried[key][-1])
    medians = {key: statistics.median(values) for key, values in rounds.items()}
    rows = [
        {"order": key[0], "counts": key[1], "tokens_s": medians[key], "all": rounds[key],
         "predicted": cost.predict(*key).tokens_s, "predicted_stage_s": cost.predict(*key).stage_s,
         "stage_s": [statistics.median(s) for s in zip(*stages[key][-args.repeats:], strict=True)],
         "methods": [m for m, other in chosen.items() if other == key]}
        for key in sorted(finals, key=lambda key: -medians[key])
    ]  # fmt: skip
    ours, top, even = medians[chosen["throughput"]], max(medians.values()), medians[chosen["even"]]
    return {"n_tried": len(tried), "finals": rows, "of_best": ours / top, "of_even": ours / even,
            "first_pass": [{"order": k[0], "counts": k[1], "tokens_s": v[0], "predicted": cost.predict(*k).tokens_s}
                           for k, v in tried.items()]}  # fmt: skip


def against(args: argparse.Namespace, cluster: Cluster, cost: Any) -> dict[str, Any]:
    """GMA, OPA and ours for several numbers of clients, where each node's memory holds half of the blocks."""
    from mdi.placement.cost import CostModel
    from mdi.placement.methods import place
    from mdi.placement.model import Workload

    half = cost.n_layer // 2
    rows = []
    for clients in map(int, args.clients.split(",")):
        n_texts = clients * args.batch
        work = Workload(n_texts, cost.workload.sequence_length)
        wide = CostModel(cost.profile, cost.shape, work)
        room = [wide.memory(i, 0, half, 2).total + wide.shape.blocks[0].weight_bytes // 2 for i in range(cost.n_nodes)]
        nodes = tuple(replace(n, memory_bytes=b) for n, b in zip(cost.profile.nodes, room, strict=True))
        tight = CostModel(replace(cost.profile, nodes=nodes), cost.shape, work)
        chosen = {method: by_score(tight, method, scores) for method, scores in SCORES.items()}
        chosen["throughput"] = place(tight, "throughput")
        rates: dict[str, list[float]] = {method: [] for method in chosen}
        for _ in range(args.repeats):
            for method, p in chosen.items():
                rates[method].append(cluster.run(tuple(p.order), p.counts, n_texts, args.n_tokens)["tokens_s"])
        for method, p in chosen.items():
            predicted = tight.predict(p.order, p.counts).tokens_s
            row = {"clients": clients, "method": method, "nodes": p.names, "counts": p.counts,
                   "tokens_s": statistics.median(rates[method]), "all": rates[method], "predicted": predicted}  # fmt: skip
            rows.append(row)
            print(f"{clients} clients, {method}: {p.names} {p.counts}, {row['tokens_s']:.1f} tokens/s "
                  f"({min(rates[method]):.1f} to {max(rates[method]):.1f}), predicted {predicted:.1f}", flush=True)  # fmt: skip
    return {"against": rows, "batch": args.batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", default="0.6,0.3,0.15", help="cores of each node, starter first (%(default)s)")
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--n-tokens", type=int, default=40, help="per sample in the first pass; twice as many later")
    parser.add_argument("--again", type=int, default=4, help="how many of the best are measured again (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--skip-below", type=float, default=0.0, help="leave out splits predicted below this part of the best"
    )
    parser.add_argument("--clients", help="compare GMA and OPA with so many clients, e.g. 1,2,4, instead of all splits")
    parser.add_argument("--batch", type=int, default=1, help="texts of a client (%(default)s)")
    parser.add_argument("--profile-only", action="store_true", help="only measure the nodes")
    add_json_flag(parser, "placement-ring")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(ckpt := Path(name) / MODEL, MODEL)
        cluster = Cluster(ckpt, [float(share) for share in args.quotas.split(",")])
        try:
            save(args.json, measured(args, cluster, ckpt))
        finally:
            cluster.close()


def measured(args: argparse.Namespace, cluster: Cluster, ckpt: Path) -> dict[str, Any]:
    from mdi.checkpoint.shapes import read_config
    from mdi.placement.cost import CostModel
    from mdi.placement.methods import place
    from mdi.placement.model import Workload, model_shape

    shape = model_shape(read_config(ckpt / "model_config.yaml"), "float32")
    profile = cluster.measure()
    cost = CostModel(profile, shape, Workload(args.sequences, PROMPT_IDS + 2 * args.n_tokens))
    for node in profile.nodes:
        print(
            f"{node.name}: {node.n_cores} cores, "
            + ", ".join(f"{s * 1e3:.2f} ms at {rows} rows" for rows, s in node.block_s)
        )
    if args.profile_only:
        return {"profile": profile.to_json()}
    if args.clients:
        return {"profile": profile.to_json(), **against(args, cluster, cost)}
    default = place(cost)
    args.best_predicted = cost.predict(default.order, default.counts).tokens_s
    print(
        f"default placement: {default.names} {default.counts}, {args.best_predicted:.1f} tokens/s predicted", flush=True
    )
    result = compare(args, cluster, cost)
    for row in result["finals"]:
        stage = ", ".join(
            f"{a * 1e3:.1f}/{b * 1e3:.1f}" for a, b in zip(row["stage_s"], row["predicted_stage_s"], strict=True)
        )
        print(f"{row['order']} {row['counts']}: {row['tokens_s']:.1f} tokens/s, predicted {row['predicted']:.1f}; stages in ms "
              f"measured/predicted {stage}; {' '.join(row['methods'])}")  # fmt: skip
    print(f"default: {result['of_best']:.3f} of the best of {result['n_tried']}, {result['of_even']:.2f} times even")
    return {"profile": profile.to_json(), **result}


if __name__ == "__main__":
    main()
