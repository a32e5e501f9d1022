"""Flags that several commands share: the model, its placement, rows on links, and generation."""

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
        "--quantize", metavar="FORMAT", help="format of the blocks' weights: float32, bf16, fp16, int8 or int4 (on NVIDIA GPUs "
        "int8 and int4 only); smaller is faster; auto: the largest that fits the nodes. A secondary may choose its own "
        "(default: as the chunks are stored, else the checkpoint's own numbers)",
    )  # fmt: skip
    model.add_argument(
        "--quantize-head", metavar="FORMAT", help="the same for head and embedding (default: as --quantize)"
    )
    add_allow_clipping(model)
    add_kv_dtype(model)
    model.add_argument(
        "--sequence-length", "--context-length", "--block-size", type=int, metavar="N", help="most tokens of a "
        "sequence, with its prompt (default: the model's context)",
    )  # fmt: skip


def add_allow_clipping(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--allow-clipping", action="store_true", help="let weights that are too large for their format become the largest "
        "number that it holds (default: they are refused)",
    )  # fmt: skip


def add_kv_dtype(group: argparse._ArgumentGroup) -> None:
    from mdi.control.requested import KV_DTYPES
    from mdi.kernels.page_sizes import cache_type_named

    group.add_argument(
        "--kv-dtype", choices=KV_DTYPES, type=cache_type_named, default="auto", help="number type of the key/value "
        "caches on all nodes (%(default)s: as computed); bf16 and fp16 take half of float32, int8 a quarter (kernels only)",
    )  # fmt: skip


def add_machine_flags(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """The device of this node, and how much of it the node uses."""
    parser.add_argument(
        "--device", help="cpu, cuda, cuda:<n> or mps (default: the nodes file, else a GPU if there is one)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        help="CPU threads to compute with (default: the nodes file, else this node's share of the cores)",
    )
    parser.add_argument("--cores", metavar="N,N-N,...", help="CPU cores to run on (default: the nodes file, else any)")
    _add_weight_memory_flags(parser)
    parser.add_argument(
        "--kv-memory", metavar="SIZE", help="memory for this node's caches, like 2G or 500M; texts that do not fit "
        "wait (default: the nodes file, else what is free)",
    )  # fmt: skip
    parser.add_argument("-c", "--compile", action="store_true", help="compile the blocks' MLPs (needs a C++ compiler)")


def _add_weight_memory_flags(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """How weights are read from their files."""
    from mdi.cli.window_flags import add_window_flags
    from mdi.config import WEIGHT_MODES

    add_window_flags(parser)
    parser.add_argument(
        "--weights", choices=WEIGHT_MODES, default="auto", help="map: read packed weights from their file, which nodes of one "
        "machine share; copy: read them from a copy in memory; %(default)s: copy only if that is faster",
    )  # fmt: skip
    parser.add_argument(
        "--mlock", action="store_true", help="lock the weights in memory, so that they are never swapped out"
    )


def add_placement_flags(parser: argparse._ActionsContainer) -> None:
    from mdi.partition.methods import METHODS

    parser.add_argument(
        "--placement", choices=METHODS, help="how many blocks each node gets. throughput: most tokens/s, as the nodes measure "
        "themselves; latency: the shortest way of one token; opa, gma: by left-over memory (and cores), as LLaMPS; even: equal "
        "numbers, nothing is measured (default: MDI_PLACEMENT, else the cut of existing chunks, else throughput)",
    )  # fmt: skip
    parser.add_argument(
        "--prefer-memory", type=float, metavar="X", help="for opa: how much more memory counts than cores, 1/9 to 9 (5)"
    )


def add_recovery_flags(group: argparse._ActionsContainer) -> None:
    """What happens to a run when nodes are lost."""
    from mdi.net.wire import SILENCE_S

    group.add_argument(
        "--fixed", action="store_true", help="end the run when a node is lost (default: other nodes take its blocks, and the "
        "texts go on)",
    )  # fmt: skip
    group.add_argument(
        "--silence-s", type=float, default=SILENCE_S, metavar="S", help="a node that is silent for S seconds is lost "
        "(%(default)g)",
    )  # fmt: skip
    add_replay_memory(group)


def add_replay_memory(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--replay-memory", metavar="SIZE", help="memory of each node for rows that it has sent, so that after a loss only "
        "the lost blocks compute them again (default: 64M; 0 keeps none)",
    )  # fmt: skip


def add_ring_flags(group: argparse._ActionsContainer) -> None:
    """Cut and placement of a model, how long to wait for nodes, and the format of rows on links."""
    group.add_argument(
        "--chunk", type=Path, metavar="FILE", help="the starter's chunk; those of the other nodes must lie beside it"
    )
    group.add_argument("--layers", metavar="N,N,...", help="blocks per node, starter first (default: see --placement)")
    add_placement_flags(group)
    add_recovery_flags(group)
    group.add_argument(
        "--wait", type=float, default=30.0, metavar="SECONDS", help="how long to wait for secondaries to answer (%(default)s)"
    )  # fmt: skip
    add_wire_flags(group)


def add_wire_flags(group: argparse._ActionsContainer) -> None:
    from mdi.net.wire import WIRE_DTYPES

    group.add_argument(
        "--wire-dtype", choices=WIRE_DTYPES, default="auto", help="number format of rows on the links: auto (as "
        "computed), fp16, or int8 with a scale per 64 values (%(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--frames", type=int, metavar="N", help="frames in flight (default: as many as nodes; one more if measured links "
        "are slow compared with computing)",
    )  # fmt: skip


def add_generation_flags(
    parser: argparse.ArgumentParser, n_tokens: int, with_prompt: bool = True, n_samples: int = DEFAULT_N_SAMPLES
) -> None:
    generation = parser.add_argument_group("generation")
    if with_prompt:
        generation.add_argument(
            "--prompt", action="append", metavar="TEXT", help="text to continue, or FILE:path with one prompt per "
            f"paragraph; may be repeated (default: {DEFAULT_PROMPT!r})",
        )  # fmt: skip
        generation.add_argument(
            "--n-samples", type=int, help=f"texts to generate at once (default: one per prompt; {n_samples} for a single one)"
        )  # fmt: skip
        parser.set_defaults(samples_of_one=n_samples)
    generation.add_argument("--n-tokens", type=int, default=n_tokens, help="new tokens per sample (%(default)s)")
    generation.add_argument(
        "--temperature", type=float, default=0.8, help="0 always takes the likeliest token (%(default)s)"
    )
    generation.add_argument(
        "--top-k", type=int, default=200, help="draw from the k likeliest tokens; 0 is all (%(default)s)"
    )
    generation.add_argument(
        "--top-p", type=float, default=1.0, help="... that have this probability together (%(default)s)"
    )
    generation.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a text before TEXT; repeatable"
    )
    generation.add_argument(
        "--prompt-style", default="auto", metavar="auto|none|NAME", help="how a prompt is wrapped for the model (%(default)s: "
        "as the checkpoint says)",
    )  # fmt: skip
    generation.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the random numbers; the same seed gives the same texts (default: a new one, which is printed)",
    )
