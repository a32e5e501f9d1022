"""Run a secondary (worker) node: it waits for a starter, computes its blocks, and waits for the next run.

examples:
  secondary.py --nodes-config settings_distr/configuration.json 0
      the first secondary of that file; the starter sends its weights, which are kept for the next time
  secondary.py --nodes-config settings_distr/configuration.json 1 --chunk model_secondary1.safetensors
      the second one, with the chunk that prepare_model.py made and that was copied here
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from mdi.checkpoint.weights import WeightSource
    from mdi.config import NodeConfig
    from mdi.node.secondary import SecondaryNode
    from mdi.security.keys import KeyFile
    from mdi.stages.model_family import ModelFamily


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags, default_nodes_config
    from mdi.cli.access import add_access_flags

    parser.add_argument(
        "--nodes-config",
        nargs="+",
        metavar=("FILE", "INDEX"),
        default=[str(default_nodes_config()), "0"],
        help="nodes file, and this node's place in its list of secondaries, from 0 (no INDEX if the file describes "
        "only one secondary); default: settings_distr/configuration.json 0",
    )
    add_access_flags(parser)
    add_node_flags(parser)
    add_common_flags(parser)


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """What a node computes with, and where its weights are."""
    from mdi.cli.flags import add_allow_clipping, add_machine_flags

    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--chunk", type=Path, metavar="FILE", help="this node's chunk, made by prepare_model.py")
    weights.add_argument("--ckpt", type=Path, metavar="DIR", help="the whole checkpoint, if it is on this machine")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="folder for weights that a starter sent (default: MDI_CACHE_DIR, else mdi-llm in the user's cache folder)",
    )
    parser.add_argument(
        "--cache-size",
        metavar="SIZE",
        help="limit for that folder, such as 20GB: the least recently used weights are deleted (default: no limit)",
    )
    add_machine_flags(parser)
    parser.add_argument(
        "--dtype", help="float32, float16 or bfloat16 (default: the nodes file, else what the starter asks for)"
    )
    parser.add_argument(
        "--quantize",
        metavar="FORMAT",
        help="weight format, see `starter.py --help` (default: what the starter asks for)",
    )
    add_allow_clipping(parser)
    parser.add_argument("--no-announce", action="store_true", help="do not announce this node in its network")
    parser.add_argument(
        "--dial",
        metavar="ADDR:PORT",
        help="behind a router: connect to the --dial-port of a starter, which then reaches this node",
    )
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # once accepted; a secondary draws nothing
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    # local_ring.py holds the other end of stdin: this process must not outlive it, however it ends.
    parser.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from mdi.config import load_nodes, load_secondary

    path, index = place_of(args)
    return serve(args, load_secondary(path, index), nodes=load_nodes(path))


def place_of(args: argparse.Namespace) -> tuple[str, int | None]:
    """File and index of --nodes-config. Raises UsageError."""
    from mdi.errors import UsageError

    if len(args.nodes_config) > 2:
        raise UsageError(f"--nodes-config takes a file and an index, got {' '.join(args.nodes_config)}")
    index = None
    if len(args.nodes_config) == 2:
        if not args.nodes_config[1].isdigit():
            raise UsageError(f"the index after --nodes-config must be a number from 0 on, got {args.nodes_config[1]!r}")
        index = int(args.nodes_config[1])
    return args.nodes_config[0], index


def serve(
    args: argparse.Namespace,
    config: NodeConfig,
    family: Callable[[], ModelFamily] | None = None,
    nodes: Sequence[NodeConfig] = (),
) -> int:
    """Run this node until it is told to end.

    Args:
        family: makes that of the models that it runs; None is litgpt's.
        nodes: of the ring, as far as they are known: some may be on this machine.
    """
    from mdi.cli import ignore_interrupts
    from mdi.cli.access import open_keys, refuse_exposure
    from mdi.cli.checks import check_chunk, check_computing
    from mdi.cli.discover import reachable
    from mdi.node.temporary import sweep

    keys = open_keys(args)
    refuse_exposure(args, keys, config)
    check_computing(args)
    check_chunk(args.chunk)
    node, weights = _made_node(args, config, family, nodes, keys)
    try:
        node.open()
        _hand_over_when_terminated(node)
        if args.until_stdin_closes:
            threading.Thread(target=leave_with_stdin, name="stdin", daemon=True).start()
        with reachable(args, node, keys):
            node.run()
    finally:
        ignore_interrupts()
        node.close()
        if weights is not None:
            weights.close()
        if args.until_stdin_closes:
            sweep()  # of its starter, if that was killed
    return 0


def _made_node(
    args: argparse.Namespace, config: NodeConfig, family: Callable[[], ModelFamily] | None, nodes: Sequence[NodeConfig],
    keys: KeyFile | None,
) -> tuple[SecondaryNode, WeightSource | None]:  # fmt: skip
    """The node that the flags describe, with the weights on this machine, if any. UsageError, CheckpointError."""
    from mdi.cache_dir import default_cache_dir
    from mdi.cli.checks import found_ckpt
    from mdi.cli.session_flags import cores_of, parsed_bytes
    from mdi.cli.window_flags import weight_memory

    path = args.chunk or (found_ckpt(args.ckpt) if args.ckpt is not None else None)
    kv_memory, cache_bytes = parsed_bytes(args, "kv_memory"), parsed_bytes(args, "cache_size")
    cores = cores_of(args) or config.cores

    from mdi.control.requested import Requested
    from mdi.machine.neighbours import threads_beside
    from mdi.machine.threads import choose_threads
    from mdi.node.secondary import SecondaryNode
    from mdi.stages.model_family import ModelFamily

    asked = replace(Requested.of(args), threads=args.threads or config.threads or (len(cores) if cores else None))
    choose_threads(args.threads or config.threads, cores, threads_beside(config, nodes))
    model = ModelFamily() if family is None else family()
    weights = model.open_source(path) if path is not None else None
    cache_dir = args.cache_dir or default_cache_dir()
    memory = weight_memory(args)
    return SecondaryNode(config, weights, cache_dir, asked, kv_memory, model, cache_bytes, memory, keys), weights


def _hand_over_when_terminated(node: SecondaryNode) -> None:
    """SIGTERM: move this node's blocks to other nodes, if they can take them. Otherwise, and if it comes again, end at once."""
    import signal

    before = signal.getsignal(signal.SIGTERM)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if node.may_hand_over:
            threading.Thread(target=node.leave, name="leave", daemon=True).start()
        elif callable(before):
            before(number, frame)

    with contextlib.suppress(ValueError):  # not in the main thread, as in tests
        signal.signal(signal.SIGTERM, on_signal)


def leave_with_stdin() -> None:
    """End this process as by SIGTERM when its stdin is closed."""
    import signal

    # Not by way of sys.stdin: its lock would be held when the interpreter ends, and make that a fatal error.
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
