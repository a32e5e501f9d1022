#!/usr/bin/env python3
"""Placements against measurement: a ring of nodes with different CPU quotas, placed by GMA, OPA and ours.

Each node is a process in a control group of its own, with a quota of a part of one core (Linux, root). All nodes measure
themselves under their quotas, as they do before a run; from these profiles the placements are computed, where each node's
memory holds half of the blocks. Then the ring runs with each of them in turns. Rates are of decoding, from each sample's first
token on.

    placement_ring.py --clients 1,2,4
    placement_ring.py --quotas 0.25,0.5,0.75,1 --profile-only       a block's time over fractions of a core
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import tempfile
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
    return {"tokens_s": rate}


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
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._asked.send("end")
        self._process.join(30)
        self._process.kill()


def _even(n_layer: int, n_nodes: int) -> tuple[int, ...]:
    return tuple(n_layer // n_nodes + (i < n_layer % n_nodes) for i in range(n_nodes))


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
    parser.add_argument("--quotas", default="0.6,0.15,0.3,0.6", help="cores of each node, starter first (%(default)s)")
    parser.add_argument("--n-tokens", type=int, default=40, help="of each text (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", default="1,2,4", help="numbers of clients (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="texts of a client (%(default)s)")
    parser.add_argument("--profile-only", action="store_true", help="only measure the nodes")
    add_json_flag(parser, "placement_clients")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(ckpt := Path(name) / MODEL, MODEL)
        cluster = Cluster(ckpt, [float(share) for share in args.quotas.split(",")])
        try:
            result = measured(args, cluster, ckpt)
        finally:
            cluster.close()
    save(args.json, result)


def measured(args: argparse.Namespace, cluster: Cluster, ckpt: Path) -> dict[str, Any]:
    from mdi.checkpoint.shapes import read_config
    from mdi.placement.cost import CostModel
    from mdi.placement.model import Workload, model_shape

    profile = cluster.measure()
    for node in profile.nodes:
        times = ", ".join(f"{s * 1e3:.2f} ms at {rows} rows" for rows, s in node.block_s)
        print(f"{node.name}: {node.n_cores} cores, {times}", flush=True)
    if args.profile_only:
        return {"profile": profile.to_json()}
    shape = model_shape(read_config(ckpt / "model_config.yaml"), "float32")
    cost = CostModel(profile, shape, Workload(1, PROMPT_IDS + 2 * args.n_tokens))
    return {"profile": profile.to_json(), **against(args, cluster, cost)}


if __name__ == "__main__":
    main()
