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
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mdi.config import ClusterConfig, NodeConfig
    from mdi.node.kind import ModelKind
    from mdi.node.starter import StarterNode

DEFAULT_PROMPT = "Who are you?"
DEFAULT_N_SAMPLES = 3

logger = logging.getLogger("mdi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags, default_nodes_config
    from mdi.cli_output import add_output_flags

    add_model_flags(parser)
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument(
        "--nodes-config",
        type=Path,
        metavar="FILE",
        default=default_nodes_config(),
        help="who the nodes are (%(default)s)",
    )
    nodes.add_argument("--chunk", type=Path, metavar="FILE", help="the starter's chunk; the others' lie beside it")
    nodes.add_argument(
        "--layers", metavar="N,N,...", help="blocks per node by hand, starter first (default: see --placement)"
    )
    add_placement_flags(nodes)
    nodes.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for secondaries to appear (%(default)s)",
    )
    nodes.add_argument("--stop-nodes", action="store_true", help="end the secondaries' processes after the run")
    add_wire_flags(nodes)
    add_generation_flags(parser, n_tokens=300)
    add_output_flags(parser)
    add_common_flags(parser)


def add_wire_flags(group: argparse._ActionsContainer) -> None:
    """How rows travel over a ring; also of chat.py."""
    from mdi.net.wire import WIRE_DTYPES

    group.add_argument(
        "--wire-dtype", choices=WIRE_DTYPES, default="auto", help="what the nodes send each other: as computed, "
        "half precision, or 8 bits with a scale per 64 values (%(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--frames", type=int, metavar="N", help="frames in flight (default: as many as nodes, or one more where the "
        "links were measured and take long beside computing)",
    )  # fmt: skip


def add_placement_flags(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    from mdi.partition.methods import METHODS

    parser.add_argument(
        "--placement", choices=METHODS, help="who gets how many blocks. throughput: most tokens/s, by what the nodes measure "
        "of themselves; latency: the shortest way of one token; opa, gma: by left-over memory (and cores), as LLaMPS; even: "
        "nothing is measured (default: the cut of chunks that lie there, else MDI_PLACEMENT, else throughput)",
    )  # fmt: skip
    parser.add_argument(
        "--prefer-memory", type=float, metavar="X", help="for opa: how much more memory counts than cores, 1/9 to 9 (5)"
    )


def chosen_placement(args: argparse.Namespace) -> str | None:
    """The flag, else MDI_PLACEMENT; None is the default. UsageError if the variable names none."""
    from mdi.errors import UsageError
    from mdi.partition.methods import METHODS

    named = os.environ.get("MDI_PLACEMENT") or None
    if named is not None and named not in METHODS:
        raise UsageError(f"MDI_PLACEMENT={named!r}: expected {', '.join(METHODS)}")
    return getattr(args, "placement", None) or named


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import default_ckpt_folder
    from mdi.control.messages import KV_DTYPES

    model = parser.add_argument_group("model")
    model.add_argument(
        "--ckpt", type=Path, metavar="DIR", help=f"checkpoint made by prepare_model.py (below {default_ckpt_folder()})"
    )
    model.add_argument(
        "--device", help="cpu, cuda, cuda:<n> or mps (default: the nodes file, else a GPU if there is one)"
    )
    model.add_argument(
        "--dtype",
        help="float32, float16 or bfloat16 (default: on a CPU the fastest that keeps the checkpoint's precision)",
    )
    model.add_argument(
        "--quantize", metavar="FORMAT", help="hold the blocks' weights in fp16, int8 or int4 (CPU only): less memory "
        "and faster; a secondary may choose its own. prepare_model.py --quantize stores them so",
    )  # fmt: skip
    model.add_argument(
        "--quantize-head", metavar="FORMAT", help="the same for head and embedding (default: as --quantize)"
    )
    model.add_argument("--threads", type=int, help="CPU threads to compute with (default: the nodes file, else all)")
    model.add_argument("--cores", metavar="N,N-N,...", help="CPU cores to stay on (default: the nodes file, else any)")
    model.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="what the key/value caches of all "
        "nodes hold (%(default)s: as computed)",
    )  # fmt: skip
    model.add_argument(
        "--kv-memory", metavar="SIZE", help="memory for this node's caches, like 2G or 500M; what does not fit waits (default: "
        "the nodes file, else what is free)",
    )  # fmt: skip
    model.add_argument(
        "--sequence-length", "--context-length", "--block-size", type=int, metavar="N", help="tokens that a sequence may "
        "reach, prompt included (default: what the model was made for)",
    )  # fmt: skip
    model.add_argument("-c", "--compile", action="store_true", help="compile the blocks' MLPs (needs a C++ compiler)")


def add_generation_flags(
    parser: argparse.ArgumentParser, n_tokens: int, with_prompt: bool = True, n_samples: int | None = None
) -> None:
    generation = parser.add_argument_group("generation")
    if with_prompt:
        generation.add_argument(
            "--prompt", action="append", metavar="TEXT", help="text to go on from, or FILE:path with one prompt per "
            f"paragraph; may be repeated (default: {DEFAULT_PROMPT!r})",
        )  # fmt: skip
        generation.add_argument(
            "--n-samples", type=int, default=n_samples, help="texts to generate at once (default: "
            f"{n_samples or f'one per prompt; {DEFAULT_N_SAMPLES} of a single one'})",
        )  # fmt: skip
    generation.add_argument("--n-tokens", type=int, default=n_tokens, help="new tokens per sample (%(default)s)")
    generation.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (%(default)s)")
    generation.add_argument(
        "--top-k", type=int, default=200, help="sample among the k best tokens; 0 is all (%(default)s)"
    )
    generation.add_argument("--top-p", type=float, default=1.0, help="... that have this probability (%(default)s)")
    generation.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a sample here; repeatable")
    generation.add_argument(
        "--prompt-style", default="auto", metavar="auto|none|NAME", help="how a prompt is wrapped for the model (%(default)s: "
        "as the checkpoint wants it)",
    )  # fmt: skip
    generation.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of the random draws: the same seed gives the same texts (default: a new one, which is told)",
    )


def run(args: argparse.Namespace) -> int:
    from mdi.config import load_cluster

    return run_on(args, lambda: load_cluster(args.nodes_config))


def run_on(
    args: argparse.Namespace,
    cluster_of: Callable[[], ClusterConfig],
    check: Callable[[], None] = lambda: None,
    kind: ModelKind | None = None,
) -> int:
    """One run on a cluster, from flags to report; also behind sample.py and local_ring.py.

    Args:
        kind: of the model; None is litgpt's.
        check: called again and again while the nodes get ready; raises if that has become pointless.
    """
    from mdi.cli_output import print_json

    try:
        return _generate(args, cluster_of(), check, kind)
    except (Exception, KeyboardInterrupt) as e:
        if args.json and not isinstance(e, BrokenPipeError) and not getattr(e, "is_reported", False):
            print_json({"error": str(e) or "interrupted", "samples": []})
        raise


def _generate(
    args: argparse.Namespace, cluster: ClusterConfig, check: Callable[[], None], kind: ModelKind | None
) -> int:
    from mdi.cli import ignore_interrupts
    from mdi.errors import UsageError
    from mdi.node.device import set_threads
    from mdi.node.starter import StarterNode
    from mdi.prompts import read_prompts

    if not 0 <= getattr(args, "wait", 0.0) < float("inf"):
        raise UsageError(f"--wait must be 0 seconds or more, got {args.wait}")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads must be at least 1, got {args.threads}")
    prompts = read_prompts(args.prompt or [DEFAULT_PROMPT], args.n_samples, default=DEFAULT_N_SAMPLES)
    params = sampling_params(args)
    set_threads(args.threads or cluster.starter.threads, chosen_cores(args.cores, cluster.starter))
    node = StarterNode(cluster, starter_options(args), kind)
    try:
        node.open()
        encoded = encode_prompts(node, prompts)
        longest = max(map(len, encoded)) + args.n_tokens
        node.place(len(encoded), longest, check)
        node.prepare(longest, check)
        return _run(args, node, prompts, encoded, params)
    finally:
        ignore_interrupts()
        node.close()


def chosen_cores(flag: str | None, node: NodeConfig) -> tuple[int, ...] | None:
    """Cores to stay on: what --cores says, else the nodes file."""
    from mdi.config import parse_cores

    return node.cores if flag is None else parse_cores(flag, "--cores")


def starter_options(args: argparse.Namespace) -> Any:
    from mdi.cli_secondary import default_cache_dir
    from mdi.config import parse_bytes
    from mdi.control.messages import N_FRAMES_LIMIT
    from mdi.errors import UsageError
    from mdi.node.options import StarterOptions

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
        wait_s=getattr(args, "wait", 30.0),
        wire_dtype=getattr(args, "wire_dtype", "auto"),
        kv_dtype=args.kv_dtype,
        kv_memory=None if args.kv_memory is None else parse_bytes(args.kv_memory, "--kv-memory"),
        n_frames=n_frames,
    )


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


def _run(args: argparse.Namespace, node: StarterNode, prompts: list[str], encoded: list[list[int]], params: Any) -> int:
    from mdi.cli import ignore_interrupts
    from mdi.cli_output import report
    from mdi.display import Stream
    from mdi.errors import MdiError, NodeLostError

    is_streaming = not (args.json or args.no_stream)
    stream = Stream(len(prompts))
    on_text = (lambda sample, text: stream.show(sample.index, text)) if is_streaming else None
    failure: BaseException | None = None
    try:
        node.start()
        if params.temperature > 0:
            logger.info("seed %d: --seed %d gives the same texts again", params.seed, params.seed)
        for prompt, ids in zip(prompts, encoded, strict=True):
            sample = node.submit(prompt, ids, params, args.stop, on_text)
            if is_streaming:
                stream.show(sample.index, prompt + ("" if node.codec.prompt_style is None else "\n"))
        node.generate()
        node.end(leave=getattr(args, "stop_nodes", False))
    except (MdiError, KeyboardInterrupt) as e:
        ignore_interrupts()
        failure = e
        if isinstance(e, NodeLostError):
            node.mark_broken()
        node.end()
    report(args, node, failure, is_streaming)
    if failure is not None:
        failure.is_reported = True  # type: ignore[attr-defined]
        raise failure
    return 0
