"""Examine a cluster before a run: contact every node, test every link of the ring from both ends, and say what is wrong
and what to do. The secondaries must be running. Exit status 0 only if there is no problem.

examples:
  doctor.py --nodes-config settings_distr/lan_3.json
  doctor.py --nodes-config settings_distr/lan_3.json --ckpt checkpoints/org/model
      ... and check whether the blocks of this model fit
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.terminal import show

if TYPE_CHECKING:
    from mdi.config import ClusterConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags, default_nodes_config
    from mdi.cli.access import add_access_flags

    parser.add_argument(
        "--nodes-config",
        type=Path,
        metavar="FILE",
        default=default_nodes_config(),
        help="nodes file (%(default)s)",
    )
    add_access_flags(parser)
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="also check whether the blocks of this checkpoint fit")
    parser.add_argument("--layers", metavar="N,N,...", help="blocks per node, starter first (default: an even split)")
    parser.add_argument(
        "--deadline",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time limit of each connection and each answer (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.cli.access import with_keys
    from mdi.config import load_cluster
    from mdi.errors import UsageError

    if not 0.1 <= args.deadline <= 600:
        raise UsageError(f"--deadline must be from 0.1 to 600 seconds, got {args.deadline}")
    cluster = with_keys(args, load_cluster(args.nodes_config))
    if args.ckpt is not None:
        from mdi.cli.checks import check_cut, check_model

        check_model(args)
        check_cut(args, cluster.n_stages)

    from mdi.cache_dir import default_cache_dir
    from mdi.examine.doctor import examine

    report = examine(cluster, args.deadline, _needed_bytes(args, cluster), default_cache_dir())
    show(json.dumps(report.to_json()) if args.json else str(report))
    return 0 if report.is_well else 1


def _needed_bytes(args: argparse.Namespace, cluster: ClusterConfig) -> dict[str, int]:
    """Weights of each node's stage, as they are stored."""
    if args.ckpt is None:
        return {}
    from mdi.node.starter_weights import StarterWeights

    weights = StarterWeights(args.ckpt, None, cluster.n_nodes, args.layers)
    try:
        return {node.name: weights.stage_bytes(i) for i, node in enumerate(cluster.nodes)}
    finally:
        weights.close()
