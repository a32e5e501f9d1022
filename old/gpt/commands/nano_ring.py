"""Run a whole NanoGPT ring on this machine: starter, intermediate nodes and finisher, a process each.

Every other flag goes to the starter; see starter.py --help.

example:
  local_ring.py --nodes 3 --ckpt checkpoints/nano-7 --n-tokens 500
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpt.commands.left_out import describe_cut, leave_out
    from gpt.commands.nano_starter import N_TOKENS
    from mdi.cli import local_ring as cli_local_ring

    cli_local_ring.add_arguments(parser)
    leave_out(parser)
    describe_cut(parser)
    parser.set_defaults(n_tokens=N_TOKENS)


def run(args: argparse.Namespace) -> int:
    from gpt.commands.families import nano
    from gpt.commands.nano_starter import fill_in
    from gpt.rings import NanoRing
    from mdi.cli.local_ring import run_ring

    fill_in(args, args.nodes)
    return run_ring(args, NanoRing, nano)
