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
    from mdi.config import ClusterConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi import cli_starter

    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes, the starter among them (%(default)s)")
    parser.add_argument("--devices", metavar="DEV,DEV,...", help="device of each node, starter first")
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    cli_starter.add_arguments(parser)
    parser.set_defaults(nodes_config=None)


def run(args: argparse.Namespace) -> int:
    from mdi.cli import ignore_interrupts
    from mdi.cli_starter import run_on
    from mdi.errors import UsageError
    from mdi.node.local import LocalRing

    if args.nodes_config is not None:
        raise UsageError("local_ring.py makes its own nodes file; to use yours, run starter.py and secondary.py")
    if args.placement is None and args.devices is None:
        args.placement = "even"  # the nodes are all alike: measuring them would tell nothing
    with contextlib.ExitStack() as stack:
        rings: list[LocalRing] = []

        def open_ring() -> ClusterConfig:
            ring = LocalRing(args.nodes, args.devices, args.threads, args.ckpt, args.verb, args.debug)
            rings.append(stack.enter_context(ring))
            stack.callback(ignore_interrupts)
            args.threads = ring.threads_of_starter
            return ring.cluster

        return run_on(args, open_ring, lambda: rings[0].check())
