"""Run a model over a ring of nodes, from its first node: this one cuts the model, configures the secondaries, and
generates.

examples:
  starter.py --ckpt checkpoints/org/model --nodes-config settings_distr/configuration.json --prompt "Who are you?"
      three samples over the nodes of that file (start secondary.py on the others)
  starter.py --ckpt checkpoints/org/model --nodes-config settings_distr/standalone.json --n-samples 1 --temperature 0
      the same on this machine alone, the most probable text
  starter.py ... --prompt FILE:questions.txt --n-tokens 500 --json
      one sample per paragraph of a file; the result as one JSON object
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mdi.cli.resume import Journaling
    from mdi.config import ClusterConfig, NodeConfig
    from mdi.metrics import RunMetrics
    from mdi.node.model_family import ModelFamily
    from mdi.node.starter import StarterNode
    from mdi.recovery.journal import JournalText

logger = logging.getLogger("mdi")


def add_arguments(parser: argparse.ArgumentParser, is_litgpt: bool = True, is_resumable: bool = True) -> None:
    """`is_litgpt` false leaves out what models without caches, chunks and placements have no use for."""
    from mdi.cli import add_common_flags, default_nodes_config
    from mdi.cli.access import add_access_flags
    from mdi.cli.discover import add_discovery_flags
    from mdi.cli.flags import (
        add_generation_flags,
        add_model_flags,
        add_placement_flags,
        add_recovery_flags,
        add_wire_flags,
    )
    from mdi.cli.output import add_output_flags
    from mdi.cli.parallel_flags import add_parallel_flags
    from mdi.cli.resume import add_resume_flags

    add_model_flags(parser, is_litgpt)
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument(
        "--nodes-config",
        type=Path,
        metavar="FILE",
        help="who the nodes are (default: who is found in the network with the key of --key; without a key "
        f"{default_nodes_config()})",
    )
    add_access_flags(nodes)
    if is_litgpt and is_resumable:
        add_discovery_flags(nodes)
    default_cut = "see --placement" if is_litgpt else "see README.md"
    nodes.add_argument(
        "--layers", metavar="N,N,...", help=f"blocks per node by hand, starter first (default: {default_cut})"
    )
    if is_litgpt:
        nodes.add_argument("--chunk", type=Path, metavar="FILE", help="the starter's chunk; the others' lie beside it")
        add_placement_flags(nodes)
        add_recovery_flags(nodes)
    nodes.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for secondaries to appear (%(default)s)",
    )
    nodes.add_argument("--stop-nodes", action="store_true", help="end the secondaries' processes after the run")
    add_wire_flags(nodes, with_frames=is_litgpt)
    if is_litgpt:
        add_parallel_flags(nodes)
    add_generation_flags(parser, n_tokens=300)
    if is_litgpt and is_resumable:
        add_resume_flags(parser)
    add_output_flags(parser)
    add_common_flags(parser)


def chosen_placement(args: argparse.Namespace) -> str | None:
    """The flag, else MDI_PLACEMENT; None is the default. UsageError if the variable names none."""
    from mdi.errors import UsageError
    from mdi.partition.methods import METHODS

    named = os.environ.get("MDI_PLACEMENT") or None
    if named is not None and named not in METHODS:
        raise UsageError(f"MDI_PLACEMENT={named!r}: expected {', '.join(METHODS)}")
    return getattr(args, "placement", None) or named


def run(args: argparse.Namespace) -> int:
    from mdi.cli.discover import cluster_of_flags
    from mdi.cli.resume import Journaling, list_runs

    if args.resume == "":
        list_runs(args)
        return 0
    journaling = None if args.no_journal else Journaling(args)
    try:
        generate_on(args, lambda: cluster_of_flags(args), journaling=journaling)
    finally:
        if journaling is not None:
            journaling.close()
    return 0


def run_on(
    args: argparse.Namespace,
    cluster_of: Callable[[], ClusterConfig],
    check: Callable[[], None] = lambda: None,
    family: Callable[[], ModelFamily] | None = None,
) -> int:
    """One run on a cluster, from flags to report; also behind sample.py. See `generate_on`."""
    generate_on(args, cluster_of, check, family)
    return 0


def generate_on(
    args: argparse.Namespace,
    cluster_of: Callable[[], ClusterConfig],
    check: Callable[[], None] = lambda: None,
    family: Callable[[], ModelFamily] | None = None,
    is_reported: bool = True,
    journaling: Journaling | None = None,
) -> RunMetrics:
    """One run on a cluster, from flags to what it measured.

    Args:
        family: makes that of the model; None is litgpt's.
        check: called again and again while the nodes get ready; raises if that has become pointless.
        is_reported: show the texts as they grow, and tables and files at the end.
        journaling: writes down what the run reaches.
    """
    from mdi.cli.output import print_json

    try:
        return _generate(args, cluster_of, check, family, is_reported, journaling)
    except (Exception, KeyboardInterrupt) as e:
        if args.json and not isinstance(e, BrokenPipeError) and not getattr(e, "is_reported", False):
            print_json({"error": str(e) or "interrupted", "samples": []})
        raise


def _generate(
    args: argparse.Namespace,
    cluster_of: Callable[[], ClusterConfig],
    check: Callable[[], None],
    family: Callable[[], ModelFamily] | None,
    is_reported: bool,
    journaling: Journaling | None,
) -> RunMetrics:
    from mdi.cli import ignore_interrupts
    from mdi.cli.access import with_keys
    from mdi.cli.checks import check_computing, check_model
    from mdi.prompts import read_prompts

    check_computing(args)
    known = None if journaling is None else journaling.texts
    if known is None:
        prompts = read_prompts(args.prompt or [], args.n_samples, default=args.samples_of_one)
    else:
        prompts = [text.prompt for text in known]
    params = sampling_params(args)
    starter_options(args)
    cluster = with_keys(args, cluster_of())
    check_model(args, cluster.n_nodes, is_litgpt=family is None)
    options, cores = starter_options(args), chosen_cores(args.cores, cluster.starter)

    tell_loading()
    from mdi.machine.device import set_threads
    from mdi.machine.neighbours import threads_beside
    from mdi.node.starter import StarterNode

    set_threads(args.threads or cluster.starter.threads, cores, threads_beside(cluster.starter, cluster.nodes))
    node = StarterNode(cluster, options, None if family is None else family())
    try:
        node.open()
        encoded = encode_prompts(node, prompts) if known is None else [text.prompt_ids for text in known]
        longest = max(map(len, encoded)) + args.n_tokens
        node.place(len(encoded), longest, check)
        node.prepare(longest, check)
        if journaling is not None:
            journaling.begin(args, node, prompts, encoded)
        return _run(args, node, prompts, encoded, params, is_reported, known)
    finally:
        ignore_interrupts()
        node.close()


def tell_loading() -> None:
    """A word before the imports that take seconds."""
    if "torch" not in sys.modules:
        logger.info("loading PyTorch ...")


def tell_seed(params: Any) -> None:
    """Where something is drawn: how to have the same again."""
    if params.temperature > 0:
        logger.info("seed %d: --seed %d gives the same texts again", params.seed, params.seed)


def chosen_cores(flag: str | None, node: NodeConfig) -> tuple[int, ...] | None:
    """Cores to stay on: what --cores says, else the nodes file."""
    from mdi.config import parse_cores

    return node.cores if flag is None else parse_cores(flag, "--cores")


def starter_options(args: argparse.Namespace) -> Any:
    from mdi.cache_dir import default_cache_dir
    from mdi.cli.parallel_flags import parallel_options
    from mdi.cli.window_flags import weight_memory
    from mdi.config import parse_bytes
    from mdi.control.messages import N_FRAMES_LIMIT, SILENCE_LIMITS_S
    from mdi.errors import UsageError
    from mdi.net.wire import SILENCE_S
    from mdi.node.options import StarterOptions
    from mdi.tracing.spans import N_SPANS

    wait_s = getattr(args, "wait", 30.0)
    if not 0 <= wait_s < float("inf"):
        raise UsageError(f"--wait must be 0 seconds or more, got {wait_s}")
    if args.sequence_length is not None and args.sequence_length < 1:
        raise UsageError(f"--sequence-length must be at least 1, got {args.sequence_length}")
    silence_s = getattr(args, "silence_s", SILENCE_S)
    low, high = SILENCE_LIMITS_S
    if not low <= silence_s <= high:
        raise UsageError(f"--silence-s must be from {low:g} to {high:g} seconds, got {silence_s:g}")
    n_frames = getattr(args, "frames", None)
    if n_frames is not None and not 1 <= n_frames <= N_FRAMES_LIMIT:
        raise UsageError(f"--frames must be from 1 to {N_FRAMES_LIMIT}, got {n_frames}")
    return StarterOptions(
        ckpt=args.ckpt,
        chunk=getattr(args, "chunk", None),
        layers=getattr(args, "layers", None),
        placement=chosen_placement(args),
        prefer_memory=getattr(args, "prefer_memory", None),
        cache_dir=default_cache_dir(),
        device=args.device,
        dtype=args.dtype,
        sequence_length=args.sequence_length,
        compile=args.compile,
        quantize=args.quantize,
        quantize_head=args.quantize_head or args.quantize,
        prompt_style=args.prompt_style,
        wait_s=wait_s,
        wire_dtype=getattr(args, "wire_dtype", "auto"),
        kv_dtype=args.kv_dtype,
        weight_memory=weight_memory(args),
        kv_memory=None if args.kv_memory is None else parse_bytes(args.kv_memory, "--kv-memory"),
        n_frames=n_frames,
        parallel=parallel_options(args),
        fixed=getattr(args, "fixed", True),
        silence_s=silence_s,
        **replay_memory(getattr(args, "replay_memory", None)),
        n_spans=N_SPANS if getattr(args, "trace", None) is not None else 0,
    )


def replay_memory(flag: str | None) -> dict[str, int]:
    from mdi.config import parse_bytes

    return {} if flag is None else {"replay_memory": parse_bytes(flag, "--replay-memory")}


def sampling_params(args: argparse.Namespace) -> Any:
    """What the flags say of the draws; without --seed a new one, which is written to `args`. UsageError."""
    from mdi.engine.sequence import SamplingParams
    from mdi.errors import UsageError

    if args.top_k < 0:
        raise UsageError(f"--top-k must be 0 (all tokens) or more, got {args.top_k}")
    if args.seed is None:
        args.seed = secrets.randbelow(10**9)
    if any(not stop for stop in args.stop):
        raise UsageError("--stop: an empty text would end every sample at once")
    return SamplingParams(
        n_tokens=args.n_tokens, temperature=args.temperature, top_k=args.top_k or None, top_p=args.top_p, seed=args.seed
    )


def encode_prompts(node: StarterNode, prompts: list[str]) -> list[list[int]]:
    """Token ids of the prompts; UsageError if one does not fit the context."""
    from mdi.errors import UsageError

    encoded = [node.codec.encode_prompt(prompt) for prompt in prompts]
    for i, ids in enumerate(encoded):
        try:
            node.check_prompt(ids)
        except UsageError as e:
            raise UsageError(f"prompt {i}: {e}") from None
    return encoded


def _run(
    args: argparse.Namespace,
    node: StarterNode,
    prompts: list[str],
    encoded: list[list[int]],
    params: Any,
    is_reported: bool,
    known: list[JournalText] | None,
) -> RunMetrics:
    from mdi.cli import ignore_interrupts
    from mdi.cli.output import report
    from mdi.display import open_stream
    from mdi.errors import MdiError, NodeLostError

    is_streaming = is_reported and not (args.json or args.no_stream)
    failure: BaseException | None = None
    try:
        node.start()
        if is_reported:
            tell_seed(params)
        stream = open_stream(len(prompts)) if is_streaming else None
        on_text = (lambda sample, text: stream.show(sample.index, text)) if stream is not None else None
        for i, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            if stream is not None:
                stream.show(i, prompt + ("" if node.codec.prompt_style is None else "\n"))
            before, reason = ((), None) if known is None else (known[i].ids, known[i].finish_reason)
            node.submit(prompt, ids, params, args.stop, on_text, before=before, finish_reason=reason)
        node.generate()
        node.end(leave=getattr(args, "stop_nodes", False))
    except (MdiError, KeyboardInterrupt) as e:
        ignore_interrupts()
        failure = e
        if isinstance(e, NodeLostError):
            node.mark_broken()
        node.end()
    if is_reported or failure is not None:
        report(args, node, failure, is_streaming)
    if failure is not None:
        failure.is_reported = True  # type: ignore[attr-defined]
        raise failure
    return node.metrics()
