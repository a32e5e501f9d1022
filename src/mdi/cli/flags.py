"""Flags that several commands have: the model, its placement, how rows travel, and what is generated."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdi.prompts import DEFAULT_N_SAMPLES, DEFAULT_PROMPT


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import default_ckpt_folder

    model = parser.add_argument_group("model")
    model.add_argument(
        "--ckpt",
        type=Path,
        metavar="DIR",
        help=f"checkpoint made by prepare_model.py (below {default_ckpt_folder()}), or a GGUF file",
    )
    add_machine_flags(model)
    model.add_argument(
        "--dtype",
        help="float32, float16 or bfloat16 (default: on a CPU the fastest that keeps the checkpoint's precision)",
    )
    model.add_argument(
        "--quantize", metavar="FORMAT", help="hold the blocks' weights in float32, bf16, fp16, int8 or int4 (CPU only): less "
        "memory and faster; auto: the largest that fits the nodes. A secondary may choose its own. prepare_model.py "
        "--quantize stores them so (default: the checkpoint's own numbers)",
    )  # fmt: skip
    model.add_argument(
        "--quantize-head", metavar="FORMAT", help="the same for head and embedding (default: as --quantize)"
    )
    add_kv_dtype(model)
    model.add_argument(
        "--sequence-length", "--context-length", "--block-size", type=int, metavar="N", help="tokens that a sequence may "
        "reach, prompt included (default: what the model was made for)",
    )  # fmt: skip


def add_kv_dtype(group: argparse._ArgumentGroup) -> None:
    from mdi.control.requested import KV_DTYPES
    from mdi.kernels.page_sizes import cache_type_named

    group.add_argument(
        "--kv-dtype", choices=KV_DTYPES, type=cache_type_named, default="auto", help="what the key/value caches of all "
        "nodes hold (%(default)s: as computed); bf16 and fp16 take half of float32, int8 about a quarter (kernels only)",
    )  # fmt: skip


def add_machine_flags(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """What this node computes on, and with how much of it."""
    parser.add_argument(
        "--device", help="cpu, cuda, cuda:<n> or mps (default: the nodes file, else a GPU if there is one)"
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads to compute with (default: nodes file, else its share of cores)"
    )
    parser.add_argument("--cores", metavar="N,N-N,...", help="CPU cores to stay on (default: the nodes file, else any)")
    _add_weight_memory_flags(parser)
    parser.add_argument(
        "--kv-memory", metavar="SIZE", help="memory for this node's caches, like 2G or 500M; what does not fit waits "
        "(default: the nodes file, else what is free)",
    )  # fmt: skip
    parser.add_argument("-c", "--compile", action="store_true", help="compile the blocks' MLPs (needs a C++ compiler)")


def _add_weight_memory_flags(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Where weights that lie in files are read from."""
    from mdi.cli.window_flags import add_window_flags
    from mdi.config import WEIGHT_MODES

    add_window_flags(parser)
    parser.add_argument(
        "--weights", choices=WEIGHT_MODES, default="auto", help="read packed weights where they lie in their file (map: nodes "
        "of one machine share them), or from a copy in memory (copy); %(default)s copies only where that is faster",
    )  # fmt: skip
    parser.add_argument("--mlock", action="store_true", help="keep the weights in memory, whatever else wants it")


def add_placement_flags(parser: argparse._ActionsContainer) -> None:
    from mdi.partition.methods import METHODS

    parser.add_argument(
        "--placement", choices=METHODS, help="who gets how many blocks. throughput: most tokens/s, by what the nodes measure "
        "of themselves; latency: the shortest way of one token; opa, gma: by left-over memory (and cores), as LLaMPS; even: "
        "nothing is measured (default: the cut of chunks that lie there, else MDI_PLACEMENT, else throughput)",
    )  # fmt: skip
    parser.add_argument(
        "--prefer-memory", type=float, metavar="X", help="for opa: how much more memory counts than cores, 1/9 to 9 (5)"
    )


def add_recovery_flags(group: argparse._ActionsContainer) -> None:
    """What becomes of a run whose nodes are lost."""
    from mdi.net.wire import SILENCE_S

    group.add_argument(
        "--fixed", action="store_true", help="end the run when a node is lost (default: others take its blocks, and the texts "
        "go on)",
    )  # fmt: skip
    group.add_argument(
        "--silence-s", type=float, default=SILENCE_S, metavar="S", help="a node that is not heard of for so many seconds is "
        "lost (%(default)g)",
    )  # fmt: skip
    add_replay_memory(group)


def add_replay_memory(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--replay-memory", metavar="SIZE", help="what each node keeps of the rows that it has sent, so that a lost node's "
        "blocks alone compute them again (default: 64M; 0 keeps none)",
    )  # fmt: skip


def add_ring_flags(group: argparse._ActionsContainer) -> None:
    """How a model is cut and placed, how long nodes are waited for, and how rows travel."""
    group.add_argument("--chunk", type=Path, metavar="FILE", help="the starter's chunk; the others' lie beside it")
    group.add_argument(
        "--layers", metavar="N,N,...", help="blocks per node by hand, starter first (default: see --placement)"
    )
    add_placement_flags(group)
    add_recovery_flags(group)
    group.add_argument(
        "--wait", type=float, default=30.0, metavar="SECONDS", help="how long to wait for secondaries to appear (%(default)s)"
    )  # fmt: skip
    add_wire_flags(group)


def add_wire_flags(group: argparse._ActionsContainer) -> None:
    from mdi.net.wire import WIRE_DTYPES

    group.add_argument(
        "--wire-dtype", choices=WIRE_DTYPES, default="auto", help="what the nodes send each other: as computed, "
        "half precision, or 8 bits with a scale per 64 values (%(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--frames", type=int, metavar="N", help="frames in flight (default: as many as nodes, or one more where the "
        "links were measured and take long beside computing)",
    )  # fmt: skip


def add_generation_flags(
    parser: argparse.ArgumentParser, n_tokens: int, with_prompt: bool = True, n_samples: int = DEFAULT_N_SAMPLES
) -> None:
    generation = parser.add_argument_group("generation")
    if with_prompt:
        generation.add_argument(
            "--prompt", action="append", metavar="TEXT", help="text to go on from, or FILE:path with one prompt per "
            f"paragraph; may be repeated (default: {DEFAULT_PROMPT!r})",
        )  # fmt: skip
        generation.add_argument(
            "--n-samples", type=int, help=f"texts to generate at once (default: one per prompt; {n_samples} of a single one)"
        )  # fmt: skip
        parser.set_defaults(samples_of_one=n_samples)
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
