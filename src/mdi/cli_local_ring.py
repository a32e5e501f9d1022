"""Run a whole ring on this machine: one process per node, on free ports, all gone when the run ends.

Every other flag goes to the starter; see starter.py --help.

examples:
  local_ring.py --nodes 3 --ckpt checkpoints/org/model --prompt "Who are you?"
  local_ring.py --nodes 2 --devices cuda:0,cuda:1 --ckpt checkpoints/org/model
  local_ring.py --nodes 2 --devices cuda:0,cpu --ckpt checkpoints/org/model --layers 20,12
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mdi.config import ClusterConfig
    from mdi.node.kind import ModelKind
    from mdi.node.local import LocalRing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi import cli_starter

    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes, the starter among them (%(default)s)")
    parser.add_argument("--devices", metavar="DEV,DEV,...", help="device of each node, starter first")
    parser.add_argument(
        "--pin", action="store_true", help="keep each node on cores of its own: its share of --cores, else of all"
    )
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    cli_starter.add_arguments(parser)
    parser.set_defaults(nodes_config=None)


def run(args: argparse.Namespace) -> int:
    from mdi.node.local import LocalRing

    return run_ring(args, LocalRing)


def run_ring(args: argparse.Namespace, make_ring: type[LocalRing], kind: ModelKind | None = None) -> int:
    """One run on a ring of child processes; `kind` is of the model, None is litgpt's."""
    from mdi.cli import ignore_interrupts
    from mdi.cli_starter import run_on
    from mdi.errors import UsageError

    if args.nodes_config is not None:
        raise UsageError("local_ring.py makes its own nodes file; to use yours, run starter.py and secondary.py")
    with contextlib.ExitStack() as stack:
        rings: list[LocalRing] = []

        def open_ring() -> ClusterConfig:
            ring = make_ring(
                args.nodes, args.devices, args.threads, args.ckpt, args.verb, args.debug, _cores(args), _kv_memory(args)
            )  # fmt: skip
            rings.append(stack.enter_context(ring))
            stack.callback(ignore_interrupts)
            args.threads = ring.threads_of_starter
            args.cores = None  # the nodes file has each node's share
            return ring.cluster

        return run_on(args, open_ring, lambda: rings[0].check(), kind)


def _cores(args: argparse.Namespace) -> Sequence[int] | None:
    """Cores to divide among the nodes; None if none is to be kept on any."""
    from mdi.config import parse_cores
    from mdi.node.local import pinnable_cores

    if args.cores is not None:
        return parse_cores(args.cores, "--cores")
    return pinnable_cores() if args.pin else None


def _kv_memory(args: argparse.Namespace) -> int | None:
    from mdi.config import parse_bytes

    return None if args.kv_memory is None else parse_bytes(args.kv_memory, "--kv-memory")
