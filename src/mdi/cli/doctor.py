"""Examine a cluster before a run: contact every node, test every link of the ring from both ends, and say what is wrong
and what to do. The secondaries must be running. Exit status 0 only if there is no problem.

examples:
  doctor.py --nodes-config settings_distr/lan_3.json
  doctor.py --nodes-config settings_distr/lan_3.json --ckpt checkpoints/org/model
      ... and check whether the blocks of this model fit
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mdi.spec.options import ACCESS, COMMON, Options
from mdi.spec.parser import Parser
from mdi.terminal import show

if TYPE_CHECKING:
    from mdi.cancel import Cancel
    from mdi.spec.cluster import ClusterConfig


def add_arguments(parser: Parser) -> None:
    parser.options(
        None, "nodes_config", *ACCESS, "ckpt", "layers", "deadline", "json", *COMMON,
        nodes_config={"help": "nodes file (default: {nodes_config})"},
        ckpt={"help": "also check whether the blocks of this checkpoint fit"},
        layers={"help": "blocks per node, starter first (default: an even split)"},
    )  # fmt: skip


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli import default_nodes_config
    from mdi.cli.access import with_keys
    from mdi.spec.cluster import load_cluster

    cluster = with_keys(options, load_cluster(options.nodes_config or default_nodes_config()))
    if options.ckpt is not None:
        from mdi.cli.session import check_cut, with_model

        options = with_model(options, cancel)
        check_cut(options, cluster.n_stages)

    from mdi.files import default_cache_dir
    from mdi.host.doctor import examine

    report = examine(cluster, options.deadline, _needed_bytes(options, cluster), default_cache_dir(), cancel)
    show(json.dumps(report.to_json()) if options.json else str(report))
    return 0 if report.is_ok else 1


def _needed_bytes(options: Options, cluster: ClusterConfig) -> dict[str, int]:
    """Weights of each node's stage, as they are stored."""
    if options.ckpt is None:
        return {}
    from mdi.stages.model_family import ModelFamily

    weights = ModelFamily().open_weights(options.ckpt, None, cluster.n_nodes, options.layers, None, will_be_cut=False)
    try:
        return {node.name: weights.stage_bytes(i) for i, node in enumerate(cluster.nodes)}
    finally:
        weights.close()
