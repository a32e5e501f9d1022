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
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from leftovers import by_score, gma_scores, opa_scores
from records import add_json_flag, save

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the children inherit it
SCORES = {"gma": gma_scores, "opa": opa_scores}
ROOT = Path(__file__).resolve().parents[1]

PERIOD_US = 20_000  # short, so that a node under a quota is slow and not now and then absent
MODEL = {
    "name": "twelve-blocks", "n_layer": 12, "n_embd": 512, "n_head": 8, "n_query_groups": 4, "intermediate_size": 1408,
    "block_size": 512, "vocab_size": 2048, "padded_vocab_size": 2048, "rotary_percentage": 1.0, "parallel_residual": False,
    "bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
}  # fmt: skip
PROMPT_IDS = 8


class Quota:
    """A control group with a limit on CPU time, in either form of Linux' control groups."""

    def __init__(self, name: str) -> None:
        v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        self._folder = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/cpu") / f"mdi-bench-{os.getpid()}-{name}"
        self._is_v2 = v2
        self._folder.mkdir()
        # A quota is a limit and no promise: on a busy machine the group must also come before other programs.
        (self._folder / ("cpu.weight" if v2 else "cpu.shares")).write_text("800" if v2 else "8192")

    def hold(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float | None) -> None:
        quota = "-1" if cores is None else str(int(cores * PERIOD_US))
        if self._is_v2:
            (self._folder / "cpu.max").write_text(f"{'max' if cores is None else quota} {PERIOD_US}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(quota)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def make_checkpoint(folder: Path) -> None:
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(1)
    config = Config(**MODEL)
    with torch.device("meta"):
        names = GPT(config).state_dict()
    torch.save({n: torch.ones(t.shape) if t.dim() == 1 else torch.randn(t.shape) * 0.02 for n, t in names.items()},
               folder / "lit_model.pth")  # fmt: skip
    save_config(config, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def child_profile(ckpt: Path, with_head: bool) -> None:
    """Measure this process, when told to, as a node does on request."""
    from mdi.checkpoint.shapes import read_config
    from mdi.host.computing import choose_computing
    from mdi.host.threads import choose_threads
    from mdi.placement.profiler import bench_of
    from mdi.placement.profiling import Subject
    from mdi.spec.options import Requested

    choose_threads(1)
    config = read_config(ckpt / "model_config.yaml")
    computing = choose_computing(config, Requested(device="cpu", dtype="float32"), "float32")
    bench = bench_of(Subject(config, "", computing), 0.6, lambda *told: None)
    print("ready", flush=True)
    for _ in sys.stdin:
        speeds = bench.run(ckpt, with_head)
        print(json.dumps([speeds.read_bytes_s, speeds.block_s, speeds.head_s]), flush=True)


def child_starter(ckpt: Path, nodes: Path) -> None:
    """A starter that runs one split after the other: JSON lines in, JSON lines out."""
    from mdi.engine.sequence import SamplingParams
    from mdi.host.threads import choose_threads
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.cluster import ClusterConfig, load_cluster
    from mdi.spec.options import StarterOptions

    choose_threads(1)
    cluster = load_cluster(nodes)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        chosen = tuple(cluster.secondaries[i] for i in job["secondaries"])
        layers = ",".join(map(str, job["counts"]))
        node = Run(
            GivenNodes(ClusterConfig(cluster.starter, chosen)),
            StarterOptions(ckpt=ckpt, layers=layers, dtype="float32", prompt_style="none", wait_s=120, draft="none"),
            PROMPT_IDS + job["n_tokens"],
        )
        try:
            node.open()
            params = SamplingParams(n_tokens=job["n_tokens"], temperature=0.0, top_k=None, top_p=1.0, seed=1)
            for i in range(job["sequences"]):
                node.submit("", [i + 1] * PROMPT_IDS, params)
            node.read()
            node.close()
            metrics = node.metrics()
        finally:
            node.close()
        stage_s = [n.compute_s / max(1, n.frames) for n in metrics.nodes]
        rate = statistics.mean(s.tokens_per_s for s in metrics.samples) * len(metrics.samples)
        rss = [n.peak_rss_bytes for n in metrics.nodes]
        print(json.dumps({"tokens_s": rate, "stage_s": stage_s, "peak_rss_bytes": rss}), flush=True)


class Cluster:
    """Processes in control groups: first to be measured, then as a ring."""

    def __init__(self, ckpt: Path, quotas: list[float]) -> None:
        self._ckpt, self.shares = ckpt, quotas
        self._quotas = [Quota(f"node{i}") for i in range(len(quotas))]
        self._children: list[subprocess.Popen[str]] = []

    def measure(self, rounds: int = 3) -> list[dict[str, Any]]:
        """All nodes at the same time, as they will run, so that what else the machine does slows all alike; medians."""
        children = [
            self._spawn(i, [__file__, "--child-profile", str(self._ckpt), "head" if i == 0 else ""])
            for i in range(len(self.shares))
        ]
        for child in children:
            self._expect(child, "ready")
        for quota, share in zip(self._quotas, self.shares, strict=True):
            quota.limit(share)
        found: list[list[Any]] = [[] for _ in children]
        for _ in range(rounds):
            for child in children:
                self._tell(child, "go")
            for child, results in zip(children, found, strict=True):
                assert child.stdout is not None
                results.append(json.loads(child.stdout.readline()))
        for quota, child in zip(self._quotas, children, strict=True):
            quota.limit(None)
            assert child.stdin is not None
            child.stdin.close()
            child.wait()
        self._children.clear()
        return [_medians(results) for results in found]

    def open(self, folder: Path) -> None:
        from mdi.run.local import free_ports

        ports = iter(free_ports(2 * len(self.shares)))
        entries = [
            {"addr": "127.0.0.1", "communication": {"port": next(ports)}, "inference": {"port_in": next(ports)}, "threads": 1}
            for _ in self.shares
        ]  # fmt: skip
        nodes = folder / "nodes.json"
        nodes.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}))
        for i in range(1, len(self.shares)):
            command = [
                "-m",
                "mdi.cli",
                "secondary",
                "--nodes-config",
                str(nodes),
                str(i - 1),
                "--ckpt",
                str(self._ckpt),
            ]
            self._spawn(i, [*command, "--cache-dir", str(folder / f"cache{i}"), "--until-stdin-closes", "--quiet"])
        self._starter = self._spawn(0, [__file__, "--child-starter", str(self._ckpt), str(nodes)])
        self._expect(self._starter, "ready")
        everyone = list(range(1, len(self.shares)))
        self.run(everyone, _even(MODEL["n_layer"], len(self.shares)), 2, 4)  # all have loaded torch before quotas begin
        for quota, share in zip(self._quotas, self.shares, strict=True):
            quota.limit(share)

    def run(self, secondaries: list[int], counts: tuple[int, ...], sequences: int, n_tokens: int) -> dict[str, Any]:
        """One run; secondaries by their place in the ring, from 1 on."""
        others = [i - 1 for i in secondaries]
        job = {"secondaries": others, "counts": counts, "sequences": sequences, "n_tokens": n_tokens}
        result: dict[str, Any] = json.loads(self._ask(self._starter, json.dumps(job)))
        return result

    def close(self) -> None:
        for quota in self._quotas:
            with contextlib.suppress(OSError):
                quota.limit(None)
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for child in self._children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for quota in self._quotas:
            quota.close()

    def _spawn(self, i: int, command: list[str]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        self._quotas[i].hold(child.pid)
        self._children.append(child)
        return child

    def _tell(self, child: subprocess.Popen[str], line: str) -> None:
        assert child.stdin is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()

    def _ask(self, child: subprocess.Popen[str], line: str) -> str:
        self._tell(child, line)
        assert child.stdout is not None
        return child.stdout.readline()

    def _expect(self, child: subprocess.Popen[str], word: str) -> None:
        assert child.stdout is not None
        line = child.stdout.readline()
        if word not in line:
            raise SystemExit(f"a child said {line!r} instead of {word!r}")


def _medians(results: list[Any]) -> dict[str, Any]:
    def times(which: int) -> list[list[float]]:
        return [
            [column[0][0], statistics.median(s for _, s in column)]
            for column in zip(*(r[which] for r in results), strict=True)
        ]

    return {"read_bytes_s": statistics.median(r[0] for r in results), "block_s": times(1), "head_s": times(2)}


def cluster_profile(measured: list[dict[str, Any]], shares: list[float], config_hash: str, process_bytes: int) -> Any:
    from mdi.placement.profile import ClusterProfile

    names = ["starter", *(f"secondary{i}" for i in range(len(measured) - 1))]
    nodes = [
        {"name": name, "device": "cpu", "n_cores": share, "memory_bytes": 4 * 10**9, "disk_bytes": 10**10,
         "disk_read_bytes_s": 0, "process_bytes": process_bytes, **values}
        for name, share, values in zip(names, shares, measured, strict=True)
    ]  # fmt: skip
    links = [{"source": a, "target": b, "round_trip_s": 60e-6, "bytes_s": 1e9} for a in names for b in names if a != b]
    return ClusterProfile.from_json(
        {"nodes": nodes, "links": links, "model": MODEL["name"], "config_hash": config_hash, "format": "float32"}
    )


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
        result = cluster.run(list(order[1:]), counts, args.sequences, n_tokens)
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
    from dataclasses import replace

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
                rates[method].append(cluster.run(list(p.order[1:]), p.counts, n_texts, args.n_tokens)["tokens_s"])
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
    parser.add_argument("--child-profile", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--child-starter", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child_profile:
        return child_profile(Path(args.child_profile[0]), bool(args.child_profile[1]))
    if args.child_starter:
        return child_starter(*map(Path, args.child_starter))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that control groups and children do not stay behind
    shares = [float(share) for share in args.quotas.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ckpt = folder / "model"
        ckpt.mkdir()
        make_checkpoint(ckpt)
        cluster = Cluster(ckpt, shares)
        try:
            result = run(args, cluster, folder, ckpt)
        finally:
            cluster.close()
    save(args.json, result)


def run(args: argparse.Namespace, cluster: Cluster, folder: Path, ckpt: Path) -> dict[str, Any]:
    from mdi.checkpoint.shapes import read_config
    from mdi.placement.cost import CostModel
    from mdi.placement.methods import place
    from mdi.placement.model import Workload, model_shape

    measured = cluster.measure()
    shape = model_shape(read_config(ckpt / "model_config.yaml"), "float32")
    profile = cluster_profile(measured, cluster.shares, shape.config_hash, 500_000_000)
    cost = CostModel(profile, shape, Workload(args.sequences, PROMPT_IDS + 2 * args.n_tokens))
    for node in profile.nodes:
        print(
            f"{node.name}: {node.n_cores} cores, "
            + ", ".join(f"{s * 1e3:.2f} ms at {rows} rows" for rows, s in node.block_s)
        )
    if args.profile_only:
        return {"profile": profile.to_json()}
    if args.clients:
        cluster.open(folder)
        return {"profile": profile.to_json(), **against(args, cluster, cost)}
    default = place(cost)
    args.best_predicted = cost.predict(default.order, default.counts).tokens_s
    print(
        f"default placement: {default.names} {default.counts}, {args.best_predicted:.1f} tokens/s predicted", flush=True
    )
    cluster.open(folder)
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
