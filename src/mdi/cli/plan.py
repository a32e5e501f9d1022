"""Predict which node gets which blocks, whether the model fits, how fast it is, and what would help. Loads and sends nothing.

The model is whatever `mdi run` runs; of one on the hub only its config.json is fetched. Without nodes the plan is for this
machine alone, which measures itself.

examples:
  mdi plan model.Q4_K_M.gguf                     does it fit here, and how fast is it?
  mdi plan Qwen/Qwen3-0.6B --quantize int8
  mdi plan nano-llama --nodes-config nodes.json --n-samples 8
      the nodes measure themselves and their links (`mdi secondary` must be running on them)
  mdi plan --example > cluster.json
      profiles of three single-board computers; change them to yours
  mdi plan Qwen/Qwen3-0.6B --profiles cluster.json --placement latency
  mdi plan Qwen/Qwen3-0.6B --profiles cluster.json --aim clients --per-client 4096:2
      how many texts of 4,096 tokens get 2 tokens/s each or more
  mdi plan openai/gpt-oss-20b --profiles cluster.json --quantize mxfp4 --nodes starter secondary1 --json
      with only these two nodes
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.errors import MdiError, PlacementError, UsageError
from mdi.model.plain import ModelConfig
from mdi.spec.cluster import DTYPES
from mdi.spec.combinations import MODEL, facts_of, refuse
from mdi.spec.options import ACCESS, COMMON, DEFAULT_PLACEMENT, Options, Requested, planned_format
from mdi.spec.parser import Parser
from mdi.spec.settings_file import TEXT_LIMIT_BYTES, read_limited
from mdi.terminal import show

logger = logging.getLogger("mdi")

if TYPE_CHECKING:
    from mdi.cancel import Cancel
    from mdi.placement.model import ModelShape
    from mdi.placement.plan import PlanReport
    from mdi.placement.profile import ClusterProfile


FIRST = (
    "--profiles", "--nodes-config", "--key", "--example", "--ckpt",
    "--config", "--quantize", "--n-samples", "--sequence-length", "--placement", "--json",
    "--verb",
)  # fmt: skip


DEFAULT_PROMPT = 512  # tokens


def add_arguments(parser: Parser) -> None:
    parser.options(
        "nodes", "profiles", "nodes_config", *ACCESS, "fresh", "wait_s", "save_profiles", "only", "example",
        nodes_config={"help": "nodes file of running nodes, which measure themselves (default: this machine alone)"},
        wait_s={"help": "for nodes to answer (%(default)s)"},
    )  # fmt: skip
    parser.options(
        "model", "model", "ckpt", "ckpt_folder", "config", "hf_token", "revision", "quantize", "dtype", "kv_dtype",
        ckpt={"help": "the model as a flag: a folder, its name in the store, or a GGUF file"},
        quantize={"help": "weight format: float32, bf16, fp16, int8, q6_k, q4_k, int4 or mxfp4", "read": planned_format},
        dtype={"help": "without a weight format: number type of weights and computing", "choices": DTYPES},
    )  # fmt: skip
    parser.options(
        "run", "replay_memory", "n_samples", "sequence_length", "prompt_tokens", "keep_prefixes", "memory", "aim", "per_client",
        "draft", "draft_rate",
        keep_prefixes={"help": "also predict how long a kept prompt takes to be read, see `mdi serve`"},
        draft={
            "help": "small model that guesses on the starter, which gets fewer blocks for it: its folder, or its name",
            "metavar": "DIR", "default": "none",
        },
        memory={
            "help": "limit for the process of each node, such as 700MB: its weights are read from its disk while it computes "
            "(default: as the profiles say; without a limit all weights are in memory)",
        },
        n_samples={"help": "sequences at once (%(default)s)", "metavar": "S", "default": 1},
        sequence_length={
            "help": "most tokens of a sequence (default: the model's context)", "metavar": "L", "flags": ("--sequence-length",),
        },
    )  # fmt: skip
    parser.options(
        "placement", "placement", "layers",
        placement={
            "help": "throughput: most tokens/s; latency: the shortest way of one token; even: equal numbers (default: "
            "%(default)s)", "default": DEFAULT_PLACEMENT,
        },
        layers={"help": "blocks per node, starter first"},
    )  # fmt: skip
    parser.options(None, "json", *COMMON, json={"help": "print one JSON object"})


def run(options: Options, cancel: Cancel) -> int:
    from mdi.checkpoint.folder import gguf_file, gguf_name

    options = _with_model(options, cancel)
    if options.example:
        from mdi.placement.profile import boards

        _print(boards().to_json())
        return 0
    try:
        report = _plan(options, cancel)
    except PlacementError as e:
        if not options.json:
            raise
        _print({"error": str(e), "missing": [{"node": name, "bytes": n} for name, n in e.missing]})
        return 1
    file = None if options.ckpt is None else gguf_file(options.ckpt)
    name = report.model if file is None else gguf_name(file)  # as everything else calls it
    report = replace(report, model=name, notes=(*report.notes, *_chunks_note(options, report)))
    if options.json:
        _print(report.to_json())
    else:
        from mdi.placement.plan import format_plan

        show(format_plan(report))
    return 0


def _with_model(options: Options, cancel: Cancel) -> Options:
    """The options with a folder as --ckpt, or a name as --config: the weights need not be there, the settings must.

    Raises:
        UsageError: there is no such model. DownloadError: the hub does not give its settings.
    """
    from mdi.checkpoint.folder import CONFIG_FILE, no_checkpoint
    from mdi.cli.session import found_ckpt, is_hub_name, model_here

    if options.model:
        refuse({**facts_of(options), MODEL: options.model}, MODEL)
        if (here := model_here(options.model, options.ckpt_folder)) is None:
            if _known(options.model) is None and is_hub_name(options.model):
                return replace(options, ckpt=_settings_from_hub(options, cancel))
            return replace(options, config=options.model)
        options = replace(options, ckpt=here[0])
    if options.ckpt is None:
        return options
    folder = found_ckpt(options.ckpt, options.ckpt_folder)
    if not any((folder / name).is_file() for name in (CONFIG_FILE, "config.json")):
        raise UsageError(no_checkpoint(folder))
    return replace(options, ckpt=folder)


def _settings_from_hub(options: Options, cancel: Cancel) -> Path:
    """A folder with the config.json of a model on the hub. Raises DownloadError."""
    from mdi.checkpoint.download import fetch_settings
    from mdi.files import default_cache_dir

    folder = default_cache_dir() / "settings"
    return fetch_settings(options.model, folder, options.hf_token, options.revision, cancel)


def _chunks_note(options: Options, report: PlanReport) -> list[str]:
    """A note that the checkpoint has chunks with another cut, which override this plan."""
    from mdi.placement.planning import format_blocks
    from mdi.stages.model_family import ModelFamily

    n_nodes = len(report.nodes) + len(report.placement.left_out)
    if options.ckpt is None or options.layers is not None or n_nodes == 1:
        return []
    try:
        weights = ModelFamily().open_weights(options.ckpt, None, n_nodes, None, options.quantize, will_be_cut=False)
    except MdiError:  # settings alone, say: then there is nothing that could win
        return []
    weights.close()
    planned = [(node.start, node.stop) for node in report.nodes]
    if not weights.is_cut_by_chunks or planned == weights.blocks:
        return []
    names = ["starter", *(f"secondary{i}" for i in range(n_nodes - 1))]
    flag = f"--placement {options.placement}"
    if options.placement == "even":  # which leaves chunks as they are
        flag = "--layers " + ",".join(str(stop - start) for start, stop in planned)
    return [
        f"the checkpoint has chunks for {n_nodes} nodes ({format_blocks(names, weights.blocks)}), and mdi starter takes their "
        f"cut unless it is given {flag}"
    ]


def _plan(options: Options, cancel: Cancel) -> PlanReport:
    from mdi.placement.profile import read_profile

    if options.profiles is None:
        profile = _live(options, cancel)
        if options.save_profiles is not None:
            _save(options.save_profiles, profile)
        return plan_on(options, profile)
    return plan_on(options, read_profile(_read(options.profiles), str(options.profiles)))


def _read(path: Path) -> str:
    try:
        return read_limited(path, TEXT_LIMIT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None


def _live(options: Options, cancel: Cancel) -> ClusterProfile:
    """Profiles that the nodes of a nodes file, or this machine alone, measure of themselves."""
    from mdi.cli.access import open_keys, with_keys
    from mdi.cli.discover import Discovery
    from mdi.files import default_cache_dir
    from mdi.spec.cluster import load_cluster, standalone

    named = None if options.nodes_config is None else with_keys(options, load_cluster(options.nodes_config))
    if options.ckpt is None and options.config is None:
        raise UsageError("give the model: its NAME, a folder or a GGUF file, as for `mdi run`")
    if named is not None:
        cluster = named
    elif (keys := open_keys(options)) is not None:
        with Discovery(options, cancel) as discovery:
            cluster = discovery.cluster_now(keys)
    else:
        cluster = standalone()
        logger.info("the plan is for this machine alone; --key, --nodes-config or --profiles (see --example) give more")

    from mdi.checkpoint.manifest import config_hash
    from mdi.checkpoint.mixtures import meant
    from mdi.host.threads import choose_threads, threads_of_others
    from mdi.placement.planning import measure_live
    from mdi.spec.model_id import ModelId

    config = _config(options, None)
    model = ModelId(config.name, config, config_hash(config), options.dtype or _stored_dtype(options.ckpt))
    choose_threads(cluster.starter.threads, cluster.starter.cores, threads_of_others(cluster.starter, cluster.nodes))
    form = options.quantize or _usual_format(options)
    form = form and meant(form, config)
    asked = Requested(dtype=options.dtype, quantize=form, quantize_head=form)
    return measure_live(cluster, model, asked, default_cache_dir(), options.wait_s, options.fresh, cancel)


def _usual_format(options: Options) -> str | None:
    """What `mdi run` takes for weights that are here, unless it must be smaller; None: their own numbers."""
    from mdi.run.choice import formats_to_try
    from mdi.stages.model_family import ModelFamily

    if options.ckpt is None or options.dtype is not None:
        return None
    try:
        weights = ModelFamily().open_weights(options.ckpt, None, 1, None, None, False)
    except MdiError:  # settings alone
        return None
    weights.close()
    return formats_to_try(weights)[0]


def _tied_type(ckpt: Path | None) -> str | None:
    """Number type of an embedding that is the head as well, of weights that are here; else None."""
    from mdi.checkpoint.source import open_source

    if ckpt is None:
        return None
    try:
        with contextlib.closing(open_source(ckpt)) as source:
            return source.tied_type
    except MdiError:  # settings alone
        return None


def _stored_dtype(ckpt: Path | None) -> str:
    """Number type of the stored weights; float32 if they are not here."""
    from mdi.checkpoint.folder import GGUF_NOTE, is_lit_dir, is_readable_hf
    from mdi.checkpoint.source import open_source

    if ckpt is None or not (is_lit_dir(ckpt) or is_readable_hf(ckpt) or (ckpt / GGUF_NOTE).is_file()):
        return "float32"
    source = open_source(ckpt)
    source.close()
    return source.dtype


def _save(path: Path, profile: ClusterProfile) -> None:
    try:
        path.write_text(json.dumps(profile.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}") from None


def plan_on(options: Options, profile: ClusterProfile) -> PlanReport:
    """The plan that the flags ask for, on a cluster whose profile is known."""
    from mdi.block_ranges import parse_layers
    from mdi.engine.speculation import most_rows_of
    from mdi.kernels.weight_formats import is_packed_form
    from mdi.model.plain import spec_of
    from mdi.placement.clients import most_clients
    from mdi.placement.model import Workload, model_shape, with_paths
    from mdi.placement.parallel import stage_places
    from mdi.placement.plan import plan
    from mdi.placement.planning import smaller_shapes
    from mdi.placement.windows import NodeWindows
    from mdi.tensor.shares import why_not_shared_out

    if options.only:
        profile = _only(profile, options.only)
    config = _config(options, profile)
    first = profile.nodes[0]
    tied_type = _tied_type(options.ckpt) if first.device == "cpu" and not first.group else None
    shape = model_shape(config, options.quantize or options.dtype or profile.format, options.kv_dtype, tied_type)
    profile = with_paths(profile, config, shape.config_hash, shape.format)
    if options.memory is not None:
        profile = replace(profile, nodes=tuple(replace(node, window_bytes=options.memory) for node in profile.nodes))
    if (options.aim == "clients") != (options.per_client is not None):
        raise UsageError("--aim clients and --per-client L:X go together")
    if options.per_client and (options.sequence_length is not None or options.n_samples not in (None, 1)):
        raise UsageError(
            "--per-client says how long texts are, and the plan how many: leave --sequence-length and --n-samples out"
        )
    length = options.per_client[0] if options.per_client else options.sequence_length or shape.context_length
    if not 1 <= length <= shape.context_length:
        flag = "--per-client" if options.per_client else "--sequence-length"
        raise UsageError(f"{flag} {length}: {shape.name or 'the model'} has a context of {shape.context_length}")
    layers = (
        None
        if options.layers is None
        else parse_layers(options.layers, shape.n_layer, len(stage_places(profile)), shape.cuts)
    )
    draft_bytes = 0
    if options.draft not in ("none", "auto"):
        small = _config_of(options.draft)
        draft_bytes = model_shape(small, options.quantize or options.dtype or profile.format).weight_bytes
    n_samples = 1 if options.n_samples is None else options.n_samples
    workload = Workload(n_samples, length, replay_bytes=options.replay_memory, draft_bytes=draft_bytes)
    has_windows, may_share = any(node.window_bytes for node in profile.nodes), why_not_shared_out(config) is None
    if has_windows and not is_packed_form(shape.format):
        raise UsageError(
            f"--memory needs weights in a format of the kernels, not {shape.format}: give --quantize bf16, for example"
        )
    if has_windows and options.placement == "latency":
        raise UsageError(
            "--memory: blocks are shared out evenly over windows of weights: leave --placement latency out"
        )
    clients = None
    if options.per_client is not None and has_windows:
        raise UsageError("--aim clients counts no windows of weights: leave --memory out")
    if options.per_client is not None:
        clients = most_clients(profile, shape, workload, options.per_client[1], may_share)
        workload = replace(workload, n_sequences=max(1, clients.n))
    n_prompt = options.prompt_tokens or min(DEFAULT_PROMPT, max(1, length - 1))
    if n_prompt > length:
        raise UsageError(f"--prompt-tokens {n_prompt}: a sequence has {length} tokens at most")
    found = plan(
        profile,
        shape,
        workload,
        method=options.placement or DEFAULT_PLACEMENT,
        layers=layers,
        measured=_measured(profile, config, shape),
        smaller=smaller_shapes(config, shape, tied_type),
        may_share=may_share,
        windows=NodeWindows(config, shape, profile, workload) if has_windows else None,
        prompt_tokens=n_prompt,
    )
    found = replace(found, clients=clients)
    if options.keep_prefixes:
        found = found.with_kept(profile, shape)
    if options.draft_rate is None:
        return found
    return found.with_draft(options.draft_rate, most_rows_of(spec_of(config).has_experts, has_window=False))


def _only(profile: ClusterProfile, names: Sequence[str]) -> ClusterProfile:
    known = {node.name: node for node in profile.nodes}
    for name in names:
        if name not in known:
            raise UsageError(f"--nodes: there is no node {name!r} in the profiles, only {', '.join(known)}")
    if len(set(names)) < len(names):
        raise UsageError("--nodes: each node once")
    links = tuple(link for link in profile.links if link.source in names and link.target in names)
    return replace(profile, nodes=tuple(known[name] for name in names), links=links)


def _config(options: Options, profile: ClusterProfile | None) -> ModelConfig:
    """The configuration of the model that is meant."""
    from mdi.checkpoint.source import settings_of

    if options.ckpt is not None:
        return settings_of(options.ckpt)
    if options.config is not None:
        return _config_of(options.config)
    if profile is None or not profile.model:
        raise UsageError("give the model: its NAME, a folder or a GGUF file, as for `mdi run`")
    return _named(profile.model)


def _config_of(name: str) -> ModelConfig:
    """Of a folder, a file, or a name."""
    from mdi.checkpoint.shapes import read_config
    from mdi.checkpoint.source import settings_of

    path = Path(name)
    if path.is_dir():
        return settings_of(path)
    return read_config(path) if path.is_file() else _named(name)


def _known(name: str) -> ModelConfig | None:
    """Of a name that is known without its files, here or in litgpt's table. Raises CheckpointError: nothing computes it."""
    from dataclasses import asdict

    from mdi.checkpoint.hfconfig import published_config
    from mdi.checkpoint.shapes import full_config

    published = published_config(name)
    if published is not None or (litgpt := _litgpt_config()) is None:
        return published
    table = litgpt.name_to_config
    by_hub_name = {f"{c['hf_config']['org']}/{c['hf_config']['name']}": n for n, c in table.items()}
    known = by_hub_name.get(name, name)
    return full_config(asdict(litgpt.Config.from_name(known)), known) if known in table else None


def _litgpt_config() -> Any:
    """litgpt's module of this name; None where litgpt is not installed."""
    from mdi.checkpoint.litgpt_module import litgpt_module

    try:
        return litgpt_module("config")
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("litgpt"):
            raise
        return None


def _named(name: str) -> ModelConfig:
    """Of a name that is known without its files. Raises UsageError, CheckpointError."""
    from difflib import get_close_matches

    from mdi.checkpoint.hfconfig import PUBLISHED

    if (known := _known(name)) is not None:
        return known
    litgpt = _litgpt_config()
    table = () if litgpt is None else litgpt.name_to_config
    names = {written.lower(): n for n in (*table, *PUBLISHED) for written in (n, n.partition("/")[2] or n)}
    lower = name.lower()
    alike = [written for written in names if lower in written] + get_close_matches(lower, names, n=5, cutoff=0.75)
    near = list(dict.fromkeys(names[written] for written in alike))
    hint = f"; did you mean {', '.join(near[:5])}?" if near else ""
    more = (
        ""
        if litgpt is not None
        else "; ORG/NAME asks the hub, and with litgpt (pip install litgpt) more names are known"
    )
    raise UsageError(f"there is no file or directory {name!r}, and no known model has this name{hint}{more}")


def _measured(profile: ClusterProfile, config: ModelConfig, shape: ModelShape) -> ModelShape | None:
    """The model of the profile's times; None if it is unknown."""
    from mdi.placement.model import model_shape

    if profile.config_hash == shape.config_hash:
        return model_shape(config, profile.format)
    if not profile.model:
        return None
    try:
        other = model_shape(_named(profile.model), profile.format)
    except MdiError:
        return None
    return other if other.config_hash == profile.config_hash else None


def _print(result: dict[str, Any]) -> None:
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")
