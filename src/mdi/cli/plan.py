"""Predict which node gets which blocks, whether the model fits, how fast it is, and what would help. Loads and sends nothing.

examples:
  plan.py --nodes-config settings_distr/lan_3.json --ckpt checkpoints/org/model --n-samples 8
      the nodes measure themselves and their links (secondary.py must be running on them)
  plan.py --profiles cluster.json --ckpt checkpoints/org/model --n-samples 8
  plan.py --profiles cluster.json --config tiny-llama-1.1b --quantize int8 --placement latency
  plan.py --profiles cluster.json --config tiny-llama-1.1b --nodes starter secondary1 --json
      with only these two nodes
  plan.py --profiles cluster.json --ckpt checkpoints/org/small --beside large.json
      a second model in the memory that the first one leaves; large.json is the output of plan.py --json for the first
  plan.py --example > cluster.json
      profiles of three single-board computers; change them to yours
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.config import DTYPES
from mdi.errors import PlacementError, UsageError
from mdi.partition.methods import DEFAULT_METHOD, METHODS
from mdi.settings_file import TEXT_LIMIT_BYTES, read_limited
from mdi.terminal import show

if TYPE_CHECKING:
    from mdi.partition.model import ModelShape
    from mdi.partition.plan import PlanReport
    from mdi.partition.profile import ClusterProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags
    from mdi.cli.access import add_access_flags
    from mdi.cli.flags import add_kv_dtype, add_replay_memory
    from mdi.cli.window_flags import add_window_flags

    nodes = parser.add_argument_group("nodes")
    nodes.add_argument("--profiles", type=Path, metavar="FILE", help="profiles of nodes and links, instead of nodes")
    nodes.add_argument(
        "--nodes-config",
        type=Path,
        metavar="FILE",
        help="instead of profiles: nodes file of running nodes, which measure themselves",
    )
    add_access_flags(nodes)
    nodes.add_argument("--fresh", action="store_true", help="measure again instead of using stored results")
    nodes.add_argument("--wait", type=float, default=30.0, metavar="SECONDS", help="for nodes to answer (%(default)s)")
    nodes.add_argument("--save-profiles", type=Path, metavar="FILE", help="write what was measured, for --profiles")
    nodes.add_argument("--nodes", nargs="+", metavar="NAME", help="only these nodes of the profiles, starter first")
    nodes.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="PLAN", help="output of `plan.py --json` for other models on "
        "these nodes; the plan uses only what those leave free (models that run now are counted anyway)",
    )  # fmt: skip
    nodes.add_argument("--example", action="store_true", help="print example profiles, and end")
    model = parser.add_argument_group("model")
    model.add_argument("--ckpt", type=Path, metavar="DIR", help="checkpoint made by prepare_model.py")
    model.add_argument(
        "--config", metavar="NAME", help="a model without its checkpoint: litgpt's name, or a model_config.yaml (default: the "
        "model that the profiles were measured with)",
    )  # fmt: skip
    model.add_argument("--quantize", metavar="FORMAT", help="weight format: float32, bf16, fp16, int8 or int4")
    model.add_argument("--dtype", choices=DTYPES, help="without a weight format: number type of weights and computing")
    add_kv_dtype(model)
    run_group = parser.add_argument_group("run")
    add_replay_memory(run_group)
    run_group.add_argument("--n-samples", type=int, default=1, metavar="S", help="sequences at once (%(default)s)")
    run_group.add_argument(
        "--sequence-length", type=int, metavar="L", help="most tokens of a sequence (default: the model's context)"
    )
    add_placement_flags(parser)
    window = parser.add_argument_group("window")
    add_window_flags(window)
    window.add_argument(
        "--disk-rate",
        metavar="SIZE",
        help="bytes per second of the disks, such as 500M (default: as measured)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_common_flags(parser)


def add_placement_flags(parser: argparse.ArgumentParser) -> None:
    placement = parser.add_argument_group("placement")
    placement.add_argument(
        "--placement", choices=METHODS, default=DEFAULT_METHOD, help="throughput: most tokens/s; latency: the shortest way of "
        "one token; opa and gma: by left-over memory (and cores), as LLaMPS; even: equal numbers (default: %(default)s)",
    )  # fmt: skip
    placement.add_argument("--layers", metavar="N,N,...", help="blocks per node, starter first")
    placement.add_argument(
        "--prefer-memory", type=float, metavar="X", help="for opa: how much more memory counts than cores, 1/9 to 9 (5)"
    )


def run(args: argparse.Namespace) -> int:
    _check_model(args)
    if args.example:
        from mdi.partition.example import boards

        _print(boards().to_json())
        return 0
    try:
        report = _plan(args)
    except PlacementError as e:
        if not args.json:
            raise
        _print({"error": str(e), "missing": [{"node": name, "bytes": n} for name, n in e.missing]})
        return 1
    report = replace(report, notes=(*report.notes, *_chunks_note(args, report)))
    if args.json:
        _print(report.to_json())
    else:
        from mdi.partition.plan_table import format_plan

        show(format_plan(report))
    return 0


def _check_model(args: argparse.Namespace) -> None:
    """Raises UsageError before anything heavy is imported; the weights need not be here, the settings must."""
    from mdi.checkpoint.folder import CONFIG_FILE, no_checkpoint
    from mdi.cli.checks import found_ckpt
    from mdi.weight_formats import check_packed

    check_packed(args.quantize)
    if args.ckpt is not None:
        args.ckpt = found_ckpt(args.ckpt)
        if not (args.ckpt / CONFIG_FILE).is_file():
            raise UsageError(no_checkpoint(args.ckpt))


def _chunks_note(args: argparse.Namespace, report: PlanReport) -> list[str]:
    """A note that the checkpoint has chunks with another cut, which override this plan."""
    from mdi.errors import MdiError
    from mdi.measure.planning import told_blocks
    from mdi.node.starter_weights import StarterWeights

    n_nodes = len(report.nodes) + len(report.placement.left_out)
    if args.ckpt is None or args.layers is not None or n_nodes == 1:
        return []
    try:
        weights = StarterWeights(args.ckpt, None, n_nodes, None, args.quantize)
    except MdiError:  # settings alone, say: then there is nothing that could win
        return []
    weights.close()
    planned = [(node.start, node.stop) for node in report.nodes]
    if not weights.is_cut_by_chunks or planned == weights.blocks:
        return []
    names = ["starter", *(f"secondary{i}" for i in range(n_nodes - 1))]
    flag = f"--placement {args.placement}"
    if args.placement == "even":  # which leaves chunks as they are
        flag = "--layers " + ",".join(str(stop - start) for start, stop in planned)
    return [
        f"the checkpoint has chunks for {n_nodes} nodes ({told_blocks(names, weights.blocks)}), and starter.py takes their cut "
        f"unless it is given {flag}"
    ]


def _plan(args: argparse.Namespace) -> PlanReport:
    from mdi.partition.profile import read_profile

    if args.profiles is None and args.nodes_config is not None:
        profile = _live(args)
        if args.save_profiles is not None:
            _save(args.save_profiles, profile)
        return plan_on(args, profile)
    if args.profiles is None or args.nodes_config is not None:
        raise UsageError(
            "give the nodes: --nodes-config FILE for nodes that are running, or --profiles FILE (--example prints one to "
            "start from)"
        )
    return plan_on(args, read_profile(_read(args.profiles), str(args.profiles)))


def _read(path: Path) -> str:
    try:
        return read_limited(path, TEXT_LIMIT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None


def _live(args: argparse.Namespace) -> ClusterProfile:
    """What the nodes of a nodes file measure of themselves."""
    from mdi.cache_dir import default_cache_dir
    from mdi.cli.access import with_keys
    from mdi.config import load_cluster

    if not 0 <= args.wait < float("inf"):
        raise UsageError(f"--wait must be 0 seconds or more, got {args.wait}")
    cluster = with_keys(args, load_cluster(args.nodes_config))
    if args.ckpt is None and args.config is None:
        raise UsageError("give the model that the nodes are to measure: --ckpt DIRECTORY or --config NAME")

    from mdi.checkpoint.manifest import config_hash
    from mdi.control.requested import Requested
    from mdi.machine.neighbours import threads_beside
    from mdi.machine.threads import choose_threads
    from mdi.measure.planning import Model, measure_live

    config = _config(args, None)
    model = Model(config["name"] or "", config, config_hash(config), args.dtype or _stored_dtype(args.ckpt))
    choose_threads(cluster.starter.threads, cluster.starter.cores, threads_beside(cluster.starter, cluster.nodes))
    asked = Requested(dtype=args.dtype, quantize=args.quantize, quantize_head=args.quantize, kv_dtype=args.kv_dtype)
    return measure_live(cluster, model, asked, default_cache_dir(), args.wait, args.fresh)


def _stored_dtype(ckpt: Path | None) -> str:
    """What the weights are stored in; float32 if they are not here."""
    from mdi.checkpoint.folder import GGUF_NOTE, WEIGHT_FILES
    from mdi.checkpoint.source import open_source

    if ckpt is None or not any((ckpt / name).is_file() for name in (*WEIGHT_FILES, GGUF_NOTE)):
        return "float32"
    source = open_source(ckpt)
    source.close()
    return source.dtype


def _save(path: Path, profile: ClusterProfile) -> None:
    try:
        path.write_text(json.dumps(profile.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}") from None


def plan_on(args: argparse.Namespace, profile: ClusterProfile) -> PlanReport:
    """The plan that the flags ask for, on a cluster whose profile is known."""
    from mdi.cli.session_flags import parsed_bytes, replay_bytes
    from mdi.cli.window_flags import asked_window
    from mdi.measure.computed_by import with_paths
    from mdi.measure.model_shape import model_shape
    from mdi.measure.planning import smaller_shapes
    from mdi.measure.window_plan import with_windows, without_limits
    from mdi.partition.beside import left_over
    from mdi.partition.group_profile import stage_places
    from mdi.partition.model import Workload
    from mdi.partition.plan import plan
    from mdi.partition.split import parse_layers
    from mdi.tensor.shares import why_not_shared_out

    if args.nodes:
        profile = _only(profile, args.nodes)
    for path in args.beside:
        profile = left_over(profile, _read(path), str(path))
    config = _config(args, profile)
    shape = model_shape(config, args.quantize or args.dtype or profile.format, args.kv_dtype)
    profile = with_paths(profile, config, shape.config_hash, shape.format)
    length = args.sequence_length or shape.context_length
    if not 1 <= length <= shape.context_length:
        raise UsageError(
            f"--sequence-length {length}: {shape.name or 'the model'} has a context of {shape.context_length}"
        )
    layers = None if args.layers is None else parse_layers(args.layers, shape.n_layer, len(stage_places(profile)))
    window = asked_window(args)
    report = plan(
        profile if window is None else without_limits(profile),
        shape,
        Workload(args.n_samples, length, replay_bytes=replay_bytes(args)),
        method=args.placement,
        layers=layers,
        preferences=preferences(args),
        measured=_measured(profile, config, shape),
        smaller=smaller_shapes(config, shape),
        may_share=why_not_shared_out(config) is None,
    )
    if window is None:
        return report
    return with_windows(report, profile, config, shape, window, parsed_bytes(args, "disk_rate"))


def preferences(args: argparse.Namespace) -> dict[tuple[str, str], float]:
    from mdi.partition.greedy import PREFERENCES, opa_weights

    chosen = dict(PREFERENCES)
    if args.prefer_memory is not None:
        chosen[("memory", "cores")] = args.prefer_memory
        opa_weights(chosen)
    return chosen


def _only(profile: ClusterProfile, names: list[str]) -> ClusterProfile:
    known = {node.name: node for node in profile.nodes}
    for name in names:
        if name not in known:
            raise UsageError(f"--nodes: there is no node {name!r} in the profiles, only {', '.join(known)}")
    if len(set(names)) < len(names):
        raise UsageError("--nodes: each node once")
    links = tuple(link for link in profile.links if link.source in names and link.target in names)
    return replace(profile, nodes=tuple(known[name] for name in names), links=links)


def _config(args: argparse.Namespace, profile: ClusterProfile | None) -> dict[str, Any]:
    """The whole litgpt Config of the model that is meant."""
    from mdi.checkpoint.shapes import read_config

    if args.ckpt is not None:
        return read_config(args.ckpt / "model_config.yaml")
    if args.config is None:
        if profile is None or not profile.model:
            raise UsageError("give the model: --ckpt DIRECTORY or --config NAME")
        return _named(profile.model)
    path = Path(args.config)
    if path.is_dir():
        return read_config(path / "model_config.yaml")
    return read_config(path) if path.is_file() else _named(args.config)


def _named(name: str) -> dict[str, Any]:
    from dataclasses import asdict

    from mdi.checkpoint.shapes import full_config
    from mdi.litgpt_module import litgpt_module

    litgpt = litgpt_module("config")
    name_to_config = litgpt.name_to_config
    by_hub_name = {f"{c['hf_config']['org']}/{c['hf_config']['name']}": n for n, c in name_to_config.items()}
    name = by_hub_name.get(name, name)
    if name not in name_to_config:
        near = [n for n in name_to_config if name.lower() in n.lower()][:5]
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UsageError(f"litgpt knows no model {name!r}, and there is no such file or directory{hint}")
    return full_config(asdict(litgpt.Config.from_name(name)), name)


def _measured(profile: ClusterProfile, config: dict[str, Any], shape: ModelShape) -> ModelShape | None:
    """The model of the profile's times; None if it is unknown."""
    from mdi.measure.model_shape import model_shape

    if profile.config_hash == shape.config_hash:
        return model_shape(config, profile.format)
    try:
        other = model_shape(_named(profile.model), profile.format)
    except UsageError:
        return None
    return other if other.config_hash == profile.config_hash else None


def _print(result: dict[str, Any]) -> None:
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")
