"""Examine a cluster before a run: contact every node, test every link of the ring from both ends, and say what is wrong
and what to do. The nodes must be running. Exit status 0 only if there is no problem.

With --model FILE, no cluster is examined: this machine computes a few short texts with the GGUF file, and so does llama.cpp, if
llama-cpp-python is installed. What differs is printed: ids of tokens, and the best next tokens with their log probabilities.

examples:
  mdi doctor
      the machines of your key, which `mdi join` fetched or `--machines` made
  mdi doctor --key cluster.key --ckpt model.gguf
      ... and check whether the blocks of this model fit
  mdi doctor --nodes-config nodes.json
      the nodes of that file
  mdi doctor --model model.gguf
      does this program compute the model as llama.cpp does?
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from mdi.spec.options import ACCESS, COMMON, Options
from mdi.spec.parser import Parser
from mdi.terminal import show

if TYPE_CHECKING:
    from mdi.cancel import Cancel
    from mdi.spec.cluster import ClusterConfig


def add_arguments(parser: Parser) -> None:
    parser.options(
        None, "nodes_config", *ACCESS, "addr", "ckpt", "layers", "deadline", "compared", "json", *COMMON,
        nodes_config={
            "help": "nodes file (default: the machines of the key; in a checkout without one "
            "src/settings_distr/configuration.json if it is there)"
        },
        ckpt={"help": "also check whether the blocks of this checkpoint fit"},
        layers={"help": "blocks per node, starter first (default: an even split)"},
    )  # fmt: skip


def run(options: Options, cancel: Cancel) -> int:
    if options.compared is not None:
        return _compare(options, cancel)
    cluster = _cluster(options, cancel)
    if options.ckpt is not None:
        from mdi.cli.session import check_cut, with_model

        options = with_model(options, cancel)
        check_cut(options, cluster.n_stages)

    from mdi.files import default_cache_dir
    from mdi.host.doctor import examine

    report = examine(cluster, options.deadline, _needed_bytes(options, cluster), default_cache_dir(), cancel)
    show(json.dumps(report.to_json()) if options.json else str(report))
    return 0 if report.is_ok else 1


def _compare(options: Options, cancel: Cancel) -> int:
    """The model of --model on this machine, beside llama.cpp. Raises MdiError."""
    from mdi.checkpoint.folder import gguf_file
    from mdi.cli.session import run_options, with_model
    from mdi.errors import UsageError
    from mdi.kernels.weight_formats import OWN
    from mdi.run.comparing import ROOM, compare, lines, other_of, to_json
    from mdi.run.nodes import NodeSource
    from mdi.run.run import Run
    from mdi.spec.cluster import standalone

    options = with_model(replace(options, model=options.compared or ""), cancel)
    file = None if options.ckpt is None else gguf_file(options.ckpt)
    if file is None:
        raise UsageError(
            f"--model {options.compared}: llama.cpp reads GGUF files only; `mdi prepare-model {options.compared} --export gguf "
            "--out DIR` writes one"
        )
    other, others = other_of(file)
    asked = run_options(replace(options, quantize=OWN, draft="none"))
    with Run(NodeSource(standalone), asked, ROOM, n_texts=1, cancel=cancel) as ring:
        found = compare(ring, other, others)
        show(json.dumps(to_json(found)) if options.json else "\n".join(lines(found, ring)))
    return 0 if found.is_ok else 1


def _cluster(options: Options, cancel: Cancel) -> ClusterConfig:
    """Of the nodes file that is given, else of the user's key, else of the checkout's nodes file. Raises UsageError."""
    from mdi.cli import default_nodes_config
    from mdi.cli.access import default_key_file, users_keys, with_keys
    from mdi.cli.discover import Discovery
    from mdi.errors import UsageError
    from mdi.spec.cluster import load_cluster

    if options.nodes_config is None and (keys := users_keys(options)) is not None:
        with Discovery(options, cancel) as discovery:
            return discovery.cluster_now(keys)
    path = options.nodes_config or default_nodes_config()
    if options.nodes_config is None and not path.is_file():
        raise UsageError(
            f"there is no cluster to examine: no key at {default_key_file()}, and no nodes file. `mdi serve --machines N NAME` "
            "or `mdi key` makes a key, `mdi join` brings machines to it; or give --key FILE or --nodes-config FILE"
        )
    return with_keys(options, load_cluster(path))


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
