#!/usr/bin/env python3
"""A ring over a Ray cluster: one actor on each machine, which Ray places, and starts again where one fails.

    pip install ray mdi-llm
    ray_ring.py --nodes 3 --key cluster.key -- serve org/name --host 0.0.0.0 --api-key-file keys.txt

Each actor runs `mdi job` as a process of its own, which ends with it; activations travel between these processes, not through
Ray. The key file has to be at the same path on all machines. --address is Ray's (default: the cluster of this machine).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PORT = 8089
TERMINATED = 143  # a node's exit status when its starter ends it


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Node:
    """One process of the job, on the machine that Ray has chosen."""

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def run(self, rank: int, size: int, head: str, key: str, command: list[str]) -> int:
        """The exit status of the process."""
        flags = ["--rank", str(rank), "--size", str(size), "--head", f"{head}:{PORT}", "--key", key]
        if rank:
            flags.append("--until-stdin-closes")  # which is when this actor ends
        program = [sys.executable, "-m", "mdi.cli", "job"]
        status = subprocess.Popen([*program, *flags, *command], stdin=subprocess.PIPE).wait()
        if rank and status not in (0, TERMINATED):
            os._exit(1)  # Ray starts this actor again, and calls this again
        return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="machines")
    parser.add_argument("--key", required=True, metavar="FILE", help="the cluster's key, at this path on all machines")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs that Ray reserves on each machine (1)")
    parser.add_argument("--address", help="of the Ray cluster (default: that of this machine)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="starter, run or serve, with its flags")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    ray.init(address=args.address or "auto")
    group = placement_group([{"CPU": args.cpus}] * args.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    nodes = [
        Node.options(  # type: ignore[attr-defined]
            num_cpus=args.cpus, scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank)
        ).remote()
        for rank in range(args.nodes)
    ]
    head = ray.get(nodes[0].address.remote())
    running = [node.run.remote(rank, args.nodes, head, args.key, command) for rank, node in enumerate(nodes)]
    try:
        status = int(ray.get(running[0]))
    except KeyboardInterrupt:
        return 130
    ray.wait(running, num_returns=args.nodes, timeout=30)
    return status


if __name__ == "__main__":
    sys.exit(main())
