"""Run a whole NanoGPT ring on this machine: starter, intermediate nodes and finisher, a process each.

Every other flag goes to the starter; see starter.py --help.

example:
  local_ring.py --nodes 3 --ckpt checkpoints/nano-7 --n-tokens 500
"""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from gpt.commands.left_out import describe_cut, leave_out
    from gpt.commands.nano_starter import N_TOKENS
    from mdi.cli import local_ring as cli_local_ring

    cli_local_ring.add_arguments(parser)
    leave_out(parser)
    describe_cut(parser)
    parser.set_defaults(n_tokens=N_TOKENS)


def run(options: Options, cancel: Cancel) -> int:
    from gpt.commands.families import nano
    from gpt.commands.nano_starter import filled_in
    from gpt.rings import NanoRing
    from mdi.cli.local_ring import run_ring

    return run_ring(filled_in(options, options.nodes or 1), NanoRing, cancel, nano)
